"""Exceptions of this package, and the words of their messages.

All derive from `GemmaKVError` but `ArgumentError`, which is a ValueError.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

from gemmakv._core import (
    CacheFullError,
    CorruptFile,
    GemmaKVError,
    MismatchError,
    set_argument_error,
)

__all__ = [
    "ArgumentError",
    "CacheFullError",
    "CorruptFile",
    "GemmaKVError",
    "MismatchError",
]


class ArgumentError(ValueError):
    """An argument has a value that it cannot have.

    Its message is "ARGUMENT: expected EXPECTED, found FOUND".

    Attributes:
      argument: the argument's name, maybe with a place in it, as in
        "messages[0].role".
      expected: what it can be, in words.
      found: the value; after pickling, and where the core refuses it, text
        about one that is no number and no text.
    """

    argument: str
    expected: str
    found: object

    def __init__(
        self,
        argument: str,
        expected: str,
        found: object,
        *,
        shown: str | None = None,
    ) -> None:
        # `shown` is what the message says about the value, if not its `repr`.
        words = brief(found) if shown is None else shown
        super().__init__(f"{argument}: expected {expected}, found {words}")
        self.argument = argument
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[Any, ...]:
        # A value that cannot be pickled must not keep the error from those who
        # wait for it in another process.
        fields = dict(self.__dict__)
        if type(self.found) not in _PLAIN:
            fields["found"] = brief(self.found)
        return _remake, (type(self), self.args), fields


_OF_CORE = re.compile(
    r"(?P<argument>[a-z]\w*(\[\d+\])*): expected (?P<expected>.*), "
    r"found (?P<found>.*)"
)


def _of_core(message: str) -> ValueError:
    """Makes the error of a value that the core refuses."""
    said = _OF_CORE.fullmatch(message)
    if said is None:
        return ValueError(message)
    shown = said["found"]
    found: object = shown
    for kind in (float, int):
        with contextlib.suppress(ValueError):
            found = kind(shown)
    return ArgumentError(said["argument"], said["expected"], found, shown=shown)


set_argument_error(_of_core)


def within(prefix: str, error: ValueError) -> ValueError:
    """Makes the same error about a part of something: with a prefix before its
    message, and so before the name of its argument.
    """
    return renamed(error, lambda words: prefix + words)


def renamed(error: ValueError, rename: Callable[[str], str]) -> ValueError:
    """Makes the same error about another argument: `rename` is given the
    message, and the name that this begins with.
    """
    message = rename(str(error))
    if not isinstance(error, ArgumentError):
        return ValueError(message)
    outer = _remake(type(error), (message,))
    outer.__dict__.update(error.__dict__)
    outer.argument = rename(error.argument)
    return outer


_PLAIN = (type(None), bool, int, float, str, bytes)


def _remake(kind: type[ArgumentError], args: tuple[Any, ...]) -> ArgumentError:
    """Makes an error that was pickled, but for its attributes."""
    return kind.__new__(kind, *args)


def one_line(error: BaseException) -> str:
    """Gives what an error says in one line; its type if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def brief(value: object) -> str:
    """Gives `repr` of a value for a message: one line, not too long."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or lists in lists in lists.
        text = f"a {type(value).__name__} too long to print"
    except Exception:
        # What a `repr` raises must not hide which argument is bad.
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 60 else text[:57] + "..."


def unexpected(
    name: object,
    expected: str,
    found: object,
    kind: type[Exception] | None = None,
) -> Exception:
    """Makes the error for a value of `name`, an argument or a file, to be
    raised: an ArgumentError, or one of another `kind`.
    """
    if kind is None:
        return ArgumentError(str(name), expected, found)
    return kind(f"{name}: expected {expected}, found {brief(found)}")
