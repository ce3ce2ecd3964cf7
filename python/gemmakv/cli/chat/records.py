"""What is kept of a conversation beside its KV cache, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from typing import Any

from gemmakv.cli.chat.settings import OVERFLOW
from gemmakv.errors import CorruptFile

FORMAT = 1
_ROLES = ("user", "model")


@dataclasses.dataclass
class Record:
    """A conversation's text, settings and place among the others.

    `messages` are (role, content) pairs without the system text. `parent` is
    the id of the conversation that this one was forked from, when it had
    `forked_at` turns. Times are seconds since the epoch; `tokens` is the
    length of the KV cache when the record was written.
    """

    name: str
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None
    forked_at: int = 0
    created: float = dataclasses.field(default_factory=time.time)
    changed: float = dataclasses.field(default_factory=time.time)
    system: str | None = None
    messages: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    overflow: str = "error"
    tokens: int = 0

    @property
    def turns(self) -> int:
        return sum(role == "user" for role, _ in self.messages)

    @property
    def last_text(self) -> str:
        """What the user said last; "" at the beginning."""
        for role, content in reversed(self.messages):
            if role == "user":
                return content
        return ""

    def to_json(self) -> bytes:
        document = {"format": FORMAT, **dataclasses.asdict(self)}
        # ASCII: any str goes through, lone surrogates included.
        return json.dumps(document, indent=1).encode("ascii") + b"\n"


def from_json(data: bytes) -> Record:
    """The record that `to_json` gave; CorruptFile if it is none."""
    try:
        document = json.loads(data)
    except ValueError:
        raise CorruptFile("expected JSON, found something else") from None
    if not isinstance(document, dict):
        raise CorruptFile("expected a JSON object")
    if document.pop("format", None) != FORMAT:
        raise CorruptFile(f"expected format {FORMAT}")
    fields = {field.name for field in dataclasses.fields(Record)}
    if document.keys() != fields:
        odd = sorted(document.keys() ^ fields)
        raise CorruptFile(f"missing or unknown: {', '.join(odd)}")
    for name, kinds in _KINDS.items():
        value = document[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise CorruptFile(f"{name}: found {type(value).__name__}")
    if document["overflow"] not in OVERFLOW:
        raise CorruptFile(f"overflow: found {document['overflow']!r}")
    document["messages"] = _messages(document["messages"])
    return Record(**document)


_KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "id": (str,),
    "parent": (str, type(None)),
    "forked_at": (int,),
    "created": (int, float),
    "changed": (int, float),
    "system": (str, type(None)),
    "messages": (list,),
    "options": (dict,),
    "overflow": (str,),
    "tokens": (int,),
}


def _messages(values: list[Any]) -> list[tuple[str, str]]:
    """Pairs of role and text: user and model by turns, the model last."""
    if len(values) % 2:
        raise CorruptFile("messages: the last one has no reply")
    messages = []
    for i, value in enumerate(values):
        role = _ROLES[i % 2]
        if (
            not isinstance(value, list)
            or len(value) != 2
            or value[0] != role
            or not isinstance(value[1], str)
        ):
            raise CorruptFile(f"messages: expected [{role!r}, text] at {i}")
        messages.append((role, value[1]))
    return messages
