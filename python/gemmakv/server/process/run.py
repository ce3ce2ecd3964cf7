"""A server's process: it loads the model, serves until a signal, and ends.

uvicorn has the connections, the signals and the workers. `_Process` stands
between it and the application: it loads the model while requests are told so,
and ends what runs in time when the server is told to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.config import STARTUP_FAILURE

from gemmakv._support.interrupts import handled
from gemmakv._support.processors import shares
from gemmakv.chat._gemma import Gemma
from gemmakv.server.app import App
from gemmakv.server.process.logs import LOG, LoopErrors, set_up_logs
from gemmakv.server.process.sockets import BACKLOG, address_of
from gemmakv.server.process.workers import Worker, supervise
from gemmakv.server.service.chat import ChatService
from gemmakv.server.settings import Settings

_KEEP_ALIVE_S = 65  # longer than proxies keep theirs
_REFRESH_S = 1.0  # between the numbers that a worker tells the others
_RETRY_S = 5.0  # until a worker that cannot start is replaced
_PATIENCE_S = 10.0  # after the time that draining may take


class Setup(Protocol):
    """The maker of a server's service. Workers get pickled copies of it."""

    def load(self, check: Callable[[], None]) -> Gemma:
        """Loads the model, on a thread; calls `check` now and then, which may
        raise.
        """

    def make_service(self, gemma: Gemma, mark: str) -> ChatService:
        """Makes the service of the model, on the event loop. Its leases begin
        with `mark`, which is that of a former process in its place.
        """

    def close(self) -> None:
        """Closes the files and folders that the other functions opened."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes that serve.

    Attributes:
      count: the number of them.
      timeout: seconds until one that hangs is replaced.
      pinned: whether each has processors of its own.
    """

    count: int
    timeout: int
    pinned: bool


class Stopped(Exception):
    """A signal came while the model was loaded."""


def serve(
    settings: Settings,
    sock: socket.socket,
    setup: Setup,
    log_format: str = "text",
    workers: Workers | None = None,
) -> int:
    """Serves until a signal says so; gives an exit code when everything is
    answered.

    While the model is loaded, requests are told so. Raises what `setup`
    raises. With `workers` they serve, and this process supervises them.
    """
    if workers is not None:
        set_up_logs(log_format, uvicorn=logging.INFO)
        with tempfile.TemporaryDirectory(prefix="gemmakv-") as folder:
            address = address_of(settings, sock)
            config = _config(
                _Factory(settings, setup, log_format, address, folder, workers),
                settings,
                factory=True,
                workers=workers.count,
                timeout_worker_healthcheck=workers.timeout,
            )
            return supervise(config, sock, Path(folder))
    set_up_logs(log_format)
    process = _Process(settings, setup, address_of(settings, sock))
    server = uvicorn.Server(_config(process, settings, workers=1))
    with (
        sock,
        # uvicorn raises its signals again when it has ended.
        handled(signal.SIGTERM, _ignore),
        handled(signal.SIGINT, _ignore),
    ):
        try:
            server.run([sock])
        except SystemExit:
            if process.failure is None:
                raise
            raise process.failure from None
    return 0


def _ignore(number: int, frame: object) -> None:
    pass


def _config(
    app: _Process | _Factory, settings: Settings, **more: Any
) -> uvicorn.Config:
    limits, most = settings.limits, settings.max_connections
    return uvicorn.Config(
        app,
        interface="asgi3",
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        # From there on uvicorn refuses requests.
        limit_concurrency=None if most is None else most + 1,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(
            settings.drain_timeout + limits.last_s
        ),
        h11_max_incomplete_event_size=limits.header_bytes,
        **more,
    )


@dataclasses.dataclass
class _Factory:
    """Makes the application in a worker."""

    settings: Settings
    setup: Setup
    log_format: str
    address: str
    folder: str
    workers: Workers

    def __call__(self) -> _Process:
        # A terminal's end reaches all; the supervisor says what it means.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        count = self.workers.count
        worker = Worker(Path(self.folder), count)
        if self.workers.pinned:
            # What it starts is to stay there, too: HTTP, templates.
            os.sched_setaffinity(0, shares(count)[worker.index % count])
        set_up_logs(self.log_format, worker.index)
        return _Process(self.settings, self.setup, self.address, worker)


