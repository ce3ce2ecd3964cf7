"""Checks of JSON schemas beyond those that llguidance makes.

llguidance keeps bounds of integers in 64 bits and of numbers in doubles: bounds
that do not fit are others then, or crash it. And a schema whose values would
have no end is noticed in the middle of a text. What it does not know but can be
said in other keywords is said in these: formats, and names of properties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from gemmakv.errors import brief

MOST = 2**53  # whole numbers up to here are doubles
BOUNDS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
# Whose values are schemas, schemas by name, or lists of them.
SCHEMAS = (
    "items", "additionalProperties", "additionalItems", "contains",
    "propertyNames", "not", "if", "then", "else", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
NAMED = (
    "properties", "patternProperties", "$defs", "definitions",
    "dependentSchemas",
)  # fmt: skip
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")

# What these say where they say nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}), "dependentRequired": ({},),
    "dependentSchemas": ({},), "dependencies": ({},), "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    # Formats that are for a reader, or of numbers.
    "format": ("password", "binary", "int32", "int64", "float", "double"),
}  # fmt: skip
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_BASE64 = "^([0-9A-Za-z+/]{4})*([0-9A-Za-z+/]{2}==|[0-9A-Za-z+/]{3}=)?$"
# Formats that llguidance does not know, by other libraries' names of them.
_PATTERNS = {
    "base64": _BASE64,
    "base64url": "^[0-9A-Za-z_-]*$",
    "byte": _BASE64,
    "cidrv4": rf"^({_BYTE}\.){{3}}{_BYTE}/(3[0-2]|[12]?[0-9])$",
    "cuid": r"^[cC][^\s-]{8,}$",
    "cuid2": "^[0-9a-z]+$",
    "e164": r"^\+[1-9][0-9]{6,14}$",
    "emoji": r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$",
    "jwt": r"^[0-9A-Za-z_-]+\.[0-9A-Za-z_-]+\.[0-9A-Za-z_-]*$",
    "ksuid": "^[0-9A-Za-z]{27}$",
    "mac": "^([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}$",
    "nanoid": "^[0-9A-Za-z_-]{21}$",
    "ulid": "^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$",
    "xid": "^[0-9A-Va-v]{20}$",
}
# Keywords that hold of the same value as those beside them.
_BESIDE = frozenset(
    (
        "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref",
        "$dynamicRef", "dependentSchemas", "dependencies",
    )
)  # fmt: skip
# Keywords that say which properties an object has beside those named.
_OTHERS = frozenset(
    (
        "additionalProperties", "unevaluatedProperties", "patternProperties",
        "propertyNames", "minProperties", "dependentRequired",
    )
)  # fmt: skip

Steps = tuple[str | int, ...]  # keys and indices that lead to a part


class SchemaError(ValueError):
    """A keyword of a schema that is wrong or cannot be enforced, at `field`:
    its path, with names that may have any characters.
    """

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


def checked_schema(
    schema: Mapping[str, Any],
    where: str,
    *,
    strict: bool,
    left: list[tuple[str, str]] | None = None,
) -> dict[str, Any]:
    """The schema, without bounds that cannot be held where it is not strict:
    `left` gets the place of each and why. Parts that only values without an
    end satisfy are False, which is the schema that nothing satisfies.

    `where` begins errors: ValueError for such bounds of one that is strict, for
    numbers that are none, and for a schema that only values without an end
    satisfy, unless it is not strict: it loses the references to itself then.
    """
    removed = [] if left is None else left
    refers = False
    closes = _is_plain(schema)

    def bounds(steps: Steps, part: Any) -> Any:
        nonlocal refers
        if not isinstance(part, Mapping):
            return part
        found = _in_known_words(part)
        if closes and not _BESIDE & {*steps} and _names_all(found):
            found["additionalProperties"] = False
        refers = refers or "$ref" in found
        for name in BOUNDS:
            value = found.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            at = dotted("", (*steps, name))
            # An integer may be too large for math to ask.
            if isinstance(value, float) and not math.isfinite(value):
                raise SchemaError(
                    where + at,
                    f"expected a number that JSON can say, found {value}",
                )
            why = ""
            if name == "multipleOf" and value <= 0:
                why = f"expected more than 0, found {brief(value)}"
            elif abs(value) > MOST:
                why = (
                    "expected a number between -2^53 and 2^53, found "
                    + brief(value)
                )
            if not why:
                continue
            if strict:
                raise SchemaError(where + at, why)
            removed.append((at, why))
            del found[name]
        return mapped(found, bounds, steps)

    try:
        found: dict[str, Any] = bounds((), schema)
        pruned = _pruned(found) if refers else found
        if pruned is False and not strict:
            found = _without_circles(found, removed)
            pruned = _pruned(found)
    except RecursionError:
        raise ValueError(
            f"{where}: expected fewer schemas in each other"
        ) from None
    if pruned is False:
        raise SchemaError(f"{where}.$ref", _ENDLESS)
    return dict(pruned)


def _in_known_words(node: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in keywords that llguidance knows, without those that say
    nothing. What this cannot be done of stays as it is.
    """
    found = {
        name: value
        for name, value in node.items()
        if not any(_is_same(value, one) for one in _NOTHING.get(name, ()))
    }
    pattern = _PATTERNS.get(found["format"]) if _has_format(found) else None
    if pattern is not None:
        del found["format"]
        found.setdefault("pattern", pattern)  # its own says as much
    if _holds_at_most_one(found):
        found.pop("uniqueItems", None)
    names = _names_allowed(found.get("propertyNames"))
    properties = found.get("properties", {})
    if (
        names is not None
        and isinstance(properties, Mapping)
        and "patternProperties" not in found
    ):
        del found["propertyNames"]
        others = found.get("additionalProperties", True)
        found["properties"] = {
            **{k: v if k in names else False for k, v in properties.items()},
            **{k: others for k in names if k not in properties},
        }
        found["additionalProperties"] = False
    return found


