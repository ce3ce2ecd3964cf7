"""The wall clock jumps while servers run: nothing but times that people read
depends on it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
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

CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"
RESPONSES = "/v1/responses"
DAY = 86_400
AHEAD = 116 * DAY  # more than responses are kept
JUMPS = (DAY, -DAY, AHEAD, 0)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> JumpingClock:
    return JumpingClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def clock(built: JumpingClock) -> Iterator[JumpingClock]:
    yield built
    built.jump(0)


@pytest.fixture
def start(
    clock: JumpingClock, talker_path: Path, tmp_path: Path
) -> Callable[..., ServerProcess]:
    def run(*more: object) -> ServerProcess:
        return ServerProcess(
            "-m", talker_path, "--sessions", tmp_path / "kept",
            "--max-model-len", 4096, "--default-seed", 3, "--log-format",
            "json", *more, **clock.env,
        )  # fmt: skip

    return run


def ask(server: ServerProcess, path: str, body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def body_of(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": USER, "max_tokens": 4, **more}


@contextlib.contextmanager
def streaming(server: ServerProcess, session: str) -> Iterator[None]:
    """A turn runs in the session until the end, and is cut off then."""
    body = body_of(
        session=session, max_tokens=100_000, ignore_eos=True, stream=True
    )
    with httpx.stream(
        "POST", server.url + CHAT, json=body, timeout=60
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


def wait_in_line(server: ServerProcess) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(server.url + CHAT, json=body_of(), timeout=60)


def turn(server: ServerProcess, session: str) -> tuple[int, str]:
    response = httpx.post(
        server.url + CHAT, json=body_of(session=session), timeout=60
    )
    code = response.json().get("error", {}).get("code", "")
    return response.status_code, code


def until_free(server: ServerProcess, session: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (found := turn(server, session)) != (200, ""):
        assert found == (409, "session_busy")
        assert time.monotonic() < end, "the session is never free"
        time.sleep(0.2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_session_is_held_and_let_go(
    start: Callable[..., ServerProcess], clock: JumpingClock, workers: int
) -> None:
    with start("--max-model-len", 200_000, "--workers", workers) as server:
        session = ask(server, SESSIONS, {})["id"]
        with streaming(server, session):
            for seconds in JUMPS:
                clock.jump(seconds)
                for _ in range(4):  # whichever worker answers
                    assert turn(server, session) == (409, "session_busy")
                time.sleep(0.3)
            clock.jump(-DAY)
        until_free(server, session, 8)
        clock.jump(DAY)
        assert turn(server, session) == (200, "")


def test_a_session_of_a_server_that_was_killed(
    start: Callable[..., ServerProcess], clock: JumpingClock
) -> None:
    """It is free when its lease ends, though the clock went back a day."""
    with start("--max-model-len", 200_000) as server:
        session = ask(server, SESSIONS, {})["id"]
        with streaming(server, session):
            server.signal(signal.SIGKILL)
            server.wait()
    clock.jump(-DAY)
    with start() as server:
        until_free(server, session, 30)


def test_responses_stay(
    start: Callable[..., ServerProcess], clock: JumpingClock
) -> None:
    """A clock that was ahead for a moment deleted all of them, and one that was
    behind made those that were told of then expire when it was right again.
    """
    made = []

    def respond(server: ServerProcess) -> None:
        made.append(ask(
            server, RESPONSES, {"input": "hi", "max_output_tokens": 3}
        )["id"])  # fmt: skip
        for id in made:
            found = httpx.get(f"{server.url}{RESPONSES}/{id}", timeout=60)
            assert found.status_code == 200, found.text

    with start() as server:
        for seconds in (0, AHEAD, -AHEAD, 0):
            clock.jump(seconds)
            respond(server)
            respond(server)
    for seconds in (AHEAD, 0):
        clock.jump(seconds)
        with start() as server:
            respond(server)


def test_deadlines_and_connections(
    start: Callable[..., ServerProcess], clock: JumpingClock
) -> None:
    with start("--max-running", 1, "--max-model-len", 200_000) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            connection.getresponse().read()
            socket = connection.sock
            for seconds in JUMPS:
                body = body_of(
                    max_tokens=100_000, ignore_eos=True, deadline=1.0
                )
                begin = time.monotonic()
                timer = threading.Timer(0.4, clock.jump, [seconds])
                timer.start()
                connection.request("POST", CHAT, json.dumps(body))
                response = connection.getresponse()
                found = json.loads(response.read())
                assert response.status == 200, found
                assert found["choices"][0]["finish_reason"] == "length"
                assert 0.9 < time.monotonic() - begin < 30
                timer.join()
            # The same connection all the time.
            assert connection.sock is socket
    lines = [json.loads(one) for one in server.lines if one.startswith("{")]
    took = [line["seconds"] for line in lines if "seconds" in line]
    assert len(took) >= len(JUMPS)
    assert all(0 <= one < 30 for one in took)


def test_a_full_queue_says_when_to_come_back(
    start: Callable[..., ServerProcess], clock: JumpingClock
) -> None:
    with start(
        "--max-running", 1, "--max-queue", 1, "--max-model-len", 200_000
    ) as server:
        session = ask(server, SESSIONS, {})["id"]
        with streaming(server, session):
            waits = threading.Thread(target=wait_in_line, args=(server,))
            waits.start()
            metrics = "gemmakv_requests_waiting 1"
            while metrics not in httpx.get(server.url + "/metrics").text:
                time.sleep(0.05)
            for seconds in JUMPS:
                clock.jump(seconds)
                response = httpx.post(
                    server.url + CHAT, json=body_of(), timeout=60
                )
                assert response.status_code == 429
                assert 1 <= int(response.headers["retry-after"]) <= 120
            server.signal(signal.SIGKILL)
        waits.join()


def test_prefixes_on_a_disk(
    start: Callable[..., ServerProcess], clock: JumpingClock, tmp_path: Path
) -> None:
    """Written by a clock that was ahead, and used by one that is behind."""
    disk = ("--prefix-cache-disk", tmp_path / "prefixes")
    words = " ".join(f"{i} words" for i in range(200))
    body = body_of(messages=[{"role": "user", "content": words}])
    texts, cached = set(), []
    for seconds in (AHEAD, -AHEAD, 0):
        clock.jump(seconds)
        with start(*disk) as server:
            found = ask(server, CHAT, body)
            texts.add(found["choices"][0]["message"]["content"])
            details = found["usage"]["prompt_tokens_details"]
            cached.append(details["cached_tokens"])
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
    assert len(texts) == 1
    assert cached[0] == 0
    assert min(cached[1:]) >= 256
    assert os.listdir(tmp_path / "prefixes")
