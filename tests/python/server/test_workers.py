"""Several processes at one port: `gemmakv serve --workers`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.server.process.workers import Worker
from gemmakv.server.service.counts import FOLDER
from support import raw_http
from support.asgi import NAME, USER
from support.command import RunCli, assert_fails
from support.forks import run_program
from support.server_process import ServerProcess, words
from support.waits import LIMIT_S, wait_until

WORKER_TIMEOUT_S = 10
CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"
READY = "gemmakv: serving "
LONG = {
    "model": NAME, "messages": USER, "max_tokens": 500_000,
    "ignore_eos": True, "stream": True,
}  # fmt: skip


class Servers:
    """Starts servers of two workers that share a prefix cache in memory."""

    def __init__(self, model: Path) -> None:
        if not Path("/dev/shm").is_dir():
            pytest.skip("no /dev/shm")
        self._model = model
        self._memory = tempfile.mkdtemp(dir="/dev/shm")
        self._started: list[ServerProcess] = []

    def __call__(self, *more: object) -> ServerProcess:
        found = ServerProcess(
            "-m", self._model, "--workers", 2, "--log-format", "json",
            "--prefix-cache-shared", f"{self._memory}/shared",
            "--default-seed", 3, "--drain-timeout", 1, *more,
        )  # fmt: skip
        self._started.append(found)
        return found

    def end(self) -> None:
        for server in self._started:
            if server.process.poll() is None:
                server.signal()
                server.wait()
        shutil.rmtree(self._memory)


@pytest.fixture
def start(talker_path: Path) -> Iterator[Servers]:
    servers = Servers(talker_path)
    yield servers
    servers.end()


@pytest.fixture(scope="module")
def running(
    talker_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server whose workers may be killed and stopped, but not itself."""
    servers = Servers(talker_path)
    folder = tmp_path_factory.mktemp("workers")
    yield servers(
        "--sessions", folder / "kept", "--worker-timeout", WORKER_TIMEOUT_S
    )
    servers.end()


def workers_of(server: ServerProcess) -> list[int]:
    pid = server.process.pid
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        pytest.skip("needs /proc/PID/task/TID/children of Linux")
    return server.workers()


def until(holds: Callable[[], object]) -> None:
    """Waits for what a request or files of the system tell."""
    wait_until(holds, pause_s=0.02)


def both(server: ServerProcess) -> list[int]:
    """The workers, once there are two that answer."""
    until(lambda: len(workers_of(server)) == 2)
    until(lambda: len(answering(server)) == 2)
    return workers_of(server)


def answering(server: ServerProcess) -> set[int]:
    """Who answers connections that are open at once."""
    clients = [HTTPConnection("127.0.0.1", server.port) for _ in range(4)]
    before = len(server.lines)
    for client in clients:
        client.request("GET", "/health")
        client.getresponse().read()
    for client in clients:
        client.close()
    until(lambda: by_worker(server, "/health", before).total() >= 4)
    return set(by_worker(server, "/health", before))


def by_worker(
    server: ServerProcess, path: str, since: int = 0
) -> Counter[int]:
    said = [
        json.loads(line)
        for line in server.lines[since:]
        if line.startswith("{")
    ]
    return Counter(line["worker"] for line in said if line.get("path") == path)


def metric(server: ServerProcess, name: str) -> float:
    return raw_http.metric(server.url, name)


