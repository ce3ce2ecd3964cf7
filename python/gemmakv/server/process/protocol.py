"""A connection: HTTP/1.1 by h11 and uvicorn, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import http
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gemmakv.server.apis.http import ANNOUNCED, JSON, PIPE
from gemmakv.server.process.workers import Worker
from gemmakv.server.service.errors import RequestError
from gemmakv.server.settings import Limits

_BYTES = re.compile(r"bytearray\((?P<said>b(['\"]).*?\2)\)", re.DOTALL)
_LONGEST = 120  # characters of what was found
_LINGER_S = 2.0  # for a client that still sends to read what is wrong
_TOO_LARGE = 431
_PATIENCE = 10  # times as long may reading the end of what was given up take

# Of a request's scope, if its head was read, and what is wrong: the headers
# and the body of the answer.
Refusal = Callable[
    [Scope | None, RequestError], tuple[dict[str, str], bytes]
]


class Connection(H11Protocol):
    """A connection whose requests have to arrive in time.

    The line and the headers of a request have `header_s` seconds, counted
    from their first byte, or from the beginning of the connection.
    """

    limits = Limits()
    of: Worker | None = None
    refusal: Refusal
    app: Any
    conn: _Parser
    _timer: asyncio.TimerHandle | None = None
    _over = False  # nothing that comes is read any more

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Parser(self.limits.header_bytes)

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self.app = self._with_more(self.app)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self.of is not None:
            self.of.count(connections=-1)
        super().connection_lost(exc)
        self.app = self.config.loaded_app  # no circle holds what is over

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        super().data_received(data)
        if self._over:
            return
        if self.conn.announced > self.limits.body_bytes and self.cycle:
            self.cycle.message_event.set()  # it need not wait for the bytes
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()
        elif self._timer is None:
            self._arm()

    def on_response_complete(self) -> None:
        self._disarm()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what the parser has just raised an error for, in place of
        uvicorn's line of text, and ends the connection.
        """
        self._over = True
        self._disarm()
        scope: Any = None
        if self.cycle is not None and not self.cycle.response_complete:
            scope = self.cycle.scope
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun
            return
        error = _of_parser(
            sys.exception(), self.limits.header_bytes, scope is not None
        )
        headers, body = self.refusal(scope, error)
        headers = {
            "content-type": JSON,
            "content-length": str(len(body)),
            "connection": "close",
            **headers,
        }
        if scope is not None and scope["method"] == "HEAD":
            body = b""
        head = h11.Response(
            status_code=error.status,
            headers=[(k.encode(), v.encode()) for k, v in headers.items()],
            reason=http.HTTPStatus(error.status).phrase.encode(),
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # A connection that is closed with bytes unread is reset, and what was
        # said may be lost with it.
        self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _should_upgrade(self) -> bool:
        """Never: asked for another protocol, HTTP's servers may go on with
        HTTP. The class would advise to install one for each such request.
        """
        return False

    def _with_more(self, app: ASGIApp) -> ASGIApp:
        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            # Other versions of HTTP have no chunks.
            scope[PIPE] = _Body(self, scope["http_version"] == "1.1")
            if scope["http_version"] == "1.1":
                scope[ANNOUNCED] = lambda: self.conn.announced
            await app(scope, receive, send)

        return run

    def _arm(self) -> None:
        self._timer = self.loop.call_later(
            self.limits.header_s, self.transport.close
        )

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Parser(h11.Connection):
    """A server's, with bounds on what h11 has none for.

    Attributes:
      announced: bytes of the present request's body: those that came, and
        those of the chunk that is coming.
    """

    def __init__(self, header_bytes: int) -> None:
        super().__init__(h11.SERVER, header_bytes)
        self._most = header_bytes
        self._came = 0
        self.announced = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._came = 0
        elif isinstance(event, h11.Data):
            self._came += len(event.data)
        elif isinstance(event, h11.EndOfMessage):
            # h11's own bound is for what arrives in parts.
            length = sum(len(k) + len(v) + 4 for k, v in event.headers)
            if length > self._most:
                raise h11.RemoteProtocolError(
                    "trailers too long", error_status_hint=_TOO_LARGE
                )
        # It tells nobody the size of a chunk but in its reader.
        coming = getattr(self._reader, "_bytes_in_chunk", 0)
        self.announced = self._came + coming
        return event


class _Kept:
    """In place of a transport: what is written to it leaves later."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self.write = self._parts.append

    def leave(self) -> None:
        self._transport.write(b"".join(self._parts))
        self._parts.clear()

    def close(self) -> None:
        self.leave()
        self._transport.close()


class _Body:
    """A `Pipe`: chunks of a body whose length was not said. Through ASGI and
    h11, which begin and end the body, one takes 10 us more.
    """

    def __init__(self, protocol: Connection, chunked: bool) -> None:
        """Not `chunked`: it is never free."""
        self._chunked = chunked
        self._cycle = protocol.cycle
        self._flow = protocol.flow
        self._transport = protocol.transport
        self._write = protocol.transport.write
        self._loop = protocol.loop
        self._unread_s = protocol.limits.unread_s

    def free(self) -> bool:
        cycle = self._cycle
        return (
            self._chunked
            and cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not self._flow.write_paused
        )

    def open(self) -> bool:
        return not self._flow.write_paused

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        kept = _Kept(self._transport)
        self._cycle.transport = cast(asyncio.Transport, kept)
        try:
            yield
        finally:
            self._cycle.transport = self._transport
            kept.leave()

    def write(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self, data: bytes) -> None:
        if self._cycle.response_started and self._chunked:
            if data:
                self.write(data)
            self._write(b"0\r\n\r\n")
        elif self._cycle.response_started:
            self._write(data)
        # To uvicorn the client has gone; what it has not read is still sent.
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        self._transport.close()
        self._loop.call_later(
            _PATIENCE * self._unread_s, self._transport.abort
        )

    def cut(self) -> None:
        self._cycle.disconnected = True
        self._transport.abort()


def _of_parser(
    error: BaseException | None, most: int, in_body: bool
) -> RequestError:
    """What h11 says is wrong with a request."""
    status = getattr(error, "error_status_hint", 400)
    words = _BYTES.sub(lambda found: found["said"], str(error))
    if status == _TOO_LARGE:
        what, more = "headers", "with the line, found more"
        if in_body:
            what, more = "body", "of a chunk's size or of trailers, found more"
        return RequestError(
            status,
            f"{what}: expected at most {most} bytes {more}",
            code="headers_too_large",
        )
    if len(words) > _LONGEST:
        words = words[:_LONGEST] + "..."
    words = words[:1].lower() + words[1:]
    return RequestError(
        status, f"request: expected HTTP/1.1, found {words}", code="bad_http"
    )
