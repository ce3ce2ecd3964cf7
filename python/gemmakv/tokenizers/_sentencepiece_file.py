"""SentencePiece models of Hugging Face directories, as Gemma uses them.

A model file is a protocol buffer (sentencepiece_model.proto): pieces = 1
{piece = 1, score = 2, type = 3}, trainer_spec = 2, normalizer_spec = 3. What
the files beside it say of its tokens is written into it, so that the library
does the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from gemmakv._support.documents import read_bytes
from gemmakv.errors import CorruptFile, MismatchError, brief
from gemmakv.tokenizers._added_tokens import Marks
from gemmakv.tokenizers._tokenizer import (
    SPACE_MARK,
    byte_piece,
    check_rows,
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of the model
_PIECE, _SCORE, _TYPE = 1, 2, 3  # fields of a piece
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# Field of the specification, name, default, Gemma's value.
_TRAINER_SETTINGS = ((35, "byte_fallback", 0, 1),)
_NORMALIZER_SETTINGS = (
    (2, "precompiled_charsmap", b"", b""),
    (3, "add_dummy_prefix", 1, 0),
    (4, "remove_extra_whitespaces", 1, 0),
    (5, "escape_whitespaces", 1, 1),
)

_Value = int | bytes


def marked_model(
    path: Path, marks: Marks, rows: int | None = None
) -> bytes:
    """The model of a file with `marks` written into it.

    Control tokens are of type CONTROL, and so are tokens after the first
    `rows`, which the model has no rows for; added tokens that the file lacks
    follow its own. Raises OSError, CorruptFile for a damaged file or one
    that contradicts the marks, MismatchError for one that is not of Gemma's
    kind or of this model.
    """
    data = read_bytes(path)
    try:
        chunks, specs = _split(data)
        _check_settings(path, specs)
        texts = [_text(chunk) for chunk in chunks]
        added = _place(path, texts, marks)
        _write_types(chunks, texts, marks)
    except _Damaged as error:
        raise CorruptFile(
            f"{path}: not a SentencePiece model: {error}"
        ) from None
    for text in added:
        kind = _CONTROL if marks.is_control(text) else _USER_DEFINED
        chunks.append(_piece(text, 0.0, kind))
    if rows is not None:
        _leave_out(path, chunks, rows)
    fields = [_field(_PIECES, chunk) for chunk in chunks]
    fields += [
        _field(number, body) for number, bodies in specs.items()
        for body in bodies
    ]
    return b"".join(fields)


class _Damaged(Exception):
    """The bytes are no protocol buffer of a model."""


def _place(path: Path, texts: list[str], marks: Marks) -> list[str]:
    """Texts of the added tokens that follow those of the file."""
    ids = {text: i for i, text in enumerate(texts)}
    after: dict[int, str] = {}
    for token, added in sorted(marks.added.items()):
        if token < len(texts):
            if not _same(texts[token], added.content):
                raise CorruptFile(
                    f"{added.file}: token {token} is {brief(added.content)}, "
                    f"in {path} {brief(texts[token])}"
                )
        elif added.content in ids:
            raise CorruptFile(
                f"{added.file}: token {token} is {brief(added.content)}, "
                f"which is token {ids[added.content]} in {path}"
            )
        elif token != len(texts) + len(after):
            raise CorruptFile(
                f"{added.file}: expected token {len(texts) + len(after)} to "
                f"follow those of {path}, found {token}"
            )
        else:
            after[token] = added.content
    marks.check_known(ids | {text: i for i, text in after.items()})
    return list(after.values())


def _same(piece: str, content: str) -> bool:
    """Whether a piece is what a JSON file calls `content`."""
    if piece == content or piece == content.replace(" ", SPACE_MARK):
        return True
    return len(content) == 1 and piece == byte_piece(ord(content))


def _write_types(
    chunks: list[bytes], texts: list[str], marks: Marks
) -> None:
    """Makes the pieces that are control tokens of that type."""
    for i, text in enumerate(texts):
        # By names alone, control tokens begin with one of these.
        if text[:1] not in ("<", "[") and text not in marks.special:
            continue
        if not marks.is_control(text):
            continue
        fields = dict(_fields(chunks[i]))
        if fields.get(_TYPE, _NORMAL) not in (_UNKNOWN, _CONTROL, _BYTE):
            chunks[i] = _piece(text, _score(fields), _CONTROL)


def _leave_out(path: Path, chunks: list[bytes], rows: int) -> None:
    """Makes the pieces that have no row control tokens."""
    texts = 0
    for i in range(rows, len(chunks)):
        fields = dict(_fields(chunks[i]))
        kind = fields.get(_TYPE, _NORMAL)
        if kind in (_UNKNOWN, _CONTROL, _UNUSED):
            continue
        texts += 1
        chunks[i] = _piece(_text(chunks[i]), _score(fields), _CONTROL)
    check_rows(str(path), len(chunks), rows, texts)


def _score(fields: dict[int, _Value]) -> float:
    data = fields.get(_SCORE, bytes(4))
    if not isinstance(data, bytes) or len(data) != 4:
        raise _Damaged("a score is no number")
    return float(struct.unpack("<f", data)[0])


def _text(chunk: bytes) -> str:
    """The text of a piece's message."""
    if chunk[:1] == b"\n" and len(chunk) > 1 and chunk[1] < 0x80:
        value: _Value | None = chunk[2 : 2 + chunk[1]]  # nearly always
    else:
        value = dict(_fields(chunk)).get(_PIECE)
    if not isinstance(value, bytes) or not value:
        raise _Damaged("a piece without text")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise _Damaged(f"a piece is no UTF-8: {brief(value)}") from None


