"""What the prefix cache saves and costs: every goal that it has, in one run.

    python tools/bench/prefix_cache.py [MODEL ...] [--rows first cost ...] \
        [--short] [--threads N] [--json OUT] [--shared DIR] [--disk DIR]

| row | |
|---|---|
| first | first token behind a known prefix and 16 new ones, for each tier, \
against computing all |
| match | finding and taking over a known prefix in RAM, alone |
| turns | asking a lower tier for a conversation of 64 turns that it lacks |
| cost | prefill, decode and peak memory with all tiers and no hit, against no \
cache |
| mapped | decode on pages mapped from shared memory, against the heap |
| at-once | identical prompts at once, against one prefill and forks |
| pss | keys and values of four processes with one prefix in shared memory, \
against one |
| round-robin | chats by turns with too little RAM and a disk: positions \
computed, against those never computed before |

Pairs are taken by turns, so that both see the same machine; the table has
medians, the lowest and the highest. What is known was computed by another
process, which has ended. Each hit is the first of a new PrefixCache with that
one tier: files are checked anew, nothing about the tier's pace is known. The
remote tier is a Redis of its own on the loopback device, values signed.

--short: no prefix of 24,000, fewer chats, fewer repeats. Needs Linux, and for
the remote tier `redis-server` and the package redis.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from chats import Chats, Ours, Shape, chat_bytes, turn_end, words

import gemmakv

NEW = 16
SECRET = "thirty-two bytes that nobody guesses"
GOALS = {  # of the first token, by what is known
    2_048: {"ram": ">= 30x", "shared": ">= 20x", "disk": ">= 15x",
            "remote": ">= 8x"},
    24_000: {"ram": ">= 400x", "shared": ">= 200x", "disk": ">= 120x",
             "remote": ">= 50x"},
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    known: tuple[int, ...] = (2_048, 24_000)
    mapped: int = 8_192
    identical: tuple[int, int] = (32, 2_000)  # prompts, tokens of each
    processes: int = 4
    shape: Shape = dataclasses.field(default_factory=Shape)
    repeats: int = 5


SHORT = Sizes(
    known=(2_048,),
    mapped=2_048,
    identical=(8, 512),
    shape=Shape(chats=8, turns=4),
    repeats=2,
)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of the table; `values` in its unit."""

    row: str
    what: str
    values: list[float]
    unit: str  # "x" is a ratio
    goal: str
    note: str = ""

    def cells(self) -> list[str]:
        middle = statistics.median(self.values)
        numbers = [middle, min(self.values), max(self.values)]
        digits = 0 if middle >= 100 else 1 if middle >= 10 else 3
        median, low, high = (f"{number:.{digits}f}" for number in numbers)
        spread = f"{low}..{high}" if len(self.values) > 1 else ""
        unit = self.unit if self.unit == "x" else " " + self.unit
        return [self.what, self.goal, median + unit, spread, self.note]


def seconds(call: Callable[..., object], *args: object) -> float:
    begin = time.perf_counter()
    call(*args)
    return time.perf_counter() - begin


def processor_ms() -> dict[str, float]:
    """Of each thread of this process, so far."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            used = (thread / "schedstat").read_text().split()[0]
            found[thread.name] = int(used) / 1e6
    return found


def beside(before: dict[str, float], engines: set[str]) -> float:
    """Processor time since then of threads that are no engine's."""
    return sum(
        now - before.get(thread, 0)
        for thread, now in processor_ms().items()
        if thread not in engines
    )


def first_token(
    gemma: gemmakv.Gemma, ids: Sequence[int], mode: str = "on"
) -> tuple[float, gemmakv.Usage]:
    begin = time.perf_counter()
    cache = gemmakv.create_kv_cache(gemma.config)
    result = gemma.generate(cache, ids, max_tokens=1, prefix_cache=mode)
    return time.perf_counter() - begin, result.usage


