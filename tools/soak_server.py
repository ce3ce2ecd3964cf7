#!/usr/bin/env python3
"""Asks `gemmakv serve` many times, and makes everything fail around it.

    python tools/soak_server.py same [--requests 10000] [--clients 49]
    python tools/soak_server.py faults [--minutes 15] [--clients 64]

same: seeded requests of every API, again and again in another order, streamed
or not, with and without the prefix cache, among many others, by one worker and
by two, before and after a restart on the same folders. Each must have the
tokens that it had alone, from a server without a prefix cache or guesses.

faults: clients talk in sessions of their own, and cancel, vanish, read slowly,
send nonsense, fork, rewind and delete. Meanwhile workers and the whole server
are killed, the disk is full, the folder is read-only, the clock jumps and stays
there; all that runs may keep no more than one long conversation takes. In the
end: every turn and every response that was acknowledged is there, at most one
turn more behind it; what sessions said, said again to a server of its own, gets
the same replies; no request was left without an answer or an error of the API;
nothing runs any more; memory and file descriptors are what they were. The
folder is a small file system of its own where this may mount one (root); else
disk and folder stay well. The clock is shifted by tools/clock_jump.c, built for
that where there is a compiler. What does not fail here is said at the start.

`--model` is a GGUF file with a tokenizer; without it a tiny random one is
written, as the tests do (needs their packages). Exits with 1 for anything that
is wrong. `--seed` begins all random choices.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))

import gemmakv
from support.clock import JumpingClock, why_not
from support.server_process import ServerProcess

MODEL = "m"
CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"
RESPONSES = "/v1/responses"
MOUNT_MIB = 64
JUMPS_S = (-86_400, -3_600, -30, 0, 0, 45, 3_600, 86_400, 10**7)
PATIENCE_S = 120.0  # with one request


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7)))
        for _ in range(words)
    )


def start(args: argparse.Namespace, *more: object, **env: str) -> ServerProcess:
    return ServerProcess(
        "-m", args.model, "--served-model-name", MODEL,
        "--max-model-len", 4096, *more, **env,
    )


# -- the same tokens ----------------------------------------------------------


class Kinds:
    """Requests by their number, and what each API calls its answer."""

    def __init__(self, seed: int, count: int) -> None:
        self.count = count
        rng = random.Random(seed)
        self._systems = [sentence(rng, n) for n in (20, 60, 150)]
        self._bodies = [self._body(rng, i) for i in range(count)]

    def _body(self, rng: random.Random, i: int) -> dict[str, Any]:
        return {
            "system": rng.choice(self._systems),
            "user": sentence(rng, rng.choice((1, 5, 30, 120))),
            "max_tokens": rng.choice((1, 2, 5, 12, 30)),
            "temperature": rng.choice((0.0, 0.7, 1.3)),
            "seed": rng.randrange(1 << 40),
            "top_k": rng.choice((0, 5, 40)),
            "kind": ("chat", "completion", "anthropic", "ollama")[i % 4],
        }

    def request(self, i: int, stream: bool, cold: bool) -> tuple[str, Any]:
        b = self._bodies[i]
        sampling = {
            "temperature": b["temperature"], "top_k": b["top_k"],
            "seed": b["seed"],
        }
        user = {"role": "user", "content": b["user"]}
        system = {"role": "system", "content": b["system"]}
        if b["kind"] == "chat":
            return CHAT, {
                "model": MODEL, "messages": [system, user], "stream": stream,
                "max_tokens": b["max_tokens"], "logprobs": True, **sampling,
            }
        if b["kind"] == "completion":
            return "/completion", {
                "prompt": f"{b['system']} {b['user']}", "stream": stream,
                "n_predict": b["max_tokens"], "return_tokens": True,
                "cache_prompt": not cold, **sampling,
            }
        if b["kind"] == "anthropic":
            return "/v1/messages", {  # an API without seeds
                "model": MODEL, "system": b["system"], "messages": [user],
                "max_tokens": b["max_tokens"], "stream": stream,
                "temperature": 0,
            }
        return "/api/chat", {
            "model": MODEL, "messages": [system, user], "stream": stream,
            "options": {"num_predict": b["max_tokens"], **sampling},
        }

    def answer(self, i: int, stream: bool, text: str) -> Any:
        """What is compared: the text, with tokens and log-probabilities where
        the API has them."""
        kind = self._bodies[i]["kind"]
        if not stream:
            parts = [json.loads(text)]
        else:
            lines = text.splitlines()
            if kind != "ollama":
                lines = [
                    line[6:] for line in lines if line.startswith("data: {")
                ]
            parts = [json.loads(line) for line in lines if line]
        if any("error" in part for part in parts):
            raise RuntimeError(f"{kind}: {text[:500]}")
        if kind == "chat":
            said, probs = "", []
            for part in parts:
                for choice in part["choices"]:
                    of = choice["delta" if stream else "message"]
                    said += of.get("content") or ""
                    probs += (choice.get("logprobs") or {"content": []})[
                        "content"] or []
            return said, probs
        if kind == "completion":
            return (
                "".join(part["content"] for part in parts),
                [t for part in parts for t in part.get("tokens") or []],
            )
        if kind == "anthropic":
            if not stream:
                return "".join(of["text"] for of in parts[0]["content"])
            return "".join(
                part["delta"].get("text", "") for part in parts
                if part["type"] == "content_block_delta")
        return "".join(part["message"]["content"] for part in parts)


async def ask(
    http: httpx.AsyncClient, kinds: Kinds, i: int, stream: bool, cold: bool
) -> Any:
    path, body = kinds.request(i, stream, cold)
    while True:
        response = await http.post(path, json=body)
        if response.status_code != 429:
            break
        await asyncio.sleep(0.05)
    if response.status_code != 200:
        raise RuntimeError(f"{path}: {response.status_code}, {response.text}")
    return kinds.answer(i, stream, response.text)


def client(
    server: ServerProcess, limit: int, patience_s: float = PATIENCE_S
) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=server.url, timeout=patience_s,
        limits=httpx.Limits(max_connections=limit))


async def run_same(
    args: argparse.Namespace, server: ServerProcess, kinds: Kinds,
    expected: list[Any], requests: int, rng: random.Random,
) -> Counter[str]:
    left = requests
    found: Counter[str] = Counter()

    async def work(http: httpx.AsyncClient) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            i = rng.randrange(kinds.count)
            stream, cold = rng.random() < 0.5, rng.random() < 0.25
            answer = await ask(http, kinds, i, stream, cold)
            found["right" if answer == expected[i] else "wrong"] += 1
            if answer != expected[i] and found["wrong"] < 4:
                print(
                    f"request {i}, stream {stream}, cold {cold}:\n"
                    f"expected {expected[i]!r}\nfound {answer!r}",
                    file=sys.stderr)

    async with client(server, args.clients, args.patience) as http:
        await asyncio.gather(*[work(http) for _ in range(args.clients)])
        metrics = (await http.get("/metrics")).text
    for line in metrics.splitlines():
        if any(
            name in line for name in (
                "cached_tokens", "drafted_tokens", "accepted_tokens")
        ) and not line.startswith("#"):
            print(" ", line, flush=True)
    return found


def same(args: argparse.Namespace, folder: Path) -> int:
    kinds = Kinds(args.seed, args.kinds)
    rng = random.Random(args.seed)
    with start(
        args, "--prefix-cache-ram", "off", "--speculate", "off",
        "--max-running", 1,
    ) as server:

        async def alone() -> list[Any]:
            async with client(server, 1, args.patience) as http:
                return [
                    await ask(http, kinds, i, False, True)
                    for i in range(kinds.count)
                ]

        expected = asyncio.run(alone())
    print(f"{kinds.count} requests alone", flush=True)
    total: Counter[str] = Counter()
    stages = [
        ("one worker", ["--max-running", 16]),
        ("one worker, started again", ["--max-running", 48]),
        ("two workers", ["--workers", 2]),
        ("two workers, started again", ["--workers", 2, "--max-running", 48]),
    ]
    for name, options in stages:
        begin = time.monotonic()
        with start(
            args, "--prefix-cache-disk", folder / "prefixes",
            "--sessions", folder / "kept", "--max-queue", 64, *options,
        ) as server:
            found = asyncio.run(run_same(
                args, server, kinds, expected, args.requests // len(stages),
                rng))
            server.signal(signal.SIGTERM)
            ended = server.wait()
        total += found
        print(
            f"{name}: {found['right']} right, {found['wrong']} wrong, exit "
            f"status {ended}, {time.monotonic() - begin:.0f} s", flush=True)
        total["status"] += ended != 0
    return int(bool(total["wrong"] or total["status"]))


# -- faults -------------------------------------------------------------------


class Disk:
    """A small file system for the folder, if one may be mounted."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        folder.mkdir()
        self.mounted = os.geteuid() == 0 and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_MIB}m", "none",
             str(folder)], check=False).returncode == 0

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.path / "filler").open(
            "wb", buffering=0
        ) as filler:
            while True:
                filler.write(bytes(1 << 16))

    def free(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)

    def read_only(self, so: bool) -> None:
        """What is in it cannot be changed, open or not."""
        subprocess.run(
            ["chattr", "-R", "+i" if so else "-i", str(self.path)],
            check=False, capture_output=True)

    def close(self) -> None:
        if self.mounted:
            self.read_only(False)
            subprocess.run(["umount", "-l", str(self.path)], check=False)


