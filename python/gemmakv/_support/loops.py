"""Waiting on an event loop for what the core does on its own threads."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from gemmakv import _core

# asyncio is imported where a loop runs: it takes 7 MB that most programs do
# not need.
if TYPE_CHECKING:
    import asyncio

_hubs: weakref.WeakKeyDictionary[Any, _Hub] = weakref.WeakKeyDictionary()
_hubs_lock = threading.Lock()


def loop_runs_here() -> bool:
    """Tells whether this thread runs an event loop, which is not to wait."""
    if "asyncio" not in sys.modules:
        return False
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Hub:
    """The pipe of the core that wakes one loop, which watches it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waker = _core.Waker()
        # Weak: what is left over on a loop that was closed can go.
        self.bells: weakref.WeakValueDictionary[int, Bell] = (
            weakref.WeakValueDictionary()
        )
        self.read: set[_core.Call] = set()
        loop.add_reader(self.waker.fd, self._take)

    def wake_read(self) -> None:
        _core.Call.wake(list(self.read))
        self.read.clear()

    def _take(self) -> None:
        for key in self.waker.take():
            bell = self.bells.get(key)
            if bell is not None:
                bell.wake()


class Bell:
    """Lets tasks sleep until another thread rings.

    Of the loop that runs when it is made. No thread waits or polls for it, and
    `core.ring()` takes no lock of the interpreter.
    """

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.get_running_loop()
        with _hubs_lock:
            hub = _hubs.get(self.loop)
            if hub is None:
                hub = _hubs[self.loop] = _Hub(self.loop)
        self._hub = hub
        self.core = _core.Bell(hub.waker)
        self.waiting: set[asyncio.Future[None]] = set()
        hub.bells[self.core.key] = self

    def runs_here(self) -> bool:
        """Tells whether the running loop is its loop."""
        import asyncio

        return self.loop is asyncio.get_running_loop()

    def note_read(self, call: _core.Call) -> None:
        """Has the core go on with a call, once all tasks that can read have
        done so: then the next tokens of all share a step.
        """
        if not self._hub.read:
            self.loop.call_soon(self._hub.wake_read)
        self._hub.read.add(call)

    def wake(self) -> None:
        """Has the tasks go on that wait."""
        for future in self.waiting:
            _wake(future)

    async def wait(self, seconds: float | None = None) -> None:
        """Until it rings, or the time is over, or for no reason.

        To be called right after a look at what is waited for.
        """
        future = self.loop.create_future()
        timer = None
        if seconds is not None:
            timer = self.loop.call_later(seconds, _wake, future)
        self.waiting.add(future)
        try:
            await future
        finally:
            self.waiting.discard(future)
            if timer is not None:
                timer.cancel()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def until_done(call: _core.Call, bell: Bell) -> None:
    """Waits for the end of a call that was told to end: a step at most.

    A cancel meanwhile is put off until then.
    """
    import asyncio

    cancelled = None
    while not call.done:
        try:
            await bell.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
