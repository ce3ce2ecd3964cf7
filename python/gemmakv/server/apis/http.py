"""A call over HTTP: its body, its answer, whole or piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
import urllib.parse
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from gemmakv.generation._result import ToolCall
from gemmakv.generation._scores import PromptLogprobs
from gemmakv.server.apis import body as _body
from gemmakv.server.process.workers import Worker
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import RequestError, invalid
from gemmakv.server.service.events import (
    Called,
    Ended,
    Event,
    Finished,
    Started,
    Token,
)
from gemmakv.server.service.requests import ChatRequest, Tenant
from gemmakv.server.settings import Settings

_T = TypeVar("_T")
_Query = TypeVar("_Query", bound=msgspec.Struct)

JSON = "application/json"
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
PIPE = "gemmakv.pipe"  # in a scope: its `Pipe`
# In a scope: a function that says how many bytes the body has at least, those
# of chunks that are yet to come included.
ANNOUNCED = "gemmakv.announced"
_COMMENT = b": ping\n\n"  # in any stream of server-sent events
_HEADER_BYTES = 1_000  # of a list of fields
_IN_HEADERS = ".[]$_~/-"  # beside letters and digits
_POOL_BYTES = 64 << 10  # longer bodies are parsed off the event loop


class ErrorStyle(Protocol):
    """How an API says what is wrong."""

    def __call__(
        self, error: RequestError, request_id: str
    ) -> tuple[int, object]:
        """The HTTP status, and what the body says."""


@dataclasses.dataclass
class Call:
    """One request and its answer.

    Attributes:
      worker: which of the server's processes answers, if there are several.
      tenant: whose it is; None before it is known.
      request_id: what answers, logs and errors call it.
      path: of the route, with the names of its parameters.
      status: of the answer; 0 before it began.
      expects: what the route takes as its body.
      document: the body, once it was read.
      ignored: fields of the request that were left out of it (`--lenient`),
        as a header has them.
      without: of these, fields of the query.
      request: what is asked of the model, once that is known.
      not_enforced: fields of tools that calls are not held to, as a header.
    """

    scope: Scope
    receive: Receive
    send: Send
    settings: Settings
    headers: Headers
    request_id: str
    service: ChatService | None = None
    worker: Worker | None = None
    tenant: Tenant | None = None
    status: int = 0
    expects: object = None
    document: dict[str, Any] | None = None
    ignored: list[str] = dataclasses.field(default_factory=list)
    without: set[str] = dataclasses.field(default_factory=set)
    request: ChatRequest | None = None
    not_enforced: str = ""
    arrived: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def chat(self) -> ChatService:
        """Raises RequestError while the model is being loaded."""
        if self.service is None:
            raise loading()
        return self.service

    @property
    def owner(self) -> Tenant:
        assert self.tenant is not None
        return self.tenant

    def owner_of(self, salt: str | None) -> Tenant:
        """The owner, within the cache's part for the request's salt."""
        return self.owner.narrowed(salt)

    def reject(self, error: RequestError) -> None:
        """Counts it."""
        if self.service is not None:
            reason = error.code or str(error.status)
            self.service.counts.rejected.add(reason=reason)

    @property
    def name(self) -> str:
        """Of the model, in answers."""
        return self.settings.served_model_name[0]

    @property
    def query(self) -> QueryParams:
        """What stands behind the path's question mark."""
        return QueryParams(self.scope["query_string"])

    def query_of(self, shape: type[_Query]) -> _Query:
        """Its fields. Raises RequestError naming the one that is bad."""
        given: dict[str, str] = {}
        known = {field.encode_name for field in msgspec.structs.fields(shape)}
        for name, value in self.query.multi_items():
            if name in self.without:
                continue
            if name in given and name in known:
                raise invalid(
                    name,
                    "expected it once, found "
                    f"{_short(given[name])} and {_short(value)}",
                )
            given[name] = value
        return _body.typed(given, shape, texts=True)

    async def json(
        self,
        shape: type[_T],
        check: Callable[[dict[str, Any]], None] | None = None,
    ) -> tuple[_T, dict[str, Any]]:
        """The body's fields, and all of it, which `check` sees first. Raises
        RequestError.
        """
        assert shape is self.expects, "the route's own, which is documented"
        if self.document is None:
            self.document = await self._document()
        if check is not None:
            check(self.document)
        return _body.typed(self.document, shape), self.document

    async def _document(self) -> dict[str, Any]:
        limits = self.settings.limits
        coding = self.headers.get("content-encoding", "identity")
        if coding.strip().lower() not in ("", "identity"):
            raise RequestError(
                415,
                f"content-encoding: expected none, found {_short(coding)}",
                code="unsupported_encoding",
            )
        body = await self._read(limits.body_bytes, limits.body_s)
        most = limits.json_depth, limits.json_values
        if len(body) > _POOL_BYTES and self.service is not None:
            return await self.service.in_pool(_body.parse, body, *most)
        return _body.parse(body, *most)

    def check_model(self, model: str | None) -> None:
        """Raises RequestError for a model that is not served."""
        names = self.settings.served_model_name
        if model is None or model in names:
            return
        if model.endswith(":latest") and model[: -len(":latest")] in names:
            return
        raise RequestError(
            404,
            f"model: {_short(model)} is not served here, expected "
            + " or ".join(names),
            param="model",
            code="model_not_found",
        )

    async def _read(self, most: int, seconds: float) -> bytes:
        length = self.headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > most:
            raise _too_large(most)
        announced = self.scope.get(ANNOUNCED, int)
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise asyncio.CancelledError
                    body += message.get("body", b"")
                    if len(body) > most or announced() > most:
                        raise _too_large(most)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RequestError(
                408,
                f"body: expected all of it within {seconds:g} s, found "
                f"{len(body)} bytes",
                code="request_timeout",
            ) from None

    async def answer(
        self,
        content: object,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """The whole answer: text as it is, bytes of JSON, else as JSON."""
        if isinstance(content, str):
            kind, data = "text/plain; charset=utf-8", content.encode()
        elif isinstance(content, bytes):
            kind, data = JSON, content
        else:
            kind, data = JSON, encoded(content)
        more = {**(headers or {}), "content-length": str(len(data))}
        await self._start(status, kind, more)
        body = b"" if self.scope["method"] == "HEAD" else data
        await self.send({"type": "http.response.body", "body": body})

    async def _start(
        self, status: int, kind: str, headers: Mapping[str, str]
    ) -> None:
        self.status = status
        pairs = {"content-type": kind, **headers}
        if self.ignored:
            pairs["x-gemmakv-ignored"] = ", ".join(self.ignored)
        if self.request is not None and status < 400:
            self.not_enforced = _listed(self.request.not_enforced)
        if self.not_enforced:
            pairs["x-gemmakv-not-enforced"] = self.not_enforced
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (k.encode(), v.encode("latin-1")) for k, v in pairs.items()
                ],
            }
        )


