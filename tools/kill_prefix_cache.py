#!/usr/bin/env python3
"""Kills processes that share a folder of the prefix cache, at any moment.

    python tools/kill_prefix_cache.py [--kills 200] [--processes 4]
        [--model FILE] [--lengths 300,520,800] [--above DIR] [--seed 1]

Each process loads the model and answers prompts that begin alike, `--lengths`
tokens long, with a tier below RAM that all of them write to, read from and
sweep. Half of them are killed (SIGKILL) by hand at random moments, the others
by themselves at a moment of the tier's protocol, which tools/kill_at.c, built
for the occasion, finds in their system calls. Every answer must be, bit for
bit, that of a model without a prefix cache: its tokens, their
log-probabilities, the logits behind them. In the end a sweep leaves nothing in
the folder that is no object, and what is left answers right once more.

`--above` is where the folder is made, the shared tier on a memory file system,
else the disk tier; without it, one after the other. The default model is a tiny
random one, written for the occasion (needs `gguf`). Exits with 1 for a wrong
answer, a process that ended by itself, or bytes that are left.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))

import gemmakv
from gemmakv import _core
from support import preload

# Moments of tools/kill_at.c: a folder is made, its key and its objects are
# created, written in halves and linked, found ones are touched, sweeps lock and
# unlink.
POINTS = (
    "after-mkdir", "before-create", "before-touch", "after-create",
    "after-write", "before-link", "after-link", "after-lock",
    "before-unlink", "*",
)  # fmt: skip
_PASSES = {"before-touch": 6, "after-write": 40, "after-lock": 3, "*": 200}
_LONG_S = 300  # for a process that says nothing
_LENGTHS = (300, 520, 800)  # tokens of the beginnings


@dataclasses.dataclass
class Report:
    """What a run came to."""

    tier: str = ""
    killed: int = 0
    by_point: dict[str, int] = dataclasses.field(default_factory=dict)
    answers: int = 0
    wrong: int = 0
    cached_tokens: int = 0  # of answers, from the tier
    ended: int = 0  # processes that were not killed
    left_files: int = 0  # in the folder, beside objects, key and lock
    left_bytes: int = 0
    damaged: int = 0
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        return not (
            self.wrong
            or self.ended
            or self.left_files
            or self.left_bytes
            or self.damaged
        )


def prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids: beginnings of these lengths, each with several ends."""
    draw = random.Random(5)
    ids = range(5, min(vocab_size, 250))
    beginnings = [draw.choices(ids, k=n) for n in lengths]
    return [
        beginning[: len(beginning) - cut] + draw.choices(ids, k=20 + cut)
        for beginning in beginnings
        for cut in (0, 0, 30)
    ]


def answer(gemma: gemmakv.Gemma, prompt: list[int]) -> tuple[str, int]:
    """A hash of all bits of it, and tokens that came from a tier."""
    cache = gemmakv.create_kv_cache(gemma.config)
    found = gemma.generate(cache, prompt, max_tokens=3, logprobs=True)
    logits = gemma.logits(cache, [7])
    assert found.logprobs is not None
    digest = hashlib.sha256(repr(found.token_ids).encode())
    digest.update(found.logprobs.tobytes())
    digest.update(logits.tobytes())
    cached = found.usage.cached
    return digest.hexdigest(), sum(cached.values()) - cached.get("ram", 0)


def work(
    model: str,
    tier: str,
    folder: str,
    budget: int,
    seed: int,
    lengths: Sequence[int],
) -> None:
    """The life of one process, which says what it does on stdout."""
    prefix = gemmakv.PrefixCache(
        ram=0,
        **{tier: folder, f"{tier}_bytes": budget},  # type: ignore[arg-type]
    )
    gemma = gemmakv.Gemma.load(model, threads=1, prefix_cache=prefix)
    draw = random.Random(seed)
    asked = prompts(gemma.config.vocab_size, lengths)
    print(json.dumps(["ready"]), flush=True)
    while True:
        index = draw.randrange(len(asked))
        print(json.dumps([index, *answer(gemma, asked[index])]), flush=True)
        if draw.random() < 0.3:
            prefix.flush()