async def patiently(call: Coroutine[Any, Any, str]) -> str:
    """Raises TimeoutError after PATIENCE_S, in which all of this ran: where
    everything is stopped for a while nothing is stuck.
    """
    task = asyncio.create_task(call)
    for _ in range(int(PATIENCE_S)):
        if (await asyncio.wait({task}, timeout=1))[0]:
            return task.result()
    task.cancel()
    raise TimeoutError


class Talker:
    """A client with sessions of its own. Everything that it was told is kept
    in `turns`: what was said, with which seed, and the reply."""

    def __init__(self, faults: Faults, number: int) -> None:
        self._faults = faults
        self._rng = random.Random(f"{faults.args.seed} {number}")
        self.turns: dict[str, list[tuple[Any, str]]] = {}
        # Whether a turn may be there that nobody was told of, and which.
        self.unsure: dict[str, Any] = {}
        # What responses said, by their ids.
        self.responses: dict[str, str] = {}

    async def run(self, http: httpx.AsyncClient) -> None:
        while not self._faults.over:
            name = self._rng.choices(
                ("turn", "stream", "cancel", "vanish", "slow", "several",
                 "nonsense", "fork", "rewind", "delete", "respond", "again"),
                (30, 30, 8, 5, 2, 5, 6, 5, 5, 4, 8, 8))[0]
            begin = time.monotonic()
            try:
                what = await patiently(getattr(self, "_" + name)(http))
            except httpx.TransportError as error:
                what = type(error).__name__
                await asyncio.sleep(0.2)  # it is being started again
            except TimeoutError:
                what = "stuck"
                print(f"stuck: {name} for {PATIENCE_S} s", file=sys.stderr)
            self._faults.told(name, what, time.monotonic() - begin)

    async def _session(self, http: httpx.AsyncClient) -> str | None:
        known = [one for one in self.turns if one not in self.unsure]
        if known and (len(known) > 3 or self._rng.random() < 0.9):
            return self._rng.choice(known)
        response = await http.post(
            SESSIONS, json={"system": sentence(self._rng, 12)})
        if response.status_code not in (200, 201):
            return None
        found = response.json()["id"]
        self.turns[found] = []
        return str(found)

    def _body(self, session: str | None, **more: Any) -> dict[str, Any]:
        return {
            "model": MODEL, "max_tokens": self._rng.choice((1, 4, 12, 40)),
            "seed": self._rng.randrange(1 << 40), "temperature": 1,
            "messages": [{
                "role": "user",
                "content": sentence(self._rng, self._rng.choice((1, 8, 60)))}],
            **({"session": session} if session else {}), **more,
        }

    async def _settle(self, http: httpx.AsyncClient) -> None:
        """Looks which of the turns that nobody was told of are there."""
        for session, body in list(self.unsure.items()):
            for _ in range(100):
                response = await http.get(f"{SESSIONS}/{session}")
                if response.status_code == 200:
                    break
                if response.status_code == 404:
                    self._faults.lost(session, "a session that is gone")
                    self.turns.pop(session, None)
                    self.unsure.pop(session, None)
                    break
                await asyncio.sleep(0.2)
            else:
                return
            if response.status_code != 200:
                continue
            told = self.turns[session]
            there = [t["reply"]["content"] for t in response.json()["turns"]]
            if there[: len(told)] != [reply for _, reply in told]:
                self._faults.lost(session, f"told {told!r}, found {there!r}")
            if len(there) > len(told) + 1:
                self._faults.lost(session, f"{len(there) - len(told)} more")
            for reply in there[len(told):][:1]:
                told.append((body, reply))
            del self.unsure[session]

    def _refused(self, response: httpx.Response) -> str:
        """The status of an error of the API."""
        try:
            error = response.json()["error"]
            assert error["message"] and error["type"]
        except (ValueError, KeyError, TypeError, AssertionError):
            self._faults.lost("", f"no error of the API: {response.text!r}")
            return "untyped"
        if response.status_code >= 500 and response.status_code != 503:
            self._faults.lost("", f"{response.status_code}: {error}")
        return f"{response.status_code} {error.get('code') or error['type']}"

    async def _turn(self, http: httpx.AsyncClient) -> str:
        await self._settle(http)
        session = await self._session(http)
        if session is None:
            return "no session"
        body = self._body(session)
        self.unsure[session] = body
        response = await http.post(CHAT, json=body)
        if response.status_code != 200:
            return self._refused(response)  # perhaps it is there: `_settle`
        message = response.json()["choices"][0]["message"]
        self.turns[session].append((body, message["content"]))
        del self.unsure[session]
        return "200"

    async def _stream(
        self, http: httpx.AsyncClient, pause: float = 0, cut: int = 1 << 30
    ) -> str:
        await self._settle(http)
        session = await self._session(http)
        if session is None:
            return "no session"
        body = self._body(session, stream=True)
        if cut < 1 << 30 or pause:
            body |= {"max_tokens": 300, "ignore_eos": True}
        self.unsure[session] = body
        text, ended = "", False
        async with http.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._refused(response)
            lines = 0
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"error in the stream: {event['error']['type']}"
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                lines += 1
                if lines >= cut:
                    return "cancelled"
                if pause:
                    await asyncio.sleep(pause)
        if not ended:
            return "stream without an end"
        self.turns[session].append((body, text))
        del self.unsure[session]
        return "200"

    async def _cancel(self, http: httpx.AsyncClient) -> str:
        return await self._stream(http, cut=self._rng.randint(1, 60))

    async def _slow(self, http: httpx.AsyncClient) -> str:
        return await self._stream(http, pause=0.02, cut=200)

    async def _vanish(self, http: httpx.AsyncClient) -> str:
        """Goes away before there is an answer."""
        body = self._body(None, max_tokens=1000, ignore_eos=True, n=2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.random() / 2):
                await http.post(CHAT, json=body)
        return "gone"

    async def _several(self, http: httpx.AsyncClient) -> str:
        body = self._body(None, n=self._rng.randint(2, 4))
        response = await http.post(CHAT, json=body)
        if response.status_code != 200:
            return self._refused(response)
        choices = response.json()["choices"]
        if len(choices) != body["n"]:
            self._faults.lost("", f"{len(choices)} choices of {body['n']}")
        return "200"

    async def _nonsense(self, http: httpx.AsyncClient) -> str:
        content = self._rng.choice((
            b"", b"{", b"[" * 20_000, b"\xff\xfe", b'{"messages": 3}',
            b'{"messages": [{"role": "user", "content": "x"}], "top_p": 7}',
            b'{"session": "sess_nobody", "messages": [{"role": "user", '
            b'"content": "x"}]}', b"x" * 9_000_000,
        ))
        response = await http.post(CHAT, content=content, headers={
            "content-type": "application/json"})
        if response.status_code < 400:
            self._faults.lost("", f"taken: {content[:80]!r}")
        return self._refused(response)

    async def _fork(self, http: httpx.AsyncClient) -> str:
        await self._settle(http)
        session = await self._session(http)
        if session is None or len(self.turns) > 40:
            return "no session"
        response = await http.post(f"{SESSIONS}/{session}/fork", json={})
        if response.status_code not in (200, 201):
            return self._refused(response)
        self.turns[response.json()["id"]] = list(self.turns[session])
        return "200"

    async def _rewind(self, http: httpx.AsyncClient) -> str:
        await self._settle(http)
        session = await self._session(http)
        if session is None or not self.turns[session]:
            return "no turn"
        response = await http.get(f"{SESSIONS}/{session}")
        if response.status_code != 200:
            return self._refused(response)
        turns = response.json()["turns"]
        if len(turns) != len(self.turns[session]):
            self._faults.lost(
                session, f"{len(turns)} turns, expected "
                f"{len(self.turns[session])}")
            del self.turns[session]
            return "wrong"
        keep = self._rng.randint(0, len(turns) - 1)
        # Whether it is done is not known if there is no answer: forget it.
        before = self.turns.pop(session)
        response = await http.post(
            f"{SESSIONS}/{session}/rewind",
            json={"turn": turns[keep - 1]["id"] if keep else None})
        if response.status_code == 200:
            self.turns[session] = before[:keep]
            return "200"
        if response.status_code < 500:
            self.turns[session] = before
        return self._refused(response)

    async def _delete(self, http: httpx.AsyncClient) -> str:
        await self._settle(http)
        session = await self._session(http)
        if session is None or len(self.turns) < 3:
            return "no session"
        before = self.turns.pop(session)
        response = await http.delete(f"{SESSIONS}/{session}")
        if response.status_code < 300:
            return "200"
        if response.status_code < 500:
            self.turns[session] = before
        return self._refused(response)


    async def _respond(self, http: httpx.AsyncClient) -> str:
        body = {
            "model": MODEL, "max_output_tokens": self._rng.choice((1, 6, 20)),
            "input": sentence(self._rng, 8), "temperature": 1,
        }
        if self.responses and self._rng.random() < 0.5:
            body["previous_response_id"] = self._rng.choice(
                list(self.responses))
        response = await http.post(RESPONSES, json=body)
        if response.status_code != 200:
            return self._refused(response)
        found = response.json()
        self.responses[found["id"]] = text_of(found)
        return "200"

    async def _again(self, http: httpx.AsyncClient) -> str:
        """A response that was told of is there, whatever the clock says."""
        if not self.responses:
            return "none"
        id = self._rng.choice(list(self.responses))
        return await self.look(http, id)

    async def look(self, http: httpx.AsyncClient, id: str) -> str:
        response = await http.get(f"{RESPONSES}/{id}")
        if response.status_code == 503:
            return self._refused(response)
        if response.status_code != 200:
            self._faults.lost(id, f"{response.status_code}: {response.text}")
        elif (said := text_of(response.json())) != self.responses[id]:
            self._faults.lost(id, f"{self.responses[id]!r}, found {said!r}")
        return str(response.status_code)


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"]
        for part in item.get("content", ()))


