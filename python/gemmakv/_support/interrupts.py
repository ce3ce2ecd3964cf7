"""Ctrl-C where the command line starts and ends: exit code 130, no traceback.

Imported before all else, as the imports of the package take a while.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_EXIT_INTERRUPT = 130  # 128 + SIGINT, as shells have it


def exit_at_them() -> None:
    """From now on Ctrl-C ends the process, unless it means something else."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _exit)


def raise_them() -> None:
    """Undoes `exit_at_them`: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: object) -> None:
    del number, frame
    os._exit(_EXIT_INTERRUPT)


def _is_command_line() -> bool:
    """Whether this process is `gemmakv` or `python -m gemmakv`."""
    started = sys.argv[0] if getattr(sys, "argv", None) else ""
    if started == "-m":  # its package is imported before argv is set
        return "gemmakv" in sys.orig_argv
    return os.path.basename(started) == "gemmakv"


if _is_command_line():
    exit_at_them()
