"""How fast a model runs here, beside what this machine could do at most.

Each measurement comes with the machine's limits measured right before it, and
its share is the median of these rounds' own shares: what else the machine does
then counts on both sides.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gemmakv import _core
from gemmakv._support.arguments import integer, quantize_target
from gemmakv._support.files import StrPath
from gemmakv._support.progress import Progress, as_callback
from gemmakv.cache._kv_cache import create_kv_cache
from gemmakv.chat._gemma import Gemma
from gemmakv.diagnostics._cpu import cpu_info
from gemmakv.diagnostics._profile import Profile, profile_of
from gemmakv.diagnostics._speculation import TEXTS, Comparison, Speculation
from gemmakv.errors import GemmaKVError
from gemmakv.generation._options import core_options
from gemmakv.generation._profile import StepProfile
from gemmakv.generation._requests import requests_of
from gemmakv.generation._threads import ThreadPlacement
from gemmakv.models import _catalog as models

PREFILL_TOKENS = (128, 512, 2048)
BATCHES = (4, 8, 16, 32)
DECODE_TOKENS = 64
BATCH_TOKENS = 24
FIRST_TOKEN = "load to first token"
PEAK_MEMORY = "peak memory"
_FLOAT_TYPES = ("F32", "F16", "BF16")

Pair = tuple[float, float]  # what was measured, the machine's limit


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the machine did at most, with as many threads as the model."""

    read_bytes_per_s: float
    int8_ops_per_s: float
    float_ops_per_s: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: medians over the rounds.

    `share` is that of the machine's limit, 1.0 being all of it: the time (or
    memory) that the limit allows by what was measured. `limit` is in `unit`.
    """

    name: str
    value: float
    unit: str
    limit: float
    share: float


@dataclasses.dataclass(frozen=True)
class Report:
    model: str
    quantize: str | None
    cpu: str
    target: str
    threads: int
    placement: ThreadPlacement
    rounds: int
    limits: Limits
    weight_bytes: int
    packed_weights: str
    parallel_loops_per_token: float
    rows: list[Row]
    # Names of rows that are longer than the model's context.
    left_out: list[str]
    # The rows are without guesses.
    speculation: list[Speculation]
    # Where the time of steps went, if that was asked for.
    profile: list[Profile] | None = None


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step of a model has to do at least, by its matrices.

    Attention, norms and sampling come on top; they are not in the limit.
    """

    read_bytes: int  # of the weights that every step reads
    layer_int8_ops: int  # for each row of a step
    layer_float_ops: int
    head_int8_ops: int  # for each row that gets logits: the last layer, too
    head_float_ops: int

    def seconds(self, limits: Limits, rows: int, logits_rows: int) -> float:
        """The shortest time for a step: reading, or computing."""
        int8 = rows * self.layer_int8_ops + logits_rows * self.head_int8_ops
        floats = (
            rows * self.layer_float_ops + logits_rows * self.head_float_ops
        )
        return max(
            self.read_bytes / limits.read_bytes_per_s,
            int8 / limits.int8_ops_per_s + floats / limits.float_ops_per_s,
        )


def work_of(gemma: Gemma) -> Work:
    """The work of a loaded model."""
    matrices = requests_of(gemma).engine.matrices()
    names = {name for name, *_ in matrices}
    head = "output.weight" if "output.weight" in names else "token_embd.weight"
    sums = {"layer": [0, 0], "head": [0, 0]}
    read_bytes = 0
    for name, type_name, rows, cols, nbytes in matrices:
        if name == "token_embd.weight" and name != head:
            continue  # it gives single rows
        read_bytes += nbytes
        late = name == head or _is_late(name, gemma.config)
        place = sums["head" if late else "layer"]
        place[type_name in _FLOAT_TYPES] += 2 * rows * cols
    return Work(read_bytes, *sums["layer"], *sums["head"])


def _is_late(name: str, config: _core.ModelConfig) -> bool:
    """Whether a matrix is multiplied for rows that get logits alone: it is of a
    layer behind the last one with keys and values of its own, or of that one
    and makes none of them. A recurrent layer is computed for all rows.
    """
    parts = name.split(".")
    if parts[0] != "blk":
        return False
    layer = int(parts[1])
    owners = config.shares_kv or [None] * config.num_layers
    last = max(i for i, owner in enumerate(owners) if owner is None)
    if layer == last and config.layer_kinds[last] != "recurrent":
        return parts[2] not in ("attn_k", "attn_v")
    return layer > last


