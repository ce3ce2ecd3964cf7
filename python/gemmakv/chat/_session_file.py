"""Sessions as bytes; docs/internals/session-format.md describes the format."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import (
    TYPE_CHECKING,
    Any,
    BinaryIO,
    Literal,
    NamedTuple,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from gemmakv._support.files import PathOrFile, StrPath, read_all
from gemmakv._support.json import to_json
from gemmakv.cache._kv_cache import KVCache, KvDtype
from gemmakv.cache._pool import BlockPool
from gemmakv.chat._messages import Message, messages_of
from gemmakv.chat._transcript import Ids
from gemmakv.errors import (
    CorruptFile,
    MismatchError,
    brief,
    one_line,
    unexpected,
)
from gemmakv.generation._grammar import Grammar
from gemmakv.generation._options import APART, split_rows

if TYPE_CHECKING:
    from gemmakv.chat._gemma import Gemma

MAGIC = b"GKVSESSN"
VERSION = 2
TOKEN_VERSION = 3  # tokens in place of keys and values; not written any more
# With tools, calls or results: who knows none of these reads no further.
TOOL_VERSION = 4
# Magic, version, zero, bytes of the text part, bytes of the KV part.
_HEADER = struct.Struct("<8sIIQQ")
_DIGEST_BYTES = 32
_FINGERPRINT_BYTES = 16
HOW_TO_REBUILD = (
    "Session.load(..., rebuild=True) keeps the text and computes the keys and "
    "values again"
)
Overflow = Literal["error", "drop_oldest_turns"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)
# Where a snapshot states its size (docs/internals/snapshot-format.md).
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
    think: bool | None = None
    tools: list[Any] = dataclasses.field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    @property
    def knows_tools(self) -> bool:
        return bool(self.tools) or any(
            message.tool_calls or message.role == "tool"
            for message in self.messages
        )


def kinds_of(fields: type) -> dict[str, Any]:
    """Gives what `isinstance` may ask of a dataclass's fields in JSON."""
    return {
        name: get_origin(hint) if isinstance(hint, GenericAlias) else hint
        for name, hint in get_type_hints(fields).items()
    }


def write(
    text: SessionText, cache: KVCache, write: Callable[[bytes], None]
) -> None:
    """Gives the bytes to `write`, one piece after the other."""
    begun = False

    def write_piece(piece: bytes) -> None:
        nonlocal begun
        if not begun:
            [size] = _SNAPSHOT_BYTES.unpack_from(piece)
            write(_head(text, size))
            begun = True
        write(piece)

    cache._core.save(write_piece, True)


def _head(text: SessionText, kv_bytes: int) -> bytes:
    """Makes all that stands before the KV part."""
    version = TOOL_VERSION if text.knows_tools else VERSION
    fields = {name: getattr(text, name) for name in _KINDS}
    for name, default in _OPTIONAL.items():
        # Versions that do not know it read files without it.
        if getattr(text, name) != default:
            fields[name] = getattr(text, name)
    fields["messages"] = [message.to_dict() for message in text.messages]
    fields["options"] = options_to_json(text.options)
    document = to_json("messages", fields)
    head = _HEADER.pack(MAGIC, version, 0, len(document), kv_bytes) + document
    return head + hashlib.sha256(head).digest()


@dataclasses.dataclass(frozen=True)
class TokenPart:
    """Token ids of a conversation whose keys and values are elsewhere."""

    fingerprint: str
    ids: Ids  # int32 [n]

    @classmethod
    def of(cls, data: memoryview) -> TokenPart:
        size = len(data) - _FINGERPRINT_BYTES - _DIGEST_BYTES
        part, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if size < 0 or size % 4 or hashlib.sha256(part).digest() != digest:
            raise CorruptFile("session: the tokens do not match their checksum")
        return cls(
            bytes(part[:_FINGERPRINT_BYTES]).hex(),
            np.frombuffer(part[_FINGERPRINT_BYTES:], "<i4").astype(np.int32),
        )

    def check(self, gemma: Gemma, text: SessionText) -> Ids:
        """Gives the token ids, for that model."""
        if self.fingerprint != gemma.fingerprint:
            raise MismatchError(
                "session: its tokens are for other weights, or for these on "
                "another arithmetic (that of another version of gemmakv or "
                f"kind of processor): their fingerprint is {self.fingerprint}"
                f", expected {gemma.fingerprint}; {HOW_TO_REBUILD}"
            )
        ids, vocabulary = self.ids, gemma.config.vocab_size
        if len(ids) > text.capacity_tokens or not all(
            (ids >= 0) & (ids < vocabulary)
        ):
            raise CorruptFile(
                f"session: expected at most {text.capacity_tokens} token ids "
                f"below {vocabulary}, found others"
            )
        return ids


class KeptTokens(NamedTuple):
    """The tokens of a session whose keys and values are in the prefix cache.
    `ends`: where turns ended in them, as far as it is known.
    """

    kv_dtype: KvDtype
    ids: Ids
    ends: tuple[int, ...] = ()


class SessionState(NamedTuple):
    """A session's text and settings, and the tokens of its cache."""

    text: SessionText
    tokens: TokenPart

    @property
    def kept(self) -> KeptTokens:
        return KeptTokens(
            cast(KvDtype, self.text.kv_dtype),
            self.tokens.ids,
            tuple(end for end in self.text.ends if end is not None),
        )


