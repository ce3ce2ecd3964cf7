"""What is kept of a session beside its KV cache, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from typing import Any

from gemmakv._support.json import to_json
from gemmakv.chat._messages import Message, messages_of
from gemmakv.chat._session_file import (
    OVERFLOWS,
    kinds_of,
    options_from_json,
    options_to_json,
)
from gemmakv.errors import CorruptFile, MismatchError, brief, unexpected

FORMAT = 2


class NewerRecord(MismatchError):
    """A record that a newer version wrote: to be left alone.

    `name` is the session's name, "" if it cannot be told.
    """

    def __init__(self, name: object, reason: str) -> None:
        self.name = name if isinstance(name, str) else ""
        super().__init__(f"{reason}; update gemmakv to open it")


@dataclasses.dataclass
class Record:
    """A session's text, settings and place among the others.

    Attributes:
      name: what people call it.
      id: 32 hexadecimal digits, its own for ever.
      parent: id of the session that this one was forked from, or None.
      forked_at: turns that one had then.
      created: seconds since the epoch.
      changed: seconds since the epoch.
      system: the system text.
      messages: the others.
      draft: what the user said last, if its reply is not among the messages:
        it was not made, or not kept.
      options: generation keywords.
      overflow: "error" or "drop_oldest_turns".
      tokens: length of the KV cache when the record was written.
      think: whether the model is to think; None: as the template has it.
    """

    name: str
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None
    forked_at: int = 0
    created: float = dataclasses.field(default_factory=time.time)
    changed: float = dataclasses.field(default_factory=time.time)
    system: str | None = None
    messages: list[Message] = dataclasses.field(default_factory=list)
    draft: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    overflow: str = "error"
    tokens: int = 0
    think: bool | None = None

    @property
    def turns(self) -> int:
        return sum(message.role == "user" for message in self.messages)

    @property
    def last_text(self) -> str:
        """What the user said last; "" at the beginning."""
        if self.draft is not None:
            return self.draft
        for message in reversed(self.messages):
            if message.role == "user":
                return message.text
        return ""

    def to_json(self) -> bytes:
        fields = {"format": FORMAT, **self.__dict__}
        fields["messages"] = [one.to_dict() for one in self.messages]
        fields["options"] = options_to_json(self.options)
        if self.think is None:  # versions without it read all others
            del fields["think"]
        return to_json("messages", fields, indent=1) + b"\n"


@dataclasses.dataclass
class Listed(Record):
    """A record as it is listed: of its messages only what is said of them.

    Attributes:
      turn_count: the number of turns.
      said_last: what the user said last.
    """

    turn_count: int = 0
    said_last: str = ""

    @property
    def turns(self) -> int:
        return self.turn_count

    @property
    def last_text(self) -> str:
        return self.said_last if self.draft is None else self.draft


def copy_of(record: Record) -> Record:
    return dataclasses.replace(
        record, messages=[*record.messages], options={**record.options}
    )


def from_json(data: bytes) -> Record:
    """The record that `to_json` gave.

    Raises CorruptFile if it is none, NewerRecord if a newer version wrote it.
    """
    try:
        document = json.loads(data)
    except ValueError:
        raise CorruptFile("expected JSON, found something else") from None
    except RecursionError:
        raise CorruptFile("expected JSON, found it nested too deep") from None
    if not isinstance(document, dict):
        raise CorruptFile("expected a JSON object")
    name, version = document.get("name"), document.pop("format", None)
    if type(version) is int and version > FORMAT:
        raise NewerRecord(name, f"its format {version} is newer")
    if version == 1:
        _upgrade(document)
    elif version != FORMAT:
        raise unexpected("format", "1 or 2", version, CorruptFile)
    if missing := _KINDS.keys() - document.keys():
        raise CorruptFile(f"missing: {', '.join(sorted(missing))}")
    if not isinstance(document.get("think"), bool | None):
        raise CorruptFile(f"think: found {brief(document['think'])}")
    if unknown := document.keys() - _KINDS.keys() - {"think"}:
        raise NewerRecord(name, f"unknown: {', '.join(sorted(unknown))}")
    for field, kinds in _KINDS.items():
        value = document[field]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise CorruptFile(f"{field}: found {type(value).__name__}")
    if document["overflow"] not in OVERFLOWS:
        raise CorruptFile(f"overflow: found {brief(document['overflow'])}")
    return Record(
        **{
            **document,
            "messages": _messages(document["messages"]),
            "options": options_of(document["options"], name),
        }
    )


# JSON has one kind of number.
_KINDS = kinds_of(Record) | {"created": (int, float), "changed": (int, float)}
del _KINDS["think"]  # optional


def _upgrade(document: dict[str, Any]) -> None:
    """Makes a record of format 1 one of format 2, as far as it is one."""
    document["draft"] = None
    messages = document.get("messages")
    if isinstance(messages, list):
        document["messages"] = [
            dict(zip(("role", "content"), one))
            if isinstance(one, list) and len(one) == 2
            else None
            for one in messages
        ]


def options_of(options: dict[str, Any], name: object) -> dict[str, Any]:
    """Gives options as a record has them. Raises NewerRecord, CorruptFile."""
    try:
        return options_from_json(options)
    except TypeError as error:
        raise NewerRecord(name, f"options: {error}") from None
    except ValueError as error:
        raise CorruptFile(f"options: {error}") from None


def _messages(values: list[Any]) -> list[Message]:
    try:
        messages = messages_of(values) if values else []
    except (ValueError, RecursionError) as error:
        raise CorruptFile(str(error)) from None
    if messages and messages[-1].role == "user":
        raise CorruptFile("messages: the last one has no reply")
    return messages