def load(
    model: str, threads: int | None, prefix_cache: gemmakv.PrefixCache | bool
) -> gemmakv.Gemma:
    """Ready: the first step of a model checks its weights."""
    gemma = gemmakv.Gemma.load(
        model, threads=threads, prefix_cache=prefix_cache, speculate="off"
    )
    first_token(gemma, range(1_000, 1_016), "off")
    return gemma


# What other processes do.


def elsewhere(call: Callable[..., Any], *args: object) -> Any:
    """What it returns in a process that ends then."""
    with a_process() as other:
        return other.submit(call, *args).result()


def a_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    )


def publish(
    model: str,
    threads: int | None,
    ids: list[int],
    tiers: dict[str, Any],
) -> None:
    """Computes a prompt; all tiers have it then."""
    with gemmakv.PrefixCache(ram="1GiB", **tiers) as prefix:
        gemma = gemmakv.Gemma.load(
            model, threads=threads, prefix_cache=prefix, speculate="off"
        )
        first_token(gemma, ids)
        prefix.flush()
        stats = prefix.stats()
        if stats.dropped or any(stats.failed_writes.values()):
            raise RuntimeError(f"not everything was written: {stats}")


def peak(
    model: str, threads: int | None, ids: list[int], tiers: dict[str, Any]
) -> float:
    """MB that a short run takes at most; no tiers: no prefix cache."""
    with contextlib.ExitStack() as stack:
        prefix: gemmakv.PrefixCache | bool = False
        if tiers:
            prefix = stack.enter_context(gemmakv.PrefixCache(**tiers))
        gemma = gemmakv.Gemma.load(
            model, threads=threads, prefix_cache=prefix, speculate="off"
        )
        cache = gemmakv.create_kv_cache(gemma.config)
        gemma.generate(cache, ids, max_tokens=32, ignore_eos=True)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status: expected VmHWM, found none")


def pss(folder: str | None = None) -> float:
    """MiB of this process, what it shares divided by those that do; with a
    folder, of mappings of its files alone."""
    total, inside = 0.0, folder is None
    where = "smaps_rollup" if folder is None else "smaps"
    for line in Path(f"/proc/self/{where}").read_text().splitlines():
        words_ = line.split()
        if folder is not None and not words_[0].endswith(":"):
            inside = words_[-1].startswith(folder)
        elif words_[0] == "Pss:" and inside:
            total += float(words_[1])
    return total / 1024


HELD: dict[str, Any] = {}  # of a process that shares a prefix


def share_begin(model: str, threads: int | None, folder: str) -> None:
    prefix = gemmakv.PrefixCache(ram="1GiB", shared=folder)
    HELD["gemma"] = load(model, threads, prefix)


def share_pss(folder: str) -> tuple[float, float]:
    gc.collect()
    return pss(), pss(folder)


def share(ids: list[int]) -> dict[str, int]:
    gemma = HELD["gemma"]
    HELD["cache"] = gemmakv.create_kv_cache(gemma.config)
    result = gemma.generate(
        HELD["cache"], ids, max_tokens=1, prefix_cache="read"
    )
    return result.usage.cached


def share_end() -> None:
    HELD["gemma"].prefix_cache.cache.close()
    HELD.clear()


# The rows.


