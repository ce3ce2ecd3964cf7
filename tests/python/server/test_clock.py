"""The wall clock jumps while servers run: nothing but times that people read
depends on it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.asgi import NAME, USER
from support.clock import JumpingClock, why_not
from support.server_process import ServerProcess
from support.waits import LIMIT_S, wait_until

CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"
RESPONSES = "/v1/responses"
DAY = 86_400
AHEAD = 116 * DAY  # more than responses are kept
JUMPS = (DAY, -DAY, AHEAD, 0)
DEADLINE_S = 0.5
ENDLESS = {"max_tokens": 100_000, "ignore_eos": True, "stream": True}

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def clock(tmp_path: Path) -> JumpingClock:
    return JumpingClock(tmp_path)


@pytest.fixture
def start(
    clock: JumpingClock, talker_path: Path, tmp_path: Path
) -> Callable[..., ServerProcess]:
    """Starts a server with one request at a time and one that waits."""

    def run(*more: object) -> ServerProcess:
        return ServerProcess(
            "-m", talker_path, "--sessions", tmp_path / "kept",
            "--prefix-cache-disk", tmp_path / "prefixes", "--default-seed", 3,
            "--max-model-len", 200_000, "--max-running", 1, "--max-queue", 1,
            "--log-format", "json", *more, **clock.env,
        )  # fmt: skip

    return run


def ask(server: ServerProcess, path: str, body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def body_of(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": USER, "max_tokens": 4, **more}


@contextlib.contextmanager
def streaming(server: ServerProcess, session: str) -> Iterator[None]:
    """Runs a turn in the session until the end, and cuts it off then."""
    with httpx.stream(
        "POST",
        server.url + CHAT,
        json=body_of(session=session, **ENDLESS),
        timeout=LIMIT_S,
        verify=False,
    ) as response:
        lines = response.iter_lines()
        next(lines)
        over = threading.Event()

        def read() -> None:
            with contextlib.suppress(httpx.HTTPError):
                for _ in lines:
                    if over.is_set():
                        return

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            over.set()
            reader.join()


def turn(server: ServerProcess, session: str) -> tuple[int, str]:
    response = server.post(CHAT, body_of(session=session))
    code = response.json().get("error", {}).get("code", "")
    return response.status_code, code


def wait_until_free(server: ServerProcess, session: str) -> None:
    def takes_a_turn() -> bool:
        found = turn(server, session)
        assert found in ((200, ""), (409, "session_busy"))
        return found[0] == 200

    wait_until(takes_a_turn, pause_s=0.1)  # each look is a request


def check_that_a_session_is_held(
    server: ServerProcess, clock: JumpingClock, workers: int = 1
) -> None:
    """It is busy while its turn runs, and free after it."""
    session = ask(server, SESSIONS, {})["id"]
    with streaming(server, session):
        for seconds in JUMPS:
            clock.jump(seconds)
            for _ in range(2 * workers):  # whichever worker answers
                assert turn(server, session) == (409, "session_busy")
        clock.jump(-DAY)
    wait_until_free(server, session)
    clock.jump(DAY)
    assert turn(server, session) == (200, "")


def check_deadlines_and_connections(
    server: ServerProcess, clock: JumpingClock
) -> None:
    body = json.dumps(body_of(**ENDLESS, deadline=DEADLINE_S))
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        connection.getresponse().read()
        socket = connection.sock
        clock.jump(0)
        for seconds in (DAY, -DAY):
            begin = time.monotonic()
            connection.request("POST", CHAT, body)
            response = connection.getresponse()
            assert response.status == 200
            said = response.readline()
            clock.jump(seconds)
            said += response.read()
            assert b'"finish_reason":"length"' in said
            assert time.monotonic() - begin > DEADLINE_S * 0.9
        assert connection.sock is socket, "it is the same connection"


def check_that_a_full_queue_says_when(
    server: ServerProcess, clock: JumpingClock
) -> None:
    session = ask(server, SESSIONS, {})["id"]
    with streaming(server, session):
        waits = threading.Thread(target=ask, args=(server, CHAT, body_of()))
        waits.start()
        metrics = "gemmakv_requests_waiting 1"
        wait_until(lambda: metrics in server.get("/metrics").text)
        for seconds in JUMPS:
            clock.jump(seconds)
            response = server.post(CHAT, body_of())
            assert response.status_code == 429
            assert 1 <= int(response.headers["retry-after"]) <= 120
    waits.join()


class Kept:
    """Responses and a prefix that stay, whatever the clock says."""

    def __init__(self) -> None:
        self._responses: list[str] = []
        self._texts: set[str] = set()

    def check_responses(self, server: ServerProcess) -> None:
        """Makes one and finds it and all before it."""
        body = {"input": "hi", "max_output_tokens": 3}
        self._responses.append(ask(server, RESPONSES, body)["id"])
        for id in self._responses:
            found = server.get(f"{RESPONSES}/{id}")
            assert found.status_code == 200, found.text

    def count_cached(self, server: ServerProcess) -> int:
        """Gives the tokens of a prompt that were in the cache."""
        words = " ".join(f"{i} words" for i in range(80))
        said = [{"role": "user", "content": words}]
        found = ask(server, CHAT, body_of(messages=said))
        self._texts.add(found["choices"][0]["message"]["content"])
        assert len(self._texts) == 1
        cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


def start_with_prefixes(
    start: Callable[..., ServerProcess], kept: Kept, *more: object
) -> ServerProcess:
    """Starts a server that has taken the prefix from the disk. One whose first
    read was slow computes it, and another one is started.
    """
    found: list[ServerProcess] = []

    def takes_it() -> bool:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(start(*more))
            if kept.count_cached(server) >= 256:
                stack.pop_all()
                found.append(server)
        return bool(found)

    wait_until(takes_it)
    return found[0]


def files_of(folder: Path) -> set[tuple[Path, int]]:
    """Each file, and which one it is under its name."""
    return {
        (path, path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_servers_whose_clock_jumps(
    start: Callable[..., ServerProcess], clock: JumpingClock, tmp_path: Path
) -> None:
    """A clock that was ahead for a moment deleted all responses, and one that
    was behind made those that were made then expire when it was right again.
    """
    kept = Kept()
    with start() as server:
        for seconds in (0, AHEAD, -AHEAD, 0):
            clock.jump(seconds)
            kept.check_responses(server)
            kept.check_responses(server)
        check_that_a_session_is_held(server, clock)
        check_deadlines_and_connections(server, clock)
        check_that_a_full_queue_says_when(server, clock)
        clock.jump(AHEAD)
        assert kept.count_cached(server) == 0
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    prefixes = files_of(tmp_path / "prefixes")
    assert prefixes
    lines = [json.loads(one) for one in server.lines if one.startswith("{")]
    took = [line["seconds"] for line in lines if "seconds" in line]
    assert len(took) > 2 * len(JUMPS)
    assert all(0 <= one < DAY / 2 for one in took)

    with start_with_prefixes(start, kept) as server:  # still ahead
        kept.check_responses(server)
        session = ask(server, SESSIONS, {})["id"]
        with streaming(server, session):
            server.signal(signal.SIGKILL)
            server.wait()

    clock.jump(-AHEAD)
    with start_with_prefixes(start, kept, "--workers", 2) as server:
        assert prefixes <= files_of(tmp_path / "prefixes"), "none was replaced"
        check_that_a_session_is_held(server, clock, workers=2)
        for seconds in (-AHEAD, 0):
            clock.jump(seconds)
            kept.check_responses(server)
        # The lease of the server that was killed ends by a clock of its own.
        clock.jump(-DAY)
        wait_until_free(server, session)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
