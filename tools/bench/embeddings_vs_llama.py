"""Embeddings of gemmakv against llama.cpp in one interleaved run.

    python tools/bench/embeddings_vs_llama.py --gguf MODEL.gguf [MODEL2.gguf]
        --llama-bin-dir DIR [--rounds 7] [--threads 2] [--tokens 256]
        [--texts 32] [--peer bench server] [--json OUT]

MODEL is a GGUF file of EmbeddingGemma; one of its shape with random weights
comes from tools/make_random_gguf.py --architecture gemma-embedding. DIR holds
llama-bench and llama-server. Every round has both sides make vectors of texts
of the same number of tokens, one side right after the other and in alternating
order; the table gives medians and the median of the rounds' own ratios. The
side that does not measure is stopped or gone.

- gemmakv: `gemma.embed` of all texts in one call, its Python included.
- `bench`: `llama-bench -embd 1`, which computes one text after the other (rows
  of a batch that are no text of its own would see each other) and times
  neither tokens nor pooling nor a server. Flash attention as a trial shows it
  to be faster.
- `server`: `llama-server --embeddings`, one request for all texts. Batches as a
  trial shows them to be fastest.

Both sides are asked for as many texts as make a round of some seconds. The
processor's time a text takes is given beside: it differs less where others use
the machine too.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import interleaved


@dataclasses.dataclass(frozen=True)
class Speed:
    """Vectors a second, of wall clock and of processor time."""

    wall: float
    processor: float


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
    ticks = sum(int(field) for field in fields.split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


class Gemmakv(interleaved.Gemmakv):
    """The worker process, and what it is asked for."""

    def __init__(self, model: str, args: argparse.Namespace):
        super().__init__(model, args.threads)
        self.args = args
        self.measure()  # first touch of buffers

    def measure(self) -> Speed:
        before = processor_seconds(self.process.pid)
        wall = self.ask({"kind": "embed", "tokens": self.args.tokens,
                         "texts": self.args.texts})["texts_per_s"]
        used = processor_seconds(self.process.pid) - before
        return Speed(wall, self.args.texts / used)


class LlamaBench:
    """llama-bench, a process for each measurement."""

    name = "llama-bench"

    def __init__(self, model: str, args: argparse.Namespace):
        self.model, self.args = model, args
        # The first run of a series is often slow.
        trial = {flash: max(self._run(flash, 4)[0] for _ in range(2))
                 for flash in ("on", "off")}
        self.flash = max(trial, key=trial.get)
        self.setting = f"flash attention {self.flash}"
        self.idle = self._run(self.flash, 1)[1]

    def _run(self, flash: str, texts: int) -> tuple[float, float]:
        """Vectors a second, and the seconds that the process used."""
        size = str(self.args.tokens)
        command = [str(self.args.llama_bin_dir / "llama-bench"), "-m",
                   self.model, "-t", str(self.args.threads), "-embd", "1", "-p",
                   size, "-n", "0", "-b", size, "-ub", size, "-fa", flash, "-r",
                   str(texts), "-o", "json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True,
                              check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        used = (after.ru_utime + after.ru_stime
                - before.ru_utime - before.ru_stime)
        speed = json.loads(done.stdout)[0]["avg_ts"] / self.args.tokens
        return speed, used

    def measure(self) -> Speed:
        wall, used = self._run(self.flash, self.args.texts)
        # Without loading, the warm-up and one text.
        return Speed(wall, (self.args.texts - 1) / max(used - self.idle, 1e-9))

    def close(self) -> None:
        pass


class LlamaServer:
    """llama-server; stopped whenever it is not measuring."""

    name = "llama-server"
    # Rows of a batch: one text, some, all.
    BATCHES = (1, 2, 8)

    def __init__(self, model: str, args: argparse.Namespace):
        self.model, self.args = model, args
        self.process: subprocess.Popen | None = None
        trial = {}
        for texts in self.BATCHES:
            self._start(texts)
            trial[texts] = max(self.measure().wall for _ in range(2))
        best = max(trial, key=trial.get)
        self.setting = f"batches of {best * args.tokens} rows"
        self._start(best)
        self.measure()

    def _start(self, texts: int) -> None:
        self.close()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        rows = str(texts * self.args.tokens)
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [str(self.args.llama_bin_dir / "llama-server"), "-m", self.model,
             "--embeddings", "-t", str(self.args.threads), "-tb",
             str(self.args.threads), "--host", "127.0.0.1", "--port",
             str(port), "-np", str(texts), "-c",
             str(max(texts * self.args.tokens, 2048)), "-b", rows, "-ub", rows],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    break
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise SystemExit("llama-server does not start") from None
                time.sleep(0.2)

    def measure(self) -> Speed:
        self.process.send_signal(signal.SIGCONT)
        # Token ids: the same rows on both sides, whatever the vocabulary.
        size = self.args.tokens
        texts = [[2, *(1000 + (i * size + j) * 7 % 100000
                       for j in range(size - 1))]
                 for i in range(self.args.texts)]
        request = urllib.request.Request(
            self.url + "/v1/embeddings", json.dumps({"input": texts}).encode(),
            {"Content-Type": "application/json"})
        before = processor_seconds(self.process.pid)
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            body = json.load(answer)
        seconds = time.perf_counter() - begin
        used = processor_seconds(self.process.pid) - before
        self.process.send_signal(signal.SIGSTOP)
        if len(body["data"]) != len(texts):
            raise SystemExit(f"llama-server gave {len(body['data'])} vectors")
        return Speed(len(texts) / seconds, len(texts) / used)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


PEERS = {"bench": LlamaBench, "server": LlamaServer}


def compare(args: argparse.Namespace, ours: Gemmakv, theirs) -> dict:
    pairs = interleaved.in_turn(args.rounds, ours.measure, theirs.measure)
    row: dict = {"peer": theirs.name, "setting": theirs.setting}
    for clock in ("wall", "processor"):
        row[clock] = interleaved.summary(
            [(getattr(mine, clock), getattr(peer, clock))
             for mine, peer in pairs], "llama.cpp")
    return row


def table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        wall, used = row["wall"], row["processor"]
        cells.append([
            row["file"], f"{row['peer']}, {row['setting']}",
            f"{wall['gemmakv']:.2f}", f"{wall['llama.cpp']:.2f}",
            f"{wall['ratio']:.2f}",
            "{:.2f}..{:.2f}".format(*wall["ratio_range"]),
            "{:.2f} ({:.2f}..{:.2f})".format(
                used["ratio"], *used["ratio_range"])])
    return interleaved.markdown(
        ["file", "against", "gemmakv", "llama.cpp", "ratio", "range",
         "ratio of processor time"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True, nargs="+")
    parser.add_argument("--llama-bin-dir", required=True, type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--peer", nargs="+", choices=PEERS,
                        default=list(PEERS))
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    load = interleaved.load_at_start()
    interleaved.end_when_terminated()
    rows = []
    for gguf in args.gguf:
        for name in args.peer:
            theirs = PEERS[name](gguf, args)
            if isinstance(theirs, LlamaServer):
                theirs.process.send_signal(signal.SIGSTOP)
            ours = None
            try:
                ours = Gemmakv(gguf, args)
                row = compare(args, ours, theirs)
            finally:
                theirs.close()
                if ours is not None:
                    ours.close()
            rows.append({"file": pathlib.Path(gguf).name, **row})
            print(rows[-1]["file"], name, f"{row['wall']['ratio']:.2f}",
                  file=sys.stderr)
    print(f"{datetime.date.today()}, {args.texts} texts of {args.tokens} "
          f"tokens, {args.threads} threads, load {load:.1f} at start, "
          f"gemmakv: {ours.cpu}; vectors a second\n\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps(
            {"date": str(datetime.date.today()), "threads": args.threads,
             "tokens": args.tokens, "texts": args.texts, "load": load,
             "gemmakv": ours.cpu, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
