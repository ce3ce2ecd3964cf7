"""gemmakv against llama.cpp in one interleaved run on the same file.

    python tools/bench/vs_llama.py --gguf MODEL.gguf --llama-bin-dir DIR \
        [--rounds 5] [--threads 2] [--only prefill-512 ...] [--json OUT]
    python tools/bench/vs_llama.py --shape 4b --tokenizer-from DEMO.gguf \
        --gguf OUT.gguf --llama-bin-dir DIR

DIR holds llama-bench and llama-batched-bench. Every round measures each work
on both sides, one right after the other and in alternating order; the table
gives medians and the median of the rounds' own ratios, because only those are
free of what else the machine does. gemmakv's process is stopped while
llama.cpp runs; llama.cpp's starts anew for each measurement and warms itself
up, which its own programs leave out of the time.

Fairness: same file, same number of threads, llama.cpp's default batches (2048,
512) and f16 KV against gemmakv's bf16; llama.cpp runs with flash attention on
or off, whichever a trial shows to be faster for that work, unless --flash says
which (for a quick look). gemmakv's times
include sampling and its Python calls, llama.cpp's have no sampling.
Works named sampled-* draw with temperature 1, top_k 64 and top_p 0.95, as the
makers of Gemma 3 recommend: llama.cpp's program has no sampling, so that the
ratio is what it would be at least. Those named speculate-* decode with lookup
(speculation.py has the texts) against llama.cpp's plain decoding at the same
context, and are not of the model's speed alone.

With --shape, OUT.gguf is made if it is not there: random weights in the shape
of Gemma 3 1B (Q4_0) or 4B (Q4_K with Q6_K in between and for the embedding, as
Q4_K_M mixes them; 2.6 GB), whose speed does not depend on the values, and fewer
works are measured.

first-token needs llama-cpp-python (LLAMA_CPP_LIB_PATH=DIR for a native one).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys

import speculation
from interleaved import (
    SAMPLING,
    Gemmakv,
    cpu_name,
    end_when_terminated,
    interleave,
    load_at_start,
    markdown,
)

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Work:
    """One thing to measure: a request to the worker, a peer's command."""

    name: str
    request: dict
    program: str
    arguments: tuple[str, ...]
    field: str  # of the peer's JSON that holds tokens a second


def bench(name: str, request: dict, *arguments: str) -> Work:
    return Work(name, request, "llama-bench",
                (*arguments, "-r", "1", "-o", "json"), "avg_ts")


def batched(count: int, name: str = "batch", **sampling: float) -> Work:
    return Work(
        f"{name}-{count}",
        {"kind": "decode", "tokens": 64, "context": 32, "batch": count,
         **sampling},
        "llama-batched-bench",
        ("-npp", "32", "-ntg", "64", "-npl", str(count), "-c",
         str(max(512, 96 * count)), "-b", "2048", "-ub", "512",
         "--output-format", "jsonl"),
        "speed_tg")