def test_same_answers_from_each(
    running: ServerProcess, shared: gemmakv.Gemma
) -> None:
    server = running
    both(server)
    options: Any = {"max_tokens": 20, "seed": 7, "temperature": 1}
    expected = shared.chat(USER, **options).text
    all_here = threading.Barrier(12)
    name = "gemmakv_completion_tokens_total"
    count = metric(server, name)
    body = json.dumps({"model": NAME, "messages": USER, **options})

    def ask(index: int) -> str:
        http = HTTPConnection("127.0.0.1", server.port, timeout=60)
        http.request("POST", CHAT, body)
        answer = json.load(http.getresponse())
        all_here.wait(60)  # connected, while the others come
        http.close()
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def ask_all() -> Counter[int]:
        before = len(server.lines)
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            assert set(pool.map(ask, range(12))) == {expected}
        until(lambda: by_worker(server, CHAT, before).total() == 12)
        return by_worker(server, CHAT, before)

    # Which worker takes a connection is the system's choice.
    rounds = [ask_all()]
    while not all(sum(rounds, Counter())[worker] for worker in (0, 1)):
        assert len(rounds) < 20, rounds
        rounds.append(ask_all())
    count += 240 * len(rounds)
    until(lambda: metric(server, name) == count)
    # What one computed the other need not.
    prompt = {"prompt": "a long tale " * 60, "max_tokens": 1}
    tier = 'gemmakv_prefix_cache_tokens_total{tier="shared"}'

    def found() -> bool:
        nonlocal count
        httpx.post(server.url + "/v1/completions", json=prompt, timeout=60)
        count += 1
        return metric(server, tier) >= 256

    until(found)
    until(lambda: metric(server, name) == count)


def test_killed_worker(running: ServerProcess) -> None:
    """Another takes its place, its sessions go on, its numbers stay."""
    server = running
    before = both(server)
    name = "gemmakv_completion_tokens_total"
    count = metric(server, name)
    http = httpx.Client(timeout=60, base_url=server.url)
    id = http.post(SESSIONS, json={}).json()["id"]

    def body(text: str, **more: Any) -> dict[str, Any]:
        message = {"role": "user", "content": text}
        return {"session": id, "messages": [message], "max_tokens": 6, **more}

    assert http.post(CHAT, json=body("a")).status_code == 200
    until(lambda: metric(server, name) == count + 6)
    more = {"stream": True, "max_tokens": 500_000, "ignore_eos": True}
    with (
        pytest.raises(httpx.HTTPError),
        httpx.stream(
            "POST", server.url + CHAT, json=body("b", **more), timeout=120
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        for _ in lines:
            pass
    http.close()
    after = both(server)
    assert not set(before) & set(after)
    with httpx.Client(timeout=60, base_url=server.url) as http:
        answer = http.post(CHAT, json=body("c"))
        assert answer.status_code == 200, answer.text
        turns = http.get(f"{SESSIONS}/{id}").json()["turns"]
        asked = [turn["messages"][-1]["content"] for turn in turns]
        assert asked == ["a", "c"]  # b was never acknowledged
    count += 6 + answer.json()["usage"]["completion_tokens"]
    until(lambda: metric(server, name) == count)


@pytest.mark.slow
def test_a_hung_worker_is_replaced(running: ServerProcess) -> None:
    """Connections that it had taken waited for it for ever."""
    before = both(running)
    os.kill(before[0], signal.SIGSTOP)
    until(lambda: before[0] not in workers_of(running))
    after = both(running)
    assert before[1] in after, "the other one was not"


@pytest.mark.slow
def test_sessions_removed(
    start: Servers, tmp_path: Path
) -> None:
    """A new worker makes no new database beside the one that is gone."""
    folder = tmp_path / "kept"
    server = start("--sessions", folder)
    pids = both(server)
    id = server.post(SESSIONS, {}).json()["id"]
    shutil.rmtree(folder)
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: "cannot start" in server.log)
    for _ in range(4):
        found = server.get(f"{SESSIONS}/{id}")
        assert found.status_code == 503, found.text
    assert "restart the server" in server.log
    assert not folder.exists()
    # The other one serves on, however often this one fails.
    body = {"model": NAME, "messages": USER, "max_tokens": 2}
    answer = httpx.post(server.url + CHAT, json=body, timeout=60)
    assert answer.status_code == 200
    server.signal()
    assert server.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, everybody",
    [
        (signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGHUP, True),
        (signal.SIGINT, True),
    ],
)  # fmt: skip
def test_drain(
    start: Servers, number: signal.Signals, everybody: bool
) -> None:
    """Checks that running replies are finished, also where a service manager
    or a terminal signals every process, and that nobody else connects.
    """
    server = start("--drain-timeout", 60)
    pids = both(server)
    # More than all that lies between holds: none ends before it is read.
    body = LONG | {"max_tokens": 600, "logprobs": True, "top_logprobs": 20}
    streams = [raw_http.unread(server.port) for _ in range(3)]
    for stream in streams:
        stream.sendall(raw_http.request_of(CHAT, body))
    until(lambda: metric(server, "gemmakv_rows_running") == 3)
    for pid in (server.process.pid, *(pids if everybody else ())):
        os.kill(pid, number)
    until(lambda: is_refused(server.port))
    for stream in streams:
        raw_http.read_until(stream, b"data: [DONE]")
        stream.close()
    assert server.wait() == 0


