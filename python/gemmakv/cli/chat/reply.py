"""One reply, streamed to the view."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from gemmakv._support.interrupts import handled
from gemmakv.cli.chat.book import Turn
from gemmakv.errors import CacheFullError

if TYPE_CHECKING:
    from gemmakv.chat._session import Session
    from gemmakv.chat._stream import ChatStream
    from gemmakv.cli.chat.chat import Chat


def reply(
    chat: Chat,
    text: str,
    on_stop: Callable[[], None] | None = None,
    is_ending: Callable[[], bool] = lambda: False,
) -> None:
    """Sends `text` to the current session and shows what it answers.

    With `on_stop`, Ctrl-C calls it and ends the reply; what is shown of it
    stays in the session, and is stored however often Ctrl-C is pressed. If
    nothing is shown, the message is taken back; where `is_ending` says that
    the whole chat ends, it stays on disk without a reply, as after a crash.
    Without `on_stop`, Ctrl-C raises KeyboardInterrupt.
    """
    stopped = taken_back = False
    stream: ChatStream | None = None

    def stop(number: int, frame: object) -> None:
        nonlocal stopped, taken_back
        taken_back = taken_back or not is_ending()
        stopped = True
        if on_stop is not None:
            on_stop()
        if stream is not None:
            stream.cancel()

    def start(session: Session) -> ChatStream:
        nonlocal stream
        stream = session.stream(text, prompt_progress=chat.view.reading)
        if stopped:
            stream.cancel()
        return stream

    with handled(signal.SIGINT, stop) if on_stop else nullcontext():
        _reply(chat, text, start, lambda: stopped and not taken_back)


def _reply(
    chat: Chat,
    text: str,
    start: Callable[[Session], ChatStream],
    keeps_draft: Callable[[], bool],
) -> None:
    """`keeps_draft` says whether a message without a reply stays on disk."""
    entry = chat.book.current
    session = chat.session(entry)
    chat.save_draft(entry, text)
    chat.view.begin_reply()
    turns, had = session.turns, len(session.cache)
    stream, said = None, False
    try:
        stream = start(session)
        for piece in stream:
            said = said or bool(piece.text)
            chat.view.thought(piece.reasoning)
            chat.view.piece(piece.text)
        generation = stream.result()
    except BaseException as error:
        if isinstance(error, Exception):
            if stream is not None:
                stream.cancel()  # the view may have failed, as it is gone
            if said or not keeps_draft():
                chat.drop_draft(entry)
        chat.view.drop_reply()
        if isinstance(error, CacheFullError):
            raise CacheFullError(_what_makes_room(session, error)) from None
        raise
    usage = generation.usage
    cancelled = generation.finish_reason == "cancelled"
    stays = not cancelled or bool(generation.token_ids)
    dropped = session.turns < turns + stays
    entry.last = Turn(usage, 0 if dropped else had - usage.cached_tokens)
    unsaid = cancelled and not generation.text
    if unsaid:
        if stays:
            session.undo()
        if keeps_draft():  # the record on disk is that of before, with it
            chat.view.drop_reply()
            return
    entry.record.draft = None
    chat.save(entry)
    chat.view.end_reply(entry.name, generation)
    if unsaid:
        chat.view.say("nothing was said, so the message is taken back")


def _what_makes_room(session: Session, error: CacheFullError) -> str:
    """The error, with what a person at a chat can do."""
    found, _, hint = str(error).partition("; ")
    if not found.startswith("session: "):  # not of this session's length
        found = f"{found}; {hint}" if hint else found
    ways = ["say less"]
    if session.turns:
        ways.append("/undo or /new make room")
        if session.overflow == "error":
            ways.append(
                "/set overflow drop_oldest_turns forgets the oldest turns by "
                "itself"
            )
    context = session.gemma.config.context_length
    if session.cache.capacity_tokens < context:
        ways.append(
            f"a chat with --capacity-tokens, at most {context}, begins "
            "sessions that take more"
        )
    return f"{found.removeprefix('session: ')}; {', '.join(ways)}"
