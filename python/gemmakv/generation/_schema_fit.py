"""The keywords of a JSON schema that a compiler of grammars takes.

A tool whose schema need not be enforced is served without the keywords that
cannot be, and only without those. `with_usual_forms` gives the forms of other
libraries their evident meaning, and leaves out values that mean nothing.
`repaired` finds what else a compiler refuses by compiling: parts of the schema
by themselves, from the inside to the outside, and of a part that is refused
more and more of its keywords.
"""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from gemmakv.errors import brief
from gemmakv.generation._schema_check import (
    BOUNDS,
    LISTS,
    NAMED,
    SCHEMAS,
    SchemaError,
    Steps,
    children,
    dotted,
    is_place,
    mapped,
    resolve,
)

MOST_TRIALS = 2_000  # of one request; each takes about 0.3 ms

_Key = TypeVar("_Key")


@dataclasses.dataclass(frozen=True)
class Tried:
    """A grammar to be tried.

    Attributes:
      kind, text: as of a `Grammar`.
      lenient: keywords of a JSON schema that the compiler does not know are
        no reason to refuse it.
      begin: text with which it begins, after which it is looked at again.
    """

    kind: str
    text: str
    lenient: bool = False
    begin: str = ""

    def job(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "overrides": dict(overrides)}


# Says of each grammar why the compiler refuses it, or None.
Attempt = Callable[[Sequence[Tried]], list[str | None]]
# What is tried of a schema. Raises ValueError where nothing need be.
Written = Callable[[Mapping[str, Any]], Tried]
_ABSENT = object()
# Types as other libraries call them; "" is any. Letters of any case.
_TYPES = {
    "any": "", "type_unspecified": "", "unknown": "", "mixed": "",
    "int": "integer", "long": "integer", "int32": "integer",
    "int64": "integer", "float": "number", "double": "number",
    "decimal": "number", "str": "string", "text": "string",
    "bool": "boolean", "list": "array", "tuple": "array", "dict": "object",
    "map": "object", "none": "null", "nil": "null",
    **{kind: kind for kind in (
        "object", "array", "string", "number", "integer", "boolean", "null",
    )},
}  # fmt: skip
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties",
    "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_MAY_BE_EMPTY = ("prefixItems", "items")  # lists of schemas
_TEXTS = ("pattern", "format", "$ref")


@dataclasses.dataclass(frozen=True)
class Unfit:
    """A keyword of a schema that a grammar does not enforce, and why."""

    steps: Steps
    why: str

    def error(self, field: str, more: str = "") -> SchemaError:
        """The error for it in a schema that has to be enforced."""
        why = self.why
        if self.steps:
            why = why.removeprefix(f"{self.steps[-1]}: ")
        return SchemaError(dotted(field, self.steps), why + more)


def pointer(steps: Steps) -> str:
    """A JSON pointer, in the form that a URI's fragment has."""
    names = (str(s).replace("~", "~0").replace("/", "~1") for s in steps)
    return "#" + "".join(f"/{urllib.parse.quote(n, '~$')}" for n in names)


def type_of(given: Any) -> Any:
    """A type by the name that JSON Schema has for it, "" for any type, a list
    of such names; None if it is none.
    """
    if isinstance(given, str):
        return _TYPES.get(given.lower())
    if not isinstance(given, list) or not given:
        return None
    kinds = [type_of(kind) if isinstance(kind, str) else None for kind in given]
    if None in kinds:
        return None
    return "" if "" in kinds else list(dict.fromkeys(kinds))


def with_usual_forms(
    schema: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Unfit]]:
    """The schema with types by their names in JSON Schema, and without
    keywords whose values mean nothing in it, which come second. Raises
    RecursionError.
    """
    left: list[Unfit] = []

    def clean(node: Mapping[str, Any], steps: Steps) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in node.items():
            kept, why = _usual(name, value, schema)
            if why:
                left.append(Unfit((*steps, name), why))
            elif kept is not _ABSENT:
                found[name] = kept

        return mapped(found, cleaned, steps)

    def cleaned(steps: Steps, child: Any) -> Any:
        if isinstance(child, Mapping):
            return clean(child, steps)
        if not isinstance(child, bool):
            why = f"expected a JSON schema, found {brief(child)}"
            left.append(Unfit(steps, why))
            child = {}
        return child

    return clean(schema, ()), left


