"""A server's process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gemmakv.chat._gemma import Gemma
from gemmakv.server._app import LOG, App, JsonLog
from gemmakv.server._service import ChatService
from gemmakv.server._settings import Settings

_KEEP_ALIVE_S = 65  # longer than proxies keep theirs
_BACKLOG = 1024
_LAST_S = 5.0  # for answers to be sent when the drain is over

# Loads the model; calls its argument now and then, which may raise.
Load = Callable[[Callable[[], None]], Gemma]
MakeService = Callable[[Gemma], ChatService]


class Stopped(Exception):
    """A signal came while the model was loaded."""


def bind(settings: Settings) -> socket.socket:
    """A socket that listens. Raises OSError naming the address."""
    host, port = settings.host, settings.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OSError(f"host: {host!r}: {error.strerror}") from None
    found = socket.socket(family, kind, proto)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        words = error.strerror
        if error.errno == errno.EADDRINUSE:
            words = "another program listens there; --port takes another one"
        raise OSError(f"port: {host}:{port}: {words}") from None
    return found


def serve(
    settings: Settings,
    sock: socket.socket,
    load: Load,
    make_service: MakeService,
    log_format: str = "text",
) -> None:
    """Serves until a signal says so; returns when everything is answered.

    While `load` runs, requests are told so. A second signal ends the process
    at once. Raises what `load` and `make_service` raise.
    """
    _set_up_logs(log_format)
    with sock:
        asyncio.run(_Process(settings, sock).run(load, make_service))


class _Process:
    def __init__(self, settings: Settings, sock: socket.socket) -> None:
        self._settings = settings
        self._sock = sock
        self._app = App(settings)

        class Protocol(_Protocol):
            header_s = settings.limits.header_s

        self._server = _Server(
            uvicorn.Config(
                self._app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(settings.drain_timeout + _LAST_S),
                h11_max_incomplete_event_size=settings.limits.header_bytes,
            )
        )
        self._stopping = False

    async def run(self, load: Load, make_service: MakeService) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        serving = asyncio.ensure_future(
            self._server.serve(sockets=[self._sock])
        )
        service = None
        try:
            with contextlib.suppress(Stopped):
                gemma = await loop.run_in_executor(
                    None, load, self._check_stopping
                )
                service = make_service(gemma)
                self._app.service = service
                self._say_ready()
            if self._stopping and service is not None:
                self._drain()
        finally:
            if service is None:
                self._server.should_exit = True
                await serving
        await serving
        service_closed = self._app.service
        if service_closed is not None:
            service_closed.close()

    def _check_stopping(self) -> None:
        if self._stopping:
            raise Stopped

    def _stop(self, number: int) -> None:
        if self._stopping:
            os._exit(128 + number)
        self._stopping = True
        self._server.should_exit = True
        if self._app.service is not None:
            self._drain()

    def _drain(self) -> None:
        """Everything that is here ends by itself, or when the time is over."""
        service = self._app.service
        assert service is not None
        service.drain()
        seconds = self._settings.drain_timeout
        LOG.info(
            "stopping: %d requests are here, for %g s at most; another "
            "signal stops at once",
            service.live,
            seconds,
        )
        asyncio.get_running_loop().call_later(seconds, service.abort)

    def _say_ready(self) -> None:
        host, port = self._sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        names = ", ".join(self._settings.served_model_name)
        sys.stderr.write(
            f"gemmakv: serving {names} at http://{shown}:{port} "
            "(Ctrl-C stops)\n"
        )
        sys.stderr.flush()


class _Server(uvicorn.Server):
    """Signals are handled by `_Process`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """A connection whose requests have to arrive in time.

    The line and the headers of a request have `header_s` seconds, counted
    from their first byte, or from the beginning of the connection.
    """

    header_s = 20.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()
        elif self._timer is None:
            self._arm()

    def on_response_complete(self) -> None:
        self._disarm()
        super().on_response_complete()

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.header_s, self.transport.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _set_up_logs(log_format: str) -> None:
    """Of the server and of what runs it, on stderr."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonLog())
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        )
    for name, level in (
        ("gemmakv.server", logging.INFO),
        ("uvicorn.error", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
