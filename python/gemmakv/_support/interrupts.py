"""Ctrl-C where the command line starts and ends: exit code 130, no traceback;
once all is done, the exit code that there is.

Imported before all else, as the imports of the package take a while.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


def exit_at_them() -> None:
    """From now on Ctrl-C ends the process, unless it means something else."""
    _replace(signal.default_int_handler, _exit)
    # Where one left an exec(), as those of dataclasses, Python would end the
    # process by the signal after all, until another exec() begins.
    exec("")


def raise_them() -> None:
    """Undoes `exit_at_them`: Ctrl-C raises KeyboardInterrupt again."""
    _replace(_exit, signal.default_int_handler)


@contextlib.contextmanager
def handled(number: int, function: Handler) -> Iterator[None]:
    """Has a signal call `function` while the body runs."""
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


def _exit(number: int, frame: object) -> None:
    del number, frame
    os._exit(130)  # 128 + SIGINT, as shells have it


def _ignore_them() -> None:
    """Has Ctrl-C ignored once all is done and the exit code stands.

    As Python takes itself apart it gives its handlers up: for a tenth of a
    second Ctrl-C would end the process by the signal.
    """
    _replace(_exit, signal.SIG_IGN)


def _replace(old: object, new: object) -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is old:
            signal.signal(signal.SIGINT, new)  # type: ignore[arg-type]


# The package of `-m` is imported before argv is set.
_started = os.path.basename(next(iter(getattr(sys, "argv", ())), ""))
if _started == "gemmakv" or (_started == "-m" and "gemmakv" in sys.orig_argv):
    atexit.register(_ignore_them)  # the first one, which runs last
    exit_at_them()