def _check_settings(path: Path, specs: dict[int, list[bytes]]) -> None:
    for number, settings in (
        (_TRAINER, _TRAINER_SETTINGS),
        (_NORMALIZER, _NORMALIZER_SETTINGS),
    ):
        fields: dict[int, _Value] = {}
        for body in specs.get(number, []):
            fields.update(_fields(body))
        for field, name, default, expected in settings:
            found = fields.get(field, default)
            if found != expected:
                raise MismatchError(
                    f"{path}: {name} is {brief(found)}, expected "
                    f"{brief(expected)} as in Gemma's tokenizers"
                )


def _split(data: bytes) -> tuple[list[bytes], dict[int, list[bytes]]]:
    """Messages of the pieces, and bodies of the other fields."""
    chunks: list[bytes] = []
    others: dict[int, list[bytes]] = {}
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            raise _Damaged(f"field {number} is no message")
        if number == _PIECES:
            chunks.append(value)
        else:
            others.setdefault(number, []).append(value)
    if not chunks:
        raise _Damaged("no pieces")
    return chunks, others


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Numbers and values of a message's fields; numbers that are not
    varints as their bytes.
    """
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, position = _varint(data, position)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise _Damaged(f"wire type {kind}")
        if size > end - position:
            raise _Damaged("it ends early")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number and the position after it."""
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _Damaged("a number is cut off" if shift < 64 else "a bad number")


def _piece(text: str, score: float, kind: int) -> bytes:
    encoded = text.encode("utf-8")
    if kind == _USER_DEFINED:  # matched where spaces are marked already
        encoded = text.replace(" ", SPACE_MARK).encode("utf-8")
    return (
        _field(_PIECE, encoded)
        + bytes([_SCORE << 3 | _FIXED32])
        + struct.pack("<f", score)
        + bytes([_TYPE << 3 | _VARINT, kind])
    )


def _field(number: int, body: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(body)) + body


def _number(value: int) -> bytes:
    """A varint."""
    data = bytearray()
    while value >= 0x80:
        data.append((value & 0x7F) | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
