"""A reply of a session, piece by piece."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from gemmakv.errors import GemmaKVError
from gemmakv.generation import Generation, Piece
from gemmakv.stream import Stream

if TYPE_CHECKING:
    from gemmakv.conversation import Turn
    from gemmakv.session import Session


class ChatStream(Iterator[Piece], AsyncIterator[Piece]):
    """Pieces of a reply that is being made: `for`, or `async for`.

    The texts of all pieces joined are the reply as it stands in the session's
    messages: white space around it is left out, so white space waits for the
    text that follows it. The session is busy until the stream has ended, is
    cancelled or let go of. To be read by one thread or task at a time.

    An exception of the generation or of its `progress` leaves the session as
    it was before the turn.
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
        self._working = False  # the lock's holder is at it
        self._by_task = False  # read by `async for`

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> Piece:
        self._read_by(task=False)
        try:
            while True:
                piece = self._read()
                if piece is not None:
                    return piece
                if self._ended and not self._ready:
                    raise StopIteration
        except KeyboardInterrupt:
            self.cancel()
            raise

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> Piece:
        # Here, as it takes 7 MB that most programs do not need.
        import asyncio

        self._read_by(task=True)
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
        for _ in self:
            pass
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
            # Called in the middle of a read of this very thread (by a signal
            # handler or a callback), it leaves the rest to that read.
            if not self._working:
                self._working = True
                try:
                    self._settle()
                finally:
                    self._working = False

    def _read_by(self, task: bool) -> None:
        """Notes who reads: that thread must not wait for the session."""
        if not self._ended:
            self._by_task = task
            self._session._holder = threading.get_ident()

    def _make_way(self) -> None:
        """A call of the reading thread needs the session: ends the reply.

        Raises GemmaKVError if it is still wanted.
        """
        if self._working or (self._by_task and not self._inner._cancelled):
            raise GemmaKVError(
                "session: its reply is still being streamed in this thread; "
                "read it to its end or cancel() it first"
            )
        self.cancel()

    def _read(self) -> Piece | None:
        """The next piece, or None if there is none within a moment."""
        with self._lock:
            if self._ready:
                return self._ready.popleft()
            if self._ended:
                return None
            self._working = True
            try:
                piece = self._advance()
            finally:
                self._working = False
        if self._inner._cancelled:
            self.cancel()
        return piece

    def _advance(self) -> Piece | None:
        """Reads `inner`, and ends the turn if that has ended. Requires: the
        lock.
        """
        try:
            piece = self._inner._poll()
        except KeyboardInterrupt:
            raise  # the reader cancels
        except BaseException as error:
            self._fail(error)
            raise
        if piece is not None:
            piece = self._trim(piece)
        if self._inner._finished:
            self._settle()
        return piece

    def _settle(self) -> None:
        """Ends the turn. Requires: the lock, and that `inner` has ended or is
        cancelled.
        """
        if self._ended:
            return
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
        finally:
            self._session._talk.take_back(self._turn)
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