def kept_tokens(file: BinaryIO) -> KeptTokens | None:
    """Reads them from a session file; gives None for one that has keys and
    values, or is none. Raises CorruptFile, MismatchError.
    """
    state = kept_state(file)
    return None if state is None else state.kept


def kept_state(file: BinaryIO) -> SessionState | None:
    """Reads all of a session file with tokens, and the head of any other, for
    which it gives None. Raises CorruptFile, MismatchError.
    """
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or _HEADER.unpack(head)[1] != TOKEN_VERSION:
        return None
    _size(head)
    text, part = split(memoryview(head + file.read()))
    assert isinstance(part, TokenPart)
    return SessionState(text, part)


def read(path_or_file: PathOrFile) -> bytes:
    """Reads the bytes of a file that begins as a session does."""
    return read_all(path_or_file, _HEADER.size, _size)


def is_session(path: StrPath) -> bool:
    """Tells whether a file is one that `Session.save` wrote, or empty."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) in (b"", MAGIC)


def split(
    data: memoryview, whole: bool = True
) -> tuple[SessionText, memoryview | TokenPart]:
    """Gives the text part, checked, and the KV part.

    Without `whole`, the KV part may be anything, and is not looked at.
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
        text = _checked(fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptFile(
            "session: the text part is not that of a session: "
            + one_line(error)
        ) from None
    if version == TOKEN_VERSION and whole:
        return text, TokenPart.of(data[start:])
    return text, data[start:]


def restore(
    snapshot: memoryview, gemma: Gemma, pool: BlockPool | None
) -> KVCache:
    try:
        return KVCache.from_bytes(snapshot, gemma, pool=pool)
    except MismatchError as error:
        raise MismatchError(f"session: {error}; {HOW_TO_REBUILD}") from None
    except CorruptFile as error:
        raise CorruptFile(f"session: {error}; {HOW_TO_REBUILD}") from None


def options_to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Gives generation keywords as JSON has them; functions and models are
    left out.
    """
    plain = {
        name: value
        for name, value in options.items()
        if name not in APART and not callable(value)
    }
    if plain.get("logit_bias"):  # JSON has neither int keys nor infinity
        plain["logit_bias"] = [
            [int(token), repr(float(bias))]
            for token, bias in plain["logit_bias"].items()
        ]
    if isinstance(plain.get("grammar"), Grammar):
        plain["grammar"] = dataclasses.asdict(plain["grammar"])
    result: dict[str, Any] = json.loads(json.dumps(plain, default=_plain))
    return result


def options_from_json(options: dict[str, Any]) -> dict[str, Any]:
    """Gives what `options_to_json` was given. Raises ValueError for a bad
    value, TypeError for a keyword that is none.
    """
    bias = options.get("logit_bias")
    if bias:
        try:
            bias = {int(token): float(value) for token, value in bias}
        except TypeError:
            raise unexpected("logit_bias", "pairs of numbers", bias) from None
        options = {**options, "logit_bias": bias}
    grammar = options.get("grammar")
    if isinstance(grammar, dict):
        if set(grammar) != {"kind", "text"}:
            raise unexpected("grammar", "a kind and a text", grammar)
        options = {**options, "grammar": Grammar(**grammar)}
    split_rows(options, 1, batch=False)
    return options


def _size(head: bytes) -> int:
    """Counts the bytes of the whole, from the first; raises for others."""
    if len(head) < _HEADER.size or head[: len(MAGIC)] != MAGIC:
        found = f"{brief(head[: len(MAGIC)])} at the beginning"
        if MAGIC.startswith(head[: len(MAGIC)]):  # and no more of it
            found = f"{len(head)} bytes"
        raise CorruptFile(
            f"session: expected a file of a saved session, found {found}"
        )
    _, version, _, text_bytes, kv_bytes = _HEADER.unpack(head)
    if version > TOOL_VERSION:
        raise MismatchError(
            f"session: format version {version} is newer than this version of "
            f"gemmakv reads ({TOOL_VERSION}); update gemmakv"
        )
    size: int = _HEADER.size + text_bytes + _DIGEST_BYTES + kv_bytes
    return size


_KINDS = kinds_of(SessionText)
_OPTIONAL: dict[str, Any] = {
    "think": None,
    "tools": [],
    "tool_choice": None,
    "parallel_tool_calls": True,
}
_OPTIONAL_KINDS = {name: _KINDS.pop(name) for name in _OPTIONAL}


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
    """Checks the types of fields. Raises KeyError, TypeError or ValueError."""
    for name, kind in _KINDS.items():
        value = fields[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {brief(value)}")
    if unknown := fields.keys() - _KINDS.keys() - _OPTIONAL.keys():
        raise TypeError(f"unknown field {min(unknown)}")
    for name, kind in _OPTIONAL_KINDS.items():
        value = fields.get(name, _OPTIONAL[name])
        if kind is not Any and not isinstance(value, kind):
            raise TypeError(f"{name} is {brief(value)}")
    text = SessionText(**fields)
    text.messages = messages_of(text.messages) if text.messages else []
    text.options = options_from_json(text.options)
    turns = sum(message.role == "user" for message in text.messages)
    if len(text.ends) > turns or not all(
        end is None or type(end) is int and end >= 0 for end in text.ends
    ):
        raise TypeError(f"ends is {brief(text.ends)}")
    return text


def _plain(value: object) -> object:
    """Gives numbers and sequences of other libraries as JSON has them."""
    for convert in ("tolist", "item"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    return list(value)  # type: ignore[call-overload]