def least_memory(model: str) -> int:
    """What one conversation takes, and a step besides."""
    config = gemmakv.Gemma.load(model, prefix_cache=False).config
    _, sliding = config.kv_bytes_per_token()
    return config.kv_bytes_at(4096) + 256 * sliding


class Faults:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.over = False
        self.counts: dict[str, Counter[str]] = {}
        self.slowest: dict[str, float] = {}
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self._rng = random.Random(args.seed)
        self.disk = Disk(folder / "disk")
        self.clock = None if why_not() else JumpingClock(folder)
        for what, reason in (
            ("clock stays right", why_not()),
            ("disk and folder stay well",
             None if self.disk.mounted else "no file system may be mounted"),
        ):
            if reason:
                print(f"the {what}: {reason}", flush=True)
        self.memory = least_memory(args.model)
        self.preemptions = self._counted = 0
        self.port = 0
        self.server: ServerProcess | None = None

    def told(self, name: str, what: str, seconds: float) -> None:
        self.counts.setdefault(name, Counter())[what] += 1
        self.slowest[name] = max(self.slowest.get(name, 0), seconds)

    def lost(self, session: str, what: str) -> None:
        self.wrong.append(f"{session} {what}"[:2000])
        print("wrong:", self.wrong[-1], file=sys.stderr, flush=True)

    def start(self) -> ServerProcess:
        kept, prefixes = self.disk.path / "kept", self.disk.path / "prefixes"
        return start(
            self.args, "--port", self.port, "--workers", 2, "--sessions", kept,
            "--prefix-cache-disk", f"{prefixes}:16MiB",
            "--prefix-cache-ram", "4MiB", "--max-queue", 24,
            "--max-running", 8, "--drain-timeout", 5,
            "--kv-cache-memory", self.memory,
            **(self.clock.env if self.clock else {}))

    def workers(self) -> list[int]:
        assert self.server
        return self.server.workers()

    def sizes(self) -> list[tuple[int, int]]:
        """MiB of anonymous memory and open files, of each worker."""
        found = []
        for pid in self.workers():
            status = Path(f"/proc/{pid}/status").read_text()
            [line] = [
                line for line in status.splitlines()
                if line.startswith("RssAnon")]
            files = len(os.listdir(f"/proc/{pid}/fd"))
            found.append((int(line.split()[1]) // 1024, files))
        return found

    async def fail(self) -> None:
        """One fault, and its end."""
        rng = self._rng
        kinds = ["worker", "worker", "server", "stop", "term"]
        if self.disk.mounted:
            kinds += ["full", "full", "read-only"]
        if self.clock:
            kinds += ["clock", "clock"]
        kind = rng.choice(kinds)
        self.done[kind] += 1
        assert self.server
        if kind == "worker":
            with contextlib.suppress(OSError, IndexError):
                os.kill(rng.choice(self.workers()), signal.SIGKILL)
        elif kind == "stop":
            with contextlib.suppress(OSError, IndexError):
                pid = rng.choice(self.workers())
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(2)
                os.kill(pid, signal.SIGCONT)
        elif kind in ("server", "term"):
            self.server.signal(
                signal.SIGKILL if kind == "server" else signal.SIGTERM)
            for _ in range(60):  # not of a time in which all this is stopped
                if self.server.process.poll() is not None:
                    break
                await asyncio.sleep(1)
            await asyncio.to_thread(self.server.wait, 5)
            await asyncio.sleep(0.5)  # workers end by themselves
            self.server = await asyncio.to_thread(self.start)
        elif kind == "full":
            await asyncio.to_thread(self.disk.fill)
            await asyncio.sleep(3)
            self.disk.free()
        elif kind == "read-only":
            self.disk.read_only(True)
            await asyncio.sleep(3)
            self.disk.read_only(False)
        else:
            assert self.clock
            self.clock.jump(rng.choice(JUMPS_S))  # others happen meanwhile

    async def run(self) -> None:
        with socket_free() as port:
            self.port = port
        self.server = await asyncio.to_thread(self.start)
        talkers = [Talker(self, i) for i in range(self.args.clients)]
        left = all_s = 60 * self.args.minutes
        first: list[tuple[int, int]] = []
        async with client(
            self.server, 2 * self.args.clients, 60 * PATIENCE_S
        ) as http:
            tasks = [asyncio.create_task(one.run(http)) for one in talkers]
            while left > 0:
                begin = time.monotonic()
                await asyncio.sleep(self._rng.uniform(2, 8))
                if left < all_s * 5 / 6 and not first:
                    first = self.sizes()
                await self.count(http)
                await self.fail()
                for task in tasks:
                    if task.done():
                        task.result()
                # Not the time in which all of this was stopped.
                left -= min(time.monotonic() - begin, 30)
            self.over = True
            await asyncio.gather(*tasks)
            await asyncio.sleep(2)
            for talker in talkers:
                await talker._settle(http)
                if talker.unsure:
                    self.lost(str(list(talker.unsure)), "not to be had")
                for id in talker.responses:
                    if (found := await talker.look(http, id)) != "200":
                        self.lost(id, found)
            await self.idle(http)
            last = self.sizes()
            print(f"MiB and open files of each worker: {first} then {last}")
            kept = sum(len(one.responses) for one in talkers)
            print(f"{kept} responses that were told of are there")
            await self.repeat(http, talkers)
        self.server.signal(signal.SIGTERM)
        if code := await asyncio.to_thread(self.server.wait):
            self.lost("", f"exit status {code}: {self.server.log[-500:]}")

    async def count(self, http: httpx.AsyncClient) -> None:
        """Of servers that end, what they counted last is missing."""
        with contextlib.suppress(httpx.TransportError):
            for line in (await http.get("/metrics")).text.splitlines():
                if line.startswith("gemmakv_preemptions_total"):
                    now = int(float(line.split()[-1]))
                    last, self._counted = self._counted, now
                    self.preemptions += now - last if now >= last else now

    async def idle(self, http: httpx.AsyncClient) -> None:
        """Nothing runs or waits any more."""
        busy: list[str] = []
        for _ in range(100):
            metrics = (await http.get("/metrics")).text
            busy = [
                line for line in metrics.splitlines()
                if line.startswith((
                    "gemmakv_rows_running", "gemmakv_requests_waiting"))
                and float(line.split()[-1]) != 0
            ]
            if not busy:
                return
            await asyncio.sleep(0.1)
        self.lost("", f"still there: {busy}")

    async def repeat(
        self, http: httpx.AsyncClient, talkers: list[Talker]
    ) -> None:
        """Says sessions again, to a server that nothing happens to."""
        assert self.server
        chosen = [
            (session, turns) for one in talkers
            for session, turns in one.turns.items() if turns]
        self._rng.shuffle(chosen)
        turns_said = 0
        with contextlib.ExitStack() as stack:
            kept = stack.enter_context(tempfile.TemporaryDirectory())
            fresh = await asyncio.to_thread(
                start, self.args, "--sessions", kept,
                "--prefix-cache-ram", "off")
            stack.enter_context(fresh)
            async with client(fresh, 1) as other:
                for session, turns in chosen[: self.args.repeated]:
                    found = (await http.get(f"{SESSIONS}/{session}")).json()
                    made = (await other.post(SESSIONS, json={
                        "system": found["system"]})).json()["id"]
                    for body, reply in turns:
                        again = body | {"session": made, "stream": False}
                        answer = (await other.post(CHAT, json=again)).json()
                        text = answer["choices"][0]["message"]["content"]
                        turns_said += 1
                        if not text.startswith(reply) or (
                            text != reply and body["max_tokens"] < 300
                        ):
                            self.lost(session, f"{reply!r}, again {text!r}")
                            break
                        if text != reply:
                            break  # it was cut: the rest goes on from that
        print(
            f"{len(chosen)} sessions with {sum(len(t) for _, t in chosen)} "
            f"turns; {min(len(chosen), self.args.repeated)} said again, "
            f"{turns_said} turns")


@contextlib.contextmanager
def socket_free() -> Iterator[int]:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


def faults(args: argparse.Namespace, folder: Path) -> int:
    faults = Faults(args, folder)
    try:
        asyncio.run(faults.run())
    finally:
        if faults.server and faults.server.process.poll() is None:
            faults.server.signal(signal.SIGKILL)
        faults.disk.close()
    print(
        f"faults: {dict(faults.done)}, {faults.preemptions} requests gave way "
        f"in {faults.memory} bytes")
    for name, counts in sorted(faults.counts.items()):
        print(f"{name}: {dict(counts)}, slowest {faults.slowest[name]:.1f} s")
    stuck = sum(counts["stuck"] for counts in faults.counts.values())
    print(f"{len(faults.wrong)} wrong, {stuck} stuck")
    return int(bool(faults.wrong or stuck))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("same", "faults"))
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kinds", type=int, default=400)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--repeated", type=int, default=60, help="sessions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S,
        help="seconds until a request of `same` is given up")
    args = parser.parse_args()
    args.clients = args.clients or {"same": 49, "faults": 64}[args.what]
    folder = Path(tempfile.mkdtemp())
    try:
        if not args.model:
            from support.tiny_gguf import write_talker

            args.model = write_talker(folder / "talker.gguf")
        return (same if args.what == "same" else faults)(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
