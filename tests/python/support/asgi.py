"""Servers in this process: requests without sockets, and with a client that
goes away.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx

import gemmakv
from gemmakv.generation._requests import requests_of
from gemmakv.server.app import App
from gemmakv.server.service.chat import ChatService
from gemmakv.server.settings import Settings
from support.waits import LIMIT_S, wait_in_loop

T = TypeVar("T")
NAME = "talker"
USER = [{"role": "user", "content": "hello there"}]


def make_app(gemma: gemmakv.Gemma, **settings: Any) -> App:
    """An application that serves `gemma` as "talker", unless the settings
    name it.
    """
    settings = {"served_model_name": (NAME,), **settings}
    chosen = Settings(version=gemmakv.__version__, **settings)
    return App(chosen, ChatService(gemma, chosen))


def client(app: App) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    return httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=LIMIT_S
    )


def in_loop(app: App, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """What `work` gives with a client of `app`."""

    async def main() -> T:
        async with client(app) as http:
            return await work(http)

    return asyncio.run(main())


def post(app: App, path: str, body: Any, **headers: str) -> httpx.Response:
    """One request; a body of bytes goes as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return in_loop(
        app, lambda http: http.post(path, content=data, headers=headers)
    )


def get(app: App, path: str, **headers: str) -> httpx.Response:
    return in_loop(app, lambda http: http.get(path, headers=headers))


def sse_events(text: str) -> list[tuple[str, Any]]:
    """(event, data) of each frame; data of "[DONE]" is that text."""
    found = []
    for frame in text.split("\n\n"):
        lines = [line for line in frame.split("\n") if line]
        if not lines or all(line.startswith(":") for line in lines):
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        data = fields["data"]
        found.append(
            (
                fields.get("event", ""),
                data if data == "[DONE]" else json.loads(data),
            )
        )
    return found


class Exchange:
    """One request whose client can go away at any time.

    Use it on a running loop: `start`, then `frames`, `leave`, `done`.
    """

    def __init__(
        self,
        app: App,
        path: str,
        body: Any,
        headers: Any = None,
        *,
        method: str = "POST",
        query: bytes = b"",
        whole: bool = True,
        leaves_after: int = 0,
    ) -> None:
        """Starts a request. Of a body that is not `whole`, more is to come.
        The client leaves after that many parts of the answer, if any.
        """
        self.status = 0
        self.data = b""
        self._parts_left = leaves_after
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._changed = asyncio.Event()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        pairs = {"host": "localhost", **(headers or {})}
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"},
            "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": query,
            "headers": [(k.encode(), v.encode()) for k, v in pairs.items()],
            "server": ("localhost", 80), "client": ("127.0.0.1", 1),
        }  # fmt: skip
        self._incoming.put_nowait(
            {"type": "http.request", "body": data, "more_body": not whole}
        )
        self.task = asyncio.ensure_future(
            app(self._scope, self._incoming.get, self._send)
        )

    @property
    def is_taken(self) -> bool:
        """Whether the server has read what there is of the body."""
        return self._incoming.empty()

    def leave(self) -> None:
        """The client closes its connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def holds(self, text: bytes) -> None:
        """Waits until `text` has been sent."""
        while text not in self.data:
            assert not self.task.done(), self.data
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), LIMIT_S)

    async def done(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.task), LIMIT_S)

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.data += message.get("body", b"")
        self._changed.set()
        if self._parts_left and message["type"] == "http.response.body":
            self._parts_left -= 1
            if self._parts_left == 0:
                self.leave()
                await asyncio.sleep(0)  # the application hears of it


def steps_of(gemma: gemmakv.Gemma) -> int:
    """The steps that a model's engine has taken."""
    return requests_of(gemma).engine.steps


def steps_at_rest(gemma: gemmakv.Gemma) -> int:
    """Waits until an engine takes no more steps, and gives their number."""
    steps = -1
    while steps != steps_of(gemma):
        steps = steps_of(gemma)
        time.sleep(0.05)  # many steps: nothing else tells of its rest
    return steps


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits until `condition` holds. Raises AssertionError with `what` if it
    does not within the limit.
    """
    try:
        await wait_in_loop(condition)
    except AssertionError as error:
        raise AssertionError(f"it never came to: {what}") from error
