"""Many chats in too little memory: gemmakv against llama-server.

    python tools/bench/sessions_vs_llama.py --gguf MODEL.gguf \
        --llama-server FILE [--short | --long] [--chats N] [--turns N] \
        [--threads 2] [--share 0.25] [--json OUT]

Chats by turns (chats.py), the whole history with each request, one request at a
time, greedy, token ids both ways: what is measured is which positions are
computed again. Four engines on one file take turns, a round of all chats each:

- gemmakv, RAM alone; gemmakv with a disk below
- llama-server with `--cache-ram`; the same with a client that saves its slot to
  a file after each request and restores it before

Equal memory: `--share` of what all chats take. llama-server's is its slot's
buffers and `--cache-ram` together (its checkpoints come on top), gemmakv's is
the conversation that runs and the prefix cache's `ram`. Writing to disk counts:
gemmakv's round ends when all is written. Same threads, llama-server's default
batches, f16 there and bf16 here; gemmakv is called in this process,
llama-server through HTTP on the loopback device, which costs it under 1 ms a
request.

llama-server from the sources in llama-cpp-python's sdist:

    pip download --no-binary :all: --no-deps llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
    cmake --build build --target llama-server
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chats import Answer, Ask, Chats, Ours, Shape, chat_bytes

import gemmakv

FORMS = {
    "short": Shape(chats=16, turns=4),
    "middle": Shape(chats=32, turns=6),
    "long": Shape(chats=64, turns=8),
}
MIB = 1 << 20


class LlamaServer:
    """One that runs until it is closed."""

    def __init__(
        self, args: argparse.Namespace, shape: Shape, cache_mib: int,
        folder: str, *options: str
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._log = Path(folder) / f"server-{port}.log"
        if args.swa_full:
            options += ("--swa-full",)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [args.llama_server, "-m", args.gguf, "-t", str(args.threads),
                 "-np", "1", "-c", str(256 * -(-(shape.length + 2) // 256)),
                 "--cache-ram", str(cache_mib), "--slot-save-path", folder,
                 "--host", "127.0.0.1", "--port", str(port), *options],
                stdout=log, stderr=log)
        self._http = http.client.HTTPConnection("127.0.0.1", port)
        while True:
            try:
                self.request("GET", "/health")
                break
            except (OSError, RuntimeError):
                self._http.close()
            if self._process.poll() is not None:
                raise RuntimeError(self._log.read_text()[-2000:])
            time.sleep(0.1)

    def request(
        self, method: str, path: str, body: object = None
    ) -> dict:
        self._http.request(
            method, path, json.dumps(body),
            {"Content-Type": "application/json"})
        response = self._http.getresponse()
        text = response.read()
        self._http.close()  # the server would while others have their turn
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status}, {text[:500]!r}")
        return json.loads(text)

    def slot_mib(self) -> float:
        """Of its buffers of keys and values, as it says."""
        sizes = re.findall(
            r"KV buffer size = +([0-9.]+) MiB", self._log.read_text())
        if not sizes:
            raise RuntimeError(f"{self._log}: expected sizes of KV buffers")
        return sum(map(float, sizes))

    def __call__(self, prompt: list[int], reply: int) -> Answer:
        begin = time.perf_counter()
        found = self.request("POST", "/completion", {
            "prompt": prompt, "n_predict": reply, "temperature": 0,
            "ignore_eos": True, "return_tokens": True, "cache_prompt": True,
        })
        computed = found["timings"]["prompt_n"] + reply - 1
        return Answer(
            found["tokens"], computed, time.perf_counter() - begin)

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait()


class SavedSlots:
    """A client that keeps the server's slot in files, one for each chat."""

    def __init__(self, server: LlamaServer, shape: Shape) -> None:
        self._server = server
        self._first = shape.system + shape.said  # tells chats apart
        self._files: dict[tuple[int, ...], str] = {}

    def __call__(self, prompt: list[int], reply: int) -> Answer:
        begin = time.perf_counter()
        chat = tuple(prompt[: self._first])
        if chat in self._files:
            self._slot("restore", chat)
        answer = self._server(prompt, reply)
        self._files.setdefault(chat, f"chat-{len(self._files)}.bin")
        self._slot("save", chat)
        return dataclasses.replace(
            answer, seconds=time.perf_counter() - begin)

    def _slot(self, action: str, chat: tuple[int, ...]) -> None:
        self._server.request(
            "POST", f"/slots/0?action={action}",
            {"filename": self._files[chat]})


