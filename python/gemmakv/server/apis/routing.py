"""Routes of the APIs: how they read bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope

from gemmakv.errors import brief
from gemmakv.server.apis.body import parse
from gemmakv.server.apis.call import CALL, Call
from gemmakv.server.service.errors import RequestError
from gemmakv.server.service.prompts import check_count

OPEN_TAG = "open"
_POOL_BYTES = 64 << 10  # longer bodies are parsed off the event loop


class BadBody(HTTPException):
    """A body that is not read; `error` says why. The framework lets no other
    class of errors of a body through.
    """

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.status, error.message)
        self.error = error


class BodyRequest(Request):
    """A request whose body is JSON, whatever its type says: clients leave
    that out, or send a form's. It is read within the limits of the server.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name != b"content-type"
        ]
        headers.append((b"content-type", b"application/json"))
        super().__init__({**scope, "headers": headers}, receive)
        self._call: Call = scope[CALL]
        self._data: bytes | None = None

    async def body(self) -> bytes:
        if self._data is None:
            try:
                self._data = await self._read()
            except RequestError as error:
                raise BadBody(error) from None
        return self._data or b" "  # an empty one is no JSON, and said to be so

    async def json(self) -> Any:
        data, limits = self._data or b"", self._call.settings.limits
        most = limits.json_depth, limits.json_values
        service = self._call.running
        try:
            if len(data) > _POOL_BYTES and service is not None:
                found = await service.threads.run(parse, data, *most)
            else:
                found = parse(data, *most)
            messages = found.get("messages")
            if isinstance(messages, list):  # before their fields are read
                check_count(messages, limits.messages)
            return found
        except RequestError as error:
            raise BadBody(error) from None

    async def _read(self) -> bytes:
        limits = self._call.settings.limits
        coding = self.headers.get("content-encoding", "identity")
        if coding.strip().lower() not in ("", "identity"):
            raise RequestError(
                415,
                f"content-encoding: expected none, found {brief(coding)}",
                code="unsupported_encoding",
            )
        length = self.headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limits.body_bytes:
            raise _too_large(limits.body_bytes)
        found = bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for chunk in self.stream():
                    found += chunk
                    if len(found) > limits.body_bytes:
                        raise _too_large(limits.body_bytes)
        except ClientDisconnect:
            raise asyncio.CancelledError from None
        except TimeoutError:
            raise RequestError(
                408,
                f"body: expected all of it within {limits.body_s:g} s, found "
                f"{len(found)} bytes",
                code="request_timeout",
            ) from None
        return bytes(found)


class BodyRoute(APIRoute):
    """A route that reads its body as a `BodyRequest` does."""

    def get_route_handler(
        self,
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(BodyRequest(request.scope, request.receive))

        return handle


def router(**more: Any) -> APIRouter:
    """Makes a router for the routes of one API."""
    return APIRouter(route_class=BodyRoute, **more)


# For the routes of a router that need no key: they say nothing that is a
# secret, and probes have none.
OPEN: dict[str, Any] = {"tags": [OPEN_TAG]}


def streams(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Documents that a route also answers with streams."""
    about = (
        "A stream, if `stream` asks for one (Ollama's: unless it is false)."
    )
    schema = {"type": "string", "description": about}
    return {200: {"content": {media_type: {"schema": schema}}}}


def _too_large(most: int) -> RequestError:
    return RequestError(
        413,
        f"body: expected at most {most} bytes, found more",
        code="request_too_large",
    )
