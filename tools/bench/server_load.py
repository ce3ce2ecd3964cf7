"""Many clients over HTTP: `gemmakv serve` against llama-server.

    python tools/bench/server_load.py --gguf MODEL.gguf \
        --llama-server FILE [--rows turns-8 gap ...] [--rounds 3] \
        [--threads 2] [--short] [--json OUT]

| row | |
|---|---|
| turns-8, turns-32 | so many clients at once, each a conversation of several \
turns behind one system text, the whole history with each request |
| gap | the longest wait for a token of 8 running streams while a prompt of \
8,192 tokens is read |
| fan-out | 16 continuations of one new prefix of 4,096 tokens, asked at once |
| by-turns | 30 conversations, one request at a time, with memory for 8 |
| http | gemmakv alone: what HTTP costs at 32 streams |
| first-token | gemmakv alone: how much later a stream's first text comes than \
the library's, of three APIs, on a connection that is open already, and the \
processor time that such a request takes outside the engine's threads |

Both serve the same file with as many threads, one after the other in each
round, in changing order; ratios are of one round. Both are asked in the same
words: POST /completion, token ids, greedy, streams, `ignore_eos`, replies of a
fixed length. Texts are random and new in each round. The client is one process
with a thread for each conversation, on the same cores.

llama-server gets a slot for each client with room for what it will say, and
its defaults otherwise; gemmakv its defaults with `--max-running` as many. In
the row by-turns, memory is what 8 of the conversations take in each: the slot
and `--cache-ram` there, `--prefix-cache-ram` here, and a disk below it, which
llama-server has no way to use by itself. How to build it: sessions_vs_llama.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from chats import turn_end, words

import gemmakv

OURS, THEIRS = "gemmakv", "llama-server"
SERVED_NAME = "model"
TICK_S = 0.02
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens, and how many of what."""

    system: int = 256
    said: int = 48
    reply: int = 64
    turns: int = 4
    long: int = 8_192
    prefix: int = 4_096
    branches: int = 16
    chats: int = 30
    held: int = 8
    history: int = 1_536
    rounds_by_turns: int = 4
    streams: int = 32


SHORT = Sizes(
    turns=2, reply=32, long=2_048, prefix=1_024, branches=8, chats=10, held=3,
    history=512, rounds_by_turns=3,
)


class Clock:
    """perf_counter, less what passed while this was stopped (SIGSTOP), as by
    somebody who measures in between: servers are stopped with it then.
    """

    def __init__(self) -> None:
        self.stopped_s = 0.0
        self._continued = -1e9
        threading.Thread(target=self._look, daemon=True).start()
        signal.signal(signal.SIGCONT, self._note)

    def now(self) -> float:
        return time.perf_counter() - self.stopped_s

    def _note(self, *_: object) -> None:
        self._continued = time.perf_counter()

    def _look(self) -> None:
        last, gap_end, gap = time.perf_counter(), -2e9, 0.0
        while True:
            time.sleep(TICK_S)
            now = time.perf_counter()
            if now - last > 10 * TICK_S:
                gap_end, gap = now, now - last - TICK_S
            last = now
            # Which of the two is seen first is chance.
            if abs(gap_end - self._continued) < 1:
                self.stopped_s += gap
                gap_end, self._continued = -2e9, -1e9


CLOCK = Clock()


@dataclasses.dataclass
class Reply:
    """Of one streamed request; moments in seconds of CLOCK."""

    asked: float
    tokens: list[int] = dataclasses.field(default_factory=list)
    moments: list[float] = dataclasses.field(default_factory=list)
    computed: int = 0

    @property
    def first(self) -> float:
        return self.moments[0] - self.asked