@dataclasses.dataclass
class Engine:
    name: str
    chats: Chats
    ask: Ask
    flush: Callable[[], object] = lambda: None
    computed: int = 0
    seconds: float = 0

    def round(self) -> None:
        begin = time.perf_counter()
        for answer in self.chats.round(self.ask):
            self.computed += answer.computed
        self.flush()
        self.seconds += time.perf_counter() - begin


@contextlib.contextmanager
def engines(
    args: argparse.Namespace, shape: Shape
) -> Iterator[tuple[list[Engine], str]]:
    """Ready, and how memory was given out."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=args.disk))
        plain = gemmakv.Gemma.load(
            args.gguf, threads=args.threads, prefix_cache=False,
            speculate="off")
        one = chat_bytes(plain, shape)
        total = int(args.share * shape.chats * one)
        # Sizes of buffers are in its longer log alone.
        with contextlib.closing(
            LlamaServer(args, shape, 0, folder, "-lv", "4")
        ) as probe:
            slot = probe.slot_mib()
        cache_mib = int(total / MIB - slot)
        if cache_mib < 1 or total <= one:
            raise SystemExit(
                f"--share {args.share}: {total / MIB:.0f} MiB in all, "
                f"llama-server's slot takes {slot:.0f} MiB of it; more chats "
                "or a larger share")
        found = []

        def add(name: str, ask: Ask, **more: Callable[[], object]) -> None:
            chats = Chats(shape, plain.config)
            found.append(Engine(name, chats, ask, **more))

        for name, tiers in (
            ("gemmakv, RAM", {}),
            ("gemmakv, RAM and disk", {"disk": Path(folder, "prefixes")}),
        ):
            prefix = stack.enter_context(
                gemmakv.PrefixCache(ram=total - one, **tiers))
            gemma = gemmakv.Gemma.load(
                args.gguf, threads=args.threads, prefix_cache=prefix,
                speculate="off")
            add(name, Ours(gemma), flush=prefix.flush)
        for name in ("llama-server", "llama-server, slots in files"):
            files = Path(folder, name)
            files.mkdir()
            server = LlamaServer(args, shape, cache_mib, str(files))
            stack.callback(server.close)
            saves = name != "llama-server"
            add(name, SavedSlots(server, shape) if saves else server)
        for engine in found:  # a first step checks or warms much
            engine.ask([plain.config.bos_id, *range(1_000, 1_063)], 4)
        yield found, (
            f"{total / MIB:.0f} MiB for {shape.chats} chats of "
            f"{one / MIB:.1f} MiB: gemmakv {one / MIB:.1f} + "
            f"{(total - one) / MIB:.0f}, llama-server {slot:.1f} + {cache_mib}"
        )


def table(shape: Shape, found: list[Engine]) -> str:
    least = found[0].seconds
    lines = [
        "| engine | positions computed | of those needed | seconds | time |",
        "|---|---|---|---|---|",
    ]
    for engine in found:
        lines.append(
            f"| {engine.name} | {engine.computed:,} | "
            f"{engine.computed / shape.needed:.2f}x | {engine.seconds:.1f} | "
            f"{engine.seconds / least:.2f}x |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--llama-server", required=True)
    form = parser.add_mutually_exclusive_group()
    for name in ("short", "long"):
        form.add_argument(
            f"--{name}", dest="form", action="store_const", const=name,
            default="middle")
    parser.add_argument("--chats", type=int)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument(
        "--swa-full", action="store_true",
        help="llama-server keeps all positions of sliding layers")
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    # A terminated run leaves no server and no folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    args = parse()
    given = {"chats": args.chats, "turns": args.turns}
    shape = dataclasses.replace(
        FORMS[args.form], **{k: v for k, v in given.items() if v})
    before = os.getloadavg()[0]
    with engines(args, shape) as (found, memory):
        for turn in range(shape.turns):
            for engine in found[::-1] if turn % 2 else found:
                engine.round()
    after = os.getloadavg()[0]
    print(
        f"{Path(args.gguf).name}, {args.threads} threads, load {before:.1f} "
        f"at the start and {after:.1f} at the end; {shape.chats} chats x "
        f"{shape.turns} turns of {shape.said} + {shape.reply} tokens behind "
        f"{shape.system}, {shape.needed:,} positions; {memory}\n\n"
        f"{table(shape, found)}")
    if args.json:
        args.json.write_text(json.dumps({
            "gguf": args.gguf, "threads": args.threads,
            "load": [before, after], "shape": dataclasses.asdict(shape),
            "needed": shape.needed, "memory": memory,
            "engines": [
                {"name": e.name, "computed": e.computed,
                 "seconds": e.seconds} for e in found],
        }, indent=1) + "\n")


if __name__ == "__main__":
    main()
