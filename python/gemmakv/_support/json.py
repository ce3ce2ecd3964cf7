"""JSON, read and written more strictly than Python's `json` does it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from gemmakv._support.text import UNICODE, surrogate
from gemmakv.errors import ArgumentError, brief, one_line


def loads(
    name: str,
    data: str | bytes,
    *,
    unique: bool = True,
    finite: bool = False,
    kind: type[Exception] | None = None,
) -> Any:
    """Reads a text, or UTF-8 with a byte order mark or without.

    If `unique`, a key that comes twice in an object is an error; if `finite`,
    so are NaN, infinities and numbers that are too large for a float.

    Raises ArgumentError, or an error of `kind`, that begins with `name`.
    """
    hooks: dict[str, Any] = {}
    if unique:
        hooks["object_pairs_hook"] = _object
    if finite:
        hooks["parse_float"] = hooks["parse_constant"] = _float
    expected = "JSON"
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        return json.loads(text, **hooks)
    except _TwiceError as error:
        expected, shown = "each key once", f"{brief(error.args[0])} twice"
    except RecursionError:
        shown = "lists and objects nested too deeply"
    except ValueError as error:
        shown = one_line(error)
    if kind is not None:
        raise kind(f"{name}: expected {expected}, found {shown}")
    raise ArgumentError(name, expected, data, shown=shown)


class _TwiceError(Exception):
    """A key of an object comes twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _TwiceError(key)
            seen.add(key)
    return found


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{brief(text)}, which is no number of JSON's")
    return value


def loads_finite(text: str) -> Any:
    """Reads a text; numbers beyond all floats become the largest float, so
    that they can be written again.
    """
    return json.loads(text, parse_float=_clamped)


def _clamped(text: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def plain_json(
    name: str, value: Any, expected: str = "what JSON can say"
) -> Any:
    """Copies a value into plain types: dict, list, str, int, float, bool and
    None.

    Raises ArgumentError for what JSON cannot say, and for text that is not
    Unicode.
    """
    try:
        text = json.dumps(
            value, ensure_ascii=False, default=dict_of, allow_nan=False
        )
        text.encode("utf-8")
        return json.loads(text)
    except UnicodeEncodeError as error:
        shown = surrogate(error.object[error.start])
        raise ArgumentError(name, UNICODE, value, shown=shown) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(name, expected, value, shown=str(error)) from None


def to_json(name: str, value: object, indent: int | None = None) -> bytes:
    """Writes ASCII, so that every str goes through, lone surrogates included.

    Raises ArgumentError for what JSON cannot say.
    """
    try:
        text = json.dumps(value, indent=indent, default=dict_of)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            name, "what JSON can say", value, shown=str(error)
        ) from None
    return text.encode("ascii")


def dict_of(value: object) -> object:
    """Makes a dict of another mapping: `default=` of `json.dumps`."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(brief(value))
