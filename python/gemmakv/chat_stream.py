"""A reply of a session, piece by piece."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from gemmakv.generation import Generation, Piece
from gemmakv.stream import Stream

if TYPE_CHECKING:
    from gemmakv.session import Session, Turn


class ChatStream(Iterator[Piece], AsyncIterator[Piece]):
    """Pieces of a reply that is being made: `for`, or `async for`.

    The texts of all pieces joined are the reply as it stands in the session's
    messages: white space around it is left out, so white space waits for the
    text that follows it. The session is busy until the stream has ended, is
    cancelled or let go of. To be read by one thread or task at a time.
    """

    def __init__(self, session: Session, inner: Stream, turn: Turn) -> None:
        self._session = session
        self._inner = inner
        self._turn = turn
        self._trim = _Trimmer()
        self._ready: deque[Piece] = deque()  # read, but not given out
        self._ended = False  # the session has the reply, or is as before
        self._generation: Generation | None = None
        self._failure: BaseException | None = None
        self._lock = threading.RLock()  # held while reading `inner`
        self._reading = False

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> Piece:
        self._hold()
        while True:
            piece = self._read()
            if piece is not None:
                return piece
            if self._ended and not self._ready:
                raise StopIteration

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> Piece:
        # Here, as it takes 7 MB that most programs do not need.
        import asyncio

        self._hold()
        try:
            while True:
                piece = await asyncio.to_thread(self._read)
                if piece is not None:
                    return piece
                if self._ended and not self._ready:
                    break
        except asyncio.CancelledError:
            self.cancel()
            raise
        raise StopAsyncIteration

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self.cancel()

    @property
    def result(self) -> Generation:
        """The whole reply; waits for its end.

        Raises what ended the stream if it failed.
        """
        while not self._ended:
            self._read()
        if self._generation is None:
            assert self._failure is not None
            raise self._failure
        return self._generation

    def cancel(self) -> None:
        """Ends the reply; from any thread, any number of times.

        On return the session is free, and holds the reply as far as it came.
        Going on to iterate gives at most text that had been held back.
        """
        self._inner.cancel()
        with self._lock:
            # A signal handler may run in the middle of a read of its own
            # thread; that read then does the rest.
            if not self._reading:
                self._settle()

    def _hold(self) -> None:
        """Notes which thread must not wait for the session's end."""
        if not self._ended:
            self._session._holder = threading.get_ident()

    def _read(self) -> Piece | None:
        """The next piece, or None if there is none within a moment."""
        with self._lock:
            if self._ready:
                return self._ready.popleft()
            if self._ended:
                return None
            self._reading = True
            try:
                piece = self._inner._poll()
            except KeyboardInterrupt:
                self._settle()
                raise
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._reading = False
            if piece is not None:
                piece = self._trim(piece)
            if self._inner._finished or self._inner._cancelled:
                self._settle()
            return piece

    def _settle(self) -> None:
        """Ends the turn. Requires: the lock, and that `inner` has ended or is
        cancelled.
        """
        if self._ended:
            return
        self._inner.cancel()
        self._inner._callback = None
        try:
            while not self._inner._finished:
                piece = self._inner._poll()
                if piece is not None:
                    piece = self._trim(piece)
                if piece is not None:
                    self._ready.append(piece)
            self._generation = self._session._finish(
                self._turn, self._inner.result()
            )
        except BaseException as error:
            self._fail(error)
            raise
        self._end()

    def _fail(self, error: BaseException) -> None:
        """Leaves the session as it was before the turn."""
        self._failure = error
        self._inner.cancel()
        try:
            self._inner._handle.result()  # waits: the cache is in use
        except Exception:
            pass  # the failure itself, again
        self._session._take_back(self._turn)
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._session._release()


class _Trimmer:
    """Leaves out the white space around a text that comes in pieces."""

    def __init__(self) -> None:
        self._started = False
        self._held = ""  # white space that more text may follow

    def __call__(self, piece: Piece) -> Piece | None:
        """The piece with what is to be shown now; None if it holds nothing."""
        text = self._held + piece.text
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if piece.token_id < 0 and not shown:
            return None
        return dataclasses.replace(piece, text=shown)