def _usual(name: str, value: Any, root: Any) -> tuple[Any, str]:
    """A keyword's value in the usual form, or why there is none."""
    if name == "type":
        kind = type_of(value)
        if kind is None:
            return None, f"expected a type, found {brief(value)}"
        return kind or _ABSENT, ""
    expected = ""
    if name in NAMED:
        expected = "" if isinstance(value, Mapping) else "schemas by name"
    elif name in LISTS and isinstance(value, list):
        expected = "" if value or name in _MAY_BE_EMPTY else "schemas"
    elif name in SCHEMAS:
        known = isinstance(value, Mapping | bool)
        expected = "" if known else "a JSON schema"
    elif name in LISTS:
        expected = "schemas"
    elif name == "enum":
        if not isinstance(value, list) or not value:
            expected = "values"
    elif name == "required":
        if not isinstance(value, list) or not all(
            isinstance(one, str) for one in value
        ):
            expected = "names"
    elif name in BOUNDS:
        if isinstance(value, bool):  # of the other bound, before draft 6
            expected = "" if name.startswith("exclusive") else "a number"
        elif not isinstance(value, int | float):
            expected = "a number"
    elif name in _COUNTS:
        if isinstance(value, float) and value.is_integer() and value >= 0:
            return int(value), ""
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            expected = "a count"
    elif name in _TEXTS:
        if not isinstance(value, str):
            expected = "a text"
        elif (
            name == "$ref" and is_place(value) and resolve(root, value) is None
        ):
            expected = "a place in the schema"
    if expected:
        return None, f"expected {expected}, found {brief(value)}"
    return value, ""


def without(schema: Any, removed: Iterable[Steps]) -> Any:
    """The schema without these keywords; a schema of a list is any then."""
    for steps in removed:
        schema = _without(schema, steps)
    return schema


def _without(node: Any, steps: Steps) -> Any:
    step = steps[0]
    if isinstance(node, list):
        inner = list(node)
        at = int(step)
        inner[at] = {} if len(steps) == 1 else _without(inner[at], steps[1:])
        return inner
    if not isinstance(node, Mapping) or step not in node:
        return node
    if len(steps) > 1:
        return {**node, step: _without(node[step], steps[1:])}
    return {name: value for name, value in node.items() if name != step}


