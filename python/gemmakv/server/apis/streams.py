"""Answers of requests to the model: whole, or piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gemmakv.generation._result import ToolCall
from gemmakv.generation._scores import PromptLogprobs
from gemmakv.server.apis.call import Call, JsonResponse, to_json
from gemmakv.server.service.errors import RequestError
from gemmakv.server.service.events import (
    Called,
    Ended,
    Event,
    Finished,
    Started,
    Token,
)
from gemmakv.server.service.requests import ChatRequest

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
COMMENT = b": ping\n\n"  # in any stream of server-sent events


class Shape(Protocol):
    """The form in which an API answers one request."""

    media_type: str  # of streams
    ping: bytes

    def frames(self, event: Event) -> bytes:
        """Gives the bytes of an event in a stream; there may be none."""

    def whole(self, reply: Reply) -> object:
        """Gives the answer that is no stream, for JSON."""

    def failure(self, error: RequestError) -> bytes:
        """Gives the bytes of an error in a stream."""


class Reply:
    """The events of a request, gathered for a whole answer."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.reasoning: dict[int, str] = {}
        self.tokens: dict[int, list[Token]] = {}
        self.calls: dict[int, list[ToolCall]] = {}
        self.finished: dict[int, Finished] = {}
        self.ended: Ended | None = None
        self.dropped_messages = 0
        self.prompt_logprobs: Sequence[PromptLogprobs] = ()

    async def take(self, event: Event) -> None:
        """Adds an event."""
        if isinstance(event, Started):
            self.dropped_messages = event.dropped_messages
            self.prompt_logprobs = event.prompt_logprobs
        elif isinstance(event, Token):
            text = self.texts.get(event.index, "")
            self.texts[event.index] = text + event.text
            thoughts = self.reasoning.get(event.index, "")
            self.reasoning[event.index] = thoughts + event.reasoning
            self.tokens.setdefault(event.index, []).append(event)
        elif isinstance(event, Called):
            if event.part.end is not None:
                self.calls.setdefault(event.index, []).append(event.part.end)
        elif isinstance(event, Finished):
            self.finished[event.index] = event
        elif isinstance(event, Ended):
            self.ended = event

    @property
    def usage(self) -> Ended:
        assert self.ended is not None
        return self.ended


async def answer(
    call: Call, request: ChatRequest, shape: Shape, streamed: bool | None
) -> Response:
    """Runs a request, and makes the answer of it: whole, or as a stream that
    runs it as it is sent.

    Raises RequestError.
    """
    call.request = request
    if streamed:
        run = functools.partial(_run, call, request, shape)
        return EventStream(call, shape, run)
    reply = Reply()
    whole = dataclasses.replace(request, streamed=False)
    await call.service.run(whole, reply.take)
    return JsonResponse(shape.whole(reply))


async def _run(
    call: Call, request: ChatRequest, shape: Shape, pieces: Pieces
) -> bytes:
    """Runs a request, whose events are written as they come. Gives the last
    bytes: an error is an event of the stream, once that has begun. Raises
    RequestError before that.
    """

    async def emit(event: Event) -> None:
        await pieces.write(shape.frames(event))

    try:
        await call.service.run(request, emit)
    except RequestError as error:
        if not call.status:
            raise
        call.rename(error)
        call.error = error
        if not pieces.said or pieces.stuck:  # it only waited
            call.reject(error)
        return shape.failure(error)
    return b""


class EventStream(Response):
    """A stream that `write` writes as it is sent; it gives the last bytes.

    An error before the first bytes is raised, and answered as any other.
    """

    def __init__(
        self,
        call: Call,
        shape: Shape,
        write: Callable[[Pieces], Awaitable[bytes]],
    ) -> None:
        super().__init__(media_type=shape.media_type)
        self._call = call
        self._shape = shape
        self._write = write

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        call, shape = self._call, self._shape
        async with Pieces(call, send, shape.media_type, shape.ping) as pieces:
            await pieces.end(await self._write(pieces))


class Pieces:
    """The pieces of a streamed answer, with pings while none comes."""

    def __init__(
        self, call: Call, send: Send, media_type: str, ping: bytes
    ) -> None:
        self._call = call
        self._send = send
        self._media_type = media_type
        self._ping = ping
        self._lock = asyncio.Lock()
        self.stuck = False  # its client does not read
        self._written = time.monotonic()
        self._pinging: asyncio.Task[None] | None = None
        self.said = False  # anything of the API

    async def __aenter__(self) -> Pieces:
        if self._call.settings.ping_s:
            self._pinging = asyncio.create_task(self._ping_on())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pinging

    async def write(self, frames: bytes) -> None:
        """Sends frames; waits while the client does not read. Raises
        RequestError if that takes too long, and then for all later frames.
        """
        if frames:
            async with self._lock:
                self.said = True
                await self._put(frames)

    async def end(self, frames: bytes = b"") -> None:
        """Ends the answer. A client that does not read is sent nothing."""
        async with self._lock:
            with contextlib.suppress(RequestError):
                await self._put(frames, more=False)

    async def _put(self, data: bytes, more: bool = True) -> None:
        call = self._call
        most = call.settings.limits.unread_s
        self._written = time.monotonic()
        late = RequestError(
            408,
            f"answer: its client has read nothing for {most:g} s, expected it "
            "to go on",
            code="answer_not_read",
        )
        if self.stuck:
            raise late
        try:
            async with asyncio.timeout(most):
                if not call.status:
                    await self._begin()
                await self._send(
                    {
                        "type": "http.response.body",
                        "body": data,
                        "more_body": more,
                    }
                )
        except TimeoutError:
            self.stuck = True
            raise late from None

    async def _begin(self) -> None:
        headers = {
            "content-type": self._media_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (k.encode(), v.encode()) for k, v in headers.items()
                ],
            }
        )

    async def _ping_on(self) -> None:
        """Sends a ping whenever nothing was sent for a while: clients and
        proxies give up on silent connections. The first one begins a stream
        whose first event is long in coming.
        """
        every = self._call.settings.ping_s
        while not self.stuck:
            left = self._written + every - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
                continue
            async with self._lock:
                # Before its first event, an API may have none of its own.
                ping = self._ping
                if not self.said and self._media_type == SSE:
                    ping = COMMENT
                with contextlib.suppress(RequestError):  # the next one says it
                    await self._put(ping)


class Template:
    """Frames that differ in one text alone: the rest is encoded once."""

    def __init__(self, frame: Callable[[str], bytes]) -> None:
        """`frame` makes the frame of a text."""
        mark = secrets.token_hex(16)
        self._head, _, self._tail = frame(mark).partition(
            b'"%b"' % mark.encode()
        )

    def __call__(self, text: str) -> bytes:
        return self._head + to_json(text) + self._tail


def sse(data: Any, event: str = "") -> bytes:
    """Makes a frame of server-sent events."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + to_json(data) + b"\n\n"


def ndjson(data: Any) -> bytes:
    """Makes a line of JSON."""
    return to_json(data) + b"\n"
