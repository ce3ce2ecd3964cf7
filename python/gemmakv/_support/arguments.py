"""Checks of arguments that several modules share."""

from __future__ import annotations

import operator

from gemmakv import _core
from gemmakv.errors import brief

__all__ = ["integer", "quantize_target"]


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


def quantize_target(value: object) -> str:
    """`quantize` as the core takes it: "" for None.

    Raises ValueError, which lists the names, for what is none of them.
    """
    if value is None:
        return ""
    names = _core.quantize_types()
    if not isinstance(value, str) or value not in names:
        raise ValueError(
            f"quantize: expected one of {', '.join(names)}, or None; found "
            + brief(value)
        )
    return value
