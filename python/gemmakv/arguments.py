"""Checks of arguments that several modules share."""

from __future__ import annotations

import operator

from gemmakv.errors import brief

__all__ = ["integer"]


def integer(name: str, value: object) -> int:
    """`value` as an int. Raises ValueError naming the argument."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"{name}: expected an integer, found {brief(value)}"
        ) from None
    if abs(number) >= 1 << 62:
        raise ValueError(f"{name}: {number} is out of range")
    return number
