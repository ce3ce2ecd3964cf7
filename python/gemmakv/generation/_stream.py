"""Token by token generation."""

from __future__ import annotations

import codecs
import contextlib
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn, Self

from gemmakv import _core
from gemmakv._support.loops import Bell, until_done
from gemmakv._support.progress import Callback
from gemmakv.errors import GemmaKVError
from gemmakv.generation._result import (
    Generation,
    Piece,
    TopLogprobs,
    generation_of,
)

# What takes a piece: text, token_id, logprob, finish_reason, top_logprobs.
# A logits_processor: of token ids and logits.
Processor = Callable[[Any, Any], Any]

# How often a waiting thread looks for Ctrl-C.
_POLL_S = 0.1
REPORT_S = 0.05  # how often progress is told on an event loop


class LetGo(GemmaKVError):
    """A stream ended to which nothing refers: no reader can be told."""


class OwnProcessor:
    """A logits_processor that its stream owns, and the core does not.

    What the processor is a method of, or closes over, may well have the
    stream. Were that cycle one through the core, which keeps a request until
    somebody reads it, the collector would not see that nothing refers to it.
    """

    __slots__ = ("__weakref__", "_processor")

    def __init__(self, processor: Processor) -> None:
        self._processor = processor

    def for_core(self) -> Processor:
        reference = weakref.ref(self)

        def process(token_ids: Any, logits: Any) -> Any:
            own = reference()
            if own is None:  # the end of the stream cancels, or has done so
                raise LetGo("stream: nothing refers to it any more")
            return own._processor(token_ids, logits)

        return process


