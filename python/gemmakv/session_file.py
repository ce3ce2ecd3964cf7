"""The bytes of a saved session; the format is described in docs/session-format.md.

    magic     8 bytes   b"GKVCHAT1"
    header    8 bytes   size of the header, little endian
              JSON      UTF-8
    snapshot  8 bytes   size of the snapshot, little endian
              bytes     a conversation, see docs/snapshot-format.md
    checksum  16 bytes  BLAKE2b of all bytes before it
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from gemmakv.errors import CorruptFile, MismatchError

MAGIC = b"GKVCHAT1"
VERSION = 1
_SIZE_BYTES = 8
_CHECKSUM_BYTES = 16
_LEAST_BYTES = len(MAGIC) + 2 * _SIZE_BYTES + _CHECKSUM_BYTES
_FIELDS = {
    "template": str,
    "system": (str, type(None)),
    "overflow": str,
    "stale": bool,
    "turns": list,
    "options": dict,
}
_TURN_FIELDS = {"user": str, "reply": str, "start": int, "tail": str}


@dataclasses.dataclass(frozen=True)
class Content:
    """What a session consists of, but for its KV cache."""

    template: str
    system: str | None
    overflow: str
    stale: bool
    turns: list[dict[str, Any]]
    options: dict[str, Any]


def encode(content: Content, snapshot: bytes) -> bytes:
    """Bytes of a session. Options that JSON cannot hold are left out."""
    fields = dataclasses.asdict(content)
    fields["options"] = _plain_options(content.options)
    header = json.dumps(
        {"version": VERSION, **fields}, ensure_ascii=False
    ).encode("utf-8", "surrogatepass")
    body = b"".join(
        [
            MAGIC,
            len(header).to_bytes(_SIZE_BYTES, "little"),
            header,
            len(snapshot).to_bytes(_SIZE_BYTES, "little"),
            snapshot,
        ]
    )
    return body + _checksum(body)


def decode(data: bytes) -> tuple[Content, bytes]:
    """The content, and the bytes of the conversation.

    Raises CorruptFile for anything but a whole session, MismatchError for a
    version that this one does not know.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise CorruptFile(
            f"session: found {data[:8]!r} at the start, expected {MAGIC!r}"
        )
    if len(data) < _LEAST_BYTES:
        raise CorruptFile(
            f"session: found {len(data)} bytes, expected at least "
            f"{_LEAST_BYTES}"
        )
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if _checksum(body) != checksum:
        raise CorruptFile(
            "session: the checksum does not fit; the file is cut or damaged"
        )
    header, at = _part(body, len(MAGIC), "header")
    snapshot, at = _part(body, at, "snapshot")
    if at != len(body):
        raise CorruptFile(
            f"session: found {len(body) - at} bytes behind the snapshot, "
            "expected none"
        )
    return _content(header), snapshot


def _part(body: bytes, at: int, name: str) -> tuple[bytes, int]:
    """A part with its size before it, and where it ends."""
    begin = at + _SIZE_BYTES
    size = int.from_bytes(body[at:begin], "little")
    if begin + size > len(body):
        raise CorruptFile(
            f"session: the {name} is said to have {size} bytes, but only "
            f"{max(0, len(body) - begin)} follow"
        )
    return body[begin : begin + size], begin + size


def _content(header: bytes) -> Content:
    try:
        fields = json.loads(header.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"session: the header is not JSON: {error}") from None
    if not isinstance(fields, dict) or "version" not in fields:
        raise CorruptFile("session: the header states no version")
    if fields["version"] != VERSION:
        raise MismatchError(
            f"session: found format version {fields['version']!r}, expected "
            f"{VERSION}; a newer gemmakv may have written it"
        )
    del fields["version"]
    _check_fields("header", fields, _FIELDS)
    for turn in fields["turns"]:
        _check_fields("turn", turn, _TURN_FIELDS)
    bias = fields["options"].get("logit_bias")
    if bias is not None:
        fields["options"]["logit_bias"] = {int(k): v for k, v in bias.items()}
    return Content(**fields)


def _check_fields(
    name: str, fields: Any, expected: dict[str, Any]
) -> None:
    good = isinstance(fields, dict) and fields.keys() == expected.keys()
    if not good or not all(
        isinstance(fields[key], kind) for key, kind in expected.items()
    ):
        raise CorruptFile(
            f"session: a {name} has not the fields {', '.join(expected)}"
        )


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in options.items():
        if isinstance(value, tuple):
            value = list(value)
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        plain[name] = value
    return plain


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
