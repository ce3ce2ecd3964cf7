"""The same tokens computed in many ways, compared bit by bit.

    report = gemmakv.verify.run("gemma-3-270m")
    assert report.equal

Each way of computing ends with the logits of the same last tokens, at several
positions; their hash covers every key and value before them. All ways within
one arithmetic must agree. SIMD targets without fused multiply-add round
differently from those with it: they are another arithmetic, compared among
themselves.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from gemmakv import _core
from gemmakv._support.arguments import QuantizeType, choice, integer
from gemmakv._support.files import StrPath
from gemmakv._support.progress import Callback, Progress, as_callback
from gemmakv.cache._kv_cache import KV_DTYPES, KvDtype
from gemmakv.chat._gemma import Gemma
from gemmakv.diagnostics._cpu import cpu_info
from gemmakv.diagnostics._verify_ways import (
    MIN_TOKENS,
    POSITIONS,
    Case,
    Way,
    ways_of,
)
from gemmakv.errors import unexpected

_MARGIN = 128  # tokens beyond the sliding window, by default
_PASS_S = 1.5  # what one pass over the tokens may take, by default


@dataclasses.dataclass(frozen=True)
class Check:
    """One way of computing the tokens.

    Attributes:
      arithmetic: those of one arithmetic must agree.
      way: what was done, for people.
      digest: SHA256 of the logits.
      equal: to the first way of the same arithmetic.
      seconds: that it took.
    """

    arithmetic: str
    way: str
    digest: str
    equal: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `run`.

    Attributes:
      model: as it was given.
      quantize: as it was given.
      fingerprint: of the model.
      cpu: the processor's name.
      target: SIMD target of the ways that do not name another.
      threads: of the ways that do not say otherwise.
      kv_dtype: how keys and values were stored.
      tokens: of the conversation.
      positions: how many the hashed logits are of.
      vocab_size: logits of a position.
      sliding_window: in tokens; 0: none.
      checks: one for each way.
    """

    model: str
    quantize: str | None
    fingerprint: str
    cpu: str
    target: str
    threads: int
    kv_dtype: str
    tokens: int
    positions: int
    vocab_size: int
    sliding_window: int
    checks: list[Check]

    @property
    def equal(self) -> bool:
        """Whether all ways agree."""
        return all(check.equal for check in self.checks)


def run(
    model: StrPath,
    *,
    tokens: int | None = None,
    kv_dtype: KvDtype = "bf16",
    threads: int | None = None,
    quantize: QuantizeType | None = None,
    progress: Progress = None,
) -> Report:
    """Computes the same tokens in every way and compares the logits.

    Args:
      model: as for `Gemma.load`.
      tokens: how many; default: enough to leave the sliding window,
        fewer if this machine would need minutes.
      kv_dtype: how keys and values are stored: "f32", "bf16" or "int8".
      threads: for the ways that do not say otherwise; default: all
        processors.
      quantize: as for `Gemma.load`.
      progress: callable(done, total) in ways, or True for a line on stderr.

    Takes half a minute for a small model. Switches the SIMD target of the
    process meanwhile: no other thread may compute. Raises what `Gemma.load`
    raises, and ValueError.
    """
    choice("kv_dtype", kv_dtype, KV_DTYPES)
    count = None if tokens is None else integer("tokens", tokens)
    load = partial(
        Gemma.load, model, quantize=quantize, prefix_cache=False
    )
    gemma = load(threads=threads)
    limit = gemma.config.context_length
    if limit < MIN_TOKENS:
        expected = f"a context of {MIN_TOKENS} tokens or more"
        raise unexpected("model", expected, limit)
    if count is None:
        count = _default_tokens(gemma)
    elif not MIN_TOKENS <= count <= limit:
        expected = f"{MIN_TOKENS} to {limit} (the model's context)"
        raise unexpected("tokens", expected, count)
    case = Case.make(gemma, count, kv_dtype)
    report = Report(
        model=str(model),
        quantize=quantize,
        fingerprint=gemma.fingerprint,
        cpu=cpu_info()["cpu"],
        target=cpu_info()["target"],
        threads=gemma.threads,
        kv_dtype=kv_dtype,
        tokens=count,
        positions=POSITIONS,
        vocab_size=gemma.config.vocab_size,
        sliding_window=gemma.config.sliding_window,
        checks=[],
    )
    del gemma  # the case's own: it is freed when others are loaded
    checks = _check_all(
        case, _plan(load, case), as_callback(progress, "verifying")
    )
    return dataclasses.replace(report, checks=checks)


