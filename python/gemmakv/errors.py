"""Exceptions of this package; all derive from `GemmaKVError`."""

from gemmakv._core import (
    CacheFullError,
    CorruptFile,
    GemmaKVError,
    MismatchError,
)

__all__ = ["CacheFullError", "CorruptFile", "GemmaKVError", "MismatchError"]


def one_line(error: BaseException) -> str:
    """What an error says, in one line; its type if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def brief(value: object) -> str:
    """`repr` of a value for a message: one line, not too long."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or lists in lists in lists.
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= 60 else text[:57] + "..."


def unexpected(
    name: object,
    expected: str,
    found: object,
    kind: type[Exception] = ValueError,
) -> Exception:
    """The error for a value of `name`, an argument or a file, to be raised."""
    return kind(f"{name}: expected {expected}, found {brief(found)}")
