"""Two builds of gemmakv against each other in one interleaved run.

    python tools/bench/vs_build.py OLD_PYTHON NEW_PYTHON [--model MODEL]
        [--rounds 7] [--threads 2] [--only prefill-512 ...] [--json OUT]

OLD_PYTHON and NEW_PYTHON are interpreters (of two virtual environments) that
each have a build installed. Every round measures each work on both sides, one
right after the other and in alternating order, while the other process is
stopped; the table gives medians and the median of the rounds' own ratios, new
to old. Above 1 the new build is faster, for every work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess

from interleaved import SAMPLING

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Work:
    """A request to gemmakv_worker.py, or a fresh process of one_shot.py."""

    name: str
    request: dict | None
    by_default: bool = True


WORKS = [
    *(Work(f"prefill-{n}", {"kind": "prefill", "tokens": n})
      for n in (16, 128, 512, 2048, 8192)),
    # More than the context of some models.
    Work("prefill-16384", {"kind": "prefill", "tokens": 16384}, False),
    Work("decode", {"kind": "decode", "tokens": 64, "context": 32}),
    Work("decode-at-8192",
         {"kind": "decode", "tokens": 32, "context": 8192}),
    *(Work(f"batch-{n}",
           {"kind": "decode", "tokens": 32, "context": 32, "batch": n})
      for n in (8, 32)),
    *(Work(f"sampled-batch-{n}",
           {"kind": "decode", "tokens": 32, "context": 32, "batch": n,
            **SAMPLING})
      for n in (1, 8, 32)),
    Work("stream", {"kind": "stream", "tokens": 64}),
    Work("snapshot", {"kind": "snapshot", "tokens": 2048}),
    Work("first-token", None),
]


class Build:
    """One side: a worker that is stopped unless it is asked for something."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        self.python, self.model, self.threads = python, model, threads
        self.worker = subprocess.Popen(
            [python, str(HERE / "gemmakv_worker.py"), "--model", model,
             "--threads", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        self._answer()
        self._signal(signal.SIGSTOP)

    def measure(self, work: Work) -> float:
        """Amount of work a second."""
        if work.request is None:
            printed = subprocess.run(
                [self.python, str(HERE / "one_shot.py"), "first-token",
                 "gemmakv", self.model, str(self.threads)],
                check=True, capture_output=True, text=True,
            ).stdout
            return 1 / float(printed)
        self._signal(signal.SIGCONT)
        assert self.worker.stdin is not None
        self.worker.stdin.write(json.dumps(work.request) + "\n")
        self.worker.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer["tokens_per_s"]

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self.worker.communicate()

    def _answer(self) -> dict:
        assert self.worker.stdout is not None
        line = self.worker.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.python}: the worker has ended")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.kill(self.worker.pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", metavar="OLD_PYTHON")
    parser.add_argument("new", metavar="NEW_PYTHON")
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", help="names of works")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    works = [w for w in WORKS
             if (w.name in args.only if args.only else w.by_default)]
    builds = [Build(python, args.model, args.threads)
              for python in (args.old, args.new)]
    rates: dict[str, list[list[float]]] = {w.name: [] for w in works}
    for work in works:  # warms up
        for build in builds:
            build.measure(work)
    for round_ in range(args.rounds):
        for work in works:
            pair = [0.0, 0.0]
            for side in (0, 1) if round_ % 2 == 0 else (1, 0):
                pair[side] = builds[side].measure(work)
            rates[work.name].append(pair)
    for build in builds:
        build.close()
    print(f"{'work':16}{'old /s':>12}{'new /s':>12}{'new/old':>9}  of rounds")
    for name, pairs in rates.items():
        old, new = (statistics.median(side) for side in zip(*pairs))
        ratios = sorted(b / a for a, b in pairs)
        print(f"{name:16}{old:12.4g}{new:12.4g}"
              f"{statistics.median(ratios):9.3f}"
              f"  {ratios[0]:.3f}..{ratios[-1]:.3f}")
    if args.json:
        args.json.write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