@dataclasses.dataclass(frozen=True)
class _Task:
    """A way, and where it is to run."""

    arithmetic: str
    way: Way
    target: str = ""  # "": the best one
    load: Callable[[], Gemma] | None = None  # None: what is loaded


def _check_all(
    case: Case, plan: list[_Task], callback: Callback | None
) -> list[Check]:
    checks: list[Check] = []
    references: dict[str, str] = {}
    for done, task in enumerate(plan):
        if callback is not None:
            callback(done, len(plan))
        if task.load is not None:
            case.load(task.load)
        start = time.monotonic()
        with _on_target(task.target):
            digests = task.way.run(case)
        seconds = time.monotonic() - start
        reference = references.setdefault(task.arithmetic, digests[0])
        different = [digest for digest in digests if digest != reference]
        checks.append(
            Check(
                task.arithmetic,
                task.way.name,
                different[0] if different else reference,
                not different,
                seconds,
            )
        )
    if callback is not None:
        callback(len(plan), len(plan))
    return checks


def _plan(load: Callable[..., Gemma], case: Case) -> list[_Task]:
    """Gives all ways; those of the best target's arithmetic first."""
    usual = case.gemma.threads
    first, chunked, *others = ways_of(case)
    best, *targets = cpu_info()["targets"]
    arithmetic = _arithmetic_of(best)
    plan = [_Task(arithmetic, way) for way in (first, chunked, *others)]
    later: list[_Task] = []
    for target in targets:
        own = _arithmetic_of(target)
        name = f"SIMD target {target}"
        task = _Task(own, Way(name, first.run), target)
        if own == arithmetic:
            plan.append(task)
            continue
        later.append(task)
        if len(later) == 1:  # so that it is compared with something
            name += f", {chunked.name}"
            later.append(_Task(own, Way(name, chunked.run), target))
    for count in _thread_counts(usual):
        way = Way(f"{count} thread" + "s" * (count > 1), first.run)
        threaded = partial(load, threads=count)
        plan.append(_Task(arithmetic, way, load=threaded))
    anew = partial(load, threads=usual, packed_cache=False)
    plan.append(
        _Task(arithmetic, Way("weights packed again", first.run), load=anew)
    )
    return plan + later


def _arithmetic_of(target: str) -> str:
    with _on_target(target):
        fused = _core.numerics_id() & 0xF == 1  # above: version and processor
    return f"with{'' if fused else 'out'} fused multiply-add"


@contextmanager
def _on_target(target: str) -> Iterator[None]:
    """Runs the body's kernels on a SIMD target."""
    if not target:
        yield
        return
    _core.force_target(target)
    try:
        yield
    finally:
        _core.force_target("")


def _thread_counts(usual: int) -> list[int]:
    """Other numbers of threads: all up to eight, a few beyond."""
    counts = set(range(1, min(usual, 8) + 1)) | {usual // 2, usual + 1}
    return sorted(counts - {0, usual})


def _default_tokens(gemma: Gemma) -> int:
    """Enough to pass the window, or what this machine does in good time."""
    config = gemma.config
    case = Case.make(gemma, MIN_TOKENS, "bf16")
    cache = case.new_cache()
    start = time.monotonic()
    gemma.logits(cache, case.body)
    speed = len(case.body) / (time.monotonic() - start)
    wanted = config.sliding_window + _MARGIN
    if not config.sliding_window:
        wanted = 4 * _MARGIN
    affordable = max(MIN_TOKENS, int(_PASS_S * speed))
    return min(wanted, affordable, config.context_length)
