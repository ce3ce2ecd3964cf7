"""Waiting for what happens: a poll of a state with a generous limit."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

LIMIT_S = 120.0  # what hangs fails after it; far above what anything needs
_PAUSE_S = 0.001  # an idle machine loses nothing, a busy one little


def wait_until(
    happened: Callable[[], object], limit_s: float = LIMIT_S
) -> None:
    """Waits until `happened` gives something true. Raises AssertionError if it
    does not within the limit.
    """
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(_PAUSE_S)


async def wait_in_loop(
    happened: Callable[[], object], limit_s: float = LIMIT_S
) -> None:
    """Does what `wait_until` does, while the loop runs its other tasks."""
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        await asyncio.sleep(_PAUSE_S)


def wait_for_child(pid: int, limit_s: float = LIMIT_S) -> int:
    """Waits for the end of a forked process and gives its exit code. Raises
    AssertionError if it hangs, and kills it.
    """
    found: list[int] = []

    def ended() -> bool:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append(os.waitstatus_to_exitcode(status))
        return bool(done)

    try:
        wait_until(ended, limit_s)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return found[0]
