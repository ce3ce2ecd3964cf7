"""Several processes at one port: `gemmakv serve --workers`."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
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
from gemmakv.server.process import workers as _workers
from gemmakv.server.process.board import AWAY, Board
from gemmakv.server.service.metrics import merged
from support import raw_http
from support.asgi import NAME, USER
from support.command import RunCli, assert_fails
from support.forks import run_program
from support.server_process import ServerProcess
from support.waits import LIMIT_S, wait_until

WORKER_TIMEOUT_S = 10
CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"
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
            "--default-seed", 3, *more,
        )  # fmt: skip
        self._started.append(found)
        return found

    def end(self) -> None:
        for server in self._started:
            if server.process.poll() is None:
                server.signal()
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
    task = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
    if not os.path.exists(task):
        pytest.skip("needs /proc/PID/task/TID/children of Linux")
    return [int(pid) for pid in Path(task).read_text().split()]


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

    # Who has fewer connections takes the next; but one that the machine leaves
    # no time for a moment does not keep them waiting.
    rounds = [ask_all()]
    while min(rounds[-1][0], rounds[-1][1]) < 3:
        assert len(rounds) < 8, rounds
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
    assert "signal 9" in server.log
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
    # Counted from its last beat, which may have been long before the stop.
    waited = re.search(
        rf"process {before[0]}\) has not answered for (\d+) s", running.log
    )
    assert waited and int(waited[1]) >= WORKER_TIMEOUT_S


class _Time:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("asleep", [0.9, 1.2, 1.4, 1.6, 5, 100])
def test_nobody_hangs_while_the_machine_sleeps(
    monkeypatch: pytest.MonkeyPatch, asleep: float
) -> None:
    """Somewhat longer than the timeout: workers that had no time to beat were
    killed. Who hangs when it goes on is found none the less.
    """
    clock, killed = _Time(), []
    monkeypatch.setattr(_workers, "time", clock)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    with socket.socket() as sock:
        found = _workers._Supervisor(1, sock, 20, lambda: None, 1)
    found._places[0].pid = 4242
    for _ in range(8):
        clock.now += 0.25
        found._board.beat(0)
        found._end_hung()
    clock.now += asleep
    found._end_hung()
    assert not killed
    for _ in range(5):
        clock.now += 0.25
        found._end_hung()
    assert killed == [4242]


_SIGNAL_BEHIND_FORK = """
import os, signal, socket, sys, time
from gemmakv.server.process import workers as _workers

fork = os.fork

def fork_and_signal():
    pid = fork()
    if pid:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        # The stop is told before it has run a line, and waits to be heard.
        end = time.monotonic() + 60
        while signal.SIGTERM not in signal.sigpending():
            assert time.monotonic() < end
            time.sleep(0.001)  # the pause of a poll
    return pid

os.fork = fork_and_signal
sock = socket.create_server(("127.0.0.1", 0))
found = _workers.supervise(2, sock, 20, lambda: None)
if isinstance(found, int):
    sys.exit(found)
signal.pause()
"""


def test_a_stop_as_a_worker_is_forked() -> None:
    """It had the supervisor's handlers still: it went on, and what it had been
    told came to the supervisor as a second signal, which stops at once.
    """
    done = run_program(_SIGNAL_BEHIND_FORK)
    assert done.returncode == 0, done.stderr  # or the worker was not told


_WORKERS = """
import os, signal, socket, sys
from gemmakv.server.process import workers as _workers

sock = socket.create_server(("127.0.0.1", 0))
found = _workers.supervise(2, sock, 20, lambda: None)
if isinstance(found, int):
    sys.exit(found)
if "ready" in sys.argv:
    found.say_ready()
# In one piece, whatever the other worker writes meanwhile.
os.write(1, b"%d\\n" % os.getpid())
signal.pause()
"""


@pytest.mark.parametrize(
    "state, both_told", [("ready", True), ("loads", True), ("loads", False)]
)
def test_a_worker_that_is_told_first(state: str, both_told: bool) -> None:
    """A service manager tells all, in any order: a worker that was told first
    and ended was a failed start, with exit code 1, or one to be replaced.
    """
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("needs /proc/PID/stat of Linux")
    with subprocess.Popen(
        [sys.executable, "-c", _WORKERS, state],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        first = int(supervisor.stdout.readline())
        if state == "ready":
            int(supervisor.stdout.readline())  # so it has heard one of them
        # It finds both at once, the end of the worker first.
        supervisor.send_signal(signal.SIGSTOP)
        os.kill(first, signal.SIGTERM)
        stat = Path(f"/proc/{first}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
        if both_told:
            supervisor.send_signal(signal.SIGTERM)
        supervisor.send_signal(signal.SIGCONT)
        _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0
    assert said == ""


_ENDS_NEVER = """
import os, signal, socket, sys, time
from gemmakv.server.process import workers as _workers

_workers._PATIENCE_S = 1
sock = socket.create_server(("127.0.0.1", 0))
found = _workers.supervise(2, sock, 0.5, lambda: None)
if isinstance(found, int):
    sys.exit(found)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
found.say_ready()
if found.index == 1:
    os.kill(os.getppid(), signal.SIGTERM)
    found.control.close()
    while True:
        signal.pause()
while os.getppid() != 1:
    time.sleep(0.05)  # the pause of a poll