class Pipe(Protocol):
    """The connection below ASGI: what goes on in a body that has begun."""

    def free(self) -> bool:
        """Whether an answer is under way, and the client reads it."""

    def open(self) -> bool:
        """Whether the client reads, or has nothing to read: ASGI's `send`
        does not wait then.
        """

    def write(self, data: bytes) -> None:
        """Requires: it was free since a task ran."""

    def together(self) -> AbstractContextManager[None]:
        """Inside, what ASGI sends is kept, and leaves in one piece at the end:
        the beginning of an answer, not the end of it.
        """

    def finish(self, data: bytes) -> None:
        """Ends the body with it, and the connection, though its client does
        not read; what is not sent after a while is lost.
        """

    def cut(self) -> None:
        """Ends the connection in the midst of the answer."""


class Stream:
    """An answer piece by piece, with signs of life in between, and before."""

    def __init__(self, call: Call, kind: str, ping: bytes) -> None:
        self._call = call
        self._pipe: Pipe | None = call.scope.get(PIPE)
        self._kind = kind
        self._ping = ping
        self._lock = asyncio.Lock()
        self.said = False  # anything of the API
        self.stuck = False  # its client does not read
        self._written = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._every = call.settings.ping_s
        # A task of each stream would cost more than nearly all have use for.
        self._timer = self._loop.call_later(self._every, self._look)
        self._ping_task: asyncio.Task[None] | None = None

    async def write(self, frames: bytes) -> None:
        """Waits while the client does not read. Raises RequestError where it
        does not for too long, from then on always.
        """
        if not frames:
            return
        async with self._lock:
            if self.stuck:
                raise self._not_read()
            pipe = self._pipe
            whole: AbstractContextManager[None] = contextlib.nullcontext()
            if not self._call.status and pipe is not None and pipe.open():
                # A client that waits is woken once, not by the head alone.
                whole = pipe.together()
            with whole:
                await self._begin()
                self.said = True
                await self._send(frames, True)

    def free(self) -> bool:
        """Whether `put` may be called now."""
        pipe = self._pipe
        return (
            pipe is not None
            and self._call.status != 0
            and not self._lock.locked()
            and pipe.free()
        )

    def put(self, frames: bytes) -> None:
        """`write` without waiting. Requires: `free`."""
        assert self._pipe is not None
        self._written = time.monotonic()
        self._pipe.write(frames)

    async def end(self, frames: bytes = b"") -> None:
        """Ends it with them, also where its client does not read."""
        async with self._lock:
            try:
                if self.stuck:
                    raise self._not_read()
                await self._begin()  # there may have been nothing to say
                if frames:
                    self.said = True
                    await self._send(frames, True)
                    frames = b""
                await self._send(b"", False)
            except RequestError:
                if self._pipe is None:
                    raise
                self._pipe.finish(frames)

    async def _begin(self) -> None:
        if not self._call.status:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            if self._pipe is not None and self._pipe.open():
                await self._call._start(200, self._kind, headers)
                return
            async with self._patience():
                await self._call._start(200, self._kind, headers)

    async def close(self) -> None:
        """To be called whatever happens."""
        self._timer.cancel()
        if self._ping_task is not None:
            self._ping_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ping_task

    async def _send(self, data: bytes, more: bool) -> None:
        self._written = time.monotonic()
        message: AsgiMessage = {
            "type": "http.response.body",
            "body": data,
            "more_body": more,
        }
        if self._pipe is not None and self._pipe.free():
            await self._call.send(message)
            return
        async with self._patience():
            await self._call.send(message)

    @contextlib.asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """Around what waits for the client."""
        most = self._call.settings.limits.unread_s
        try:
            async with asyncio.timeout(most):
                yield
        except TimeoutError:
            self.stuck = True
            raise self._not_read() from None

    def _not_read(self) -> RequestError:
        most = self._call.settings.limits.unread_s
        return RequestError(
            408,
            f"answer: its client has read nothing for {most:g} s, expected it "
            "to go on",
            code="answer_not_read",
        )

    def _look(self) -> None:
        """Whether a sign of life is due."""
        left = self._written + self._every - time.monotonic()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._ping_task = self._loop.create_task(self._say_alive())

    async def _say_alive(self) -> None:
        """Begins a stream, too, whose first event is long in coming: clients
        and proxies give up on what says nothing.
        """
        async with self._lock:
            if self.stuck:
                return
            # It may have waited for the lock.
            if time.monotonic() - self._written >= self._every:
                await self._ping_now()
        self._look()

    async def _ping_now(self) -> None:
        # Before its first event, an API may have none of its own.
        ping = self._ping
        if not self.said and self._kind == SSE:
            ping = _COMMENT
        with contextlib.suppress(RequestError):  # the next one says it
            await self._begin()
            self._written = time.monotonic()
            if ping:
                await self._send(ping, True)