def _is_plain(node: Any) -> bool:
    """Tells whether what a schema says of the properties of a value stands in
    one place, so that this place can be closed.
    """
    if not isinstance(node, Mapping):
        return True
    if "allOf" in node or "properties" in node and _BESIDE & node.keys():
        return False
    return all(_is_plain(child) for _, child in children(node))


def _names_all(node: Mapping[str, Any]) -> bool:
    """Tells whether an object is to have the properties alone that its schema
    names: where it says nothing of others, and nothing asks for them. Models
    make up further ones without an end, and who reads the text wants none.
    """
    properties = node.get("properties")
    return (
        node.get("type") == "object"
        and isinstance(properties, Mapping)
        and bool(properties)
        and not (_OTHERS | _BESIDE) & node.keys()
        and properties.keys() >= {*(node.get("required") or ())}
    )


def _is_same(value: object, other: object) -> bool:
    """Compares values of JSON, in which no truth value is a number."""
    return type(value) is type(other) and value == other


def _has_format(node: Mapping[str, Any]) -> bool:
    return isinstance(node.get("format"), str)


def _holds_at_most_one(node: Mapping[str, Any]) -> bool:
    """Tells whether arrays of a schema have too few items to repeat one."""
    most = node.get("maxItems")
    return isinstance(most, int) and most <= 1


def _names_allowed(schema: Any) -> list[str] | None:
    """The names that a schema of names lists; None if it is another one."""
    if not isinstance(schema, Mapping):
        return None
    if not {*schema} <= {"type", "enum", "const", "title", "description"}:
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if (
        schema.get("type", "string") != "string"
        or "enum" in schema and "const" in schema
        or not isinstance(values, list)
        or not values
        or not all(isinstance(one, str) for one in values)
    ):
        return None
    return values


_ENDLESS = (
    "expected a schema that a value satisfies, found one that holds itself "
    "without an end"
)


def dotted(field: str, steps: Steps) -> str:
    """The path of a part of a field, as errors name fields."""
    return field + "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps
    )


