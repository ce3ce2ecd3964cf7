"""Ctrl-C at a moment that a test chooses."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from support.waits import wait_until


@contextlib.contextmanager
def ctrl_c_when(happened: Callable[[], object]) -> Iterator[None]:
    """Sends this process Ctrl-C, from another thread, once `happened` gives
    something true.
    """

    def press() -> None:
        wait_until(happened)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
