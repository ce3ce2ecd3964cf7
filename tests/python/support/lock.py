"""Whether a call lets go of the interpreter's lock."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_LIMIT_S = 60  # what keeps the lock fails after it


def lets_others_run(call: Callable[[], object]) -> bool:
    """Whether another thread runs during one of the calls that are made until
    it does. Only what lets go of the lock by itself counts: nobody is made to.
    """
    go, ran = threading.Event(), threading.Event()

    def other() -> None:
        go.wait()
        ran.set()

    thread = threading.Thread(target=other)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        go.set()
        # A busy machine may leave the other thread without a processor.
        end = time.monotonic() + _LIMIT_S
        while not ran.is_set() and time.monotonic() < end:
            call()
        return ran.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()
