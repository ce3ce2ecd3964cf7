"""`gemmakv serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import Any

import httpx

from support.forks import FORKS
from support.waits import LIMIT_S

READY = re.compile(r"gemmakv: serving .* at (http://\S+|unix:\S+) ")


class ServerProcess:
    """Started and ready on return; `with` ends it."""

    def __init__(self, *arguments: object, **env: str) -> None:
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        said, theirs = os.pipe()
        with open(os.devnull, "r+b") as nowhere:
            self.process = FORKS.start(
                ["serve", "--port", "0", "--threads", "1", *arguments],
                (nowhere.fileno(), nowhere.fileno(), theirs),
                {**os.environ, **env},
            )
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

    def wait(self, seconds: float = LIMIT_S) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

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
