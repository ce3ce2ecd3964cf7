"""Whether a grammar compiles in bounded time and memory.

llguidance has limits of its own, which do not count all that takes time: a
schema of a few lines can take hours (`multipleOf`), or all memory. No thread of
this process can be stopped. So a stranger's grammar is compiled in another one
first, which is, and here only once it ended there.
"""

from __future__ import annotations

import json
import select
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmakv.generation._grammar import Grammar

# Imported where one is started: most programs start none.
if TYPE_CHECKING:
    import subprocess

STACK_BYTES = 512 << 20  # of a thread that compiles

_PROGRAM = Path(__file__).with_name("_trial_process.py")
_WALL = 15  # times the seconds, where others take the processors


class Trials:
    """Processes for that, one for each thread that tries at once. Safe from
    several threads. They end with it, or with this process.
    """

    def __init__(
        self, limits: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> None:
        self._limits = limits
        self._overrides = overrides
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def __del__(self) -> None:
        for process in getattr(self, "_idle", ()):
            _end(process)

    def passes(self, grammar: Grammar, seconds: float) -> bool:
        """Whether it compiles, or is refused, in so many seconds of a
        processor. Raises MemoryError if no process can be had.
        """
        line = json.dumps(
            {
                "kind": grammar.kind,
                "text": grammar.text,
                "seconds": seconds,
                "overrides": dict(self._overrides),
            }
        ).encode()
        process = self._taken()
        passed = False
        try:
            passed = _ended(process, line + b"\n", _WALL * seconds)
        finally:
            if passed:
                with self._lock:
                    self._idle.append(process)
            else:
                _end(process)
        return passed

    def _taken(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)  # somebody else has killed it
        import subprocess

        try:
            return subprocess.Popen(
                [
                    sys.executable, "-P", str(_PROGRAM),
                    json.dumps(self._limits), str(STACK_BYTES),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise MemoryError(
                f"no process that compiles: {error.strerror}"
            ) from None


def _ended(
    process: subprocess.Popen[bytes], line: bytes, seconds: float
) -> bool:
    """Whether a job ended, as the process says; it may have died of it."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return False
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if ready.poll(1000 * left):
            return process.stdout.readline() == b"ended\n"
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:
        pass