class Reply:
    """What a request came to, for answers that are given as a whole."""

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


class Shape(Protocol):
    """How an API answers one request."""

    kind: str  # of streams
    ping: bytes

    def frames(self, event: Event) -> bytes:
        """What a stream says of an event; may be nothing."""

    def whole(self, reply: Reply) -> object:
        """The answer that is no stream."""

    def failure(self, error: RequestError) -> bytes:
        """What a stream says of an error."""


async def serve(
    call: Call, request: ChatRequest, shape: Shape, streamed: bool
) -> None:
    """Runs a request and answers it. Raises RequestError if nothing of the
    answer was sent.
    """
    call.request = request
    if not streamed:
        reply = Reply()
        whole = dataclasses.replace(request, streamed=False)
        await call.chat.run(whole, reply.take)
        await call.answer(shape.whole(reply))
        return
    stream = Stream(call, shape.kind, shape.ping)

    async def emit(event: Event) -> None:
        await stream.write(shape.frames(event))

    try:
        try:
            await call.chat.run(request, emit, _Outlet(stream, shape))
        except RequestError as error:
            if not call.status:
                raise
            if not stream.said or stream.stuck:  # it only waited
                call.reject(error)
            _names().rename(error)
            await stream.end(shape.failure(error))
        else:
            await stream.end()
    finally:
        await stream.close()