class Bench:
    def __init__(
        self,
        model: str,
        args: argparse.Namespace,
        sizes: Sizes,
        redis: str,
        stack: contextlib.ExitStack,
    ) -> None:
        self.model, self.threads, self.sizes = model, args.threads, sizes
        self.repeats = sizes.repeats
        self.redis = redis
        self.folders = {"shared": args.shared, "disk": args.disk}
        self.rng = np.random.default_rng(1)
        self._stack = stack  # until the last row is done
        self._known: dict[int, tuple[list[int], dict[str, Any]]] = {}
        self.off = load(model, self.threads, False)

    def ids(self, count: int) -> list[int]:
        return words(self.rng, count)

    def new(self, count: int = NEW) -> list[int]:
        """What a user says behind a reply that ended by itself."""
        return [turn_end(self.off.config), *self.ids(count - 1)]

    def remote(self) -> dict[str, Any]:
        return {"remote": self.redis, "remote_secret": SECRET}

    @contextlib.contextmanager
    def tiers(self, *names: str) -> Iterator[dict[str, Any]]:
        """Empty ones, as arguments of PrefixCache."""
        found: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            for name in names:
                if name == "remote":
                    if self.redis:
                        found |= self.remote()
                    continue
                found[name] = stack.enter_context(
                    tempfile.TemporaryDirectory(dir=self.folders[name])
                )
            yield found

    @contextlib.contextmanager
    def model_of(
        self, **tiers: Any
    ) -> Iterator[tuple[gemmakv.Gemma, gemmakv.PrefixCache]]:
        with gemmakv.PrefixCache(**{"ram": "1GiB"} | tiers) as prefix:
            yield load(self.model, self.threads, prefix), prefix

    def known(self, count: int) -> tuple[list[int], dict[str, Any]]:
        """A prefix that another process computed, and the tiers that have
        it."""
        if count not in self._known:
            ids = self.ids(count)
            tiers = self._stack.enter_context(
                self.tiers("shared", "disk", "remote")
            )
            elsewhere(publish, self.model, self.threads, ids, tiers)
            self._known[count] = ids, tiers
        return self._known[count]

    def first(self) -> Iterator[Figure]:
        for count in self.sizes.known:
            prefix_ids, tiers = self.known(count)
            arguments = {
                "ram": {},
                "shared": {"shared": tiers["shared"]},
                "disk": {"disk": tiers["disk"]},
            }
            if self.redis:
                arguments["remote"] = self.remote()
            hits: dict[str, list[float]] = {name: [] for name in arguments}
            cold: list[float] = []
            cache = self.taken(tiers["disk"], prefix_ids)
            # A long prefix takes long to compute, always about the same.
            computed = 1 if count > 8_192 else self.repeats
            for i in range(self.repeats):
                ids = prefix_ids + self.new()
                if i < computed:
                    cold.append(first_token(self.off, ids)[0])
                for name, of in arguments.items():
                    with self.model_of(**of) as (gemma, _):
                        if name == "ram":
                            gemma.prefix_cache.publish(cache)
                        taken, usage = first_token(gemma, ids, "read")
                    if usage.cached != {name: count}:
                        raise RuntimeError(
                            f"expected {count} tokens of {name}, found {usage}"
                        )
                    hits[name].append(taken)
            whole = statistics.median(cold)
            for name, times in hits.items():
                yield Figure(
                    "first", f"first token, {count:,} + {NEW}, {name}",
                    [whole / one for one in times], "x",
                    GOALS.get(count, {}).get(name, ""),
                    f"{1e3 * statistics.median(times):.1f} ms against "
                    f"{whole:.2f} s",
                )

    def taken(self, folder: str, ids: list[int]) -> gemmakv.KVCache:
        """A conversation of a prefix that a folder has, in heap blocks."""
        with self.model_of(disk=folder) as (gemma, _):
            return gemma.prefix_cache.match(ids + self.new())

    def match(self) -> Iterator[Figure]:
        count = self.sizes.known[-1]
        prefix_ids, tiers = self.known(count)
        with self.model_of() as (gemma, _):
            gemma.prefix_cache.publish(self.taken(tiers["disk"], prefix_ids))
            times = []
            for _ in range(4 * self.repeats):
                ids = prefix_ids + self.new()
                begin = time.perf_counter()
                cache = gemma.prefix_cache.match(ids)
                times.append(1e3 * (time.perf_counter() - begin))
                assert len(cache) == count, len(cache)
        yield Figure(
            "match", f"match and adopt {count:,} in RAM", times, "ms",
            "<= 1 ms",
        )

    def turns(self, turns: int = 64, said: int = 100) -> Iterator[Figure]:
        def conversation() -> list[int]:
            return [id_ for _ in range(turns) for id_ in self.new(said)]

        store = CountingStore()
        with self.model_of(remote=store) as (gemma, _):
            gemma.prefix_cache.match(conversation())
        trips = len(store.asked)
        note = (
            f"{turns * said:,} tokens; {trips} round trip"
            f"{'s' * (trips != 1)} for {sum(store.asked)} addresses"
        )
        for name in ("shared", "disk", "remote"):
            if name == "remote" and not self.redis:
                continue
            with self.tiers(name) as tiers, self.model_of(**tiers) as of:
                of[0].prefix_cache.match(conversation())  # it is open then
                times = []
                for _ in range(4 * self.repeats):
                    ids = conversation()
                    view = of[0].prefix_cache
                    times.append(1e3 * seconds(view.match, ids))
            yield Figure(
                "turns", f"{turns} turns asked in {name}", times, "ms",
                "<= 2 ms, 1 trip", note,
            )

    def cost(self) -> Iterator[Figure]:
        with self.tiers("shared", "disk", "remote") as tiers:
            with self.model_of(**tiers) as (on, prefix):
                engines = set(processor_ms())  # others come with the tiers
                for count in (128, 512):
                    yield self.prefill(on, prefix, count, engines)
                yield self.decode_cost(on, prefix, engines)
            ids = self.ids(128)
            ratios = []
            for i in range(3):
                megabytes = {
                    name: elsewhere(peak, self.model, self.threads, ids, of)
                    for name, of in alternate(
                        {"on": tiers, "off": {}}.items(), i
                    )
                }
                ratios.append(megabytes["on"] / megabytes["off"])
                ids = self.ids(128)
        yield Figure(
            "cost", "peak memory of 128 + 32 tokens, all tiers", ratios, "x",
            "<= 1.10x",
            f"{megabytes['on']:.0f} MB against {megabytes['off']:.0f}",
        )

    def prefill(
        self,
        on: gemmakv.Gemma,
        prefix: gemmakv.PrefixCache,
        count: int,
        engines: set[str],
    ) -> Figure:
        ratios, written, meanwhile = [], [], []
        for i in range(6 * self.repeats):
            ids = self.ids(count)
            times = {}
            for name, gemma in alternate(
                {"on": on, "off": self.off}.items(), i
            ):
                before = processor_ms()
                times[name], usage = first_token(gemma, ids)
                assert usage.cached_tokens == 0, usage
                if name == "on":  # not while the other is measured
                    meanwhile.append(beside(before, engines))
                    written.append(1e3 * seconds(prefix.flush))
            ratios.append(times["on"] / times["off"])
        return Figure(
            "cost", f"prefill of {count} that nobody knows, all tiers",
            ratios, "x", "<= 1.01x",
            f"threads of the tiers: {statistics.median(meanwhile):.2f} ms of "
            f"processor time meanwhile, of {1e3 * times['off']:.0f} ms; and "
            f"{statistics.median(written):.1f} ms of writing behind it",
        )

    def decode_cost(
        self,
        on: gemmakv.Gemma,
        prefix: gemmakv.PrefixCache,
        engines: set[str],
        tokens: int = 64,
    ) -> Figure:
        ratios, meanwhile = [], []
        for i in range(2 * self.repeats):
            ids = self.ids(32)
            times = {}
            for name, gemma in alternate(
                {"on": on, "off": self.off}.items(), i
            ):
                cache = gemmakv.create_kv_cache(gemma.config)
                before = processor_ms()
                result = gemma.generate(
                    cache, ids, max_tokens=tokens, ignore_eos=True
                )
                times[name] = result.timings.decode_s
                if name == "on":
                    meanwhile.append(beside(before, engines))
                prefix.flush()
            ratios.append(times["on"] / times["off"])
        return Figure(
            "cost", f"decode of {tokens}, all tiers", ratios, "x", "<= 1.01x",
            f"threads of the tiers: {statistics.median(meanwhile):.2f} ms of "
            f"processor time meanwhile, of {1e3 * times['off']:.0f} ms",
        )

    def mapped(self, tokens: int = 64) -> Iterator[Figure]:
        count = self.sizes.mapped
        ids, tiers = self.known(count)
        caches = {"heap": self.taken(tiers["disk"], ids)}
        with self.model_of(shared=tiers["shared"]) as (gemma, _):
            caches["mapped"] = gemma.prefix_cache.match(ids + self.new())
        if tiers["shared"] not in Path("/proc/self/maps").read_text():
            raise RuntimeError("expected mapped pages, found none")
        ratios, speeds = [], []
        for i in range(2 * self.repeats):
            speed = {}
            for name, cache in alternate(caches.items(), i):
                fork = cache.fork()
                assert len(fork) == count, len(fork)
                result = self.off.generate(
                    fork, [5], max_tokens=tokens, ignore_eos=True
                )
                speed[name] = result.timings.decode_tokens_per_s
            ratios.append(speed["mapped"] / speed["heap"])
            speeds.append(speed["heap"])
        yield Figure(
            "mapped", f"decode at {count:,}, mapped against heap", ratios, "x",
            ">= 0.98x", f"heap: {statistics.median(speeds):.0f} tokens/s",
        )

    def at_once(self) -> Iterator[Figure]:
        rows, count = self.sizes.identical
        ratios = []
        with self.model_of() as (on, _):
            for _ in range(self.repeats):
                prompt = self.ids(count)
                caches = [
                    gemmakv.create_kv_cache(on.config) for _ in range(rows)
                ]
                together = seconds(
                    lambda caches=caches, prompt=prompt: on.generate_batch(
                        caches, [prompt] * rows, max_tokens=8, ignore_eos=True
                    )
                )
                cache = gemmakv.create_kv_cache(on.config)
                forked = seconds(
                    lambda cache=cache, prompt=prompt: self.off.generate(
                        cache, prompt, max_tokens=8, n=rows, ignore_eos=True
                    )
                )
                ratios.append(together / forked)
        yield Figure(
            "at-once", f"{rows} identical prompts of {count:,}", ratios, "x",
            "<= 1.1x", "one prefill and forks that decode: 1",
        )

    def pss(self) -> Iterator[Figure]:
        count, most = self.sizes.known[-1], self.sizes.processes
        ids, tiers = self.known(count)
        grown, mapped = {}, {}
        for processes in (1, most):
            grown[processes], mapped[processes] = self.hold(
                processes, ids, tiers["shared"]
            )
        yield Figure(
            "pss", f"{most} processes, one prefix of {count:,}: mapped files",
            [mapped[most] / mapped[1]], "x", "<= 1.1x",
            f"{mapped[most]:.1f} MiB against {mapped[1]:.1f}",
        )
        yield Figure(
            "pss", "the same, all that they grew by", [grown[most] / grown[1]],
            "x", "", f"{grown[most]:.1f} MiB against {grown[1]:.1f}",
        )

    def hold(
        self, processes: int, ids: list[int], folder: str
    ) -> tuple[float, float]:
        """MiB by which they grow together, and of mapped files then."""
        with contextlib.ExitStack() as stack:
            all_ = [
                stack.enter_context(a_process()) for _ in range(processes)
            ]

            def each(call: Callable[..., Any], *args: object) -> list[Any]:
                return [one.submit(call, *args).result() for one in all_]

            each(share_begin, self.model, self.threads, folder)
            before = each(share_pss, folder)
            for cached in each(share, ids + self.new()):
                if cached != {"shared": len(ids)}:
                    raise RuntimeError(f"expected all of shared: {cached}")
            after = each(share_pss, folder)
            each(share_end)
        grown = sum(b[0] for b in after) - sum(a[0] for a in before)
        return grown, sum(b[1] for b in after)

    def round_robin(self) -> Iterator[Figure]:
        shape = self.sizes.shape
        size = shape.chats * chat_bytes(self.off, shape)
        computed, cached = 0, dict.fromkeys(("ram", "disk"), 0)
        with (
            self.tiers("disk") as tiers,
            self.model_of(ram=size // 4, **tiers) as (gemma, prefix),
        ):
            chats = Chats(shape, gemma.config)
            begin = time.perf_counter()
            for _ in range(shape.turns):
                for answer in chats.round(Ours(gemma)):
                    computed += answer.computed
                    for tier, count in answer.cached.items():
                        cached[tier] += count
            taken = time.perf_counter() - begin
            prefix.flush()
            stats = prefix.stats()
        yield Figure(
            "round-robin",
            f"{shape.chats} chats x {shape.turns} turns of {shape.said} + "
            f"{shape.reply}, RAM a quarter",
            [computed / shape.needed], "x", "<= 1.05x",
            f"{computed:,} of {shape.needed:,} positions, {taken:.0f} s; from "
            f"RAM {cached['ram']:,}, disk {cached['disk']:,}; "
            f"{size / 2**20:.0f} MiB of chats; {stats.dropped} not written",
        )


ROWS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "first": Bench.first,
    "match": Bench.match,
    "turns": Bench.turns,
    "cost": Bench.cost,
    "mapped": Bench.mapped,
    "at-once": Bench.at_once,
    "pss": Bench.pss,
    "round-robin": Bench.round_robin,
}