@functools.cache
def _kill_at() -> Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return preload.build("kill_at", Path(folder))


class _Process:
    """One that is to die."""

    def __init__(
        self, arguments: list[str], folder: str, point: str, at: int
    ) -> None:
        env = dict(os.environ)
        self.point = point or "random"
        if point:
            env |= {
                "LD_PRELOAD": str(_kill_at()),
                "KILL_UNDER": os.path.realpath(folder),
                "KILL_AT": f"{point}:{at}",
            }
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def wait(self) -> tuple[bool, str]:
        """Whether it was killed, and what it said of an error."""
        assert self.process.stderr is not None
        error = self.process.stderr.read()
        code = self.process.wait()
        self._reader.join()
        return code == -signal.SIGKILL, error


class Killer:
    """One run on one folder."""

    def __init__(
        self,
        model: str,
        tier: str,
        above: str,
        seed: int,
        lengths: Sequence[int] = _LENGTHS,
    ) -> None:
        self.model = model
        self._lengths = lengths
        self._lock = threading.Lock()
        self.report = Report(tier)
        self._above = above
        self._draw = random.Random(seed)
        cold = gemmakv.Gemma.load(model, threads=1, prefix_cache=False)
        self._prompts = prompts(cold.config.vocab_size, lengths)
        self._expected = [answer(cold, one)[0] for one in self._prompts]

    def run(
        self,
        kills: int,
        processes: int,
        lives: Iterator[tuple[str, int]] | None = None,
    ) -> Report:
        """Kills `kills` processes, so many at a time, at the (moment, pass) of
        `lives`; ("", 0) is by hand."""
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._above) as above:
            folder = os.path.join(above, "kv")
            budget = self._bytes_of_all(os.path.join(above, "all")) * 2 // 3
            lives = lives or self._lives()
            with ThreadPoolExecutor(processes) as several:
                ends = [
                    several.submit(self._kill, folder, budget, kills, lives)
                    for _ in range(processes)
                ]
                for end in ends:
                    end.result()
            self._finish(folder, budget)
        self.report.seconds = time.monotonic() - begin
        return self.report

    def _cache(self, folder: str, budget: int) -> gemmakv.PrefixCache:
        tier = self.report.tier
        return gemmakv.PrefixCache(
            ram=0,
            **{tier: folder, f"{tier}_bytes": budget},  # type: ignore[arg-type]
        )

    def _ask_all(self, prefix: gemmakv.PrefixCache) -> None:
        gemma = gemmakv.Gemma.load(self.model, threads=1, prefix_cache=prefix)
        for index, prompt in enumerate(self._prompts):
            self._count(index, *answer(gemma, prompt))
        prefix.flush()

    def _bytes_of_all(self, folder: str) -> int:
        with self._cache(folder, 1 << 30) as prefix:
            self._ask_all(prefix)
            return prefix.stats().bytes[self.report.tier]

    def _lives(self) -> Iterator[tuple[str, int]]:
        """How each process dies: by hand, or at the n-th pass of a point."""
        while True:
            for point in POINTS:
                yield "", 0
                yield point, self._draw.randint(1, _PASSES.get(point, 20))

    def _kill(
        self,
        folder: str,
        budget: int,
        kills: int,
        lives: Iterator[tuple[str, int]],
    ) -> None:
        """One process after the other, until enough were killed."""
        report = self.report
        while True:
            with self._lock:
                if report.killed >= kills or report.wrong or report.ended:
                    return
                point, at = next(lives)
                seed = self._draw.getrandbits(30)
            one = _Process(
                [
                    "--model", self.model, "--tier", report.tier, "--folder",
                    folder, "--budget", str(budget), "--seed", str(seed),
                    "--lengths", ",".join(map(str, self._lengths)),
                ],
                folder,
                point,
                at,
            )  # fmt: skip
            self._follow(one)
            killed, error = one.wait()
            with self._lock:
                if killed:
                    report.killed += 1
                    by_point = report.by_point
                    by_point[one.point] = by_point.get(one.point, 0) + 1
                else:
                    report.ended += 1
                    sys.stderr.write(f"{one.point}: {error}\n")
                sys.stderr.write(
                    f"\r{report.killed} killed, {report.answers} answers "
                )

    def _follow(self, one: _Process) -> None:
        """Reads what it says until it dies. Where no point has killed it by
        then, it is killed by hand."""
        answers = 0
        by_hand = one.point == "random"
        with self._lock:
            most = self._draw.randint(0, 12) if by_hand else 60
        while True:
            try:
                line = one.lines.get(timeout=_LONG_S)
            except queue.Empty:
                sys.stderr.write(f"{one.point}: it hangs\n")
                with self._lock:
                    self.report.wrong += 1
                one.kill()
                return
            if not line:
                return
            said = json.loads(line)
            if said != ["ready"]:
                answers += 1
                self._count(*said)
            if answers >= most:
                if not by_hand:
                    one.point = "random"  # it never came to its point
                else:
                    time.sleep(self._draw.random() * 0.05)
                one.kill()
                most = 1 << 30

    def _count(self, index: int, digest: str, cached: int) -> None:
        wrong = digest != self._expected[index]
        with self._lock:
            self.report.answers += 1
            self.report.cached_tokens += cached
            self.report.wrong += wrong
        if wrong:
            sys.stderr.write(f"prompt {index}: another answer\n")

    def _finish(self, folder: str, budget: int) -> None:
        """What is left is sound, and all of it is known."""
        store = _core.FolderStore(
            folder, tier="disk", mapped=False, budget_bytes=budget
        )
        store.sweep()
        found = _core.FolderStore.describe(folder)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        self.report.left_files = len(files) - found["entries"] - 2
        self.report.left_bytes = max(0, found["bytes"] - budget)
        self.report.left_files += found["temporary_files"]
        with self._cache(folder, budget) as prefix:
            self._ask_all(prefix)
            self.report.damaged = prefix.stats().damaged[self.report.tier]
        store.clear()
        self.report.left_bytes += _core.FolderStore.describe(folder)["bytes"]