class ClientNames:
    """The names that a client has for fields, by the library's.

    They are of fields and of what is in them: the longest that fits counts.
    """

    def __init__(self, names: Mapping[str, str] = {}) -> None:
        self._names = names

    def of(self, path: str) -> str:
        """The client's name of a field."""
        ours = max(
            (one for one in self._names if _leads(one, path)),
            key=len,
            default=None,
        )
        if ours is None:
            return path
        return self._names[ours] + path[len(ours) :]

    def rename(self, error: RequestError) -> None:
        """Has an error name the field that the client wrote."""
        if not error.param:
            return
        name = self.of(error.param)
        if error.message.startswith(error.param):
            error.message = name + error.message[len(error.param) :]
        error.param = name


# Those of the request that the task serves.
CLIENT_NAMES: ContextVar[ClientNames] = ContextVar("client_names")


def _names() -> ClientNames:
    return CLIENT_NAMES.get(None) or ClientNames()


def _leads(name: str, path: str) -> bool:
    """Whether the path is that name, or something in it."""
    return path == name or path.startswith((name + ".", name + "["))


def header_name(path: str) -> str:
    """A field as a header's list has it, with characters that it cannot hold
    as in a URL.
    """
    return urllib.parse.quote(path, _IN_HEADERS)


def _listed(paths: Sequence[str]) -> str:
    """Paths as a header has them: by their names in the request, without
    characters that a header cannot hold, as many as there is room for.
    """
    names = _names()
    shown: list[str] = []
    room = _HEADER_BYTES
    for path in paths:
        one = header_name(names.of(path))
        room -= len(one) + 2
        if room < 0:
            shown.append(f"{len(paths) - len(shown)} more")
            break
        shown.append(one)
    return ", ".join(shown)


class _Outlet:
    """An `Outlet` of a stream."""

    def __init__(self, stream: Stream, shape: Shape) -> None:
        self.free = stream.free
        self._put = stream.put
        self._frames = shape.frames

    def put(self, event: Token | Called) -> None:
        frames = self._frames(event)
        if frames:
            self._put(frames)


class Template:
    """Frames that differ in one text alone: the rest is encoded once."""

    def __init__(self, frame: Callable[[str], bytes]) -> None:
        """`frame` makes one."""
        mark = secrets.token_hex(16)
        self._head, _, self._tail = frame(mark).partition(
            b'"%b"' % mark.encode()
        )
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, text: str) -> bytes:
        return self._head + self._encode(text) + self._tail


Handler = Callable[[Call], Awaitable[None]]


def encoded(data: object) -> bytes:
    """As JSON."""
    return msgspec.json.encode(data)


def sse(data: object, event: str = "") -> bytes:
    """A frame of server-sent events."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def ndjson(data: object) -> bytes:
    return msgspec.json.encode(data) + b"\n"


def loading() -> RequestError:
    return RequestError(
        503, "Loading model", code="model_loading", retry_after=2
    )


def _too_large(most: int) -> RequestError:
    return RequestError(
        413,
        f"body: expected at most {most} bytes, found more",
        code="request_too_large",
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


__all__ = [
    "ANNOUNCED", "CLIENT_NAMES", "JSON", "NDJSON", "PIPE", "SSE", "Call",
    "Called", "ClientNames", "Ended", "ErrorStyle", "Event", "Finished",
    "Handler", "Pipe", "Reply", "Shape", "Started", "Stream", "Template",
    "Token", "encoded", "loading", "ndjson", "serve", "sse",
]  # fmt: skip