def test_a_hangup_that_nohup_ignores_is_ignored(talker_path: Path) -> None:
    nohup = ["sh", "-c", "trap '' HUP; exec \"$@\"", "nohup"]
    serve = [sys.executable, "-m", "gemmakv", "serve", "-m", str(talker_path),
             "--workers", "2", "--port", "0", "--threads", "1"]  # fmt: skip
    with subprocess.Popen(
        nohup + serve, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith(READY) for line in process.stderr)
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.terminate()
        process.stderr.read()
    [ignored] = [
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith("SigIgn:")
    ]
    assert ignored & 1 << signal.SIGHUP - 1
    assert process.returncode == 0


def is_refused(port: int) -> bool:
    """Says whether nobody listens any more."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


@pytest.mark.slow
def test_a_second_ctrl_c(start: Servers) -> None:
    """A terminal tells every process. The files of the workers go then."""
    server = start("--drain-timeout", 600)
    everybody = (server.process.pid, *both(server))
    folder = folder_of(everybody[1])
    with open(folder / "place-0") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    here = os.open(folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):  # or it would be emptied as it is old
        fcntl.flock(here, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(here)
    with httpx.stream(
        "POST", server.url + CHAT, json=LONG, timeout=LIMIT_S
    ) as stream:
        next(stream.iter_lines())
        for pid in everybody:
            os.kill(pid, signal.SIGINT)
        until(lambda: server.log.count("stopping: ") == 2)
        for pid in everybody:
            if words(pid):
                os.kill(pid, signal.SIGINT)
        assert server.wait() == 0
    assert not folder.exists()


def folder_of(worker: int) -> Path:
    """The folder of the workers' files."""
    variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    [folder] = [
        os.fsdecode(one.removeprefix(FOLDER.encode() + b"="))
        for one in variables
        if one.startswith(FOLDER.encode())
    ]
    return Path(folder)


@pytest.mark.slow
def test_supervisor_killed(start: Servers) -> None:
    """Workers alone would hold the port for ever."""
    server = start()
    pids = both(server)
    server.process.kill()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_bad_start(cli: RunCli, talker_path: Path) -> None:
    """A worker's error is that of the server, and so is its exit code."""
    for count in (0, 10_000):
        result = cli("serve", "-m", talker_path, "--workers", count)
        assert_fails(result, "--workers: ", f"found {count}", code=2)
    result = cli(
        "serve", "-m", talker_path, "--workers", 2, "--port", 0,
        "--max-model-len", 10**9,
    )  # fmt: skip
    assert result.returncode == 2
    said = result.stderr.decode()
    assert "Traceback" not in said
    last = said.splitlines()[-1]  # after lines of the log
    assert last.startswith("gemmakv: error: --max-model-len: ")


def test_places(tmp_path: Path) -> None:
    """A worker has the lowest place that is free, and its mark."""
    one, two = (Worker(tmp_path, 2) for _ in "12")
    assert [one.index, two.index] == [0, 1]
    mark = one.mark
    one._place.close()  # as its end does
    again = Worker(tmp_path, 2)
    assert (again.index, again.mark) == (0, mark)
    assert two.mark != mark


