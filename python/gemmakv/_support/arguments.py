"""Checks of arguments that several modules share."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from gemmakv import _core
from gemmakv.errors import ArgumentError, unexpected

QuantizeType = Literal["q8_0", "q5_0", "q4_0", "bf16"]

_LARGEST = (1 << 62) - 1
_Name = TypeVar("_Name", bound=str)


def integer(
    name: str, value: object, least: int = -_LARGEST, most: int = _LARGEST
) -> int:
    """Gives `value` as an int. Raises ArgumentError."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise unexpected(name, "an integer", value) from None
    if number < least:
        bound = f"at least {least}"
    elif number > most:
        bound = f"at most {most}"
    else:
        return number
    raise unexpected(name, f"an integer of {bound}", number)


def number(
    name: str, value: object, least: float = -math.inf, most: float = math.inf
) -> float:
    """Gives `value` as a float that is not NaN. Raises ArgumentError."""
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise unexpected(name, "a number", value) from None
    if math.isnan(number):
        bound = "a number"
    elif math.isinf(number) and not least <= number <= most:
        bound = "a finite number"
    elif number < least:
        bound = f"a number of at least {least:g}"
    elif number > most:
        bound = f"a number of at most {most:g}"
    else:
        return number
    raise ArgumentError(name, bound, number, shown=str(number))


def boolean(name: str, value: object) -> bool:
    """Gives `value`, a bool. Raises ArgumentError."""
    if not isinstance(value, bool):
        raise unexpected(name, "True or False", value)
    return value


def choice(name: str, value: object, names: Sequence[_Name]) -> _Name:
    """Gives `value`, one of `names`. Raises ArgumentError that lists them."""
    if isinstance(value, str):
        for one in names:
            if one == value:
                return one
    raise unexpected(name, f"one of {', '.join(names)}", value)


def items(name: str, values: Any, expected: str = "a list") -> list[Any]:
    """Lists what is one; texts and mappings, which can be iterated, too, are
    none. Raises ArgumentError.
    """
    if isinstance(values, Iterable) and not isinstance(
        values, (str, bytes, Mapping)
    ):
        return list(values)
    raise unexpected(name, expected, values)


def byte_view(name: str, value: object) -> memoryview:
    """Gives the bytes of an object that holds some. Raises ArgumentError."""
    try:
        return memoryview(value).cast("B")  # type: ignore[arg-type]
    except TypeError:
        raise unexpected(name, "bytes", value) from None


def path_text(name: str, value: object, expected: str) -> str:
    """Gives a path as a str that is not empty. Raises ArgumentError that says
    what was `expected`.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise unexpected(name, expected, path)
    return path


def quantize_target(value: object) -> str:
    """Gives `quantize` as the core takes it: "" for None. Raises ArgumentError,
    which lists the names.
    """
    if value is None:
        return ""
    return choice("quantize", value, _core.quantize_types())