class Server:
    """A process that is asked over HTTP until it is closed."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        with log.open("w") as to:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=to, stderr=to)
        while True:
            with contextlib.suppress(OSError):
                if self._status() == 200:
                    return
            if self.process.poll() is not None:
                raise RuntimeError(log.read_text()[-2000:])
            time.sleep(0.1)

    def _status(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status

    def ask(
        self, prompt: list[int], reply: int,
        told: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """`told` is called behind each token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            answer = Reply(CLOCK.now())
            connection.request(
                "POST", "/completion",
                json.dumps({
                    "prompt": prompt, "n_predict": reply, "temperature": 0,
                    "ignore_eos": True, "return_tokens": True,
                    "cache_prompt": True, "stream": True,
                }),
                {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(
                    f"{self.name}: {response.status}, {response.read()!r}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("tokens"):
                    moment = CLOCK.now()
                    answer.tokens += event["tokens"]
                    answer.moments += [moment] * len(event["tokens"])
                    if told:
                        told(answer)
                if "timings" in event:
                    answer.computed = event["timings"]["prompt_n"]
        if len(answer.tokens) != reply:
            raise RuntimeError(
                f"{self.name}: expected {reply} tokens, found "
                f"{len(answer.tokens)}")
        return answer

    def processor_s(self) -> dict[str, float]:
        """Of each thread, by its id."""
        found = {}
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                used = (thread / "schedstat").read_text().split()[0]
                found[thread.name] = int(used) / 1e9
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Client:
    """A connection that stays open, with as little of its own as can be."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def first(
        self, route: str, body: dict[str, Any], mark: bytes
    ) -> float | None:
        """Seconds until `mark` is in what comes, None where it never is; reads
        the stream to its end."""
        data = json.dumps({**body, "stream": True, "temperature": 0}).encode()
        begin, first, got = CLOCK.now(), None, b""
        self.socket.sendall(
            f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        while not got.endswith(b"\r\n0\r\n\r\n"):
            more = self.socket.recv(1 << 16)
            got += more
            if first is None and mark in got:
                first = CLOCK.now() - begin
            if not more or not got.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"{route}: found {got!r}")
        return first

    def close(self) -> None:
        self.socket.close()


def completion_body(prompt: str, reply: int = 4) -> dict[str, Any]:
    return {"prompt": prompt, "n_predict": reply, "ignore_eos": True}


def messages_body(prompt: str, reply: int = 4) -> dict[str, Any]:
    return {
        "model": SERVED_NAME, "max_tokens": reply,
        "messages": [{"role": "user", "content": prompt}]}


# What comes with the first text.
FIRST_TOKEN_ROUTES = (
    ("/completion", completion_body, b"data: "),
    ("/v1/chat/completions", messages_body, b'"delta":{"content"'),
    ("/v1/messages", messages_body, b"event: content_block_delta"),
)


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """`better` is by how much gemmakv is ahead, of each round; or a share of
    what llama-server takes, where `goal` is an upper limit."""

    name: str
    goal: str
    ratios: list[float]
    ours: list[float]
    theirs: list[float]
    unit: str

    def cells(self) -> list[str]:
        def middle(values: list[float]) -> str:
            return f"{statistics.median(values):.4g}" if values else ""

        ratios = sorted(self.ratios)
        x = "x" if self.theirs else ""
        return [
            self.name, self.goal, f"{middle(ratios)}{x}",
            f"{ratios[0]:.3g}..{ratios[-1]:.3g}",
            f"{middle(self.ours)} {self.unit}" if self.ours else "",
            f"{middle(self.theirs)} {self.unit}" if self.theirs else "",
        ]


class Bench:
    def __init__(self, args: argparse.Namespace, sizes: Sizes) -> None:
        self.args, self.sizes = args, sizes
        self.rng = np.random.default_rng(1)
        self.plain = gemmakv.Gemma.load(
            args.gguf, threads=args.threads, prefix_cache=False,
            speculate="off")
        self.end = turn_end(self.plain.config)
        self.bos = self.plain.config.bos_id
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(
            tempfile.TemporaryDirectory(dir=args.disk)))

    def close(self) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def serving(
        self, name: str, slots: int, length: int, *options: str
    ) -> Iterator[Server]:
        args = self.args
        # Both in whole pages of 256.
        length = 256 * -(-(length + 8) // 256)
        if name == OURS:
            command = [
                sys.executable, "-m", "gemmakv", "serve", "-m", args.gguf,
                "--threads", str(args.threads), "--max-running", str(slots),
                "--speculate", "off", "--served-model-name", SERVED_NAME]
        else:
            command = [
                args.llama_server, "-m", args.gguf, "-t", str(args.threads),
                "-np", str(slots), "-c", str(slots * length)]
        server = Server(
            name, [*command, *options], self.folder / f"{name}.log")
        try:
            # A first step checks or warms much.
            server.ask([self.bos, *range(1_000, 1_063)], 4)
            yield server
        finally:
            server.close()

    def pairs(
        self, slots: int, length: int,
        run: Callable[[Server, int], dict[str, float]],
        options: dict[str, list[str]] | None = None,
    ) -> dict[str, dict[str, list[float]]]:
        """What `run` found with each server, which see the same texts."""
        found: dict[str, dict[str, list[float]]] = {OURS: {}, THEIRS: {}}
        for i in range(self.args.rounds):
            names = [OURS, THEIRS]
            for name in names[::-1] if i % 2 else names:
                more = (options or {}).get(name, [])
                with self.serving(name, slots, length, *more) as server:
                    for key, value in run(server, i).items():
                        found[name].setdefault(key, []).append(value)
        return found

    def figure(
        self, name: str, goal: str, found: dict[str, dict[str, list[float]]],
        key: str, unit: str,
    ) -> Figure:
        ours, theirs = found[OURS][key], found[THEIRS][key]
        more_is_better = goal.startswith(">=") and not unit.startswith("s")
        ratios = [
            a / b if more_is_better or goal.startswith("<=") else b / a
            for a, b in zip(ours, theirs, strict=True)]
        return Figure(name, goal, ratios, ours, theirs, unit)

    def turns(self, clients: int) -> Iterator[Figure]:
        s = self.sizes

        def run(server: Server, seed: int) -> dict[str, float]:
            common = words(np.random.default_rng([seed, 0]), s.system)

            def chat(i: int) -> list[Reply]:
                rng = np.random.default_rng([seed, 1, i])
                history, replies = [self.bos, *common], []
                for _ in range(s.turns):
                    history += [self.end, *words(rng, s.said - 1)]
                    replies.append(server.ask(history, s.reply))
                    history += replies[-1].tokens[:-1]
                return replies

            begin = CLOCK.now()
            replies = [
                one for of in together(
                    [lambda i=i: chat(i) for i in range(clients)])
                for one in of]
            taken = CLOCK.now() - begin
            firsts = sorted(one.first for one in replies)
            return {
                "throughput": len(replies) * s.reply / taken,
                "p50": statistics.median(firsts),
                "p99": firsts[min(len(firsts) - 1, len(firsts) * 99 // 100)],
            }

        length = s.system + s.turns * (s.said + s.reply)
        found = self.pairs(clients, length, run)
        name = f"{clients} clients, {s.turns} turns"
        yield self.figure(
            f"{name}: throughput", ">= 3x", found, "throughput", "tokens/s")
        goal = "<= 0.35x" if clients == 8 else "<="
        yield self.figure(f"{name}: first token, p50", goal, found, "p50", "s")
        yield self.figure(f"{name}: first token, p99", goal, found, "p99", "s")

    def gap(self, streams: int = 8) -> Iterator[Figure]:
        s = self.sizes

        def run(server: Server, seed: int) -> dict[str, float]:
            rng = np.random.default_rng([seed, 2])
            prompts = [[self.bos, *words(rng, 63)] for _ in range(streams)]
            long = [self.bos, *words(rng, s.long - 1)]
            ready = threading.Semaphore(0)

            def told(reply: Reply) -> None:
                if len(reply.tokens) == 16:
                    ready.release()

            # They run until the long prompt is read, and are cut then.
            over = threading.Event()
            running: list[Reply] = []

            class Over(Exception):
                pass

            def stream(prompt: list[int]) -> None:
                def each(reply: Reply) -> None:
                    if len(reply.tokens) == 1:
                        running.append(reply)
                    told(reply)
                    if over.is_set():
                        raise Over

                with contextlib.suppress(Over):
                    server.ask(prompt, 4_000, each)

            with ThreadPoolExecutor(streams) as pool:
                futures = [pool.submit(stream, one) for one in prompts]
                for _ in range(streams):
                    while not ready.acquire(timeout=1):
                        for future in futures:
                            if future.done():
                                future.result()
                reply = server.ask(long, 1)
                over.set()
                for future in futures:
                    future.result()
            begin, end = reply.asked, reply.moments[0]
            worst, counts = 0.0, 0
            for one in running:
                times = [t for t in one.moments if begin <= t <= end]
                before = [t for t in one.moments if t < begin][-1:]
                after = [t for t in one.moments if t > end][:1]
                counts += len(times)
                line = [*before, *times, *after]
                worst = max(worst, *np.diff(line).tolist())
            return {
                "gap": worst, "first": reply.first,
                "tokens": counts / (end - begin),
            }

        found = self.pairs(streams + 1, max(s.long, 4_096) + 64, run)
        name = f"{streams} streams, a prompt of {s.long:,} read"
        yield self.figure(
            f"{name}: longest gap", "<= 0.3x", found, "gap", "s")
        yield self.figure(
            f"{name}: its first token", "<=", found, "first", "s")
        yield self.figure(
            f"{name}: streams meanwhile", ">=", found, "tokens", "tokens/s")

    def fan_out(self) -> Iterator[Figure]:
        s = self.sizes

        def run(server: Server, seed: int) -> dict[str, float]:
            rng = np.random.default_rng([seed, 3])
            prefix = [self.bos, *words(rng, s.prefix - 1)]
            prompts = [prefix + words(rng, 16) for _ in range(s.branches)]
            begin = CLOCK.now()
            together([lambda p=p: server.ask(p, 32) for p in prompts])
            return {"seconds": CLOCK.now() - begin}

        found = self.pairs(s.branches, s.prefix + 64, run)
        yield self.figure(
            f"{s.branches} branches of {s.prefix:,} tokens", ">= 10x", found,
            "seconds", "s")

    def by_turns(self) -> Iterator[Figure]:
        s = self.sizes
        length = s.history + s.rounds_by_turns * (s.said + 32)
        cache = gemmakv.create_kv_cache(self.plain.config)
        self.plain.generate(
            cache, words(self.rng, length), max_tokens=1, prefix_cache="off")
        memory = s.held * cache.nbytes
        del cache

        def run(server: Server, seed: int) -> dict[str, float]:
            rng = np.random.default_rng([seed, 4])
            histories = [
                [self.bos, *words(rng, s.history - 1)] for _ in range(s.chats)]
            times, computed = [], 0
            for _ in range(s.rounds_by_turns):
                for history in histories:
                    history += [self.end, *words(rng, s.said - 1)]
                    begin = CLOCK.now()
                    reply = server.ask(history, 32)
                    times.append(CLOCK.now() - begin)
                    computed += reply.computed + 31
                    history += reply.tokens[:-1]
            return {
                "seconds": sum(times), "later": sum(times[s.chats:]),
                "computed": computed,
            }

        found = self.pairs(1, length, run, {
            OURS: ["--prefix-cache-ram", f"{memory // MIB}MiB",
                   "--prefix-cache-disk", str(self.folder / "prefixes")],
            THEIRS: ["--cache-ram", str(memory // MIB)],
        })
        name = (
            f"{s.chats} conversations by turns, memory for {s.held} "
            f"({memory // MIB} MiB)")
        yield self.figure(name, ">= 5x", found, "seconds", "s")
        yield self.figure(
            f"{name}: behind the first turn", ">=", found, "later", "s")
        yield self.figure(
            f"{name}: positions computed", "<=", found, "computed", "")

    def http(self) -> Iterator[Figure]:
        s = self.sizes
        reply = 128
        prompts = [
            [self.bos, *words(self.rng, 31)] for _ in range(s.streams)]

        def in_process(prompt: list[int]) -> None:
            self.plain.generate(
                gemmakv.create_kv_cache(self.plain.config), prompt,
                max_tokens=reply, ignore_eos=True, temperature=0)

        shares, ratios, ours = [], [], []
        with self.serving(OURS, s.streams, 256) as server:
            for i in range(2 * self.args.rounds):
                speed = {}
                order = ["http", "library"]
                for name in order[::-1] if i % 2 else order:
                    before = server.processor_s()
                    begin = CLOCK.now()
                    together([
                        (lambda p=p: server.ask(p, reply))
                        if name == "http" else (lambda p=p: in_process(p))
                        for p in prompts])
                    speed[name] = CLOCK.now() - begin
                    if name == "http":
                        used = [
                            now - before.get(thread, 0)
                            for thread, now in server.processor_s().items()]
                        outside = self.outside(before, server.processor_s())
                        shares.append(100 * outside / sum(used))
                ratios.append(speed["http"] / speed["library"])
                ours.append(s.streams * reply / speed["http"])
        yield Figure(
            f"HTTP at {s.streams} streams: processor time outside the engine's "
            "threads, % of the server's", "<= 3", shares, [], [], "")
        yield Figure(
            f"HTTP at {s.streams} streams: time, of the library's (the client "
            "is on the same cores)", "<=", ratios, ours, [], "tokens/s")

    def outside(
        self, before: dict[str, float], after: dict[str, float]
    ) -> float:
        """Processor time outside the engine's threads, which are those that
        used the most."""
        used = [now - before.get(name, 0) for name, now in after.items()]
        return sum(sorted(used)[:-self.args.threads])

    def first_token(self) -> Iterator[Figure]:
        rng = np.random.default_rng([1, 5])

        def question() -> str:
            return " ".join(
                "".join(rng.choice(list("abcdefghij"), 4)) for _ in range(6))

        def in_process(prompt: str, *, chat: bool) -> float | None:
            begin = CLOCK.now()
            cache = gemmakv.create_kv_cache(self.plain.config)
            asked: Any = prompt
            if chat:
                asked = self.plain.apply_chat_template(
                    [{"role": "user", "content": prompt}])
            stream = self.plain.stream(
                cache, asked, max_tokens=4, ignore_eos=not chat, temperature=0)
            text = next(stream, None)
            took = CLOCK.now() - begin
            for _ in stream:
                pass
            return took if text else None

        with (
            self.serving(OURS, 1, 256) as server,
            contextlib.closing(Client(server.port)) as client,
        ):
            for route, body, mark in FIRST_TOKEN_ROUTES:
                later: list[float] = []
                ours: list[float] = []
                chat = "messages" in body("")
                warm = 10  # pairs that meet what is cold
                while len(ours) < 50 * self.args.rounds + warm:
                    prompt = question()
                    took: dict[str, float | None] = {}
                    order = [OURS, "library"]
                    for name in order[::-1] if len(ours) % 2 else order:
                        took[name] = (
                            client.first(route, body(prompt), mark)
                            if name == OURS else in_process(prompt, chat=chat))
                    http, library = took[OURS], took["library"]
                    # Where a chat's reply is empty, neither has a text.
                    if http is not None and library is not None:
                        later.append(1e3 * (http - library))
                        ours.append(1e3 * http)
                later, ours = later[warm:], ours[warm:]
                yield Figure(
                    f"{route}: first text, ms later than the library's",
                    "<= 1", later, ours, [], "ms")
                spent = []
                for _ in range(5 * self.args.rounds):
                    prompts = [question() for _ in range(10)]
                    before = server.processor_s()
                    for prompt in prompts:
                        client.first(route, body(prompt, 1), mark)
                    spent.append(
                        1e3 * self.outside(before, server.processor_s()) / 10)
                yield Figure(
                    f"{route}: processor ms outside the engine's threads of a "
                    "request for one token", "<= 1", spent, [], [], "")


ROWS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "turns-8": lambda bench: bench.turns(8),
    "turns-32": lambda bench: bench.turns(32),
    "gap": Bench.gap,
    "fan-out": Bench.fan_out,
    "by-turns": Bench.by_turns,
    "http": Bench.http,
    "first-token": Bench.first_token,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    # A terminated run leaves no server and no folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    args = parse()
    before = os.getloadavg()[0]
    figures: list[Figure] = []
    with contextlib.closing(
        Bench(args, SHORT if args.short else Sizes())
    ) as bench:
        for name in args.rows:
            for figure in ROWS[name](bench):
                figures.append(figure)
                print(*figure.cells(), sep=" | ", file=sys.stderr, flush=True)
    lines = [
        ["what", "goal", "ratio", "range", OURS, THEIRS], ["---"] * 6,
        *(figure.cells() for figure in figures)]
    print(
        f"{Path(args.gguf).name}, {args.threads} threads, load {before:.1f} at "
        f"the start and {os.getloadavg()[0]:.1f} at the end\n\n"
        + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    if args.json:
        args.json.write_text(json.dumps({
            "cpu": gemmakv.cpu_info(), "threads": args.threads,
            "figures": [dataclasses.asdict(one) for one in figures],
        }, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
