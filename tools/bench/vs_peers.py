"""gemmakv against OpenVINO GenAI, ONNX Runtime GenAI and CTranslate2.

    python tools/bench/vs_peers.py --gguf MODEL.gguf --folder DIR \
        [--rounds 5] [--threads 2] [--peer openvino-int8 ...] \
        [--only prefill-512 ...] [--prepare] [--json OUT]

MODEL is a Gemma 3; its weights are dequantized to float32 and each engine's
own converter makes its model of them (peers/weights.py, peers/convert.py). DIR
keeps what that takes, about 8 GB: DIR/venvs/ENGINE, a virtual environment for
each engine with the versions of peers/ENGINE.txt, and DIR/models/NAME. Both
are made if they are not there, which takes pip, 3 GB of memory and some
minutes; nothing else asks the network. DIR belongs to one MODEL. --prepare
ends after that.

Every round measures each work on both sides, one right after the other and in
alternating order, while the other process is stopped; the table gives medians
and the median of the rounds' own ratios. What has to be known to read them:

- The files are not the same: ours has its own types of weights, an engine what
  its converter makes of the same values. "equal" says of how many of 64 greedy
  tokens of ours the engine makes the same choice, each behind those before it:
  near 1 if the conversion is right, and lower for coarser weights.
- Engines run with their defaults for keys and values and for the arithmetic
  (OpenVINO: keys and values in 8 bits), with as many threads as we do, but for
  what was measured to be faster (peers/convert.py, peers/worker.py). Where an
  engine has two ways to run (OpenVINO: "paged" or "plain"), a trial shows
  which is faster for each work.
- prefill-N: to the first token of a prompt of N. decode and batch-N: 64 steps
  of 1 or N conversations behind 32 tokens each, greedy, sampling included.

An engine that cannot be had is in the table with its error.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys

from interleaved import (
    Gemmakv,
    Worker,
    cpu_name,
    end_when_terminated,
    interleave,
    load_at_start,
    markdown,
)

PEERS = pathlib.Path(__file__).resolve().parent / "peers"


@dataclasses.dataclass(frozen=True)
class Peer:
    engine: str  # the name of its requirements in peers/
    precision: str

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.precision}"


ALL = {peer.name: peer for peer in (
    Peer("openvino", "int8"), Peer("openvino", "int4"),
    Peer("onnxruntime", "int4"), Peer("ctranslate2", "int8"))}
WRITES_WEIGHTS = "ctranslate2"  # whose environment has what weights.py needs
WORKS = {
    **{f"prefill-{n}": {"kind": "prefill", "tokens": n}
       for n in (128, 512, 2048)},
    **{"decode" if n == 1 else f"batch-{n}":
       {"kind": "decode", "tokens": 64, "context": 32, "batch": n}
       for n in (1, 8, 32)},
}
GREEDY = {"kind": "greedy", "prompts": 4, "context": 48, "tokens": 16}


def run(command: list[object]) -> None:
    """A process whose last line of errors is the error of this call."""
    done = subprocess.run([str(word) for word in command], text=True,
                          capture_output=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else "no error"
        raise RuntimeError(f"{pathlib.Path(str(command[1])).name}: {said}")


class Folder:
    """Environments and converted models, made when they are asked for."""

    def __init__(self, path: pathlib.Path, gguf: str) -> None:
        self.path, self.gguf = path.resolve(), gguf

    def python(self, engine: str) -> pathlib.Path:
        """The interpreter of an environment with an engine's requirements."""
        venv = self.path / "venvs" / engine
        pins = (PEERS / f"{engine}.txt").read_text()
        done = venv / "requirements.txt"  # written last
        python = venv / "bin" / "python"
        if not done.exists() or done.read_text() != pins:
            print(f"installing {engine}", file=sys.stderr)
            run([sys.executable, "-m", "venv", venv])
            run([python, "-m", "pip", "install", "-q", "-r",
                 PEERS / f"{engine}.txt"])
            done.write_text(pins)
        return python

    def _made(self, path: pathlib.Path, command: list[object]) -> pathlib.Path:
        """A folder that a command writes, whose last word is the folder."""
        if not path.exists():
            part = path.with_name(path.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            print(f"making {path.name}", file=sys.stderr)
            run([*command, part])
            os.replace(part, path)
        return path

    def weights(self) -> pathlib.Path:
        return self._made(
            self.path / "weights",
            [self.python(WRITES_WEIGHTS), PEERS / "weights.py", self.gguf])

    def model(self, peer: Peer) -> pathlib.Path:
        path = self.path / "models" / peer.name
        if path.exists():
            return path
        return self._made(
            path, [self.python(peer.engine), PEERS / "convert.py", peer.engine,
                   peer.precision, self.weights()])

    def worker(self, peer: Peer, threads: int) -> Worker:
        return Worker([
            str(word) for word in (
                self.python(peer.engine), PEERS / "worker.py", peer.engine,
                self.model(peer), threads)])


def speed(worker: Worker, request: dict, **more: str) -> float:
    return worker.ask({**request, **more})["tokens_per_s"]


def measure(name: str, ours: Gemmakv, theirs: Worker, rounds: int) -> dict:
    request = WORKS[name]
    speed(ours, request)  # first touch of buffers and parked caches
    settings = theirs.hello["settings"]
    # The first call of each is a warm-up; one alone needs no second.
    trial = {setting: max(speed(theirs, request, setting=setting)
                          for _ in range(min(2, len(settings))))
             for setting in settings}
    setting = max(trial, key=trial.get)
    row = interleave(rounds, lambda: speed(ours, request),
                     lambda: speed(theirs, request, setting=setting), "peer")
    return {**row, "setting": setting}


def agreement(ours: Gemmakv, theirs: Worker) -> dict:
    greedy = ours.ask(GREEDY)
    return theirs.ask({"kind": "agree", **greedy,
                       "setting": theirs.hello["settings"][0]})


def compare(peer: Peer, args: argparse.Namespace, folder: Folder) -> dict:
    """All works against one engine; {"error": ...} if it cannot be had."""
    result: dict = {"engine": peer.engine, "weights": peer.precision}
    try:
        theirs = folder.worker(peer, args.threads)
    except (RuntimeError, OSError) as error:
        return {**result, "error": str(error)}
    try:
        ours = Gemmakv(args.gguf, args.threads)
        try:
            result |= {"versions": theirs.hello["versions"],
                       "gemmakv": ours.cpu, "works": {}}
            result["equal"] = agreement(ours, theirs)
            print("{}; {equal} of {of} greedy tokens equal".format(
                peer.name, **result["equal"]), file=sys.stderr)
            for name in args.only:
                try:
                    row = measure(name, ours, theirs, args.rounds)
                except RuntimeError as error:
                    row = {"error": str(error)}
                result["works"][name] = row
                print("; ".join(row_of(peer.name, name, row)),
                      file=sys.stderr)
        finally:
            ours.close()
    except RuntimeError as error:
        result["error"] = str(error)
    finally:
        theirs.close()
    return result


def row_of(name: str, work: str, row: dict) -> list[str]:
    """A row of the table."""
    if "error" in row:
        return [name, work, "-", "-", "-", row["error"], "-"]
    low, high = row["ratio_range"]
    return [name, work, f"{row['gemmakv']:.1f}", f"{row['peer']:.1f}",
            f"{row['ratio']:.2f}", f"{low:.2f}..{high:.2f}", row["setting"]]


def rows_of(name: str, result: dict) -> list[list[str]]:
    rows = [row_of(name, work, row)
            for work, row in result.get("works", {}).items()]
    if "error" in result:
        rows.append(row_of(name, "-", result))
    return rows


def notes(results: dict[str, dict]):
    for name, result in results.items():
        if "versions" in result:
            versions = ", ".join(
                f"{k} {v}" for k, v in result["versions"].items())
            equal = result.get("equal", {"equal": 0, "of": 0})
            yield (f"{name}: {versions}; {equal['equal']} of {equal['of']} "
                   "greedy tokens equal")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--folder", required=True, type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--only", nargs="+", choices=WORKS,
                        default=list(WORKS))
    parser.add_argument("--prepare", action="store_true",
                        help="install and convert, measure nothing")
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    end_when_terminated()
    folder = Folder(args.folder, args.gguf)
    failed = {}
    for name in args.peer:
        try:
            folder.python(ALL[name].engine)
            folder.model(ALL[name])
        except (RuntimeError, OSError) as error:
            failed[name] = {"error": str(error)}
            print(f"{name}: {error}", file=sys.stderr)
    if args.prepare:
        sys.exit(bool(failed))
    load = load_at_start()
    results = {
        name: failed.get(name) or compare(ALL[name], args, folder)
        for name in args.peer}
    end = os.getloadavg()[0]
    rows = [row for name, result in results.items()
            for row in rows_of(name, result)]
    print(f"{datetime.date.today()}, {cpu_name()}, {args.threads} threads, "
          f"{pathlib.Path(args.gguf).name}, load {load:.1f} at the start and "
          f"{end:.1f} at the end\n\n" + markdown(
              ["engine", "work", "gemmakv", "engine's", "ratio", "range",
               "setting"], rows) + "\n")
    print("\n".join(notes(results)))
    if args.json:
        args.json.write_text(json.dumps(
            {"date": str(datetime.date.today()), "cpu": cpu_name(),
             "threads": args.threads, "gguf": args.gguf, "load": [load, end],
             "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
