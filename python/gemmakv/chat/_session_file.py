"""Sessions as bytes; docs/session-format.md describes the format."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any

from gemmakv.cache._kv_cache import KVCache
from gemmakv.chat._templates import Message, Template
from gemmakv.errors import CorruptFile, MismatchError, brief
from gemmakv.generation._options import split_rows

if TYPE_CHECKING:
    from gemmakv.chat._gemma import Gemma
    from gemmakv.chat._session import Session

MAGIC = b"GKVSESSN"
VERSION = 1
# Magic, version, zero, bytes of the text part, bytes of the KV part.
_HEADER = struct.Struct("<8sIIQQ")
_DIGEST_BYTES = 32


def pack(session: Session) -> bytes:
    """The session's bytes. Requires: no call works on it."""
    cache = session.cache
    options = {k: v for k, v in session.options.items() if k != "progress"}
    if options.get("logit_bias"):
        options["logit_bias"] = [
            [int(token), repr(float(bias))]
            for token, bias in options["logit_bias"].items()
        ]
    text = json.dumps(
        {
            "template": session.template.name,
            "system": session.system,
            "messages": [
                [message.role, message.content]
                for message in session._talk.messages
            ],
            "incomplete": [
                i
                for i, message in enumerate(session._talk.messages)
                if message.incomplete
            ],
            "overflow": session.overflow,
            "options": options,
            "capacity_tokens": cache.capacity_tokens,
            "kv_dtype": cache.kv_dtype,
            "saved_prefill_tokens": session.stats.saved_prefill_tokens,
        },
        ensure_ascii=False,
        default=_plain,
    ).encode("utf-8")
    snapshot = cache.to_bytes()
    head = _HEADER.pack(MAGIC, VERSION, 0, len(text), len(snapshot)) + text
    return head + hashlib.sha256(head).digest() + snapshot


def unpack(
    cls: type[Session],
    gemma: Gemma,
    data: bytes,
    template: Template | str | None,
    rebuild: bool,
) -> Session:
    """The session of `pack`; see `Session.from_bytes`."""
    fields, snapshot = _split(data, whole=not rebuild)
    name = fields["template"]
    if template is None and name not in ("file", "gemma", "plain"):
        raise ValueError(
            f"template: the session was saved with a Template named "
            f"{brief(name)}; give it: Session.load(gemma, path, template=...)"
        )
    system, messages = fields["system"], fields["messages"]
    incomplete = set(fields.get("incomplete", ()))
    session = cls(
        gemma,
        system,
        fields["overflow"],
        template=name if template is None else template,
        messages=[
            Message(role, content, i in incomplete)
            for i, (role, content) in enumerate(messages)
        ],
        # With `rebuild` the model may be one of a shorter context.
        capacity_tokens=min(
            fields["capacity_tokens"], gemma.config.context_length
        ),
        kv_dtype=fields["kv_dtype"],
        options=fields["options"],
    )
    session._saved_prefill_tokens = fields["saved_prefill_tokens"]
    if not rebuild:
        session._talk.cache = _restore(snapshot, gemma)
    return session


def _restore(snapshot: bytes, gemma: Gemma) -> KVCache:
    hint = "Session.load(..., rebuild=True) keeps the text and computes the "
    hint += "keys and values again"
    try:
        return KVCache.from_bytes(snapshot, gemma)
    except MismatchError as error:
        raise MismatchError(f"session: {error}; {hint}") from None
    except CorruptFile as error:
        raise CorruptFile(f"session: {error}; {hint}") from None


def _split(data: bytes, whole: bool) -> tuple[dict[str, Any], bytes]:
    """Checked fields of the text part, and the KV part.

    Without `whole`, the KV part may be anything.
    """
    if len(data) < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise CorruptFile(
            "session: expected a file of a saved session, found "
            + (brief(data[: len(MAGIC)]) if data else "no bytes")
            + " at the beginning"
        )
    _, version, zero, text_bytes, kv_bytes = _HEADER.unpack_from(data)
    if version > VERSION:
        raise MismatchError(
            f"session: format version {version} is newer than this version of "
            f"gemmakv reads ({VERSION}); update gemmakv"
        )
    end = _HEADER.size + text_bytes
    start = end + _DIGEST_BYTES
    if len(data) < start or (whole and len(data) != start + kv_bytes):
        raise CorruptFile(
            f"session: expected {start + kv_bytes} bytes, found {len(data)}"
        )
    digest = hashlib.sha256(data[:end]).digest()
    if version != VERSION or zero != 0 or digest != data[end:start]:
        raise CorruptFile("session: the text part does not match its checksum")
    try:
        fields = json.loads(data[_HEADER.size : end].decode("utf-8"))
        return _checked(fields), data[start:]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptFile(
            "session: the text part is not that of a session: "
            + " ".join(str(error).split())
        ) from None


def _checked(fields: Any) -> dict[str, Any]:
    """Fields of the right types. Raises KeyError, TypeError or ValueError."""
    types = {
        "template": str,
        "system": (str, type(None)),
        "messages": list,
        "overflow": str,
        "options": dict,
        "capacity_tokens": int,
        "kv_dtype": str,
        "saved_prefill_tokens": int,
    }
    for name, kind in types.items():
        if not isinstance(fields[name], kind):  # type: ignore[arg-type]
            raise TypeError(f"{name} is {brief(fields[name])}")
    for message in fields["messages"]:
        role, content = message
        if not isinstance(role, str) or not isinstance(content, str):
            raise TypeError(f"a message is {brief(message)}")
    incomplete = fields.get("incomplete", [])
    if not isinstance(incomplete, list) or not all(
        type(i) is int and 0 <= i < len(fields["messages"]) for i in incomplete
    ):
        raise TypeError(f"incomplete is {brief(incomplete)}")
    bias = fields["options"].get("logit_bias")
    if bias:
        fields["options"]["logit_bias"] = {
            int(token): float(value) for token, value in bias
        }
    split_rows(fields["options"], 1, batch=False)
    result: dict[str, Any] = fields
    return result


def _plain(value: object) -> object:
    """Numbers and sequences of other libraries, for JSON."""
    for convert in ("tolist", "item"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    return list(value)  # type: ignore[call-overload]
