"""The reader of JSON bodies, which is strict."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from gemmakv._support.text import UNICODE, is_unicode, utf8_text
from gemmakv.errors import brief
from gemmakv.server.service.errors import RequestError, invalid

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_MOST_DIGITS = 40  # of an integer, with its sign


def parse(body: bytes, depth: int, values: int) -> dict[str, Any]:
    """Reads the JSON object that a body is.

    Raises RequestError for anything else, text that is not Unicode, NaN,
    infinities and integers of very many digits (it names the field of each),
    keys that come twice, and what is nested deeper than `depth` or has more
    than so many `values`.
    """
    try:
        text = utf8_text(body)
    except ValueError as error:
        raise RequestError(400, f"body: {error}") from None
    bare = _STRINGS.sub(b"", body)
    if bare.count(b",") >= values:
        raise RequestError(
            400,
            f"body: expected at most {values} values in lists and objects, "
            "found more",
        )
    _check_depth(bare, depth)
    endless: list[str] = []  # numbers that are not finite

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            endless.append(text)
        return value

    def integer(text: str) -> float:
        if len(text) <= _MOST_DIGITS:
            return int(text)
        endless.append(text)  # many digits take long to read
        return math.inf

    try:
        found = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=number,
            parse_float=number,
            parse_int=integer,
        )
    except json.JSONDecodeError as error:
        raise RequestError(
            400,
            f"body: expected JSON, found {_said(error)} at offset {error.pos}",
        ) from None
    if not isinstance(found, dict):
        raise RequestError(
            400, f"body: expected a JSON object, found {brief(found)}"
        )
    if "\\u" in text:
        _check_unicode(found, "")
    if endless:
        path = _place_of_endless(found, "") or "body"
        first = endless[0]
        digits = first.removeprefix("-").isdigit()
        kind = "an integer of 64 bits" if digits else "a finite number"
        raise invalid(path[:200], f"expected {kind}, found {first[:60]}")
    return found


def _said(error: json.JSONDecodeError) -> str:
    words = error.msg.lower().removesuffix(" at")
    if words.startswith("expecting "):  # a value, a property name, ','
        words = f"no {words.removeprefix('expecting ')}"
    if "utf-8 bom" in words:
        words = "a byte order mark"
    return words


def _check_depth(bare: bytes, most: int) -> None:
    """Checks the nesting in a body without its strings."""
    depth = 0
    for byte in bare.translate(None, _NOT_BRACKETS):
        if byte in b"[{":
            depth += 1
            if depth > most:
                raise RequestError(
                    400,
                    f"body: expected at most {most} lists and objects in "
                    "each other, found more",
                )
        else:
            depth -= 1


def _check_unicode(value: Any, path: str) -> None:
    if isinstance(value, str):
        if not is_unicode(value):
            raise invalid(
                path[:200] or "body",
                f"expected {UNICODE}, found a lone surrogate",
            )
    elif isinstance(value, dict):
        for key, one in value.items():
            _check_unicode(key, path)
            _check_unicode(one, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for i, one in enumerate(value):
            _check_unicode(one, f"{path}[{i}]")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise invalid(key[:60], "the key comes twice")
            seen.add(key)
    return found


def _place_of_endless(value: Any, path: str) -> str | None:
    """Gives the path of the first number that is not finite, if any."""
    if isinstance(value, float) and not math.isfinite(value):
        return path
    inside: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inside = [
            (f"{path}.{key}" if path else key, one)
            for key, one in value.items()
        ]
    elif isinstance(value, list):
        inside = [(f"{path}[{i}]", one) for i, one in enumerate(value)]
    for name, one in inside:
        found = _place_of_endless(one, name)
        if found is not None:
            return found
    return None
