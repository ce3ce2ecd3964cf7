"""The server's routes, and what every request goes through."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Mapping
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from gemmakv.server.apis.http import Call
from gemmakv.server.apis.lenient import tolerant
from gemmakv.server.apis.openapi import RouteOf, style_of
from gemmakv.server.apis.page import FOLDER
from gemmakv.server.apis.routes import ROUTES
from gemmakv.server.service.admission import stopping
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import RequestError
from gemmakv.server.settings import Settings

LOG = logging.getLogger("gemmakv.server")

_OPEN = frozenset(route.path for route in ROUTES if route.open)
_OPEN_FOLDERS = tuple(
    route.path.partition("{")[0]
    for route in ROUTES
    if route.open and "{" in route.path
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_HOST = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]+))(?::\d*)?")
_URL = re.compile(rb"https?://(?P<host>[^/]+)(?P<path>/.*)?", re.I | re.S)
_SLASHES = re.compile("//+")
_VERSIONS = re.compile("^/(?:v1/+)+")
_LONGEST_PATH = 60  # characters of a path that is compared with the routes
_GONE = 499  # in logs and metrics: the client went before the answer
_LOCAL_NAMES = ("localhost",)


class App:
    """The ASGI application. `service` is None while the model is loaded."""

    def __init__(
        self,
        settings: Settings,
        service: ChatService | None = None,
    ) -> None:
        self.settings = settings
        self.service = service
        endpoints = [(route, _Endpoint(route)) for route in ROUTES]
        self._router = Router(
            routes=[
                Route(route.path, endpoint, methods=[route.method])
                for route, endpoint in endpoints
            ],
            redirect_slashes=False,
        )
        # The router compares a path with one route after the other.
        self._exact = {
            (route.method, route.path): endpoint
            for route, endpoint in endpoints
            if "{" not in route.path
        }
        self._paths = frozenset(path for _, path in self._exact)
        self._patterns = [
            route.path_regex
            for route in self._router.routes
            if isinstance(route, Route) and "{" in route.path
        ]

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"expected http, found {scope['type']}")
        headers = Headers(scope=scope)
        host = _take_authority(scope) or headers.get("host")
        # Before anything looks at it: keys, forms of errors.
        scope["path"] = self._route_path(scope["path"])
        wanted = _request_id(headers)
        origin = headers.get("origin")
        more = {"x-request-id": wanted, "request-id": wanted}
        if origin is not None and self._allows(origin):
            more["access-control-allow-origin"] = origin
            more["vary"] = "origin"

        async def send_with(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                pairs = [(k.encode(), v.encode()) for k, v in more.items()]
                message["headers"] = [*message["headers"], *pairs]
            await send(message)

        call = Call(
            scope, receive, send_with, self.settings, headers, wanted,
            self.service,
        )  # fmt: skip
        scope.update({"gemmakv.call": call, "app": self})
        try:
            await self._guarded(call, origin, host)
        except RequestError as error:
            await fail(call, error)
        except HTTPException as error:  # of the router
            words, code, told = "no such route", "not_found", {}
            if error.status_code == 404:
                words += self._nearest(scope["path"])
            else:
                allowed = ", ".join(self._methods(scope))
                words, code = f"expected {allowed}", "method_not_allowed"
                told["allow"] = allowed
            method, path = scope["method"], scope["path"][:100]
            await fail(
                call,
                RequestError(
                    error.status_code,
                    f"{method} {path}: {words}",
                    code=code,
                ),
                told,
            )
        except asyncio.CancelledError:
            task, service = asyncio.current_task(), self.service
            if task is None or service is None:
                raise
            if not service.admission.draining:
                raise
            if call.status:
                raise
            task.uncancel()  # the process ends, and this is the last of it
            await fail(call, stopping())
        finally:
            call.status = call.status or _GONE
            self._note(call)

    def _methods(self, scope: Scope) -> list[str]:
        """Of all routes with the path."""
        return sorted(
            method
            for route in self._router.routes
            if isinstance(route, Route)
            and route.matches(scope)[0] is not Match.NONE
            for method in route.methods or ()
        )

    def _route_path(self, path: str) -> str:
        """The path as a route has it, for one that differs from it by slashes
        that come twice or at the end, by /v1 that comes twice, or by having
        none; any other as it is, and so are names of the page's files.
        """
        if path in self._paths or path.startswith(FOLDER):
            return path
        if path[-1:] != "/" and self._matches(path):
            return path
        outer = "/" + path.strip("/")  # names of models may have slashes
        for whole in (outer, _SLASHES.sub("/", outer)):
            whole = _VERSIONS.sub("/v1/", whole)
            for found in (whole, "/v1" + whole):
                if found in self._paths or self._matches(found):
                    return found
        return path

    def _matches(self, path: str) -> bool:
        """Whether a route has the path, with something in place of a name."""
        return any(pattern.match(path) for pattern in self._patterns)

    def _nearest(self, path: str) -> str:
        """Names the route that a path which none has is meant to be, if one is
        much like it, else where all are.
        """
        tried = path[:_LONGEST_PATH].lower()
        known = sorted(one for one in self._paths if one != "/")
        found = difflib.get_close_matches(tried, known, 1)
        if not found:
            return ", GET /openapi.json lists them all"
        [nearest] = found
        methods = [m for m, one in self._exact if one == nearest]
        return f", the nearest is {' and '.join(methods)} {nearest}"

    async def _guarded(
        self, call: Call, origin: str | None, host: str | None
    ) -> None:
        self._check_head(call.scope)
        # HTTP/1.0 has no Host; browsers, which it is checked for, always do.
        if host is not None or call.scope["http_version"] != "1.0":
            self._check_host(host or "")
        if origin is not None and not (
            self._allows(origin) or self._is_own(origin, call.headers)
        ):
            raise RequestError(
                403,
                "origin: pages of other sites may not use this server "
                "(--cors-origin lets them)",
                param="origin",
                code="origin_not_allowed",
            )
        if call.scope["method"] == "OPTIONS" and origin is not None:
            await _preflight(call)
            return
        path = call.scope["path"]
        if path not in _OPEN and not path.startswith(_OPEN_FOLDERS):
            self._check_key(call)
        endpoint: ASGIApp | None = self._exact.get((call.scope["method"], path))
        if endpoint is None:
            endpoint = self._router
        else:
            call.scope["path_params"] = {}
        await endpoint(call.scope, call.receive, call.send)

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
        # The protocol's own limit is for a head that arrives in parts.
        length = len(scope["raw_path"]) + len(scope["query_string"])
        length += sum(len(k) + len(v) + 4 for k, v in scope["headers"])
        most = self.settings.limits.header_bytes
        if length > most:
            raise RequestError(
                431,
                f"headers: expected at most {most} bytes with the line, "
                f"found {length}",
                code="headers_too_large",
            )

    def _check_key(self, call: Call) -> None:
        key = _key(call.headers)
        call.tenant = call.chat.tenant(key)
        if call.tenant is None:
            raise RequestError(
                401,
                "api_key: expected a key of this server (Authorization: "
                "Bearer KEY, or x-api-key), found "
                + ("another" if key else "none"),
                code="invalid_api_key",
            )

    def _check_host(self, header: str) -> None:
        """A page whose name was pointed at this machine says that name."""
        allowed = self.settings.allowed_host
        if "*" in allowed or (self.settings.api_keys and not allowed):
            return
        found = _HOST.fullmatch(header)
        name = (found["v6"] or found["name"]).lower() if found else ""
        known = (*_LOCAL_NAMES, self.settings.host, *allowed)
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

    def _allows(self, origin: str) -> bool:
        allowed = self.settings.cors_origin
        return "*" in allowed or origin in allowed

    def _is_own(self, origin: str, headers: Headers) -> bool:
        return origin.partition("://")[2] == headers.get("host", "")

    def _note(self, call: Call) -> None:
        scope = call.scope
        tenant = call.tenant.label if call.tenant else ""
        if call.service is not None:
            route = scope.get("gemmakv.route", "")
            call.service.counts.requests.labels(
                route=route, status=str(call.status), key=tenant
            ).inc()
        # As it was sent: a decoded one may hold line ends.
        path = scope.get("raw_path", b"")[:200].decode("ascii", "replace")
        seconds = time.monotonic() - call.arrived
        fields = {
            "method": scope["method"],
            "path": path,
            "status": call.status,
            "seconds": round(seconds, 6),
            "request_id": call.request_id,
            "key": tenant,
            "traceparent": call.headers.get("traceparent"),
            "ignored": ", ".join(call.ignored),
            "not_enforced": call.not_enforced,
        }
        LOG.info(
            "%s %s %d %.3f s %s%s%s",
            scope["method"],
            path,
            call.status,
            seconds,
            call.request_id,
            f" ignored {fields['ignored']}" if call.ignored else "",
            f" not enforced {call.not_enforced}" if call.not_enforced else "",
            extra={"fields": fields},
        )


class _Endpoint:
    """One route: its handler runs until it is done or the client is gone."""

    def __init__(self, route: RouteOf) -> None:
        self._route = route

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        del receive, send
        call: Call = scope["gemmakv.call"]
        scope["gemmakv.route"] = self._route.path
        call.expects = self._route.body
        try:
            await self._run(call)
        except RequestError:
            raise
        except Exception:
            LOG.exception("%s: a request failed", call.request_id)
            raise RequestError(
                500,
                f"internal error; the log has it as {call.request_id}",
                code="internal_error",
            ) from None

    async def _run(self, call: Call) -> None:
        gone = _Gone(call.receive)
        call.receive = gone.receive
        route = self._route
        task = asyncio.ensure_future(
            tolerant(call, route.path, route.handler)
            if call.settings.lenient
            else route.handler(call)
        )
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

    async def receive(self) -> AsgiMessage:
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


async def fail(
    call: Call, error: RequestError, headers: Mapping[str, str] | None = None
) -> None:
    """Answers with an error in the form of the API that was called."""
    if call.status:  # too late for that: the connection is cut
        return
    call.reject(error)
    style = style_of(call.scope["path"], "anthropic-version" in call.headers)
    status, content = style(error, call.request_id)
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.code == "ambiguous_length":  # what follows may be a part of it
        headers["connection"] = "close"
    if error.status in (408, 503) and error.retry_after is None:
        headers["x-should-retry"] = "false"
    with contextlib.suppress(OSError):
        await call.answer(content, status, headers)


def _request_id(headers: Headers) -> str:
    """The client's own, else a new one."""
    wanted = headers.get("x-request-id", "")
    if _REQUEST_ID.fullmatch(wanted):
        return wanted
    return "req_" + secrets.token_hex(12)


async def _preflight(call: Call) -> None:
    """What a browser asks before a page's request."""
    asked = call.headers.get("access-control-request-headers", "*")
    headers = {
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": asked,
        "access-control-max-age": "600",
    }
    if "access-control-request-private-network" in call.headers:
        headers["access-control-allow-private-network"] = "true"
    await call.answer("", headers=headers)


def _take_authority(scope: Scope) -> str | None:
    """The host of a target that is a whole URL, as proxies send it; the scope
    then has its path. None for any other target.
    """
    found = _URL.fullmatch(scope.get("raw_path", b"") or b"")
    if found is None:
        return None
    path = found["path"] or b"/"
    scope["raw_path"] = path
    scope["path"] = unquote(path.decode("ascii"))
    return found["host"].decode("ascii")


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")