class Bench:
    """A loaded model, measured round by round."""

    def __init__(
        self,
        path: str,
        threads: int | None,
        packed_cache: bool,
        quantize: str | None,
        profile: bool = False,
        draft: Gemma | None = None,
        pin_threads: bool = False,
    ):
        self.path = path
        self.options: dict[str, Any] = {
            "packed_cache": packed_cache,
            "quantize": quantize,
            "pin_threads": pin_threads,
        }
        self.gemma = Gemma.load(
            path,
            threads=threads,
            prefix_cache=False,
            profile=profile,
            draft=draft,
            **self.options,
        )
        ways = ["lookup"] if draft is None else ["lookup", "draft"]
        self.comparisons = [
            Comparison(self.gemma, text, way) for way in ways for text in TEXTS
        ]
        self.threads = self.gemma.threads
        self.work = work_of(self.gemma)
        self.probe = _core.MachineProbe(self.threads)
        self.parallel_loops_per_token = 0.0
        self.wall_s = 0.0  # of the calls that were measured last
        self._limits: list[Limits] = []

    def limits(self) -> Limits:
        """Measured now."""
        now = Limits(
            self.probe.read_bytes_per_s(),
            self.probe.int8_ops_per_s(),
            self.probe.float_ops_per_s(),
        )
        self._limits.append(now)
        return now

    def median_limits(self) -> Limits:
        fields = (dataclasses.astuple(limits) for limits in self._limits)
        return Limits(*map(statistics.median, zip(*fields)))

    def prefill(self, tokens: int) -> Pair:
        """(tokens a second, the limit)."""
        cache = create_kv_cache(self.gemma.config, tokens)
        ids = self._ids(tokens)
        best = self.work.seconds(self.limits(), tokens, 1)
        begin = time.perf_counter()
        self.gemma.logits(cache, ids)
        self.wall_s = time.perf_counter() - begin
        return tokens / self.wall_s, tokens / best

    def decode(self, batch: int, tokens: int) -> Pair:
        """(tokens a second of all conversations, the limit)."""
        engine = requests_of(self.gemma).engine
        caches = [
            create_kv_cache(self.gemma.config, tokens + 1)
            for _ in range(batch)
        ]
        cores = [cache._core for cache in caches]
        prompts = [self._ids(1 + row)[-1:] for row in range(batch)]
        keywords = {
            "max_tokens": tokens,
            "ignore_eos": True,
            "speculate": "off",  # a token each, of each step
        }
        options = [core_options(keywords)] * batch
        best = self.work.seconds(self.limits(), batch, batch)
        loops, steps = engine.parallel_loops, engine.steps
        begin = time.perf_counter()
        call = engine.start(cores, prompts, options, False)
        assert call is not None
        self.wall_s = time.perf_counter() - begin
        if batch == 1:
            self.parallel_loops_per_token = (engine.parallel_loops - loops) / (
                engine.steps - steps
            )
        return batch * tokens / self.wall_s, batch / best

    def first_token(self) -> Pair:
        """(seconds from loading to the first token, to read the weights)."""
        reading = self.work.read_bytes / self.limits().read_bytes_per_s
        return self._in_own_process()["first_token_s"], reading

    def peak_memory(self) -> Pair:
        """(bytes at the most, those of the weights)."""
        return self._in_own_process()["peak_bytes"], self.work.read_bytes

    def _in_own_process(self) -> dict[str, float]:
        """What `child` tells."""
        document = {
            "model": self.path,
            "threads": self.threads,
            **self.options,
        }
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, json.dumps(document)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise GemmaKVError(f"bench: a process of its own: {lines[-1]}")
        answer: dict[str, float] = json.loads(done.stdout)
        return answer

    def _ids(self, count: int) -> Any:
        vocab = self.gemma.config.vocab_size
        ids = (7 + np.arange(count, dtype=np.int64) * 1009) % vocab
        return ids.astype(np.int32)


_CHILD = "from gemmakv.diagnostics._bench import child; child()"


def child() -> None:
    """Loads a model, generates, and prints what that took as JSON."""
    request = json.loads(sys.argv[1])
    begin = time.perf_counter()
    gemma = Gemma.load(**request, prefix_cache=False)
    context = gemma.config.context_length
    cache = create_kv_cache(gemma.config, min(1024, context))
    gemma.generate(cache, [2], max_tokens=1)
    first_token_s = time.perf_counter() - begin
    room = min(512, context - len(cache) - 33)
    gemma.logits(cache, [7] * max(1, room))
    gemma.generate(cache, [7], max_tokens=32, speculate="off")
    print(
        json.dumps(
            {"first_token_s": first_token_s, "peak_bytes": _peak_bytes()}
        )
    )


def _peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise GemmaKVError("bench: /proc/self/status does not tell VmHWM")


