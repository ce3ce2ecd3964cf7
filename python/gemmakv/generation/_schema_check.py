"""What a JSON schema must be beyond what llguidance checks of it.

llguidance keeps bounds of integers in 64 bits and of numbers in doubles: bounds
that do not fit are others then, or crash it. And a schema whose values would
have no end is noticed in the middle of a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gemmakv.errors import brief

MOST = 2**53  # whole numbers up to here are doubles
_BOUNDS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
# Whose values are schemas, schemas by name, or lists of them.
_SCHEMAS = (
    "items", "additionalProperties", "additionalItems", "contains",
    "propertyNames", "not", "if", "then", "else", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
_NAMED = (
    "properties", "patternProperties", "$defs", "definitions",
    "dependentSchemas",
)  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")


def checked_schema(
    schema: Mapping[str, Any], where: str, *, strict: bool
) -> dict[str, Any]:
    """The schema, without bounds that cannot be held where it is not strict.

    `where` begins errors: ValueError for such bounds of one that is strict, for
    numbers that are none, and for a schema that only values without an end
    satisfy.
    """

    def bounds(part: Any, place: str) -> Any:
        if not isinstance(part, Mapping):
            return part
        found = dict(part)
        for name in _BOUNDS:
            value = found.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            at = f"{where}{place}.{name}"
            # An integer may be too large for math to ask.
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(
                    f"{at}: expected a number that JSON can say, found {value}"
                )
            if name == "multipleOf" and value <= 0:
                raise ValueError(
                    f"{at}: expected more than 0, found {brief(value)}"
                )
            if abs(value) <= MOST:
                continue
            if strict:
                raise ValueError(
                    f"{at}: expected a number between -2^53 and 2^53, found "
                    + brief(value)
                )
            del found[name]
        return _changed(found, place, bounds)

    try:
        found: dict[str, Any] = bounds(schema, "")
        ends = _has_end(found)
    except RecursionError:
        raise ValueError(
            f"{where}: expected fewer schemas in each other"
        ) from None
    if not ends:
        raise ValueError(
            f"{where}.$ref: expected a schema that a value satisfies, found "
            "one that holds itself without an end"
        )
    return found


def _changed(
    schema: dict[str, Any], place: str, change: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """With what `change` makes of the schemas in it."""
    for name in _SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            schema[name] = change(schema[name], f"{place}.{name}")
    for name in _NAMED:
        if isinstance(schema.get(name), Mapping):
            schema[name] = {
                key: change(one, f"{place}.{name}.{key}")
                for key, one in schema[name].items()
            }
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            schema[name] = [
                change(one, f"{place}.{name}[{i}]")
                for i, one in enumerate(schema[name])
            ]
    return schema


def _has_end(root: Any) -> bool:
    """Whether some value of the schema has an end.

    Places that it refers to are looked at until no more of them are known to
    have values with an end, each again when one is that it waits for: chains of
    references may be long, and share places.
    """
    waiting: dict[str, list[str]] = {}  # by place: those that wait for it
    known: set[str] = set()
    seen: set[str] = set()
    work: list[str] = []

    def looked_at(place: str) -> bool:
        def ends(ref: str) -> bool:
            if ref in known:
                return True
            waiting.setdefault(ref, []).append(place)
            if ref not in seen:
                seen.add(ref)
                work.append(ref)
            return False

        return _ends(_at(root, place), ends)

    if looked_at(""):
        return True
    while work:
        place = work.pop()
        if place in known or not looked_at(place):
            continue
        known.add(place)
        for other in waiting.pop(place, ()):
            if other:
                work.append(other)
            elif looked_at(""):
                return True
    return False


def _ends(schema: Any, refers: Callable[[str], bool]) -> bool:
    """Of one schema. What is none is somebody else's to refuse."""
    if not isinstance(schema, Mapping):
        return True
    ref = schema.get("$ref")
    # Others are names of places ($anchor), or of documents.
    if (
        isinstance(ref, str)
        and (ref == "#" or ref.startswith("#/"))
        and not refers(ref)
    ):
        return False
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        if not isinstance(parts, list) or not parts:
            continue
        ends = [_ends(one, refers) for one in parts]
        if not (all(ends) if name == "allOf" else any(ends)):
            return False
    kinds = schema.get("type", "object")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    others = [kind for kind in kinds if kind not in ("object", "array")]
    if others or "enum" in schema or "const" in schema:
        return True
    return any(
        _object_ends(schema, refers)
        if kind == "object"
        else _array_ends(schema, refers)
        for kind in kinds
    )


def _object_ends(
    schema: Mapping[str, Any], refers: Callable[[str], bool]
) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return True
    return all(
        _ends(properties.get(name), refers)
        for name in required
        if isinstance(name, str)
    )


def _array_ends(
    schema: Mapping[str, Any], refers: Callable[[str], bool]
) -> bool:
    least = schema.get("minItems")
    if not isinstance(least, int) or least < 1:
        return True
    first = schema.get("prefixItems")
    first = first[:least] if isinstance(first, list) else []
    rest = [schema.get("items")] if len(first) < least else []
    return all(_ends(one, refers) for one in [*first, *rest])


def _at(root: Any, ref: str) -> Any:
    found = root
    for part in ref.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdigit():
            found = found[int(part)] if int(part) < len(found) else None
        else:
            found = found.get(part) if isinstance(found, Mapping) else None
    return found
