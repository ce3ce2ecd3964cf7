"""Whether a call lets go of the interpreter's lock."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def lets_others_run(call: Callable[[], object]) -> bool:
    """Whether another thread runs during one of some calls. Only what lets go
    of the lock by itself counts: nobody is made to.
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
        for _ in range(100):
            call()
            if ran.is_set():
                break
        return ran.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()
