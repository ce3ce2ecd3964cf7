"""A reply of a session, piece by piece."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gemmakv import _core
from gemmakv.chat._conversation import Turn
from gemmakv.chat._reply import Part, calls_in, said
from gemmakv.generation._result import Generation, Piece, ToolCall
from gemmakv.generation._stream import _POLL_S, LetGo, PieceStream, Stream


class ChatStream(PieceStream):
    """Pieces of a reply that is being made: `for`, or `async for`, which
    never blocks its event loop.

    The texts of all pieces joined are the reply as it stands in the session's
    messages: white space around it is left out, so white space waits for the
    text that follows it. The same holds for `reasoning`, what the model thinks
    before. Calls of tools are no text: `result` has them. The session is busy
    until the stream has ended, is
    cancelled or dropped. To be read by one thread or task at a time.

    An exception of the generation or of its `progress` ends the reply: what
    was delivered of it stays in the session, marked `incomplete`. If that is
    nothing, the session is as it was before the turn.
    """

    def __init__(
        self, inner: Stream, turn: Turn, release: Callable[[], None]
    ) -> None:
        """`release` is called when the turn has ended."""
        self._inner = inner
        self._handle = inner._handle
        self._turn = turn
        self._release = release
        self._reader = turn.talk.reader()
        self._text = self._reasoning = ""  # of all pieces of `inner`
        self._calls: tuple[ToolCall, ...] = ()
        self._ready: deque[Piece] = deque()  # read, but not given out
        self._ended = False  # the session has the reply, or is as before
        self._generation: Generation | None = None
        self._failure: BaseException | None = None
        self._lock = threading.RLock()  # held while reading `inner`
        self._working = False  # the lock's holder is at it
        self._given = 0  # letters of the pieces given out

    def __del__(self) -> None:
        if getattr(self, "_ended", True):
            return
        if _core.is_guest():
            # The step that this waits for may be the one on this thread, in
            # which the collector runs.
            threading.Thread(target=self._let_go, daemon=True).start()
        else:
            self._let_go()

    def _let_go(self) -> None:
        with contextlib.suppress(LetGo):
            self.cancel()

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

        On return the session is free, and holds what was delivered: this
        waits for the model's step that runs (`acancel` and `async with` do so
        without blocking an event loop). Going on to iterate gives at most
        text that had been held back.
        """
        if not self._ended:
            self._handle.prepare_to_wait()
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

    def _waits_for_reader(self) -> bool:
        """Whether the reply comes to no end before somebody reads."""
        if self._ended:
            return False
        # The loop that would do it may be waiting here.
        _core.Call.wake([self._handle])
        return self._handle.waits_for_reader

    def _read_here(self) -> bool:
        """Whether this thread is in the middle of a read."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._working
        finally:
            self._lock.release()

    def _over(self) -> bool:
        return self._ended and not self._ready

    def _ending(self) -> bool:
        return not self._ended and self._inner._ending()

    def _save(self) -> Any:
        return (
            self._inner._save(),
            (self._text, self._reasoning, self._calls),
            self._given,
            tuple(self._ready),
            self._reader.state(),
        )

    def _restore(self, before: Any) -> None:
        if not self._ended:
            inner, texts, self._given, ready, reader = before
            self._text, self._reasoning, self._calls = texts
            self._ready = deque(ready)
            self._reader.restore(reader)
            self._inner._restore(inner)

    def _read(self, seconds: float) -> Piece | None:
        with self._lock:
            if self._ready or self._ended:
                return self._ready.popleft() if self._ready else None
            self._working = True
            try:
                piece = self._advance(seconds)
                self._given += 0 if piece is None else len(piece.text)
            finally:
                self._working = False
        # By a callback, in the middle of this. On a loop the next read, once
        # all is done, ends the turn.
        if self._inner._cancelled and (seconds > 0 or self._handle.done):
            self.cancel()
        return piece

    def _advance(self, seconds: float) -> Piece | None:
        """Reads `inner`, and ends the turn if that has ended. Requires: the
        lock.
        """
        try:
            piece = self._inner._read(seconds)
        except KeyboardInterrupt:
            raise  # the reader cancels
        except BaseException as error:
            self._fail(error)
            raise
        if piece is not None:
            piece = self._take(piece)
        if self._inner._finished:
            if piece is not None:
                self._ready.append(piece)
            self._settle()
            return self._ready.popleft() if self._ready else None
        return piece

    def _take(self, piece: Piece) -> Piece | None:
        """Notes a piece of `inner`; what is to be shown of it."""
        text, reasoning = self._note(
            self._reader.push(piece.token_id, piece.text)
        )
        if piece.token_id < 0 and not text and not reasoning:
            return None
        return dataclasses.replace(piece, text=text, reasoning=reasoning)

    def _note(self, parts: Sequence[Part]) -> tuple[str, str]:
        """Notes parts of the reply; gives the text and the thoughts of them."""
        text, reasoning = said(parts)
        self._text += text
        self._reasoning += reasoning
        self._calls += calls_in(parts)
        return text, reasoning

    def _take_rest(self) -> None:
        """Has the text given out that might have been the beginning of a call.
        Requires: `inner` has been read to its end.
        """
        text, _ = self._note(self._reader.end())
        if not text:
            return
        if not self._ready:
            self._ready.append(Piece("", -1))
        last = self._ready[-1]
        self._ready[-1] = dataclasses.replace(last, text=last.text + text)

    def _settle(self) -> None:
        """Ends the turn. Requires: the lock, and that `inner` has ended or is
        cancelled.
        """
        if self._ended:
            return
        self._inner._callback = None
        try:
            self._drain()
            self._take_rest()
            self._generation = self._turn.finish(self._inner.result())
            self._cut(len(self._generation.text))
        except BaseException as error:
            self._fail(error)
            raise
        self._end()

    def _fail(self, error: BaseException) -> None:
        """Keeps what was delivered; with nothing, all is as before the turn."""
        self._failure = error
        self._inner._callback = None
        self._inner.cancel()
        try:
            self._drain(Exception)  # the failure itself, again
            kept = self._inner._count > 0
            if kept:
                self._take_rest()
                kept_text = self._turn.keep(
                    self._text, self._reasoning, self._calls
                )
                self._cut(len(kept_text))
        except BaseException:
            kept = False  # the error that counts is the first
        finally:
            if not kept:
                self._turn.take_back()
            self._end()

    def _drain(self, *passed_over: type[Exception]) -> None:
        """Reads what `inner` still has; waits until its cache is free."""
        inner = self._inner
        while inner._ready or not inner._finished:
            try:
                piece = inner._read(_POLL_S)
            except passed_over:
                continue
            piece = None if piece is None else self._take(piece)
            if piece is not None:
                self._ready.append(piece)

    def _cut(self, length: int) -> None:
        """Has what is still to be given out end with the message."""
        left = length - self._given
        for i, piece in enumerate(self._ready):
            text = piece.text[: max(left, 0)]
            left -= len(piece.text)
            self._ready[i] = dataclasses.replace(piece, text=text)

    def _end(self) -> None:
        self._ended = True
        self._release()
