"""A session's reply, piece by piece."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType

from gemmakv.generation import Generation, Piece
from gemmakv.stream import Stream

Conclude = Callable[["Generation | None"], None]


class ChatStream(Iterator[Piece], AsyncIterator[Piece]):
    """Pieces of a reply: `for piece in stream`, or `async for`.

    White space before the first word is left out. When the stream ends,
    however it ends, the turn becomes part of the session with what was
    returned; only a stream that raises leaves the session as it was.
    """

    def __init__(self, stream: Stream, conclude: Conclude) -> None:
        self._stream = stream
        self._conclude: Conclude | None = conclude
        self._started = False
        self._generation: Generation | None = None

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> Piece:
        while True:
            try:
                piece = next(self._stream)
            except StopIteration:
                self._end()
                raise
            except KeyboardInterrupt:
                self._end()
                raise
            except BaseException:
                self._fail()
                raise
            shown = self._shown(piece)
            if shown is not None:
                return shown

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> Piece:
        while True:
            try:
                piece = await self._stream.__anext__()
            except StopAsyncIteration:
                self._end()
                raise
            except Exception:
                self._fail()
                raise
            except BaseException:  # the task was cancelled: so is the reply
                self._end()
                raise
            shown = self._shown(piece)
            if shown is not None:
                return shown

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
        self.close()

    def cancel(self) -> None:
        """Ends the reply; from any thread, any number of times.

        The conversation keeps what was returned. Going on to iterate gives at
        most the text that was held back for a stop string.
        """
        self._stream.cancel()

    def close(self) -> None:
        """Waits for the end and makes the turn part of the session."""
        if self._conclude is not None:
            self._end()

    @property
    def result(self) -> Generation:
        """The whole generation; waits for the end of the reply.

        Its `text` is the reply without white space around it. Raises what the
        generation raised.
        """
        self.close()
        if self._generation is None:
            raise RuntimeError("the reply ended with an error and has no result")
        return self._generation

    def _shown(self, piece: Piece) -> Piece | None:
        """The piece without white space at the reply's start."""
        text = piece.text if self._started else piece.text.lstrip()
        self._started = self._started or bool(text)
        if not text and piece.token_id < 0 and piece.finish_reason is None:
            return None
        return dataclasses.replace(piece, text=text)

    def _end(self) -> None:
        try:
            result = self._stream.result()
        except BaseException:
            self._fail()
            raise
        conclude, self._conclude = self._conclude, None
        if conclude is not None:
            self._generation = dataclasses.replace(
                result, text=result.text.strip()
            )
            conclude(result)

    def _fail(self) -> None:
        conclude, self._conclude = self._conclude, None
        if conclude is not None:
            conclude(None)
