"""Bodies of requests: JSON read strictly, and fields of the right types."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import inspect

from gemmakv._support.text import UNICODE, is_unicode, utf8_text
from gemmakv.errors import brief
from gemmakv.server.service.errors import RequestError, invalid

_T = TypeVar("_T")
# What narrows the part of the prefix cache that a request has.
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_WHERE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_STEP = re.compile(r"[^.\[\]]+")  # of a path: a field, or a place in a list
_MOST_DIGITS = 40  # of an integer, with its sign


def parse(body: bytes, depth: int, values: int) -> dict[str, Any]:
    """The JSON object that a body is.

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
        endless.append(text)  # as good as: many digits take long to read
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


def typed(document: dict[str, Any], shape: type[_T], texts: bool = False) -> _T:
    """A document's fields as `shape` has them, or as `texts` that say them.
    Floats that are whole are integers. Raises RequestError naming the field
    that is not as it should be.
    """
    try:
        return msgspec.convert(document, shape, strict=not texts)
    except msgspec.ValidationError:
        # Not before: nearly all bodies have none.
        document = _whole(document, inspect.type_info(shape))
    try:
        return msgspec.convert(document, shape, strict=not texts)
    except msgspec.ValidationError as error:
        found = _WHERE.fullmatch(str(error))
        what, path = str(error), ""
        if found:
            what, path = found["what"], found["path"] or ""
        lacking = _MISSING.fullmatch(what)
        if lacking:
            path = f"{path}.{lacking['name']}".lstrip(".")
            what = "missing: it has to be there"
        what = what[:1].lower() + what[1:]
        what = what.replace(", got", ", found")
        if texts:  # all are `str`
            what = what.replace(
                ", found `str`", f", found {brief(document.get(path))}"
            )
        if not lacking and ", found" not in what:
            what = _with_found(what, path, document, shape)
        raise invalid(path or "body", what) from None


def _whole(value: Any, kind: Any) -> Any:
    """The value with integers for floats that are whole, where `kind` takes
    no other numbers than integers.
    """
    kinds = _parts(kind)
    if isinstance(value, float):
        if not value.is_integer() or any(
            isinstance(one, inspect.FloatType | inspect.AnyType)
            for one in kinds
        ):
            return value
        integers = any(isinstance(one, inspect.IntType) for one in kinds)
        return int(value) if integers else value
    if isinstance(value, list):
        items = [one.item_type for one in kinds if hasattr(one, "item_type")]
        if items and any(isinstance(one, float | list | dict) for one in value):
            inside = inspect.UnionType(
                tuple(part for item in items for part in _parts(item))
            )
            return [_whole(one, inside) for one in value]
    if isinstance(value, dict):
        fields = {
            field.encode_name: field.type
            for one in kinds
            for field in getattr(one, "fields", ())
        }
        return {
            key: _whole(one, fields[key]) if key in fields else one
            for key, one in value.items()
        }
    return value


def _with_found(
    what: str, path: str, document: dict[str, Any], shape: type
) -> str:
    """A message that lacks what was found, or what was expected."""
    value: Any = document
    kind: Any = inspect.type_info(shape)
    for step in _STEP.findall(path):
        kind = _inside(kind, step)
        key = int(step) if isinstance(value, list) else step
        try:
            value = value[key]
        except (LookupError, TypeError):
            return what
    if what.startswith("invalid enum value"):
        words = ", ".join(map(str, _words(kind)))
        return f"expected one of {words}, found {brief(value)}"
    if "of length" in what:
        return f"{what}, found one of {len(value)}"
    return f"{what}, found {brief(value)}"


def _inside(kind: Any, step: str) -> Any:
    """The type of a field, or of what a list has."""
    for one in _parts(kind):
        for field in getattr(one, "fields", ()):
            if field.encode_name == step:
                return field.type
        if step.isdigit() and hasattr(one, "item_type"):
            return one.item_type
    return None


def _words(kind: Any) -> list[Any]:
    return [
        word
        for one in _parts(kind)
        if isinstance(one, inspect.LiteralType)
        for word in one.values
    ]


def _parts(kind: Any) -> tuple[Any, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _check_depth(bare: bytes, most: int) -> None:
    """Of a body without its strings."""
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
    """The path of the first number that is not finite; None if all are."""
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