def run(
    model: StrPath,
    *,
    threads: int | None = None,
    pin_threads: bool = False,
    rounds: int = 5,
    packed_cache: bool = True,
    quantize: str | None = None,
    profile: bool = False,
    draft: Gemma | None = None,
    progress: Progress = None,
) -> Report:
    """Measures a model; half a minute for one of 270M parameters.

    With `draft` also what its guesses bring, and with `profile` where the time
    of its steps goes. `progress` is told of measurements. Raises what
    `Gemma.load` raises, and ValueError for bad arguments.
    """
    callback = as_callback(progress, "measuring")
    count = integer("rounds", rounds, 1)
    quantize_target(quantize)  # before anything is fetched
    path = models.resolve(model)
    bench = Bench(
        path, threads, packed_cache, quantize, profile, draft, pin_threads
    )
    measures = _measures(bench)
    results: dict[str, list[Pair]] = {name: [] for name in measures}
    watch = _Watch(bench) if profile else None
    comparisons = bench.comparisons
    a_round = len(measures) + len(comparisons)
    total = (count + 1) * a_round
    # The first round warms up caches and threads; it does not count.
    for number in range(count + 1):
        for at, (name, measure) in enumerate(measures.items()):
            pair = measure()
            if number > 0:
                results[name].append(pair)
            if watch is not None:
                watch.note(name, counts=number > 0)
            if callback is not None:
                callback(number * a_round + at + 1, total)
        for at, comparison in enumerate(comparisons, len(measures)):
            comparison.measure(number)
            if callback is not None:
                callback(number * a_round + at + 1, total)
        if watch is not None:
            watch.skip()
    cpu = cpu_info()
    return Report(
        model=os.fspath(model),
        quantize=quantize,
        cpu=cpu["cpu"],
        target=cpu["target"],
        threads=bench.threads,
        placement=bench.gemma.thread_placement,
        rounds=count,
        limits=bench.median_limits(),
        weight_bytes=bench.work.read_bytes,
        packed_weights=bench.gemma.packed_weights.state,
        parallel_loops_per_token=bench.parallel_loops_per_token,
        rows=[_row(name, pairs) for name, pairs in results.items()],
        left_out=[
            _prefill(tokens)
            for tokens in PREFILL_TOKENS
            if _prefill(tokens) not in measures
        ],
        speculation=[comparison.result() for comparison in comparisons],
        profile=None if watch is None else watch.profiles(),
    )


class _Watch:
    """Adds up where the time of each measurement's steps goes."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._last = bench.gemma.profile()
        self._wall_s: dict[str, float] = {}
        self._found: dict[str, StepProfile] = {}

    def note(self, name: str, counts: bool) -> None:
        """Something was measured since the last call."""
        now = self._bench.gemma.profile()
        found, self._last = now - self._last, now
        if not counts or not any(found.phases()):
            return  # it was a process of its own
        self._wall_s[name] = self._wall_s.get(name, 0) + self._bench.wall_s
        known = self._found.get(name)
        self._found[name] = found if known is None else known + found

    def skip(self) -> None:
        """What came since the last call is no measurement's."""
        self._last = self._bench.gemma.profile()

    def profiles(self) -> list[Profile]:
        return [
            profile_of(name, self._wall_s[name], found, _phase_of(name))
            for name, found in self._found.items()
        ]


def _phase_of(name: str) -> str:
    return "decode" if name.startswith("decode") else "prefill"


def _measures(bench: Bench) -> dict[str, Callable[[], Pair]]:
    """What makes a round, by name."""
    context = bench.gemma.config.context_length
    measures: dict[str, Callable[[], Pair]] = {}
    for tokens in PREFILL_TOKENS:
        if tokens <= context:
            measures[_prefill(tokens)] = partial(bench.prefill, tokens)
    tokens = min(DECODE_TOKENS, context - 1)
    measures["decode"] = partial(bench.decode, 1, tokens)
    tokens = min(BATCH_TOKENS, context - 1)
    for batch in BATCHES:
        name = f"decode, batch of {batch}"
        measures[name] = partial(bench.decode, batch, tokens)
    measures[FIRST_TOKEN] = bench.first_token
    measures[PEAK_MEMORY] = bench.peak_memory
    return measures


def _prefill(tokens: int) -> str:
    return f"prefill {tokens}"


def _row(name: str, pairs: list[Pair]) -> Row:
    values, limits = zip(*pairs)
    unit = {FIRST_TOKEN: "s", PEAK_MEMORY: "bytes"}.get(name, "tokens/s")
    more_is_better = unit == "tokens/s"
    shares = [
        value / limit if more_is_better else limit / value
        for value, limit in pairs
    ]
    return Row(
        name,
        statistics.median(values),
        unit,
        statistics.median(limits),
        statistics.median(shares),
    )