class CountingStore:
    """A remote store that has nothing, and knows what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def has_many(self, keys: list[bytes]) -> list[bool]:
        self.asked.append(len(keys))
        return [False] * len(keys)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        self.asked.append(len(keys))
        return [None] * len(keys)

    def put_many(self, items: object) -> None:
        pass


def alternate(items: Any, i: int) -> list[Any]:
    found = list(items)
    return found[::-1] if i % 2 else found


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """The URL of one that ends with this; "" where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        print("no redis-server: its rows are left out", file=sys.stderr)
        yield ""
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "",
             "--appendonly", "no", "--dir", folder],
            stdout=subprocess.DEVNULL)
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(
                    ("127.0.0.1", port), 1
                ):
                    break
                if server.poll() is not None:
                    raise RuntimeError("redis-server ended")
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()


def table(figures: Sequence[Figure]) -> str:
    heads = ["what", "goal", "measured", "range", ""]
    lines = [heads, ["---"] * len(heads)]
    lines += [figure.cells() for figure in figures]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["gemma-3-270m"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument(
        "--known", nargs="+", type=int, help="tokens of known prefixes")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--shared", default="/dev/shm", help="a memory file system")
    parser.add_argument(
        "--disk", default=tempfile.gettempdir(), help="a folder on a disk")
    return parser.parse_args()


def main() -> None:
    # A terminated run leaves no server and no folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    args = parse()
    sizes = SHORT if args.short else Sizes()
    if args.repeats:
        sizes = dataclasses.replace(sizes, repeats=args.repeats)
    if args.known:
        sizes = dataclasses.replace(sizes, known=tuple(args.known))
    found: dict[str, Any] = {"cpu": gemmakv.cpu_info(), "models": {}}
    with redis_server() as redis:
        for model in args.models:
            begin, load_before = time.perf_counter(), os.getloadavg()[0]
            figures: list[Figure] = []
            with contextlib.ExitStack() as stack:
                bench = Bench(model, args, sizes, redis, stack)
                for name in args.rows:
                    for figure in ROWS[name](bench):
                        figures.append(figure)
                        print(*figure.cells(), sep=" | ", file=sys.stderr)
            taken, load_after = time.perf_counter() - begin, os.getloadavg()[0]
            print(
                f"{Path(model).name}, load {load_before:.1f} at the start and "
                f"{load_after:.1f} at the end, {taken:.0f} s\n\n"
                f"{table(figures)}\n", flush=True)
            found["models"][model] = {
                "load": [load_before, load_after],
                "seconds": taken,
                "figures": [dataclasses.asdict(one) for one in figures],
            }
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
