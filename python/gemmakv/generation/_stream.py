"""Token by token generation."""

from __future__ import annotations

import codecs
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from gemmakv import _core
from gemmakv._support.progress import Callback
from gemmakv.generation._result import (
    Generation,
    Piece,
    TopLogprobs,
    generation_of,
)

if TYPE_CHECKING:
    from gemmakv.cache._kv_cache import KVCache
    from gemmakv.generation._model import Model

# How often a waiting thread looks for Ctrl-C.
_POLL_S = 0.1


class Stream(Iterator[Piece], AsyncIterator[Piece]):
    """Pieces of a running generation: `for piece in stream`, or `async for`.

    The conversation keeps what was returned: when the stream is cancelled,
    when `progress` raises, which ends it at once, and when it fails; the error
    says how much that is. One that fails before its first piece leaves the
    conversation as it was. While a stream waits for its reader, calls with the
    same cache raise GemmaKVError.

    The generation runs by itself; leaving the loop early needs `cancel()`, or
    a `with` block, or letting go of the stream. To be used by one thread or
    task at a time (`cancel` excepted).
    """

    def __init__(
        self,
        handle: _core.StreamHandle,
        gemma: Model,
        cache: KVCache,
        max_tokens: int,
        callback: Callback | None,
    ) -> None:
        self._handle = handle
        # The stream keeps its model and its conversation alive.
        self._gemma = gemma
        self._cache = cache
        self._max_tokens = max_tokens
        self._callback = callback
        self._count = 0
        self._unreported = False  # the last piece, to `progress`
        self._failure: BaseException | None = None  # of `progress`
        self._finished = False
        self._ready: deque[Piece] = deque()  # read, but not given out
        self._cancelled = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._generation: Generation | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        while self._ready or not self._finished:
            piece = self._poll()
            if piece is not None:
                return piece
        raise StopIteration

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        # Here, as it takes 7 MB that most programs do not need.
        import asyncio

        try:
            while self._ready or not self._finished:
                piece = await asyncio.to_thread(self._poll)
                if piece is not None:
                    return piece
        except asyncio.CancelledError:
            self.cancel()
            raise
        raise StopAsyncIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not getattr(self, "_finished", True):
            self._handle.cancel()

    def cancel(self) -> None:
        """Ends the generation; from any thread, any number of times.

        The conversation keeps the tokens that were returned. Going on to
        iterate gives at most the text that was held back for a stop string.
        """
        if not self._finished:
            self._cancelled = True
            self._handle.cancel()

    def result(self) -> Generation:
        """Waits for the end and gives the whole generation.

        Raises what `progress` raised, or what the generation failed with.
        """
        for _ in self:
            pass
        if self._failure is not None:
            raise self._failure
        if self._generation is None:
            self._generation = generation_of(self._handle.result())
        return self._generation

    def _poll(self) -> Piece | None:
        """The next piece, or None if there is none within a moment."""
        if self._ready:
            return self._ready.popleft()
        if self._unreported:
            self._report(self._max_tokens)
        try:
            if self._cancelled:
                # What is unread is taken back when the generation ends, so
                # reading waits for that.
                self._handle.result()
            event = self._handle.next(0.0 if self._cancelled else _POLL_S)
            if event is None and self._cancelled:
                self._finished = True
        except KeyboardInterrupt:
            self.cancel()
            raise
        except BaseException:
            self._finished = True
            raise
        if event is None:
            return None
        self._finished = event.finished
        text = self._decoder.decode(event.bytes, event.finished)
        if event.token_id >= 0:
            self._count += 1
        if event.token_id >= 0 or text:
            self._ready.append(
                Piece(
                    text=text,
                    token_id=event.token_id,
                    logprob=event.logprob,
                    finish_reason=event.finish_reason,
                    top_logprobs=TopLogprobs.of(event.top_logprobs),
                )
            )
        # A piece is reported when the next one is asked for: what is kept if
        # that raises is what was returned.
        self._unreported = not event.finished
        if event.finished:
            self._report(self._count)
        return self._ready.popleft() if self._ready else None

    def _report(self, total: int) -> None:
        """Tells `progress`; what it raises ends the generation."""
        self._unreported = False
        if self._callback is None:
            return
        try:
            self._callback(self._count, total)
        except BaseException as error:
            self._callback = None
            self._failure = error
            self.cancel()
            # The first failure counts.
            with contextlib.suppress(Exception):
                self._handle.result()  # waits: the cache is in use
            raise
