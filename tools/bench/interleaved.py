"""What the tools share that measure two sides in turn: processes that are
stopped while the other side runs, rounds in alternating order, tables.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

HERE = pathlib.Path(__file__).resolve().parent
T = TypeVar("T")

# Of the works named sampled-*: as the makers of Gemma 3 recommend.
SAMPLING = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "seed": 1,
            "ignore_eos": True}


class Worker:
    """A process that answers a line of JSON with a line of JSON.

    It is stopped whenever it is not asked. `hello` is its first line. One that
    ends, or answers {"error": ...}, raises RuntimeError.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True)
        try:
            self.hello = self._answer()
        except RuntimeError:
            self.close()
            raise
        self.process.send_signal(signal.SIGSTOP)

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the worker ended; see its error above")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, request: dict) -> dict:
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return self._answer()
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        # Killed, not asked: a stopped process hears nothing else.
        self.process.kill()
        self.process.wait()


class Gemmakv(Worker):
    """Our side, of gemmakv_worker.py."""

    def __init__(self, model: str, threads: int) -> None:
        super().__init__(
            [sys.executable, str(HERE / "gemmakv_worker.py"), "--model", model,
             "--threads", str(threads)])
        self.cpu = self.hello["cpu"]


def in_turn(rounds: int, ours: Callable[[], T], theirs: Callable[[], T]
            ) -> list[tuple[T, T]]:
    """What both sides gave in each round; who begins alternates."""
    pairs = []
    for i in range(rounds):
        if i % 2:
            other = theirs()
            pairs.append((ours(), other))
        else:
            mine = ours()
            pairs.append((mine, theirs()))
    return pairs


def summary(pairs: Sequence[tuple[float, float]], peer: str) -> dict:
    """Medians of both sides and of the rounds' own ratios, ours to theirs."""
    ratios = [mine / other for mine, other in pairs]
    return {
        "gemmakv": statistics.median(mine for mine, _ in pairs),
        peer: statistics.median(other for _, other in pairs),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "rounds": pairs,
    }


def interleave(rounds: int, ours: Callable[[], float],
               theirs: Callable[[], float], peer: str = "llama.cpp") -> dict:
    return summary(in_turn(rounds, ours, theirs), peer)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(cells)} |"
        for cells in (head, ["---"] * len(head), *rows))


def load_at_start() -> float:
    """The load average, with a warning if others use the machine."""
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the machine is not idle (load {load:.1f})",
              file=sys.stderr)
    return load


def end_when_terminated() -> None:
    """A terminated run must not leave a stopped process behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"
