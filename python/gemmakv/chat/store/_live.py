"""Live sessions of what is kept: the KV cache if it fits, else the text.

Text is never lost to a KV cache: one that is damaged, of other weights, or
older than the text is dropped, and the text is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import BinaryIO

from gemmakv._support.files import PathOrFile
from gemmakv.chat._gemma import Gemma
from gemmakv.chat._messages import Message
from gemmakv.chat._session import Session
from gemmakv.chat._session_file import (
    HOW_TO_REBUILD,
    SessionState,
    read,
    split,
)
from gemmakv.chat._templates import knows_thinking
from gemmakv.chat.store._records import Record
from gemmakv.errors import CorruptFile, GemmaKVError, MismatchError

_TEXT_KEPT = "the text is kept, and computed again with the next message"


def from_file(gemma: Gemma, path: PathOrFile) -> tuple[Session, str]:
    """The session of a file that `Session.save` wrote, and a line to say (or
    ""). Raises CorruptFile naming `path` if its text is not sound,
    MismatchError if it has tools, which a store does not keep.
    """
    try:
        data = read(path)  # once: it may be a pipe
        text, _ = split(memoryview(data), whole=False)
        if text.knows_tools:
            raise MismatchError(
                f"{path}: the session has tools or their results, which only "
                "programs can go on with; expected one of messages alone"
            )
        try:
            return Session.from_bytes(data, gemma), ""
        except (CorruptFile, MismatchError) as error:
            line = _again(str(error))
        return Session.from_bytes(data, gemma, rebuild=True), line
    except CorruptFile as error:
        raise CorruptFile(f"{path}: {error}") from None


def from_store(
    gemma: Gemma,
    record: Record,
    file: BinaryIO | SessionState | OSError | None,
    make: Callable[[], Session],
) -> tuple[Session, str]:
    """The session of a record, and a line to say (or "").

    `file` is its session file, or what one of tokens says, or why that cannot
    be opened; None if there is none. `make` gives an empty session for when
    that is of no use.
    """
    session, line = None, ""
    if isinstance(file, OSError):
        line = _again(file.strerror or str(file))
    elif file is not None:
        try:
            if isinstance(file, SessionState):
                session = Session._from_state(file, gemma)
            else:
                with file:
                    session = Session.load(file, gemma)
        except (GemmaKVError, ValueError) as error:
            line = _again(str(error))
        except OSError as error:
            line = _again(error.strerror or str(error))
    if session is None:
        session = make()
        line = line or f"its KV cache was not stored; {_TEXT_KEPT}"
    messages = [m for m in session.messages if m.role != "system"]
    held = common_turns(messages, record.messages)
    if session.system != record.system:
        session.system = record.system
    thinks = record.think
    if thinks and not knows_thinking(session.template):
        thinks = None  # what it had was in the session file
    if session.think is not thinks:
        session.think = thinks
    session.goto(held)  # what was taken back since
    if held < record.turns:
        session.messages = record.messages
    session.options.clear()
    session.options.update(record.options)
    session.overflow = record.overflow
    if thinks is not record.think:
        line += "; " if line else ""
        line += (
            f"think is none now, as the template {session.template.name} has "
            "no thoughts"
        )
    elif not record.messages:
        return session, ""
    if held < record.turns and not line:
        line = (
            "the KV cache of the last turns had not been stored; it is "
            "computed again with the next message"
        )
    return session, line


def common_turns(some: Sequence[Message], others: Sequence[Message]) -> int:
    """Turns at the beginning that are the same in both."""
    same = 0
    while same < min(len(some), len(others)) and some[same] == others[same]:
        same += 1
    return same // 2  # a user's message and the reply


def _again(reason: str) -> str:
    reason = " ".join(reason.split()).removesuffix(f"; {HOW_TO_REBUILD}")
    return f"the stored KV cache cannot be used ({reason}); {_TEXT_KEPT}"