class Fitting:
    """Finds what of the schemas of one request a compiler does not take."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._known: dict[Tried, str | None] = {}
        self._left = MOST_TRIALS

    def refusal(self, tried: Tried) -> str | None:
        """Says why the compiler refuses a grammar; None if it takes it. Raises
        _TooLong after too many.
        """
        if tried not in self._known:
            if not self._left:
                raise _TooLong
            self._left -= 1
            [self._known[tried]] = self._attempt([tried])
        return self._known[tried]

    def patterns(
        self, schemas: Mapping[_Key, Mapping[str, Any]]
    ) -> dict[_Key, list[Unfit]]:
        """The patterns in schemas that the compiler refuses, or that it takes
        but cannot follow: such a one would end a text in the middle.
        """
        places: dict[Tried, list[tuple[_Key, Steps]]] = {}

        def walk(node: Any, key: _Key, steps: Steps) -> None:
            if not isinstance(node, Mapping):
                return
            named = node.get("patternProperties")
            found = {
                ("patternProperties", one): {"pattern": one}
                for one in (named if isinstance(named, Mapping) else ())
            }
            if isinstance(node.get("pattern"), str):
                lengths = {
                    name: node[name]
                    for name in ("pattern", "minLength", "maxLength")
                    if name in node
                }
                found[("pattern",)] = lengths  # type: ignore[index]
            for place, text in found.items():
                leaf = json.dumps({"type": "string", **text})
                tried = Tried("json_schema", leaf, True, '"')
                places.setdefault(tried, []).append((key, (*steps, *place)))
            for inner, child in children(node):
                walk(child, key, (*steps, *inner))

        for key, schema in schemas.items():
            walk(schema, key, ())
        unfit: dict[_Key, list[Unfit]] = {key: [] for key in schemas}
        if not places:
            return unfit
        tried = list(places)[:MOST_TRIALS]
        for one, why in zip(tried, self._attempt(tried), strict=True):
            for key, steps in places[one] if why is not None else ():
                unfit[key].append(Unfit(steps, str(why)))
        return unfit

    def repaired(
        self, schema: Mapping[str, Any], written: Written
    ) -> tuple[dict[str, Any], list[Unfit]]:
        """The schema without the keywords that the compiler does not take,
        which come second. Where it takes it only without all of them, or
        finding them takes too long, the one of them is the schema itself.

        Schemas are tried by themselves without references: what these lead to
        is tried where it stands.
        """
        try:
            return self._repaired(schema, written)
        except _TooLong:
            why = "expected fewer keywords that cannot be enforced, found more"
            return {}, [Unfit((), why)]

    def _repaired(
        self, schema: Mapping[str, Any], written: Written
    ) -> tuple[dict[str, Any], list[Unfit]]:
        def refused(node: Mapping[str, Any]) -> str | None:
            try:
                tried = written(node)
            except SchemaError as error:
                return error.why
            except ValueError as error:
                return str(error)
            return self.refusal(tried)

        if refused(schema) is None:
            return dict(schema), []
        found: list[Unfit] = []
        self._repair(schema, (), refused, found)
        result = without(schema, [one.steps for one in found])
        if refused(result) is not None:
            found += _in_context(result, refused)
            result = without(schema, [one.steps for one in found])
            why = refused(result)
            if why is not None:
                return {}, [Unfit((), why)]
        # A schema without its references may be refused for what it lacks.
        needed = list(found)
        for one in [one for one in found if one.steps[-1] in _JOINED]:
            fewer = [other for other in needed if other is not one]
            if refused(without(schema, [u.steps for u in fewer])) is None:
                needed = fewer
        return dict(without(schema, [one.steps for one in needed])), needed

    def _repair(
        self,
        node: Mapping[str, Any],
        steps: Steps,
        refused: Callable[[Mapping[str, Any]], str | None],
        found: list[Unfit],
    ) -> dict[str, Any]:
        """A part of the schema without references and what is refused, which
        `found` gets.
        """

        def alone(node: Mapping[str, Any]) -> str | None:
            # An optional property may be absent where nothing satisfies it.
            return refused({"type": "object", "properties": {"x": node}})

        def inner(steps: Steps, child: Any) -> Any:
            if not isinstance(child, Mapping):
                return child
            return self._repair(child, steps, refused, found)

        mended = {k: v for k, v in node.items() if k != "$ref"}
        defines = any(name in mended for name in ("$defs", "definitions"))
        if not defines and alone(mended) is None:
            return mended
        mended = mapped(mended, inner, steps)
        if alone(mended) is None:
            return mended
        good: dict[str, Any] = {}
        for name, value in mended.items():
            why = alone({**good, name: value})
            if why is None:
                good[name] = value
            else:
                found.append(Unfit((*steps, name), why))
        return good


class _TooLong(Exception):
    """Too many trials."""


# Keywords that may be refused for what they lead to, or stand beside.
_JOINED = (
    "$ref", "oneOf", "allOf", "anyOf", "patternProperties", "enum", "required",
    "additionalProperties",
)  # fmt: skip


def _in_context(
    schema: Mapping[str, Any],
    refused: Callable[[Mapping[str, Any]], str | None],
) -> list[Unfit]:
    """The keywords of `_JOINED` that the schema is to lose to be taken."""
    places: list[Steps] = []

    def walk(node: Any, steps: Steps) -> None:
        if isinstance(node, Mapping):
            places.extend((*steps, name) for name in _JOINED if name in node)
            for inner, child in children(node):
                walk(child, (*steps, *inner))

    walk(schema, ())
    found: list[Unfit] = []
    rest: Mapping[str, Any] = schema
    for steps in places:
        why = refused(rest)
        if why is None:
            break
        found.append(Unfit(steps, why))
        rest = without(rest, [steps])
    return found
