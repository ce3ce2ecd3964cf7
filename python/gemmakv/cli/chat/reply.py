"""One reply, streamed to the view."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemmakv.errors import CacheFullError

if TYPE_CHECKING:
    from gemmakv.cli.chat.chat import Chat


def reply(
    chat: Chat, text: str, on_stop: Callable[[], None] | None = None
) -> None:
    """Sends `text` to the current session and shows what it answers.

    With `on_stop`, Ctrl-C calls it and ends the reply; what is shown of it
    stays in the session (if that is nothing, so does not the message either).
    Without, it raises KeyboardInterrupt.
    """
    entry = chat.book.current
    session = chat.session(entry)
    chat.save_draft(entry, text)
    chat.view.begin_reply()
    try:
        nothing = contextlib.nullcontext()
        with _Interrupts(on_stop) if on_stop else nothing as stop:
            stream = session.stream(text)
            if stop is not None:
                stop.call(stream.cancel)
            for piece in stream:
                chat.view.piece(piece.text)
        generation = stream.result()
    except BaseException as error:
        chat.view.drop_reply()
        if isinstance(error, Exception):
            chat.drop_draft(entry)
        if isinstance(error, CacheFullError):
            raise CacheFullError(
                f"{error}; /set overflow drop_oldest_turns forgets the oldest "
                "turns by itself, /undo or /new make room"
            ) from None
        raise
    chat.view.end_reply(entry.name, generation)
    if generation.finish_reason == "cancelled" and not generation.text:
        session.undo()
        chat.view.say("nothing was said, so the message is taken back")
    chat.save(entry)


class _Interrupts:
    """While its body runs, Ctrl-C calls two functions and raises nothing.

    A Ctrl-C that comes before there is the second one is kept for it.
    """

    def __init__(self, first: Callable[[], None]) -> None:
        self._first = first
        self._function: Callable[[], None] | None = None
        self._happened = False
        self._before: Any = None

    def call(self, function: Callable[[], None]) -> None:
        self._function = function
        if self._happened:
            function()

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: object) -> None:
        del number, frame
        self._happened = True
        self._first()
        if self._function is not None:
            self._function()