def children(node: Mapping[str, Any]) -> Iterator[tuple[Steps, Any]]:
    """The schemas in a schema, and where they stand."""
    for name, value in list(node.items()):
        if name in NAMED and isinstance(value, Mapping):
            for key, child in value.items():
                yield (name, key), child
        elif name in LISTS and isinstance(value, list):
            for i, child in enumerate(value):
                yield (name, i), child
        elif name in SCHEMAS:
            yield (name,), value


def mapped(
    node: Mapping[str, Any],
    change: Callable[[Steps, Any], Any],
    steps: Steps = (),
) -> dict[str, Any]:
    """Gives the schema with what `change` makes of the schemas in it, which it
    gets with their places; `steps` lead to the schema itself.
    """
    found = dict(node)
    for name, value in node.items():
        place = (*steps, name)
        if name in NAMED and isinstance(value, Mapping):
            found[name] = {k: change((*place, k), v) for k, v in value.items()}
        elif name in LISTS and isinstance(value, list):
            found[name] = [change((*place, i), v) for i, v in enumerate(value)]
        elif name in SCHEMAS:
            found[name] = change(place, value)
    return found


def _pruned(root: dict[str, Any]) -> Any:
    """The schema with False for each part that only values without an end
    satisfy; False if it is one. The same object if there is none.
    """
    known = _places_with_end(root)
    if known is None:
        return root

    def change(_: Steps, part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        if not _ends(part, known.__contains__):
            return False
        return mapped(part, change)

    return change((), root)


def _without_circles(
    root: dict[str, Any], removed: list[tuple[str, str]]
) -> dict[str, Any]:
    """The schema without references to what only values without an end
    satisfy, whose places `removed` gets.
    """
    known = _places_with_end(root) or frozenset()

    def change(steps: Steps, part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        found = dict(part)
        if is_place(found.get("$ref")) and found["$ref"] not in known:
            removed.append((dotted("", (*steps, "$ref")), _ENDLESS))
            del found["$ref"]
        return mapped(found, change, steps)

    found: dict[str, Any] = change((), root)
    return found


def is_place(ref: Any) -> TypeGuard[str]:
    """Tells whether a reference is to a place in the schema; others are names
    of places ($anchor), or of documents.
    """
    return isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))


def _places_with_end(root: Any) -> frozenset[str] | None:
    """The references in a schema to places some of whose values have an end;
    None if that is all of them.

    Places are looked at until no more of them are known to have values with an
    end, each again when one is that it waits for: chains of references may be
    long, and share places.
    """
    waiting: dict[str, list[str]] = {}  # by place: those that wait for it
    known: set[str] = set()
    seen: set[str] = set()

    def find(part: Any) -> None:
        if isinstance(part, Mapping):
            if is_place(part.get("$ref")):
                seen.add(part["$ref"])
            for _, child in children(part):
                find(child)

    find(root)
    if not seen:
        return None
    work = list(seen)

    def looked_at(place: str) -> bool:
        def ends(ref: str) -> bool:
            if ref in known:
                return True
            waiting.setdefault(ref, []).append(place)
            if ref not in seen:
                seen.add(ref)
                work.append(ref)
            return False

        return _ends(resolve(root, place), ends)

    while work:
        place = work.pop()
        if place not in known and looked_at(place):
            known.add(place)
            work += waiting.pop(place, ())
    return None if len(known) == len(seen) else frozenset(known)


def _ends(schema: Any, refers: Callable[[str], bool]) -> bool:
    """Tells whether a schema has a value with an end. What is none is somebody
    else's to refuse.
    """
    if not isinstance(schema, Mapping):
        return True
    ref = schema.get("$ref")
    if is_place(ref) and not refers(ref):
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


def resolve(root: Any, ref: str) -> Any:
    """The part of a schema that a reference within it leads to; None if there
    is none.
    """
    found = root
    for part in ref.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdigit():
            found = found[int(part)] if int(part) < len(found) else None
        else:
            found = found.get(part) if isinstance(found, Mapping) else None
    return found