@contextlib.contextmanager
def random_model() -> Iterator[str]:
    sys.path.insert(0, str(Path(__file__).parent))
    import make_random_gguf

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tiny.gguf")
        make_random_gguf.write_random_gguf(path)
        yield path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--model", help="a GGUF file or a folder")
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(one) for one in text.split(",")],
        default=_LENGTHS,
        help="tokens of the prompts' beginnings",
    )
    parser.add_argument("--above", help="where the folder is made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tier", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(
            arguments.model,
            arguments.tier,
            arguments.folder,
            arguments.budget,
            arguments.seed,
            arguments.lengths,
        )
    places = [arguments.above] if arguments.above else ["/dev/shm", "/tmp"]
    sound = True
    model = contextlib.nullcontext(arguments.model)
    with model if arguments.model else random_model() as path:
        for place in places:
            tier = tier_of(place)
            killer = Killer(
                path, tier, place, arguments.seed, arguments.lengths
            )
            report = killer.run(arguments.kills // len(places),
                                arguments.processes)  # fmt: skip
            print(json.dumps(dataclasses.asdict(report)), flush=True)
            sound = sound and report.sound
    return 0 if sound else 1


def tier_of(place: str) -> str:
    """What a folder there is: "shared" on a memory file system."""
    with tempfile.TemporaryDirectory(dir=place) as above:
        folder = os.path.join(above, "kv")
        _core.FolderStore(folder, tier="disk", mapped=False, budget_bytes=1)
        kind = _core.FolderStore.describe(folder)["file_system"]
    return "shared" if kind in ("tmpfs", "ramfs") else "disk"


if __name__ == "__main__":
    sys.exit(main())