class PieceStream(Iterator[Piece], AsyncIterator[Piece]):
    """Pieces of a running generation: `for piece in stream`, or `async for`.

    `async for` never blocks its event loop. What a task that is cancelled, or
    a thread that gets Ctrl-C, was not given yet does not count as read.
    """

    _handle: _core.Call
    _bell: Bell | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        before = self._save()
        try:
            while not self._over():
                self._handle.prepare_to_wait()
                piece = self._read(_POLL_S)
                if piece is not None:
                    return piece
        except KeyboardInterrupt:
            # It may have struck anywhere, also after the last read.
            self._restore(before)
            self.cancel()
            raise
        except StopIteration as error:  # of code that the call runs
            raise RuntimeError("stream: raised StopIteration") from error
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while not self._over():
            self._handle.prepare_to_wait()
            if self._ending():
                await self._sleep_until_done()
            piece = self._read(0)
            if piece is not None:
                self._watch()
                assert self._bell is not None
                self._bell.note_read(self._handle)
                return piece
            if self._over() or self._ending():
                continue
            if not self._watch():
                await self._sleep(self._pause())
        raise StopAsyncIteration

    def __reduce__(self) -> NoReturn:
        raise GemmaKVError(
            "stream: a running generation cannot be copied or pickled; "
            "expected result() of it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.acancel()

    @abstractmethod
    def cancel(self) -> None: ...

    async def acancel(self) -> None:
        """Ends the generation as `cancel` does, and waits for its end, a step
        of the model at most, without blocking the event loop.
        """
        if self._over():
            return
        self._handle.prepare_to_wait()
        reader = self._bell
        self._handle.cancel()
        try:
            await self._sleep_until_done()
        finally:
            if reader is not None:
                reader.core.ring()  # on another loop
            if self._handle.done:
                self.cancel()

    def close(self) -> None:
        """Ends the generation, as `cancel` does; also done by
        `contextlib.closing`.
        """
        self.cancel()

    async def aclose(self) -> None:
        """Ends the generation and waits for it without blocking the event
        loop, as `acancel` does; also done by `contextlib.aclosing`.
        """
        await self.acancel()

    @abstractmethod
    def result(self) -> Generation: ...

    @abstractmethod
    def _ending(self) -> bool:
        """Tells whether reading waits for the end, after a cancel."""

    @abstractmethod
    def _over(self) -> bool:
        """Tells whether nothing more is to be given out."""

    @abstractmethod
    def _read(self, seconds: float) -> Piece | None:
        """Returns the next piece, or None if there is none in that time.

        After a cancel, waits for the end, or for nothing with 0 seconds.
        """

    @abstractmethod
    def _save(self) -> Any:
        """Returns what was read so far, for `_restore`."""

    @abstractmethod
    def _restore(self, before: Any) -> None:
        """Ends the generation, as if nothing had been read since."""

    def _watch(self) -> bool:
        """Has this loop told of pieces; returns whether it was not before."""
        bell = self._bell
        if bell is not None and bell.runs_here():
            return False
        self._bell = Bell()
        self._handle.watch(self._bell.core)
        _core.Call.wake([self._handle])  # another loop may have left it asleep
        return True

    def _pause(self) -> float | None:
        """Seconds after which to look again although nothing has come."""
        return None

    async def _sleep(self, seconds: float | None) -> None:
        assert self._bell is not None
        try:
            await self._bell.wait(seconds)
        except GeneratorExit:
            self._handle.cancel()
            raise
        except BaseException:  # the task is cancelled
            await self.acancel()
            raise

    async def _sleep_until_done(self) -> None:
        """Requires: cancelled."""
        self._watch()
        assert self._bell is not None
        await until_done(self._handle, self._bell)


class Stream(PieceStream):
    """Pieces of a running generation: `for piece in stream`, or `async for`.

    The conversation keeps what was returned: when the stream is cancelled,
    when `progress` raises, which ends it at once, and when it fails; the error
    says how much that is. One that ends so before its first piece leaves the
    conversation as it was, without the prompt. While a stream waits for its
    reader, calls with the same cache raise GemmaKVError.

    The generation runs by itself; leaving the loop early needs `cancel()`, or
    a block of `with` or `async with`, or letting go of the stream; so does a
    task that is cancelled between two pieces. To be used by one thread or task
    at a time (`cancel` excepted).
    """

    def __init__(
        self,
        handle: _core.Call,
        alive: object,
        max_tokens: int,
        callback: Callback | None,
        prompt_callback: Callback | None = None,
    ) -> None:
        # What is to live as long. Its conversation lives until it has ended.
        self._handle = handle
        self._alive = alive
        self._max_tokens = max_tokens
        self._callback = callback
        self._prompt_callback = prompt_callback  # None once it was told all
        self._prompt_done = -1  # tokens that it was told
        self._count = 0
        self._events = 0  # read of the handle
        self._unreported = False  # the last piece, to `progress`
        self._failure: BaseException | None = None  # of a callback
        self._failed = False  # it is to be raised
        self._finished = False
        self._ready: deque[Piece] = deque()  # read, but not given out
        self._cancelled = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False  # it has the beginning of a character
        self._generation: Generation | None = None

    def __del__(self) -> None:
        if not getattr(self, "_finished", True):
            self._handle.cancel()

    def cancel(self) -> None:
        """Ends the generation; from any thread, any number of times.

        The conversation keeps the tokens that were returned, once the step
        that runs has ended: `result` and `acancel` wait for that, and so do
        calls that change the conversation. Until then a fork or a copy may
        have more tokens. Going on to iterate gives at most the text that was
        held back for a stop string.
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
            self._handle.prepare_to_wait()
            self._generation = generation_of(self._handle.result())
        return self._generation

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the cache or the prefix cache had, as far
        as that is known yet.
        """
        begin, _ = self._handle.prompt_range
        return max(0, self._handle.cached_tokens - begin)

    def _text(self, data: bytes, last: bool) -> str:
        """The characters that are complete with `data`."""
        if self._partial or last or not data.isascii():
            text = self._decoder.decode(data, last)
            self._partial = bool(self._decoder.getstate()[0])
            return text
        return data.decode("ascii")

    def _over(self) -> bool:
        return self._finished and not self._ready

    def _ending(self) -> bool:
        return self._cancelled and not self._finished

    def _save(self) -> Any:
        return (
            self._count,
            self._events,
            self._finished,
            tuple(self._ready),
            self._decoder.getstate(),
        )

    def _restore(self, before: Any) -> None:
        self._count, self._events, self._finished, ready, state = before
        self._ready = deque(ready)
        self._decoder.setstate(state)
        self._partial = bool(state[0])
        if not self._finished:
            self._cancelled = True
            self._handle.cancel(self._events)

    def _read(self, seconds: float) -> Piece | None:
        if self._ready:
            return self._ready.popleft()
        if self._unreported:
            self._report(self._max_tokens)
        if self._prompt_callback is not None:
            self._report_prompt(self._handle.progress)
        if self._cancelled and seconds <= 0 and not self._handle.done:
            return None
        self._raise_failure()
        try:
            if self._cancelled:
                # What is unread is taken back when the generation ends, so
                # reading waits for that.
                self._handle.result()
            event = self._handle.next(0 if self._cancelled else seconds)
            if event is None and self._cancelled:
                self._finished = True
        except KeyboardInterrupt:
            raise  # the reader cancels
        except BaseException:
            self._finished = True
            raise
        if event is None:
            return None
        if self._prompt_callback is not None and not self._cancelled:
            self._report_prompt(None)
            self._raise_failure()
        self._events += 1
        self._finished = event.finished
        text = self._text(event.bytes, event.finished)
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
            self._raise_failure()
        return self._ready.popleft() if self._ready else None

    def _report(self, total: int) -> None:
        """Tells `progress`; what it raises ends the generation."""
        self._unreported = False
        if self._callback is not None:
            self._tell(self._callback, self._count, total)

    def _report_prompt(self, tokens: int | None) -> None:
        """Tells `prompt_progress` how many tokens were read; None: all. What
        it raises ends the generation.
        """
        begin, end = self._handle.prompt_range
        total = end - begin
        done = total if tokens is None else min(tokens, total)
        if done > self._prompt_done and self._prompt_callback is not None:
            self._prompt_done = done
            self._tell(self._prompt_callback, done, total)
        if tokens is None:
            self._prompt_callback = None

    def _pause(self) -> float | None:
        return None if self._prompt_callback is None else REPORT_S

    def _forget_callbacks(self) -> None:
        """Tells nobody any more how far it is."""
        self._callback = self._prompt_callback = None

    def _tell(self, callback: Callback, done: int, total: int) -> None:
        try:
            callback(done, total)
        except BaseException as error:
            self._forget_callbacks()
            self._failure = error
            self._failed = True
            if not self._finished:
                self._cancelled = True
                self._handle.cancel(self._events)

    def _raise_failure(self) -> None:
        if self._failed:
            self._failed = False
            assert self._failure is not None
            # The first failure counts.
            with contextlib.suppress(Exception):
                self._handle.result()  # waits: the cache is in use
            raise self._failure
