"""Turns as chats know them: a message and its reply, with the tokens that the
session's cache had gained when the reply had ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gemmakv.chat._messages import Message, messages_of
from gemmakv.chat._session_file import (
    SessionState,
    SessionText,
    TokenPart,
    options_to_json,
)
from gemmakv.chat._transcript import Ids
from gemmakv.chat.store import Record
from gemmakv.conversations._types import SessionInfo, Turn, bytes_of, new_id

_CACHE = "cache:"  # what the basis of a chat's tokens begins with
_NO_IDS: Ids = np.empty(0, np.int32)
# Of names that can be typed.
QUOTES = ('"', "'")
MAX_NAME_CHARS = 40


@dataclasses.dataclass(frozen=True)
class Said:
    """A turn as a chat knows it."""

    user: Message
    reply: Message
    basis: str = ""
    whole: bool = True
    tokens: Ids = dataclasses.field(default_factory=lambda: _NO_IDS)

    @classmethod
    def of(cls, turn: Turn) -> Said | None:
        """Gives a turn of the database; None: no chat can go on from it."""
        if len(turn.messages) != 1 or turn.tools:
            return None
        try:
            user, reply = messages_of([*turn.messages, turn.reply])
        except ValueError:
            return None
        if (user.role, reply.role) != ("user", "assistant") or reply.tool_calls:
            return None
        return cls(user, reply, turn.basis, turn.whole, turn.tokens)

    def is_as(self, wanted: Said, tokens: bool) -> bool:
        """Says whether it may stand where another is wanted; with `tokens`,
        which are to be the same.
        """
        if (self.user, self.reply) != (wanted.user, wanted.reply):
            return False
        if not tokens:
            return True
        if not len(wanted.tokens):
            # Those of another model, or of a server, do no harm.
            return not len(self.tokens) or self.basis != wanted.basis
        return (
            self.basis == wanted.basis
            and self.whole == wanted.whole
            and np.array_equal(self.tokens, wanted.tokens)
        )


@dataclasses.dataclass
class Line:
    """The turns of a session, the first one first."""

    ids: list[str]
    said: list[Said]

    def tokens_before(self, said: Said) -> Ids:
        """Gives those that the tokens of the next turn follow."""
        parts: list[Ids] = []
        while not said.whole:
            said = self.said[-1 - len(parts)]
            parts.insert(0, said.tokens)
        return np.concatenate([_NO_IDS, *parts])


def turns_of(record: Record, state: SessionState | None) -> list[Said]:
    """Gives the turns of a record; with `state`, and their tokens."""
    pairs = list(zip(record.messages[::2], record.messages[1::2]))
    if state is None:
        return [Said(*pair) for pair in pairs]
    ids, fingerprint = state.tokens.ids, state.tokens.fingerprint
    ends = [*state.text.ends, *[None] * len(pairs)][: len(pairs)]
    if pairs and ends[-1] is None:
        ends[-1] = len(ids) or None  # it says the same, so far
    found: list[Said] = []
    before: int | None = 0
    for pair, end in zip(pairs, ends):
        said = Said(*pair, basis=_CACHE + fingerprint)
        # Those after a turn whose end is not known begin anew.
        begin, before = before or 0, None
        if end is not None and end > begin:
            said = dataclasses.replace(
                said, whole=not begin, tokens=ids[begin:end]
            )
            before = end
        found.append(said)
    return found


def digest_of(kv_dtype: str, tokens: Ids) -> bytes:
    """Gives a name for tokens with their keys and values."""
    data = kv_dtype.encode() + b"\0" + bytes_of(tokens)
    return hashlib.blake2b(data, digest_size=16).digest()


def turn_after(line: Line, said: Said, record: Record, tenant: str) -> Turn:
    """Makes the row of the turn that comes after a line."""
    known = len(said.tokens) > 0
    return Turn(
        id=new_id("resp"),
        tenant=tenant,
        parent=line.ids[-1] if line.ids else None,
        depth=len(line.ids) + 1,
        created=record.changed,
        system=sound(record.system),
        tools=[],
        messages=[said.user.to_dict()],
        reply=said.reply.to_dict(),
        reason="cancelled" if said.reply.incomplete else "stop",
        usage={},
        params={} if record.think is None else {"think": record.think},
        basis=said.basis if known else "",
        whole=said.whole,
        tokens=said.tokens,
    )


def settings_of(record: Record, state: SessionState | None) -> dict[str, Any]:
    """Gives what is kept of a session besides, as JSON has it."""
    found = {
        "options": options_to_json(record.options),
        "overflow": record.overflow,
        "think": record.think,
        "tokens": record.tokens,
        "forked_at": record.forked_at,
    }
    if state is not None:
        text = state.text
        found |= {
            "template": text.template,
            "capacity_tokens": text.capacity_tokens,
            "kv_dtype": text.kv_dtype,
            "saved_prefill_tokens": text.saved_prefill_tokens,
        }
    return found


def state_of(found: SessionInfo, path: Sequence[Turn]) -> SessionState | None:
    """Gives what a chat's session was, with the tokens that turns have; None
    if they have none of a chat.
    """
    settings = found.settings
    last = len(path)
    while last and not (
        path[last - 1].basis.startswith(_CACHE) and len(path[last - 1].tokens)
    ):
        last -= 1
    if not last or "template" not in settings:
        return None
    basis, first = path[last - 1].basis, last - 1
    while not path[first].whole:
        first -= 1
        if first < 0 or path[first].basis != basis:
            return None
    parts = [turn.tokens for turn in path[first:last]]
    messages: list[Message] = []
    for turn in path:
        said = Said.of(turn)
        if said is None:
            return None
        messages += [said.user, said.reply]
    lengths = np.cumsum([len(part) for part in parts]).tolist()
    ends = [None] * first + lengths + [None] * (len(path) - last)
    text = SessionText(
        template=settings["template"],
        system=found.system,
        messages=messages,
        overflow=settings.get("overflow", "error"),
        options={},  # the record has them
        capacity_tokens=settings["capacity_tokens"],
        kv_dtype=settings["kv_dtype"],
        saved_prefill_tokens=settings["saved_prefill_tokens"],
        ends=ends,
        think=settings.get("think"),
    )
    fingerprint = basis[len(_CACHE) :]
    return SessionState(text, TokenPart(fingerprint, np.concatenate(parts)))


def shown_name(name: str | None, id: str) -> str:
    """Gives a name that can be typed, for one that may have any letters."""
    if name is None:
        return f"session-{id[-4:]}"
    kept = "".join(c if c.isprintable() and c != " " else "-" for c in name)
    kept = kept.strip("".join(QUOTES)).lstrip("/")[:MAX_NAME_CHARS]
    return kept or f"session-{id[-4:]}"


def sound(text: str | None) -> str | None:
    """Gives a text without halves of pairs, which no database takes."""
    return text and text.encode("utf-8", "replace").decode()