def test_turns(tmp_path: Path) -> None:
    """One loads after the other, and all serve once."""

    async def main() -> None:
        one, two = (Worker(tmp_path, 2) for _ in "12")
        waits = 0

        def check() -> None:
            nonlocal waits
            waits += 1
            if waits == 2:
                raise InterruptedError

        async with one.turn(check):
            assert not one.others_serve()
            with pytest.raises(InterruptedError):
                async with two.turn(check):
                    raise AssertionError("it is another one's turn")
            assert not one.say_serving()
        async with two.turn(check):
            assert two.others_serve()
            assert two.say_serving()
            one._serving.close()
            two._serving.close()
            assert not two.others_serve()
            assert not two.say_serving()  # another time

    asyncio.run(main())


_NEVER_ENDS = """
import os, signal, sys
from gemmakv import Gemma
from gemmakv.server.process import run as _run
from gemmakv.server.process import sockets as _sockets
from gemmakv.server.service.chat import ChatService
from gemmakv.server.settings import Limits, Settings
from support.stuck import Stuck

settings = Settings(
    ("talker",), port=0, drain_timeout=0.1, limits=Limits(last_s=0.1)
)
with _sockets.bound(settings) as sock:
    sys.exit(
        _run.serve(
            settings, sock, Stuck(settings, sys.argv[1]),
            workers=_run.Workers(1, 60, False),
        )
    )
"""


@pytest.mark.slow
def test_a_worker_that_never_ends(talker_path: Path) -> None:
    """It is ended, tells where it hung, and the server's exit code says so."""
    done = run_program(_NEVER_ENDS, talker_path)
    assert done.returncode == 1, done.stderr
    assert "Timeout (" in done.stderr
    assert "in close" in done.stderr


@pytest.mark.slow
def test_pinned_workers_have_their_own_processors(
    start: Servers,
) -> None:
    """Also one that takes the place of another."""
    there = os.sched_getaffinity(0)
    if len(there) < 2:
        pytest.skip("two workers need two processors")
    server = start("--pin-threads")

    def check(pids: list[int]) -> None:
        shares = [os.sched_getaffinity(pid) for pid in pids]
        assert not shares[0] & shares[1]
        assert shares[0] | shares[1] == there

    def told() -> Counter[int]:
        lines = [json.loads(x) for x in server.lines if x.startswith("{")]
        return Counter(
            line["worker"]
            for line in lines
            if "1 thread, pinned to CPUs " in line.get("message", "")
        )

    check(both(server))
    until(lambda: told() == {0: 1, 1: 1})
    until(lambda: metric(server, "gemmakv_threads") == 2)
    first, second = workers_of(server)
    own = os.sched_getaffinity(first)
    os.kill(first, signal.SIGKILL)
    until(lambda: first not in workers_of(server))
    pids = both(server)
    check(pids)
    successor = next(pid for pid in pids if pid != second)
    assert os.sched_getaffinity(successor) == own
    answer = httpx.post(
        server.url + CHAT,
        json={"model": NAME, "messages": USER, "max_tokens": 2},
        timeout=120,
    )
    assert answer.status_code == 200


@pytest.mark.slow
def test_more_pinned_threads_than_processors(
    cli: RunCli, talker_path: Path
) -> None:
    there = len(os.sched_getaffinity(0))
    asked = ("serve", "-m", talker_path, "--pin-threads", "--port", 0)
    result = cli(*asked, "--workers", 2, "--threads", there)
    words = ("--threads: expected", f"found {there} with", "pin_threads")
    assert_fails(result, *words, code=2)
    result = cli(*asked, "--workers", there + 1)
    assert_fails(
        result, "pin_threads", f"{there + 1} workers", f"most {there}", code=2
    )
