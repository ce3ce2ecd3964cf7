"""Text that can be expressed in UTF-8, and text that cannot.

A str of Python may hold lone surrogates, which stand for no character. They
come from bytes that were no UTF-8, and no tokenizer, file or socket takes them.
"""

from __future__ import annotations

from gemmakv.errors import ArgumentError

UNICODE = "Unicode text"  # what is expected where a surrogate was found


def is_unicode(text: str) -> bool:
    """Tells whether a text has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def encode_utf8(name: str, text: str) -> bytes:
    """Encodes a text. Raises ArgumentError for lone surrogates."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        at = error.start
        raise ArgumentError(
            name, UNICODE, text, shown=f"{surrogate(text[at])} at index {at}"
        ) from None


def check_unicode(name: str, text: str) -> None:
    """Raises ArgumentError for a text with lone surrogates."""
    encode_utf8(name, text)


def surrogate(letter: str) -> str:
    """Names a lone surrogate for a message."""
    return f"a lone surrogate (U+{ord(letter):04X})"


def overlap(text: str, *marks: str) -> int:
    """Counts the letters at the end of a text with which one of `marks` may
    begin, but not all of it.
    """
    begun = (one[:n] for one in marks for n in range(1, len(one)))
    return max((len(one) for one in begun if text.endswith(one)), default=0)


def utf8_text(data: bytes) -> str:
    """Decodes bytes. Raises ValueError that says where they are no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected UTF-8, found byte 0x{data[error.start]:02X} at offset "
            f"{error.start}"
        ) from None