def speculative(name: str, text: str) -> Work:
    """The context is in tokens what the worker makes of the text, about."""
    return bench(
        f"speculate-{name}",
        {"kind": "speculate", "text": text, "tokens": 160},
        "-p", "0", "-n", "160", "-d", str(len(text) // 4))


def texts() -> dict[str, str]:
    """By kind: the first kept prompt whose reply repeats it, and a new one."""
    found: dict[str, str] = {}
    for prompt in json.loads(speculation.PROMPTS.read_text("utf-8")):
        found.setdefault(prompt["kind"], prompt["prompt"])
    found["new text"] = next(iter(speculation.NEW.values()))
    return found


WORKS = [
    *[bench(f"prefill-{n}", {"kind": "prefill", "tokens": n},
            "-p", str(n), "-n", "0") for n in (128, 512, 2048, 8192, 16384)],
    bench("decode-128", {"kind": "decode", "tokens": 128},
          "-p", "0", "-n", "128"),
    *[batched(count) for count in (2, 4, 8, 16, 32)],
    bench("decode-at-8192", {"kind": "decode", "tokens": 64, "context": 8192},
          "-p", "0", "-n", "64", "-d", "8192"),
    *[batched(count, "sampled-batch", **SAMPLING) for count in (1, 8, 32)],
    *[speculative(name.replace(" ", "-"), text)
      for name, text in texts().items()],
]
# Of a shape: types of matrices, that of the embedding, and what is measured.
SHAPES = {
    "1b": ("gemma3", ["Q4_0"], "Q8_0"),
    "4b": ("gemma3-4b", ["Q4_K", "Q4_K", "Q4_K", "Q6_K"], "Q6_K"),
}
SHAPE_WORKS = ["prefill-512", "decode-128", "batch-8", "sampled-batch-8"]
UNITS = {"first-token": "s (less is better)", "memory": "MB (less is better)"}
ONE_SHOTS = tuple(UNITS)


class Llama:
    def __init__(self, args):
        self.args = args
        self.flash: dict[str, str] = {}

    def run(self, work: Work, flash: str) -> float:
        command = [str(self.args.llama_bin_dir / work.program), "-m",
                   self.args.gguf, "-t", str(self.args.threads), "-fa", flash,
                   *work.arguments]
        done = subprocess.run(command, capture_output=True, text=True,
                              check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        if work.program == "llama-bench":
            return float(json.loads(done.stdout)[0][work.field])
        rows = [json.loads(line) for line in done.stdout.splitlines()
                if line.startswith("{")]
        return float(rows[-1][work.field])

    def choose_flash(self, work: Work) -> None:
        if self.args.flash != "try":
            self.flash[work.name] = self.args.flash
            return
        # Two trials a setting; the first run of a series is often slow.
        trial = {flash: max(self.run(work, flash) for _ in range(2))
                 for flash in ("on", "off")}
        self.flash[work.name] = max(trial, key=trial.get)

    def measure(self, work: Work) -> float:
        return self.run(work, self.flash[work.name])


def run_alone(command: list[str]) -> tuple[float, str]:
    """(peak resident MB, stdout) of a process of its own."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.DEVNULL)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with "
                           f"{process.returncode}")
    return usage.ru_maxrss / 1024, output


def one_shot(args, what: str, engine: str) -> float:
    """Seconds to the first token, or peak MB."""
    script = [sys.executable, str(HERE / "one_shot.py"), what, engine,
              args.gguf, str(args.threads)]
    if what == "first-token":
        return float(run_alone(script)[1].split()[-1])
    if engine == "llama.cpp":
        script = [str(args.llama_bin_dir / "llama-bench"), "-m", args.gguf,
                  "-t", str(args.threads), "-p", "2048", "-n", "128", "-r",
                  "1", "--no-warmup"]
    return run_alone(script)[0]


def measure(work: Work, worker: Gemmakv, llama: Llama, rounds: int) -> dict:
    def ours() -> float:
        return worker.ask(work.request)["tokens_per_s"]

    ours()  # first touch of buffers and parked caches
    llama.choose_flash(work)
    row = interleave(rounds, ours, lambda: llama.measure(work))
    print(work.name, f"{row['ratio']:.2f}", file=sys.stderr)
    return {**row, "unit": "tok/s",
            "flash_attention": llama.flash[work.name]}


def table(results: dict) -> str:
    rows = []
    for name, row in results.items():
        low, high = row["ratio_range"]
        digits = 3 if row["unit"].startswith("s ") else 1
        rows.append([
            name, f"{row['gemmakv']:.{digits}f}",
            f"{row['llama.cpp']:.{digits}f}", f"{row['ratio']:.2f}",
            f"{low:.2f}..{high:.2f}", row["unit"]])
    return markdown(
        ["work", "gemmakv", "llama.cpp", "ratio", "range", "unit"], rows)


def plot(results: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [n for n, row in results.items() if row["unit"] == "tok/s"]
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(names) + 1))
    axes.barh(names[::-1], [results[n]["ratio"] for n in names[::-1]])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("speed, ratio to llama.cpp")
    figure.tight_layout()
    figure.savefig(path)


def parse() -> argparse.Namespace:
    names = [work.name for work in WORKS] + list(ONE_SHOTS)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--llama-bin-dir", required=True, type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=names)
    parser.add_argument("--flash", choices=("try", "on", "off"), default="try",
                        help="of llama.cpp; without a trial a run is shorter")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--tokenizer-from", metavar="GGUF")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    if (args.shape is None) != (args.tokenizer_from is None):
        parser.error("--shape and --tokenizer-from: expected both or none")
    if args.only is None:
        args.only = names if args.shape is None else SHAPE_WORKS
    return args


def make_shape(args: argparse.Namespace) -> None:
    """Writes the file of a shape, unless it is there."""
    if pathlib.Path(args.gguf).exists():
        return
    architecture, types, embedding = SHAPES[args.shape]
    part = f"{args.gguf}.part"
    subprocess.run(
        [sys.executable, str(HERE.parent / "make_random_gguf.py"),
         "--architecture", architecture, "--tokenizer-from",
         args.tokenizer_from, "--embedding-type", embedding,
         *(word for name in types for word in ("--type", name)), part],
        check=True)
    os.replace(part, args.gguf)


def main() -> None:
    args = parse()
    if args.shape is not None:
        make_shape(args)
    load = load_at_start()
    results = {}
    llama = Llama(args)
    # Processes of their own first, before there is a worker beside them.
    for what in ONE_SHOTS:
        if what in args.only:
            one_shot(args, what, "gemmakv")  # fills the page cache
            row = interleave(args.rounds,
                             lambda what=what: one_shot(args, what, "gemmakv"),
                             lambda what=what: one_shot(
                                 args, what, "llama.cpp"))
            results[what] = {**row, "unit": UNITS[what]}
            print(what, f"{row['ratio']:.2f}", file=sys.stderr)
    worker = Gemmakv(args.gguf, args.threads)
    end_when_terminated()
    try:
        for work in WORKS:
            if work.name in args.only:
                results[work.name] = measure(work, worker, llama, args.rounds)
    finally:
        worker.close()
    text = table(results)
    print(f"{datetime.date.today()}, {cpu_name()}, {args.threads} threads, "
          f"{pathlib.Path(args.gguf).name}, load {load:.1f} at start, "
          f"gemmakv: {worker.cpu}\n\n{text}")
    if args.json:
        args.json.write_text(json.dumps(
            {"date": str(datetime.date.today()), "cpu": cpu_name(),
             "threads": args.threads, "gguf": args.gguf, "load": load,
             "gemmakv": worker.cpu, "results": results}, indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
