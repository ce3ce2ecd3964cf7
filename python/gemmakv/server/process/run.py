"""A server's process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator

import uvicorn

from gemmakv.chat._gemma import Gemma
from gemmakv.server.app import LOG, App, JsonLog
from gemmakv.server.process.listener import LoopErrors, listener
from gemmakv.server.process.protocol import Connection
from gemmakv.server.process.workers import Worker
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.metrics import text_of
from gemmakv.server.settings import Settings

_KEEP_ALIVE_S = 65  # longer than proxies keep theirs
_BACKLOG = 1024
_PUBLISH_S = 0.25  # between the numbers that a worker tells the others

# Loads the model; calls its argument now and then, which may raise.
Load = Callable[[Callable[[], None]], Gemma]
MakeService = Callable[[Gemma], ChatService]


class Stopped(Exception):
    """A signal came while the model was loaded."""


@contextlib.contextmanager
def bound(settings: Settings) -> Iterator[socket.socket]:
    """A block with a socket that listens, whose file goes at the end if it has
    one, in the process that made it. Raises OSError naming the address.
    """
    if not settings.is_path:
        yield bind(settings)
        return
    path, owner = settings.host, os.getpid()
    found = _bind_path(path, shared=bool(settings.api_keys))
    made = os.stat(path)
    try:
        yield found
    finally:
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                left = os.lstat(path)
                # A later file may have the number of the one that is gone.
                if os.path.samestat(left, made) and (
                    left.st_mtime_ns == made.st_mtime_ns
                ):
                    os.unlink(path)


def _bind_path(path: str, shared: bool) -> socket.socket:
    """A Unix socket that listens. Its mode is what the umask leaves; without
    keys (`shared` is false) others than its user and group never reach it.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        found.bind(path)
        mode = stat.S_IMODE(os.stat(path).st_mode)
        os.chmod(path, mode & (0o666 if shared else 0o660))
        found.listen(_BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        raise OSError(f"host: {path}: {error.strerror or error}") from None
    return found


def _remove_stale(path: str) -> None:
    """Removes the socket of a server that is gone. Raises OSError for one at
    which a program listens, and for what is no socket.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(
            errno.EEXIST, "expected a free path or a socket, found a file"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # one that is busy does not answer
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, "another program listens there")


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
    worker: Worker | None = None,
) -> None:
    """Serves until a signal says so; returns when everything is answered.

    While `load` runs, requests are told so. A second signal ends the process
    at once. Raises what `load` and `make_service` raise. A `worker` also ends
    when its supervisor is gone, and leaves second signals to that.
    """
    set_up_logs(log_format, worker)
    with listener(sock, worker) as sock:
        asyncio.run(_Process(settings, sock, worker).run(load, make_service))


def say_ready(settings: Settings, sock: socket.socket) -> None:
    if settings.is_path:
        place = f"unix:{settings.host}"
    else:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        place = f"http://{shown}:{port}"
    names = ", ".join(settings.served_model_name)
    sys.stderr.write(f"gemmakv: serving {names} at {place} (Ctrl-C stops)\n")
    sys.stderr.flush()


class _Process:
    def __init__(
        self,
        settings: Settings,
        sock: socket.socket,
        worker: Worker | None = None,
    ) -> None:
        self._settings = settings
        self._sock = sock
        self._worker = worker
        self._app = App(settings, worker=worker)

        class Protocol(Connection):
            limits = settings.limits
            of = worker
            refusal = self._app.refusal

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
                timeout_graceful_shutdown=math.ceil(settings.limits.last_s),
                h11_max_incomplete_event_size=settings.limits.header_bytes,
            )
        )
        self._stopping = False

    async def run(self, load: Load, make_service: MakeService) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        worker = self._worker
        loop.add_signal_handler(signal.SIGTERM, self._stop, signal.SIGTERM)
        if worker is None:
            loop.add_signal_handler(signal.SIGINT, self._stop, signal.SIGINT)
        else:
            loop.add_reader(worker.control, self._supervisor_gone)
            self._beat(worker)
        serving = None
        if worker is None or worker.first:
            serving = self._serve()
        service = None
        try:
            with contextlib.suppress(Stopped):
                gemma = await loop.run_in_executor(
                    None, load, self._check_stopping
                )
                # It may have come behind the last look; the socket is closed.
                self._check_stopping()
                if gemma.thread_placement.pinned:
                    LOG.info("%s", gemma.thread_placement)
                service = make_service(gemma)
                self._app.service = service
                serving = serving or self._serve()
                if worker is None:
                    say_ready(self._settings, self._sock)
                else:
                    worker.say_ready()
                    self._publish(worker)
        finally:
            if service is None and serving is not None:
                self._server.should_exit = True
                await serving
        if serving is not None:
            await serving
        service_closed = self._app.service
        if service_closed is not None:
            service_closed.close()

    def _serve(self) -> asyncio.Future[None]:
        if self._worker is not None:
            self._worker.accepts(True)
        return asyncio.ensure_future(self._server.serve(sockets=[self._sock]))

    def _publish(self, worker: Worker) -> None:
        service = self._app.service
        assert service is not None
        worker.publish(text_of(service.counts.metrics))
        loop = asyncio.get_running_loop()
        loop.call_later(_PUBLISH_S, self._publish, worker)

    def _beat(self, worker: Worker) -> None:
        worker.beat()
        loop = asyncio.get_running_loop()
        loop.call_later(_PUBLISH_S, self._beat, worker)

    def _supervisor_gone(self) -> None:
        assert self._worker is not None
        asyncio.get_running_loop().remove_reader(self._worker.control)
        LOG.error("the supervisor is gone")
        self._stop(signal.SIGTERM)

    def _check_stopping(self) -> None:
        if self._stopping:
            raise Stopped

    def _stop(self, number: int) -> None:
        if self._stopping:
            if self._worker is None:
                os._exit(128 + number)
            return
        self._stopping = True
        if self._worker is not None:
            self._worker.accepts(False)
        if self._app.service is None:
            self._server.should_exit = True
        else:
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
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, service.abort)
        self._draining = loop.create_task(self._exit_when_idle(service))

    async def _exit_when_idle(self, service: ChatService) -> None:
        """Until then connections are accepted, and told that it stops: those
        who ask /health/ready need an answer. When the time is over, nobody who
        does not read holds it up.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout):
                await service.ended()
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Signals are handled by `_Process`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def set_up_logs(log_format: str, worker: Worker | None = None) -> None:
    """Of the server and of what runs it, on stderr."""
    handler = logging.StreamHandler()
    index = None if worker is None else worker.index
    if log_format == "json":
        handler.setFormatter(JsonLog(index))
    else:
        whose = "" if index is None else f"worker {index}: "
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {whose}%(message)s")
        )
    for name, level in (
        ("gemmakv.server", logging.INFO),
        ("uvicorn.error", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
