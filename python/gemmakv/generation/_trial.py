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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmakv.generation._schema_fit import Tried
from gemmakv.generation._trial_process import refusal

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

    def refusals(
        self, grammars: Sequence[Tried], seconds: float
    ) -> tuple[list[str | None], float] | None:
        """Why each is refused, None of one that is not, and the seconds of a
        processor that this took; None where it takes more than `seconds`, or
        1 GiB. Raises MemoryError if no process can be had.
        """
        line = json.dumps(
            {
                "grammars": [one.job(self._overrides) for one in grammars],
                "seconds": seconds,
            }
        ).encode()
        process = self._taken()
        found: dict[str, Any] | None = None
        try:
            found = _ended(process, line + b"\n", _WALL * seconds)
        finally:
            if found is not None:
                with self._lock:
                    self._idle.append(process)
            else:
                _end(process)
        if found is None:
            return None
        return found["refusals"], found["seconds"]

    def refusals_here(self, grammars: Sequence[Tried]) -> list[str | None]:
        """`refusals` in this process, for grammars of its own user. Requires:
        a thread with `STACK_BYTES` of stack.
        """
        import llguidance

        vocabulary = llguidance.LLTokenizer("byte")
        limits = llguidance.LLParserLimits(**self._limits)
        return [
            refusal(llguidance, vocabulary, limits, one.job(self._overrides))
            for one in grammars
        ]

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
) -> dict[str, Any] | None:
    """Reads what the process answers to a job; it may have died of it."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if ready.poll(1000 * left):
            answer = process.stdout.readline()
            if not answer.endswith(b"\n"):
                return None
            found: dict[str, Any] = json.loads(answer)
            return found
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:
        pass
