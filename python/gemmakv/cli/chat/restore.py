"""Live sessions of what is on disk: the KV cache if it fits, else the text.

Text is never lost to a KV cache: one that is damaged, of other weights, or
older than the text is dropped, and the text is computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gemmakv
from gemmakv.chat._session import Message, Session
from gemmakv.chat._session_file import MAGIC
from gemmakv.cli import describe
from gemmakv.cli.chat.records import Record
from gemmakv.errors import CorruptFile, GemmaKVError, MismatchError

Pairs = list[tuple[str, str]]


def pairs_of(session: Session) -> Pairs:
    """(role, content) of all messages but the system text."""
    return [
        (m.role.replace("assistant", "model"), m.text)
        for m in session.messages
        if m.role != "system"
    ]


def plain_options(session: Session) -> dict[str, Any]:
    """Its options as far as JSON can hold them."""
    plain = {}
    for name, value in session.options.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            continue
        plain[name] = value
    return plain


def from_file(
    gemma: gemmakv.Gemma, data: bytes, path: str
) -> tuple[Session, str]:
    """A session of a file's bytes, and a line to say (or "").

    Raises CorruptFile naming `path`.
    """
    try:
        return Session.from_bytes(gemma, data), ""
    except MismatchError as error:
        return Session.from_bytes(gemma, data, rebuild=True), _again(error)
    except CorruptFile as error:
        raise CorruptFile(
            f"{path}: {describe(error)}; expected a file that /save wrote"
        ) from None


def from_store(
    gemma: gemmakv.Gemma,
    record: Record,
    data: bytes | None,
    make: Callable[[], Session],
) -> tuple[Session, str]:
    """The session of a record, and a line to say (or "").

    `data` is what its session file holds; None if there is none. `make` gives
    an empty session for when that is of no use.
    """
    session, line = None, ""
    if data is not None:
        try:
            session = Session.from_bytes(gemma, data)
        except GemmaKVError as error:
            line = _again(error)
    if session is None:
        session = make()
        line = line or _again("it was not stored")
    held = _common_turns(pairs_of(session), record.messages)
    if session.system != record.system:
        session.system = record.system
    session.goto(held)  # what was taken back since
    if held < record.turns:
        session.messages = [Message(*pair) for pair in record.messages]
    session.options.clear()
    session.options.update(record.options)
    session.overflow = record.overflow
    if not record.messages:
        return session, ""
    if held < record.turns and not line:
        line = (
            "the KV cache of the last turns had not been stored; it is "
            "computed again with the next message"
        )
    return session, line


def is_session_file(path: Path) -> bool:
    """Whether a file is one that `Session.save` wrote, or empty."""
    with open(path, "rb") as file:
        head = file.read(len(MAGIC))
    return not head or head == MAGIC


def _again(reason: object) -> str:
    text = describe(reason) if isinstance(reason, Exception) else reason
    return (
        f"the stored KV cache cannot be used ({text}); the text is kept, and "
        "computed again with the next message"
    )


def _common_turns(some: Pairs, others: Pairs) -> int:
    """Turns at the beginning that are the same in both."""
    same = 0
    while same < min(len(some), len(others)) and some[same] == others[same]:
        same += 1
    return same // 2  # a user's message and the reply
