"""The command line in this process: no start, and no imports again, which
take most of a second of a processor.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import gemmakv
from support.server_process import READY


class _Errors(io.BytesIO):
    """What stderr gets, line by line."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__()
        self._hear = hear

    def write(self, data: Any) -> int:
        self._hear(bytes(data).decode())
        return super().write(data)


def run_here(
    *arguments: object, errors: io.BytesIO | None = None, **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Runs a command line that needs no process of its own, with `errors` or
    a new stream as stderr.
    """
    from gemmakv.cli import main

    out, errors = io.BytesIO(), io.BytesIO() if errors is None else errors
    given = [str(one) for one in arguments]
    # A text's end closes what is below it.
    texts = _text(out), _text(errors)
    with (
        mock.patch.dict(os.environ, env),
        contextlib.redirect_stdout(texts[0]),
        contextlib.redirect_stderr(texts[1]),
    ):
        code = main(given)
    return subprocess.CompletedProcess(
        ["gemmakv", *given], code, out.getvalue(), errors.getvalue()
    )


def _text(stream: io.BytesIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, "utf-8", write_through=True)


class ServerHere:
    """A server that runs in this process, as its client's thread sees it."""

    def __init__(self) -> None:
        self.url = self.log = ""
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._ends = False
        self._over = threading.Event()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the first signal; a second one would end the tests."""
        with self._lock:
            assert not self._ends, "the server ends already"
            self._ends = True
            os.kill(os.getpid(), number)

    def wait(self, seconds: float = 60) -> None:
        """Waits for its end."""
        assert self._over.wait(seconds), self.log

    def _hear(self, text: str) -> None:
        self.log += text
        found = READY.search(self.log)
        if found and not self._ready.is_set():
            self.url = found[1]
            self._ready.set()

    def _end(self) -> None:
        """Ends it if nobody has."""
        with contextlib.suppress(AssertionError):
            self.signal()

    def _ended(self) -> None:
        with self._lock:
            self._ends = True
        self._ready.set()
        self._over.set()


def serve_here(
    client: Callable[[ServerHere], None], *arguments: object, **env: str
) -> ServerHere:
    """Runs `gemmakv serve` in this process, as `with_client` says."""

    def serve(errors: _Errors) -> None:
        result = run_here(
            "serve", "--port", "0", "--threads", "1", *arguments,
            errors=errors, **env,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr.decode()

    return with_client(client, serve)


def serve_settings(
    client: Callable[[ServerHere], None],
    gemma: gemmakv.Gemma,
    *,
    send_buffer: int | None = None,
    **fields: Any,
) -> ServerHere:
    """Serves with settings that the command line has no flags for. The kernel
    keeps about `send_buffer` bytes of a connection that its client does not
    read.
    """
    from gemmakv.server import _run
    from gemmakv.server._service import ChatService
    from gemmakv.server._settings import Settings

    settings = Settings(("talker",), port=0, **fields)

    def serve(errors: _Errors) -> None:
        sock = _run.bind(settings)
        if send_buffer is not None:  # connections have that of the listener
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        with contextlib.redirect_stderr(_text(errors)):
            _run.serve(
                settings,
                sock,
                lambda check: gemma,
                lambda gemma: ChatService(gemma, settings),
            )

    return with_client(client, serve)


def with_client(
    client: Callable[[ServerHere], None], serve: Callable[[_Errors], None]
) -> ServerHere:
    """Serves in this thread, and runs `client` in another one once the server
    is ready. Signals it at the client's end, unless the client has. Raises
    what the client raises. Requires: the main thread.
    """
    server = ServerHere()
    failed: list[BaseException] = []

    def run() -> None:
        server._ready.wait(120)
        try:
            if server.url:
                client(server)
        except BaseException as error:
            failed.append(error)
        finally:
            server._end()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        serve(_Errors(server._hear))
    finally:
        server._ended()
        thread.join(120)
    if failed:
        raise failed[0]
    assert server.url and not thread.is_alive(), server.log
    return server
