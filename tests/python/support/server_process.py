"""`gemmakv serve` in a process of its own."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from support.forks import FORKS, Process, Streams
from support.waits import LIMIT_S

READY = re.compile(r"gemmakv: serving .* at (http://\S+|unix:\S+) ")


# Settings that the command line has no flags for.
_SETTINGS = """
import pickle, socket, sys
from gemmakv import Gemma
from gemmakv.server.process import run as _run
from gemmakv.server.process import sockets as _sockets
from gemmakv.server.service.chat import ChatService
from gemmakv.server.settings import Settings

model, send_buffer, fields = pickle.loads(bytes.fromhex(sys.argv[1]))
settings = Settings(("talker",), port=0, **fields)
sock = _sockets.bind(settings)
if send_buffer is not None:  # connections have that of the listener
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)

class Setup:
    def load(self, check):
        return Gemma.load(model, prefix_cache=False, threads=1)

    def make_service(self, gemma, mark):
        return ChatService(gemma, settings)

    def close(self):
        pass

_run.serve(settings, sock, Setup())
"""


class ServerProcess:
    """Started and ready on return; `with` ends it."""

    def __init__(self, *arguments: object, **env: str) -> None:
        words = ["serve", "--port", "0", "--threads", "1", *arguments]
        variables = {**os.environ, **env}
        self._begin(lambda streams: FORKS.start(words, streams, variables))

    @classmethod
    def with_settings(
        cls,
        model: Path,
        *,
        send_buffer: int | None = None,
        **fields: Any,
    ) -> ServerProcess:
        """Serves `model` with these fields of Settings. The kernel keeps about
        `send_buffer` bytes of a connection that its client does not read.
        """
        server = cls.__new__(cls)
        given = pickle.dumps((model, send_buffer, fields)).hex()
        server._begin(
            lambda streams: FORKS.fork(
                _SETTINGS, [given], streams, {**os.environ}, imports="servers"
            )
        )
        return server

    def _begin(self, start: Callable[[Streams], Process]) -> None:
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        said, theirs = os.pipe()
        with open(os.devnull, "r+b") as nowhere:
            self.process = start((nowhere.fileno(), nowhere.fileno(), theirs))
        os.close(theirs)
        self._said = said
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(LIMIT_S) or not self.url:
            self.process.kill()
            raise AssertionError("".join(self.lines))

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def get(self, path: str) -> httpx.Response:
        return self._ask("GET", path)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self._ask("POST", path, json=body)

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Asks over a connection of its own, and reads no certificates."""
        return httpx.request(
            method, self.url + path, timeout=LIMIT_S, verify=False, **more
        )

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def workers(self) -> list[int]:
        """Lists the processes of --workers. Raises OSError where the system
        does not tell.
        """
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        # Another child cleans up after multiprocessing.
        return [
            int(one) for one in children.split() if b"spawn_main" in words(one)
        ]

    def wait(self, seconds: float = LIMIT_S) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def end(self) -> None:
        """Waits for the end after a signal, which is to be without an error."""
        assert self.wait() == 0, self.log
        assert "Traceback" not in self.log, self.log

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def _read(self) -> None:
        with open(self._said) as said:
            for line in said:
                self.lines.append(line)
                found = READY.match(line)
                if found:
                    self.url = found[1]
                    self._ready.set()
        self._ready.set()


def words(pid: object) -> bytes:
    """Gives the command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
