"""One call of a session at a time: locking that never waits for a reader."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Iterator

from gemmakv._support.loops import Bell
from gemmakv.cache._kv_cache import KVCache
from gemmakv.chat._stream import ChatStream
from gemmakv.errors import GemmaKVError

# A reader that is at it may take what there is in this time, looked at so many
# times: were the process frozen meanwhile, so was the reader.
_GRACE_S = 0.1
_LOOKS = 4


class OneCall:
    """The right to work on a conversation: `with`, or `async with`, which
    does not block its event loop.

    Held by a call, or by a stream from its beginning to its end, whichever
    threads read it. Entering raises GemmaKVError where waiting would never
    end: in the middle of a call of the same thread, or after a stream that
    nobody reads; ValueError when it was closed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._caller = 0  # the thread of the call
        self._stream: weakref.ref[ChatStream] | None = None
        self._bells: set[Bell] = set()  # of tasks that wait

    def acquire(self) -> None:
        with self._changed:
            for timeout in self._waits(blocking=True):
                if self._busy:  # letting go of a stream may have ended it
                    self._changed.wait(timeout)

    async def aacquire(self) -> None:
        with self._told() as bell:
            for timeout in self._waits(blocking=False):
                if self._busy:
                    await bell.wait(timeout)

    def keep_for(self, stream: ChatStream) -> None:
        """It is the stream's now, which releases it. Requires: acquired."""
        with self._changed:
            self._stream = weakref.ref(stream)
            self._tell()  # who waits is to look after the reader now

    def release(self) -> None:
        with self._changed:
            self._busy = False
            self._stream = None
            self._tell()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    async def __aenter__(self) -> None:
        await self.aacquire()

    async def __aexit__(self, *exception: object) -> None:
        self.release()

    def check_open(self) -> None:
        """Raises ValueError if it was closed."""
        if self._closed:
            raise ValueError(
                "session: closed; begin a new one, or load one that was saved"
            )

    def close(self, cache: KVCache) -> None:
        """Ends a stream, waits for a call and closes the cache."""
        while not cache.closed:
            with self._changed:
                stream, timeout = self._try_to_close(cache)
                if stream is None and not cache.closed:
                    if timeout is None:
                        self._check_caller()
                    self._changed.wait(timeout)
            if stream is not None:
                if stream._read_here():
                    raise _streamed()
                stream.cancel()

    async def aclose(self, cache: KVCache) -> None:
        """Does `close` without blocking its event loop."""
        with self._told() as bell:
            while not cache.closed:
                with self._changed:
                    stream, timeout = self._try_to_close(cache)
                if stream is not None:
                    await stream.acancel()
                elif not cache.closed:
                    await bell.wait(timeout)

    def _try_to_close(
        self, cache: KVCache
    ) -> tuple[ChatStream | None, float | None]:
        """The stream that is to end first, or none and the seconds to wait at
        most. Requires: `_changed` is held.
        """
        if not self._busy:
            self._closed = True
            cache.close()
        if self._stream is None:
            return None, None
        return self._stream(), _GRACE_S / _LOOKS

    @contextlib.contextmanager
    def _told(self) -> Iterator[Bell]:
        """A bell of this loop that rings when something has changed."""
        bell = Bell()
        with self._changed:
            self._bells.add(bell)
        try:
            yield bell
        finally:
            with self._changed:
                self._bells.discard(bell)

    def _tell(self) -> None:
        """Wakes who waits. Requires: `_changed` is held."""
        self._changed.notify_all()
        for bell in self._bells:
            bell.core.ring()

    def _check_caller(self) -> None:
        """Raises where waiting for a call would be for ever."""
        if self._caller == threading.get_ident():
            raise GemmaKVError(
                "session: a call of this thread is under way; expected "
                "`progress`, signal handlers and other tasks of its "
                "event loop to leave it alone, or to await asend()"
            )

    def _waits(self, blocking: bool) -> Iterator[float | None]:
        """Seconds to wait at most before another try, until one succeeds."""
        waiting_since, looks = math.inf, 0
        while True:
            with self._changed:
                if not self._busy:
                    self.check_open()
                    self._busy = True
                    self._caller = threading.get_ident()
                    return
                stream = None if self._stream is None else self._stream()
                timeout = None if self._stream is None else _GRACE_S / _LOOKS
                if blocking and self._stream is None:
                    self._check_caller()
            if blocking and stream is not None and stream._read_here():
                raise _streamed()
            if stream is None or not stream._waits_for_reader():
                waiting_since, looks = math.inf, 0
            else:
                now = time.monotonic()
                waiting_since = min(waiting_since, now)
                if now - waiting_since >= _GRACE_S and looks >= _LOOKS:
                    raise _streamed()
                looks += 1
            del stream  # waiting must not keep it
            yield timeout


def _streamed() -> GemmaKVError:
    return GemmaKVError(
        "session: its reply is still being streamed; read it to its end or "
        "cancel() it first"
    )