class _Process:
    """The application as uvicorn runs it, with its beginning and its end.

    Attributes:
      failure: why the process ends, if the model could not be loaded.
    """

    def __init__(
        self,
        settings: Settings,
        setup: Setup,
        address: str,
        worker: Worker | None = None,
    ) -> None:
        self.failure: Exception | None = None
        self._settings = settings
        self._setup = setup
        self._address = address
        self._worker = worker
        self._app = App(settings)
        self._stopping = False

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] != "lifespan":
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                if not self._stopping:  # uvicorn's end, which needs no more
                    raise
            return
        # It is cancelled where loading fails, which is told otherwise.
        with contextlib.suppress(asyncio.CancelledError):
            await self._live(receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(LoopErrors())
        self._take_signals()
        answers = asyncio.Event()  # may answer
        loading = self._loop.create_task(self._load(answers))
        await answers.wait()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await loading
        if self._app.service is not None:
            self._app.service.close()
        self._setup.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _load(self, answers: asyncio.Event) -> None:
        """Loads the model. Requests are answered from its beginning on, unless
        other workers do that, else from its end on.
        """
        worker = self._worker
        with contextlib.suppress(Stopped):
            async with (
                contextlib.nullcontext()
                if worker is None
                else worker.turn(self._check_stopping)
            ):
                if worker is None or not worker.others_serve():
                    answers.set()
                try:
                    await self._make_service()
                except Stopped:
                    raise
                except Exception as error:
                    await self._fail(error)
                    return
                if worker is None or worker.say_serving():
                    self._say_ready()
        if worker is not None and self._app.service is not None:
            self._app.service.counts.tells_shared = worker.index == 0
            self._refresh()
        answers.set()

    async def _make_service(self) -> None:
        gemma = await self._loop.run_in_executor(
            None, self._setup.load, self._check_stopping
        )
        self._check_stopping()  # it may have come after the last look
        if gemma.thread_placement.pinned:
            LOG.info("%s", gemma.thread_placement)
        mark = "" if self._worker is None else self._worker.mark
        self._app.service = self._setup.make_service(gemma, mark)

    async def _fail(self, error: Exception) -> None:
        """Ends the process, and the server, unless other workers serve."""
        code = STARTUP_FAILURE
        self.failure = error
        if self._worker is not None and self._worker.others_serve():
            LOG.error("cannot start: %s", error)
            code = 1
            await asyncio.sleep(_RETRY_S)
            self._check_stopping()
        elif self._worker is not None:
            self._worker.say_failed(error)
        self._setup.close()
        self._loop.call_soon(sys.exit, code)

    def _say_ready(self) -> None:
        names = ", ".join(self._settings.served_model_name)
        sys.stderr.write(
            f"gemmakv: serving {names} at {self._address} (Ctrl-C stops)\n"
        )
        sys.stderr.flush()

    def _refresh(self) -> None:
        assert self._app.service is not None
        self._app.service.counts.refresh()
        self._loop.call_later(_REFRESH_S, self._refresh)

    def _take_signals(self) -> None:
        """Puts a handler of its own before uvicorn's; that of a worker hears
        of the supervisor's end, too.
        """
        handler = signal.getsignal(signal.SIGTERM)
        self._server: uvicorn.Server = handler.__self__  # type: ignore[union-attr]
        self._stopping = self._server.should_exit
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGTERM, self._stop)
        supervisor = multiprocessing.parent_process()
        if self._worker is None or supervisor is None:
            return
        end = supervisor.sentinel

        def stop() -> None:
            self._loop.remove_reader(end)
            LOG.error("the supervisor is gone")
            signal.raise_signal(signal.SIGTERM)

        self._loop.add_reader(end, stop)

    def _check_stopping(self) -> None:
        if self._stopping:
            raise Stopped

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal; a Ctrl-C after the first one ends it at once."""
        if self._stopping and number == signal.SIGINT:
            os._exit(128 + number)
        self._server.handle_exit(number, frame)
        if not self._stopping:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        """Lets the requests that are here end by themselves, until the time is
        over. uvicorn waits a little longer, for answers to be sent.
        """
        seconds = self._settings.drain_timeout
        last_s = self._settings.limits.last_s
        if self._worker is not None:  # whose end the supervisor waits for
            faulthandler.dump_traceback_later(
                seconds + last_s + _PATIENCE_S, exit=True
            )
        service = self._app.service
        if service is None:
            return
        service.drain()
        LOG.info(
            "stopping: %d requests are here, for %g s at most; Ctrl-C stops "
            "at once",
            service.live,
            seconds,
        )
        self._loop.call_later(seconds, service.abort)
