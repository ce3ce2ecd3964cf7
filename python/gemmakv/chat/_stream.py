"""A reply to messages, piece by piece."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gemmakv import _core
from gemmakv._support.loops import loop_runs_here
from gemmakv.chat._reply import Part, ReplyReader, calls_in, said
from gemmakv.generation._result import Generation, Piece, ToolCall
from gemmakv.generation._stream import _POLL_S, LetGo, PieceStream, Stream


class Answer(Protocol):
    """A reply in the making: a turn of a session, or the result of a call."""

    def reader(self) -> ReplyReader:
        """Makes what tells the parts of the reply apart."""

    def finish(self, generation: Generation) -> Generation:
        """Takes in the reply; returns it with its parts apart."""

    def keep(
        self, text: str, reasoning: str, calls: Sequence[ToolCall]
    ) -> str:
        """Takes in what there is of one that failed; returns its text."""

    def take_back(self) -> None:
        """Leaves all as it was before."""


class ChatStream(PieceStream):
    """Pieces of a reply that is being made: `for`, or `async for`, which
    never blocks its event loop.

    The texts of all pieces joined are the reply's text, without white space
    around it, so white space waits for the text that follows it. The same
    holds for `reasoning`, what the model thinks before. Calls of tools are in
    `result` alone. To be read by one thread or task at a time.

    A session is busy until its stream has ended, is cancelled or dropped. An
    exception of the generation or of its `progress` ends the reply: what was
    delivered of it stays in the session, marked `incomplete`, or in the cache
    that `Gemma.chat` was given. If that is nothing, both are as they were.
    """

    def __init__(
        self, inner: Stream, turn: Answer, release: Callable[[], None]
    ) -> None:
        """Calls `release` when the turn has ended."""
        self._inner = inner
        self._handle = inner._handle
        self._turn = turn
        self._release = release
        self._reader = turn.reader()
        self._pushed: list[tuple[int, str]] = []  # to the reader
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
        if _core.is_guest() or loop_runs_here():
            # The step that this waits for may be the one on this thread, in
            # which the collector runs; and an event loop does not wait.
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
        """Tells whether the reply comes to no end before somebody reads."""
        if self._ended:
            return False
        # The loop that would do it may be waiting here.
        _core.Call.wake([self._handle])
        return self._handle.waits_for_reader

    def _read_here(self) -> bool:
        """Tells whether this thread is in the middle of a read."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._working
        finally:
            self._lock.release()

    def _over(self) -> bool:
        return self._ended and not self._ready

    def _pause(self) -> float | None:
        return self._inner._pause()

    def _ending(self) -> bool:
        return not self._ended and self._inner._ending()

    def _save(self) -> Any:
        return (
            self._inner._save(),
            self._given,
            tuple(self._ready),
            len(self._pushed),
        )

    def _restore(self, before: Any) -> None:
        if not self._ended:
            inner, self._given, ready, count = before
            self._ready = deque(ready)
            del self._pushed[count:]
            self._reader = self._turn.reader()
            for token, text in self._pushed:
                self._reader.push(token, text)
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
        self._pushed.append((piece.token_id, piece.text))
        text, reasoning = said(self._reader.push(*self._pushed[-1]))
        if piece.token_id < 0 and not text and not reasoning:
            return None
        return dataclasses.replace(piece, text=text, reasoning=reasoning)

    def _settle(self) -> None:
        """Ends the turn. Requires: the lock, and that `inner` has ended or is
        cancelled.
        """
        if self._ended:
            return
        self._inner._forget_callbacks()
        try:
            self._drain()
            self._give_held()
            self._generation = self._turn.finish(self._inner.result())
            self._cut(len(self._generation.text))
        except BaseException as error:
            self._fail(error)
            raise
        self._end()

    def _fail(self, error: BaseException) -> None:
        """Keeps what was delivered; with nothing, all is as before the turn."""
        self._failure = error
        self._inner._forget_callbacks()
        self._inner.cancel()
        try:
            self._drain(Exception)  # the failure itself, again
            kept = self._inner._count > 0
            if kept:
                self._give_held()
                reader = self._turn.reader()
                parts: list[Part] = []
                for token, text in self._pushed:
                    parts += reader.push(token, text)
                parts += reader.end()
                kept_text = self._turn.keep(*said(parts), calls_in(parts))
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

    def _give_held(self) -> None:
        """Adds to the last piece what its reader held back, as it might have
        been a call.
        """
        text, _ = said(self._reader.end())
        if not text:
            return
        last = self._ready.pop() if self._ready else Piece("", -1)
        self._ready.append(dataclasses.replace(last, text=last.text + text))

    def _cut(self, length: int) -> None:
        """Cuts what is still to be given out where the message ends."""
        left = length - self._given
        for i, piece in enumerate(self._ready):
            text = piece.text[: max(left, 0)]
            left -= len(piece.text)
            self._ready[i] = dataclasses.replace(piece, text=text)

    def _end(self) -> None:
        self._ended = True
        self._release()
        del self._turn  # which has the conversation
