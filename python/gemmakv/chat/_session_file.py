"""Sessions as bytes; docs/session-format.md describes the format."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from gemmakv._support.files import PathOrFile, StrPath, read_all
from gemmakv.cache._kv_cache import KVCache
from gemmakv.cache._pool import BlockPool
from gemmakv.chat._messages import Message, messages_of, to_json
from gemmakv.errors import CorruptFile, MismatchError, brief, one_line
from gemmakv.generation._options import split_rows

if TYPE_CHECKING:
    from gemmakv.chat._gemma import Gemma

MAGIC = b"GKVSESSN"
VERSION = 2
# Magic, version, zero, bytes of the text part, bytes of the KV part.
_HEADER = struct.Struct("<8sIIQQ")
_DIGEST_BYTES = 32
OVERFLOWS = ("error", "drop_oldest_turns")
# Where a snapshot states its size (docs/snapshot-format.md).
_SNAPSHOT_BYTES = struct.Struct("<16xQ")


@dataclasses.dataclass
class SessionText:
    """The text part: all of a session but keys and values.

    `messages` are without the system message. `ends` has for each turn the
    cache's length when it ended, or None.
    """

    template: str
    system: str | None
    messages: list[Message]
    overflow: str
    options: dict[str, Any]
    capacity_tokens: int
    kv_dtype: str
    saved_prefill_tokens: int
    ends: list[int | None] = dataclasses.field(default_factory=list)


def kinds_of(fields: type) -> dict[str, Any]:
    """What `isinstance` may ask of a dataclass's fields as JSON has them."""
    return {
        name: get_origin(hint) if isinstance(hint, GenericAlias) else hint
        for name, hint in get_type_hints(fields).items()
    }


def write(
    text: SessionText, cache: KVCache, write: Callable[[bytes], None]
) -> None:
    """Has `write` take the bytes, one piece after the other."""
    fields = {name: getattr(text, name) for name in _KINDS}
    fields["messages"] = [message.to_dict() for message in text.messages]
    fields["options"] = options_to_json(text.options)
    document = to_json(fields)
    begun = False

    def write_piece(piece: bytes) -> None:
        nonlocal begun
        if not begun:
            [size] = _SNAPSHOT_BYTES.unpack_from(piece)
            head = _HEADER.pack(MAGIC, VERSION, 0, len(document), size)
            head += document
            write(head + hashlib.sha256(head).digest())
            begun = True
        write(piece)

    cache._core.save(write_piece, True)


def read(path_or_file: PathOrFile) -> bytes:
    """The bytes of a file that begins as a session does."""
    return read_all(path_or_file, _HEADER.size, _size)


def is_session(path: StrPath) -> bool:
    """Whether a file is one that `Session.save` wrote, or empty."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) in (b"", MAGIC)


def split(
    data: memoryview, whole: bool = True
) -> tuple[SessionText, memoryview]:
    """The text part, checked, and the KV part.

    Without `whole`, the KV part may be anything.
    """
    size = _size(bytes(data[: _HEADER.size]))
    _, version, zero, text_bytes, kv_bytes = _HEADER.unpack_from(data)
    end = _HEADER.size + text_bytes
    start = end + _DIGEST_BYTES
    if len(data) < start or (whole and len(data) != size):
        found = f"{len(data)}" if len(data) <= size else "more"
        raise CorruptFile(f"session: expected {size} bytes, found {found}")
    digest = hashlib.sha256(data[:end]).digest()
    if version == 0 or zero != 0 or digest != data[end:start]:
        raise CorruptFile("session: the text part does not match its checksum")
    try:
        fields = json.loads(bytes(data[_HEADER.size : end]))
        if version == 1:
            _upgrade(fields)
        return _checked(fields), data[start:]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptFile(
            "session: the text part is not that of a session: "
            + one_line(error)
        ) from None


def restore(
    snapshot: memoryview, gemma: Gemma, pool: BlockPool | None
) -> KVCache:
    hint = "Session.load(..., rebuild=True) keeps the text and computes the "
    hint += "keys and values again"
    try:
        return KVCache.from_bytes(snapshot, gemma, pool=pool)
    except MismatchError as error:
        raise MismatchError(f"session: {error}; {hint}") from None
    except CorruptFile as error:
        raise CorruptFile(f"session: {error}; {hint}") from None


def options_to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Generation keywords as JSON has them; functions are left out."""
    plain = {
        name: value
        for name, value in options.items()
        if name != "progress" and not callable(value)
    }
    if plain.get("logit_bias"):  # JSON has neither int keys nor infinity
        plain["logit_bias"] = [
            [int(token), repr(float(bias))]
            for token, bias in plain["logit_bias"].items()
        ]
    result: dict[str, Any] = json.loads(json.dumps(plain, default=_plain))
    return result


def options_from_json(options: dict[str, Any]) -> dict[str, Any]:
    """What `options_to_json` was given. Raises ValueError for a value that is
    bad, TypeError for a keyword that is none.
    """
    bias = options.get("logit_bias")
    if bias:
        try:
            bias = {int(token): float(value) for token, value in bias}
        except TypeError:
            raise ValueError(f"logit_bias is {brief(bias)}") from None
        options = {**options, "logit_bias": bias}
    split_rows(options, 1, batch=False)
    return options


def _size(head: bytes) -> int:
    """Bytes of the whole, of its first bytes; raises if they are others."""
    if len(head) < _HEADER.size or head[: len(MAGIC)] != MAGIC:
        raise CorruptFile(
            "session: expected a file of a saved session, found "
            + (brief(head[: len(MAGIC)]) if head else "no bytes")
            + " at the beginning"
        )
    _, version, _, text_bytes, kv_bytes = _HEADER.unpack(head)
    if version > VERSION:
        raise MismatchError(
            f"session: format version {version} is newer than this version of "
            f"gemmakv reads ({VERSION}); update gemmakv"
        )
    size: int = _HEADER.size + text_bytes + _DIGEST_BYTES + kv_bytes
    return size


_KINDS = kinds_of(SessionText)


def _upgrade(fields: dict[str, Any]) -> None:
    """Makes fields of version 1 those of version 2."""
    incomplete = fields.pop("incomplete", [])
    messages = fields["messages"]
    fields["ends"] = []
    fields["messages"] = [
        {"role": role, "content": text} for role, text in messages
    ]
    for i in incomplete:
        fields["messages"][range(len(messages))[i]]["incomplete"] = True


def _checked(fields: Any) -> SessionText:
    """Fields of the right types. Raises KeyError, TypeError or ValueError."""
    for name, kind in _KINDS.items():
        value = fields[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {brief(value)}")
    if unknown := fields.keys() - _KINDS:
        raise TypeError(f"unknown field {min(unknown)}")
    text = SessionText(**fields)
    text.messages = messages_of(text.messages) if text.messages else []
    text.options = options_from_json(text.options)
    turns = len(text.messages) // 2
    if len(text.ends) > turns or not all(
        end is None or type(end) is int and end >= 0 for end in text.ends
    ):
        raise TypeError(f"ends is {brief(text.ends)}")
    return text


def _plain(value: object) -> object:
    """Numbers and sequences of other libraries, for JSON."""
    for convert in ("tolist", "item"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    return list(value)  # type: ignore[call-overload]
