"""What every request goes through before its route, as ASGI middlewares.

From the outside in: `LoggingMiddleware` makes the `Call`, writes the log and
counts; `GuardMiddleware` refuses heads, hosts and origins; Starlette adds the
headers of CORS; `AuthenticationMiddleware` asks for a key; and
`DisconnectMiddleware` ends requests that nobody waits for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Container
from typing import Protocol
from urllib.parse import quote, unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemmakv.server.apis.call import CALL, Call
from gemmakv.server.apis.errors import error_response
from gemmakv.server.service.admission import stopping
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import RequestError
from gemmakv.server.settings import Settings

LOG = logging.getLogger("gemmakv.server")

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_HOST = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]+))(?::\d*)?")
_URL = re.compile(rb"https?://(?P<host>[^/]+)(?P<path>/.*)?", re.I | re.S)
_LOCAL_NAMES = ("localhost",)
_GONE = 499  # in logs and metrics: the client went before the answer


class Site(Protocol):
    """The part of the application that the middlewares know."""

    settings: Settings
    service: ChatService | None

    def route_path(self, path: str) -> str:
        """Gives the path of the route that a path means."""


class _Middleware:
    """Handles HTTP; the beginning and the end of the server pass through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        handle = self._handle if scope["type"] == "http" else self._app
        await handle(scope, receive, send)

    async def _handle(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        raise NotImplementedError


class LoggingMiddleware(_Middleware):
    """Gives each request its `Call`, a line of the log, and a number in the
    metrics.
    """

    def __init__(self, app: ASGIApp, site: Site) -> None:
        super().__init__(app)
        self._site = site

    async def _handle(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers, site = Headers(scope=scope), self._site
        call = Call(
            scope, site.settings, headers, _request_id(headers), site.service
        )
        scope[CALL] = call

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                more = {
                    "x-request-id": call.request_id,
                    "request-id": call.request_id,
                    **call.more_headers(),
                }
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in more.items()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with)
        except asyncio.CancelledError:
            service = call.running
            if call.status or service is None or not service.admission.draining:
                raise
            # The process ends before the request was read.
            await error_response(scope, stopping())(scope, receive, send_with)
        except Exception:
            LOG.exception("%s: a request failed", call.request_id)
            if call.status:  # too late to say so: the connection is cut
                raise
            error = RequestError(
                500,
                f"internal error; the log has it as {call.request_id}",
                code="internal_error",
            )
            response = error_response(scope, error)
            await response(scope, receive, send_with)
        finally:
            call.status = call.status or _GONE
            _note(call)


class GuardMiddleware(_Middleware):
    """Refuses requests by their heads: too long, for another host, from a
    page of another site.
    """

    def __init__(
        self, app: ASGIApp, site: Site, allows: Callable[[str], bool]
    ) -> None:
        """`allows` says whether the pages of an origin may use the server."""
        super().__init__(app)
        self._site = site
        self._allows = allows

    async def _handle(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            self._check(scope)
        except RequestError as error:
            await error_response(scope, error)(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # A copy: by its own scope the server sends no body.
            scope = scope[CALL].scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = _take_authority(scope) or headers.get("host")
        # Before anything looks at it: keys, forms of errors.
        scope["path"] = self._site.route_path(scope["path"])
        self._check_head(scope)
        # HTTP/1.0 has no Host; browsers, which it is checked for, always do.
        if host is not None or scope["http_version"] != "1.0":
            self._check_host(host or "")
        origin = headers.get("origin")
        if origin is None or self._allows(origin):
            return
        if origin.partition("://")[2] != headers.get("host", ""):
            raise RequestError(
                403,
                "origin: pages of other sites may not use this server "
                "(--cors-origin lets them)",
                param="origin",
                code="origin_not_allowed",
            )

    def _check_head(self, scope: Scope) -> None:
        names = [name for name, _ in scope["headers"]]
        if b"transfer-encoding" in names and b"content-length" in names:
            # Proxies differ in which they believe, and so in where the next
            # request begins.
            raise RequestError(
                400,
                "headers: expected Content-Length or Transfer-Encoding, found "
                "both",
                code="ambiguous_length",
            )
        upgrade = Headers(scope=scope).get("upgrade", "").lower()
        if upgrade == "websocket":
            raise RequestError(
                426,
                "upgrade: expected HTTP with server-sent events, found "
                "websocket",
                code="upgrade_not_supported",
            )
        # h11's own limit is for a head that arrives in parts.
        length = len(scope["raw_path"]) + len(scope["query_string"])
        length += sum(len(k) + len(v) + 4 for k, v in scope["headers"])
        most = self._site.settings.limits.header_bytes
        if length > most:
            raise RequestError(
                431,
                f"headers: expected at most {most} bytes with the line, "
                f"found {length}",
                code="headers_too_large",
            )

    def _check_host(self, header: str) -> None:
        """Refuses the name of another site. A page whose name somebody has
        pointed at this machine has its browser send that name.
        """
        settings = self._site.settings
        allowed = settings.allowed_host
        if "*" in allowed or (settings.api_keys and not allowed):
            return
        found = _HOST.fullmatch(header)
        name = (found["v6"] or found["name"]).lower() if found else ""
        known = (*_LOCAL_NAMES, settings.host, *allowed)
        if name in known or name.endswith(".localhost"):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise RequestError(
                403,
                f"host: expected an address, localhost or a name of "
                f"--allowed-host, found {header[:60]!r}",
                param="host",
                code="host_not_allowed",
            ) from None


class AuthenticationMiddleware(_Middleware):
    """Asks for a key, before the body is read."""

    def __init__(
        self, app: ASGIApp, open_paths: Container[str], folder: str
    ) -> None:
        """`open_paths` need no key, nor do those in `folder`."""
        super().__init__(app)
        self._open_paths = open_paths
        self._folder = folder

    async def _handle(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        path = scope["path"]
        if not (path in self._open_paths or path.startswith(self._folder)):
            try:
                _check_key(scope[CALL])
            except RequestError as error:
                await error_response(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class DisconnectMiddleware(_Middleware):
    """Ends a request whose client has gone, once its body has been read."""

    async def _handle(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        gone = _Gone(receive)
        task = asyncio.ensure_future(self._app(scope, gone.receive, send))
        watch = asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait(
                (task, watch), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            # Also where this task is cancelled: nothing is left running.
            watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if not task.cancelled():
            task.result()


class _Gone:
    """Tells when the client has gone, once the body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read = asyncio.Event()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get(
            "more_body", False
        ):
            self._read.set()
        return message

    async def wait(self) -> None:
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _check_key(call: Call) -> None:
    key = _key(call.headers)
    call.tenant = call.service.tenant(key)
    if call.tenant is None:
        raise RequestError(
            401,
            "api_key: expected a key of this server (Authorization: "
            "Bearer KEY, or x-api-key), found "
            + ("another" if key else "none"),
            code="invalid_api_key",
        )


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def _request_id(headers: Headers) -> str:
    """Gives the client's own id of a request, else a new one."""
    wanted = headers.get("x-request-id", "")
    if _REQUEST_ID.fullmatch(wanted):
        return wanted
    return "req_" + secrets.token_hex(12)


def _take_authority(scope: Scope) -> str | None:
    """Gives the host of a target that is a whole URL, as proxies send it, and
    puts the URL's path into the scope. Gives None for any other target.
    """
    found = _URL.fullmatch(scope.get("raw_path", b"") or b"")
    if found is None:
        return None
    path = found["path"] or b"/"
    scope["raw_path"] = path
    scope["path"] = unquote(path.decode("ascii"))
    return found["host"].decode("ascii")


def _note(call: Call) -> None:
    """Counts a request that is over, and writes it to the log."""
    scope = call.scope
    tenant = call.tenant.label if call.tenant else ""
    route = getattr(scope.get("route"), "path", "")
    if call.running is not None:
        call.running.counts.requests.labels(
            route=route, status=str(call.status), key=tenant
        ).inc()
    # As it was sent: a decoded one may hold line ends.
    path = scope.get("raw_path", b"")[:200].decode("ascii", "replace")
    seconds = time.monotonic() - call.arrived
    told = call.more_headers()
    error = call.error
    code, param = (error.code, error.param) if error else (None, None)
    param = quote(param or "", safe=".[]$")[:200]  # the client's own words
    failed = " ".join(filter(None, (code, param)))
    fields = {
        "method": scope["method"],
        "path": path,
        "status": call.status,
        "seconds": round(seconds, 6),
        "request_id": call.request_id,
        "key": tenant,
        "code": code,
        "param": param,
        "traceparent": call.headers.get("traceparent"),
        "ignored": told.get("x-gemmakv-ignored", ""),
        "not_enforced": told.get("x-gemmakv-not-enforced", ""),
    }
    LOG.info(
        "%s %s %d %.3f s %s%s%s%s",
        scope["method"],
        path,
        call.status,
        seconds,
        call.request_id,
        f" error {failed}" if failed else "",
        f" ignored {fields['ignored']}" if fields["ignored"] else "",
        f" not enforced {fields['not_enforced']}"
        if fields["not_enforced"]
        else "",
        extra={"fields": fields},
    )


__all__ = [
    "LOG",
    "AuthenticationMiddleware",
    "DisconnectMiddleware",
    "GuardMiddleware",
    "LoggingMiddleware",
]