"""


def test_a_worker_that_never_ends_is_killed() -> None:
    """It had said that it ends: whoever waited for that heard no signal, and
    forgot how long the end may take.
    """
    done = run_program(_ENDS_NEVER)
    assert done.returncode == 1, done.stderr
    assert "workers did not end in time" in done.stderr


_NO_PROCESS = """
import errno, os, signal, socket, sys
from gemmakv.server.process import workers as _workers

fork, forks = os.fork, []

def refuse_thrice():
    forks.append(1)
    if len(forks) in (2, 3, 4):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

os.fork = refuse_thrice
sock = socket.create_server(("127.0.0.1", 0))
found = _workers.supervise(2, sock, 20, lambda: None)
if isinstance(found, int):
    sys.exit(found)
found.say_ready()
if found.index == 1:
    os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""


def test_no_room_for_a_process() -> None:
    """The server ended, and every worker with it."""
    done = run_program(_NO_PROCESS)
    assert done.returncode == 0, done.stderr
    said = "worker 1 cannot be started: [Errno 11] "
    assert done.stderr.count(said) == 3, done.stderr


def test_ready_when_the_supervisor_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        worker = _workers.Worker(0, True, Board(1), theirs, "x")
        worker.say_ready()
        assert ours.recv(8) == b"r"
        ours.close()
        worker.say_ready()
        assert theirs.recv(8) == b""


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
    until(lambda: "before it was ready" in server.log)
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
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGHUP, True)],
)
def test_drain(
    start: Servers, number: signal.Signals, everybody: bool
) -> None:
    """Checks that running replies are finished, also where a service manager
    or a closing terminal signals every process. Clients that wait to be
    accepted then get 503.
    """
    server = start("--drain-timeout", 60)
    pids = both(server)
    # More than all that lies between holds: none ends before it is read.
    body = LONG | {"max_tokens": 600, "logprobs": True, "top_logprobs": 20}
    streams = [raw_http.unread(server.port) for _ in range(3)]
    for stream in streams:
        stream.sendall(raw_http.request_of(CHAT, body))
    until(lambda: metric(server, "gemmakv_rows_running") == 3)
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        count = 0 if everybody else 20
        sent = threading.Barrier(count + 1)
        asked = [pool.submit(ask, server, sent) for _ in range(count)]
        sent.wait(60)
        if asked:
            until(lambda: by_worker(server, CHAT))
        for pid in (server.process.pid, *(pids if everybody else ())):
            os.kill(pid, number)
        for stream in streams:
            raw_http.read_until(stream, b"data: [DONE]")
            stream.close()
        codes = {one.result() for one in asked}
    # Nobody who had asked before was cut off.
    assert codes <= {200, 503}
    assert everybody or 200 in codes
    assert server.wait() == 0


def ask(server: ServerProcess, sent: threading.Barrier) -> int:
    """Gives the status of an answer to a short request, which it waits for once
    all have sent theirs.
    """
    http = HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": NAME, "messages": USER, "max_tokens": 30}
    http.request("POST", CHAT, json.dumps(body))
    sent.wait(60)
    answer = http.getresponse()
    answer.read()
    http.close()
    return answer.status


@pytest.mark.slow
def test_second_signal(start: Servers) -> None:
    server = start()
    pids = both(server)
    with httpx.stream(
        "POST", server.url + CHAT, json=LONG, timeout=LIMIT_S
    ) as stream:
        next(stream.iter_lines())
        server.signal()
        until(lambda: "stopping" in server.log)
        server.signal()
        assert server.wait() == 128 + signal.SIGTERM
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


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
    assert_fails(result, "--max-model-len: ", code=2)


def test_beats() -> None:
    board = Board(3)
    before = board.beats()
    board.beat(1)
    board.set_load(1, 5)
    assert [a != b for a, b in zip(before, board.beats())] == [
        False, True, False,
    ]  # fmt: skip
    assert board.loads()[1] == 5 and board.read(1) == ""


def test_board() -> None:
    board = Board(3)
    assert board.loads() == [AWAY] * 3
    board.set_load(1, 5)
    assert board.loads() == [AWAY, 5, AWAY]
    assert board.read(0) == ""
    for text in ("one", "two, longer", "ü"):
        assert board.write(1, text)
        assert board.read(1) == text
    assert board.read(0) == board.read(2) == ""
    assert not board.write(1, "x" * (16 << 20))
    assert board.read(1) == "ü"
    # A writer that died half way: what was there before is read.
    board.write(1, "new")
    newest = max((0, 1), key=lambda half: board._number(1, half))
    board._memory[board._half(1, newest) + 16] ^= 1
    assert board.read(1) == "ü"


def test_merged() -> None:
    def text(count: int, gauge: int, shared: int, label: str) -> str:
        return (
            "# HELP c What c is.\n# TYPE c counter\n"
            f'c{{k="{label}"}} {count}\n'
            "# HELP g What g is.\n# TYPE g gauge\n"
            f'g{{tier="ram"}} {gauge}\ng{{tier="shared"}} {shared}\n'
        )

    assert merged([text(1, 2, 3, "a"), text(10, 20, 30, "a b")]) == (
        "# HELP c What c is.\n# TYPE c counter\n"
        'c{k="a"} 1\nc{k="a b"} 10\n'
        "# HELP g What g is.\n# TYPE g gauge\n"
        'g{tier="ram"} 22\ng{tier="shared"} 30\n'
    )
    found = merged([text(1, 2, 3, "a")], [text(5, 100, 100, "a")])
    assert 'c{k="a"} 6\n' in found
    assert 'g{tier="ram"} 2\n' in found
    assert merged([""]) == merged([]) == "\n"


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
