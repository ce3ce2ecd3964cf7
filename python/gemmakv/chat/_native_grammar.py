"""Grammars of models' own forms of calls (`_native_calls`), which hold calls to
the schemas of their tools.

Of JSON Schema: types, enum, const, properties, required, additionalProperties,
items, prefixItems, minItems, maxItems, anyOf, oneOf of one, allOf of one, $ref
within the schema, nullable, lengths and patterns of strings, and all that
llguidance knows of numbers. Keys come in the order in which the templates write
them; names that `properties` does not list come where `additionalProperties`
asks for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gemmakv.chat._answers import Answer, slashed
from gemmakv.chat._tools import MOST_CALLS, ToolSchema
from gemmakv.errors import brief
from gemmakv.generation._schema_check import SchemaError

_NOTES = frozenset({
    "title", "description", "default", "examples", "example", "deprecated",
    "readOnly", "writeOnly", "$schema", "$id", "$comment", "$defs",
    "definitions", "nullable",
})  # fmt: skip
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern"},
    "number": {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "multipleOf",
    },
    "boolean": set(),
    "null": set(),
}  # fmt: skip
_OF_TYPE["integer"] = _OF_TYPE["number"]
_ALL = frozenset().union(*_OF_TYPE.values())
_WHOLE = ("enum", "const", "$ref", "anyOf", "oneOf", "allOf")
# What a reader takes as a key without quotes.
_BARE = re.compile(r"[^\s:{}\[\],](?:[^:{}\[\],]*[^\s:{}\[\],])?")
_MOST_ITEMS, _MOST_LETTERS = 1_000, 10_000

# Text of any kind, and values of any: of all grammars.
_COMMON = r"""TEXT: /(.|\n)+/
KEY: /[A-Za-z0-9_.-]+/
string: quote TEXT? quote
number: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/
any: string | number | "true" | "false" | "null" | any_object | any_array
any_object: "{" (any_pair ("," any_pair)*)? "}"
any_pair: KEY ":" any
any_array: "[" (any ("," any)*)? "]"
"""


def native_grammar(
    marks: Mapping[str, int],
    tools: Mapping[int, ToolSchema],
    *,
    free: bool,
    parallel: bool,
    strict: bool = False,
    answer: Answer | None = None,
) -> str:
    """Writes the grammar of a reply with calls.

    Args:
      marks: ids of the control tokens: "call", "call_end", "quote", and where
        the model thinks "thought" and "thought_end".
      tools: those that may be called, by their places among all of them.
      free: the reply may be text, or have text before its calls.
      parallel: it may have several calls.
      strict: all tools are as strict ones.
      answer: the form of the reply where it has no calls, if `free`.

    Raises ValueError that names the tool and a keyword of its schema that is
    wrong or, where the tool is strict, cannot be enforced.
    """
    thinks = "thought" in marks
    lines = [
        f"quote: <[{marks['quote']}]>",
        f"again: <[{marks['call']}]> call <[{marks['call_end']}]>",
        "call: " + " | ".join(f"tool_{i}" for i in tools),
    ]
    calls = f"again{{1,{MOST_CALLS}}}" if parallel else "again"
    if thinks:
        opens, closes = marks["thought"], marks["thought_end"]
        lines.append(f"mark: <[{opens}]> | <[{closes}]>")
        lines.append(f"thought: <[{opens}]> TEXT? <[{closes}]>")
    if free and answer is not None:
        lines += answer.rules()
        thought = "thought? " if thinks else ""
        lines.insert(0, f"start: {thought}({calls} | answer)")
    elif free:
        said = "TEXT? (mark TEXT?)*" if thinks else "TEXT?"
        lines.append(f"said: {said}")
        lines.insert(0, f"start: said ({calls})?")
    else:
        lines.insert(0, f"start: {'thought? ' if thinks else ''}{calls}")
    for i, tool in tools.items():
        rules = _Rules(
            tool.field, f"args_{i}", tool.schema, strict or tool.strict
        )
        arguments = rules.arguments()
        head = _text(f"call:{tool.tool}")
        lines += [f"tool_{i}: {head} {arguments}", *rules.lines]
    return "\n".join(lines) + "\n" + _COMMON


class _Rules:
    """Rules of one schema. Each is on a line of its own, whose name says of
    which tool it is.
    """

    def __init__(
        self, where: str, prefix: str, schema: Mapping[str, Any], strict: bool
    ) -> None:
        self.lines: list[str] = []
        self._where = where
        self._prefix = prefix
        self._root = schema
        self._strict = strict
        self._of_places: dict[str, str] = {}

    def arguments(self) -> str:
        """The rule of an object of the schema."""
        return self._value({"type": "object", **self._root}, "")

    def _rule(self, body: str, kind: str = "") -> str:
        # Terminals begin with a capital.
        name = f"{kind or self._prefix}_{len(self.lines)}"
        if kind:
            name = f"{kind}_{self._prefix.upper()}_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _refused(self, place: str, keyword: str, why: str) -> ValueError:
        return SchemaError(f"{self._where}{place}.{keyword}", why)

    def _cannot(self, place: str, keyword: str) -> None:
        if self._strict:
            raise self._refused(
                place,
                keyword,
                "not supported in a strict tool of a model that has its own "
                "form of calls",
            )

    def _value(self, schema: Any, place: str) -> str:
        """The name of the rule of its values, or what may stand for it."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise SchemaError(
                self._where + place,
                f"expected a JSON schema, found {brief(schema)}",
            )
        found = self._not_null(schema, place)
        if schema.get("nullable") is True:
            found = f'({found} | "null")'
        return found

    def _not_null(self, schema: Mapping[str, Any], place: str) -> str:
        whole = [name for name in _WHOLE if name in schema]
        if whole:
            return self._of_whole(whole[0], schema, place)
        kinds = schema.get("type")
        if kinds is None:
            kinds = [
                kind
                for kind, names in _OF_TYPE.items()
                if kind != "integer" and names & schema.keys()
            ]
            for name in schema.keys() - _NOTES - _ALL:
                self._cannot(place, name)
            if not kinds:
                return "any"
        if isinstance(kinds, str):
            kinds = [kinds]
        if not isinstance(kinds, Sequence) or not kinds:
            raise self._refused(
                place, "type", f"expected a type, found {brief(kinds)}"
            )
        return _either([self._of_type(kind, schema, place) for kind in kinds])

    def _of_whole(
        self, name: str, schema: Mapping[str, Any], place: str
    ) -> str:
        value = schema[name]
        beside = schema.keys() - _NOTES - {name, "type"}
        if name == "$ref":
            for other in beside:
                self._cannot(place, other)
            return self._of_place(value, place)
        if name in ("enum", "const"):
            for other in beside:
                self._cannot(place, other)
            values = value if name == "enum" else [value]
            if not isinstance(values, list) or not values:
                raise self._refused(
                    place, name, f"expected values, found {brief(values)}"
                )
            return _either([_literal(one) for one in values])
        if not isinstance(value, list) or not value:
            raise self._refused(
                place, name, f"expected schemas, found {brief(value)}"
            )
        if name == "allOf":
            merged = {k: v for k, v in schema.items() if k != "allOf"}
            for one in value:
                if not isinstance(one, Mapping) or (
                    (merged.keys() - _NOTES) & one.keys()
                ):
                    self._cannot(place, name)
                    continue
                merged |= one
            return self._not_null(merged, place)
        if name == "oneOf" and len(value) > 1:
            self._cannot(place, name)
        for other in beside:
            self._cannot(place, other)
        return _either(
            [
                self._value(one, f"{place}.{name}[{i}]")
                for i, one in enumerate(value)
                if one is not False or len(value) == 1
            ]
        )

    def _of_place(self, ref: Any, place: str) -> str:
        """The rule of a part of the schema, made once: it may hold itself."""
        if not isinstance(ref, str) or not re.match(r"#(/|$)", ref):
            raise self._refused(
                place,
                "$ref",
                f"expected a place in the schema, found {brief(ref)}",
            )
        if ref in self._of_places:
            return self._of_places[ref]
        found: Any = self._root
        for part in ref.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                raise self._refused(
                    place, "$ref", f"the schema has no {brief(ref)}"
                )
        name = self._rule("")
        line = len(self.lines) - 1
        self._of_places[ref] = name
        self.lines[line] = f"{name}: {self._value(found, place + '.$ref')}"
        return name

    def _of_type(
        self, kind: Any, schema: Mapping[str, Any], place: str
    ) -> str:
        if not isinstance(kind, str) or kind.lower() not in _OF_TYPE:
            raise self._refused(
                place,
                "type",
                f"expected one of {', '.join(_OF_TYPE)}, found {brief(kind)}",
            )
        kind = kind.lower()
        for name in schema.keys() - _NOTES - _OF_TYPE[kind] - {"type"}:
            # Another type's say nothing of this one.
            if name not in _ALL:
                self._cannot(place, name)
        if kind == "object":
            return self._object(schema, place)
        if kind == "array":
            return self._array(schema, place)
        if kind == "string":
            return self._string(schema, place)
        if kind == "null":
            return '"null"'
        if kind == "boolean":
            return '("true" | "false")'
        found = {k: schema[k] for k in _OF_TYPE[kind] if k in schema}
        if kind == "number" and not found:
            return "number"
        found = {
            "type": kind,
            **dict(sorted(found.items())),
            "x-guidance": {"lenient": not self._strict},
        }
        return self._rule(f"%json {json.dumps(found)}")

    def _object(self, schema: Mapping[str, Any], place: str) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise self._refused(
                place,
                "properties",
                f"expected schemas by name, found {brief(properties)}",
            )
        if not isinstance(required, list) or not all(
            isinstance(name, str) for name in required
        ):
            raise self._refused(
                place, "required", f"expected names, found {brief(required)}"
            )
        all_of_them = {**dict.fromkeys(required, {}), **properties}
        members = [
            (
                self._member(name, schema, f"{place}.properties.{name}"),
                name in required,
            )
            for name, schema in _sorted(all_of_them)
            if schema is not False or name in required
        ]
        more = schema.get("additionalProperties", not all_of_them)
        closed = schema.get("additionalProperties") is False
        if closed and len(all_of_them) > len(properties):
            lacks = next(name for name in required if name not in properties)
            raise self._refused(
                place,
                "required",
                f"expected properties that there may be, found {brief(lacks)}",
            )
        extra = None
        if more is not False:
            value = self._value(more, place + ".additionalProperties")
            key = "KEY"
            if all_of_them:
                names = "|".join(re.escape(name) for name in all_of_them)
                key = self._rule(f"KEY & ~/{slashed(names)}/", "KEY")
            extra = self._rule(f'{key} ":" {value}')
        return self._rule(f'"{{" {self._members(members, extra)} "}}"')

    def _member(self, name: Any, schema: Any, place: str) -> str:
        if not isinstance(name, str):
            raise self._refused(
                place, "properties", f"expected names, found {brief(name)}"
            )
        value = self._value(schema, place)
        if _BARE.fullmatch(name):
            return self._rule(f"{_text(name + ':')} {value}")
        quoted = f"quote {_text(name)} quote" if name else "quote quote"
        return self._rule(f'{quoted} ":" {value}')

    def _members(
        self, members: Sequence[tuple[str, bool]], extra: str | None
    ) -> str:
        """Which of them come, with commas between."""
        rest = f'("," {extra})*' if extra else ""
        # From the last: what may follow each.
        after = [rest]
        for name, needed in reversed(members):
            one = f'"," {name}' if needed else f'("," {name})?'
            after.append(self._rule(f"{one} {after[-1]}"))
        after.reverse()
        first = []
        for i, (name, needed) in enumerate(members):
            first.append(f"{name} {after[i + 1]}")
            if needed:
                return f"({' | '.join(first)})"
        if extra:
            first.append(f"{extra} {rest}")
        return f"({' | '.join(first)})?" if first else ""

    def _array(self, schema: Mapping[str, Any], place: str) -> str:
        least = self._count("minItems", schema, place, 0)
        most = self._count("maxItems", schema, place, None)
        places = schema.get("prefixItems", [])
        if not isinstance(places, list):
            raise self._refused(
                place, "prefixItems", f"expected schemas, found {brief(places)}"
            )
        fixed = [
            self._value(one, f"{place}.prefixItems[{i}]")
            for i, one in enumerate(places)
        ]
        items = schema.get("items", True)
        if items is False:
            most = min(len(fixed), len(fixed) if most is None else most)
            more = "any"
        else:
            more = self._value(items, place + ".items")
        if most is not None and most < least:
            raise self._refused(
                place,
                "maxItems",
                f"expected at least {least} items, found {most}",
            )
        if most == 0:
            return '"[" "]"'
        body = self._items(fixed[:most] or [more], more, least, most)
        return self._rule(f'"[" {body} "]"')

    @staticmethod
    def _items(
        first: Sequence[str], more: str, least: int, most: int | None
    ) -> str:
        """Items with commas between; `first` have schemas of their own."""
        body = ""
        if most is None or most > len(first):
            room = "" if most is None else str(most - len(first))
            body = f'("," {more}){{{max(0, least - len(first))},{room}}}'
        for i, item in reversed(list(enumerate(first))):
            comma = '"," ' if i else ""
            body = f"{comma}{item} {body}"
            if i >= least:
                body = f"({body})?"
        return body

    def _string(self, schema: Mapping[str, Any], place: str) -> str:
        least = self._count("minLength", schema, place, 0)
        most = self._count("maxLength", schema, place, None)
        parts = []
        if most is not None and most < least:
            raise self._refused(
                place,
                "maxLength",
                f"expected at least {least}, found {most}",
            )
        if least or most is not None:
            times = f"{least},{'' if most is None else most}"
            parts.append(rf"/(.|\n){{{times}}}/")
        pattern = schema.get("pattern")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise self._refused(
                    place, "pattern", f"expected one, found {brief(pattern)}"
                )
            if _can_match(pattern):
                parts.append(f"/{slashed(_searched(pattern))}/")
            else:
                self._cannot(place, "pattern")
        if not parts:
            return "string"
        text = self._rule(" & ".join(parts), "TEXT")
        return self._rule(f"quote {text} quote")

    def _count(
        self,
        name: str,
        schema: Mapping[str, Any],
        place: str,
        default: Any,
    ) -> Any:
        value = schema.get(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._refused(
                place, name, f"expected a count, found {brief(value)}"
            )
        if value > (_MOST_ITEMS if "Items" in name else _MOST_LETTERS):
            self._cannot(place, name)
            return default
        return value


def _either(rules: Sequence[str]) -> str:
    return rules[0] if len(rules) == 1 else f"({' | '.join(rules)})"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_COMMA = ' "," '


def _sorted(fields: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """As templates sort them."""
    return sorted(fields.items(), key=lambda field: str(field[0]).lower())


def _literal(value: Any) -> str:
    """Writes one value."""
    if isinstance(value, str):
        return f"quote {_text(value)} quote" if value else "quote quote"
    if isinstance(value, Mapping):
        parts = []
        for name, one in _sorted(value):
            key = _text(name + ":")
            if not _BARE.fullmatch(name):
                key = f'{_literal(name)} ":"'
            parts.append(f"{key} {_literal(one)}")
        return f'"{{" {_COMMA.join(parts)} "}}"'
    if isinstance(value, list):
        return f'"[" {_COMMA.join(map(_literal, value))} "]"'
    return _text(json.dumps(value))


def _searched(pattern: str) -> str:
    """For the whole of a text in which JSON Schema searches the pattern."""
    text = pattern
    before, after = r"(.|\n)*", r"(.|\n)*"
    if text.startswith("^"):
        text, before = text[1:], ""
    if re.search(r"(?<!\\)(\\\\)*\$$", text):
        text, after = text[:-1], ""
    return f"{before}({text}){after}"


def _can_match(pattern: str) -> bool:
    """Tells whether llguidance has all of it: no anchors within, nothing that
    looks around or back.
    """
    text = re.sub(r"\\\\", "", pattern)
    text = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "", text)  # classes
    if re.search(r"\\[bBAzZ1-9kG]|\(\?(?!:|i:|s:|m:)", text):
        return False
    inner = re.sub(r"\\.", "", text)
    inner = inner.removeprefix("^").removesuffix("$")
    if "|" in inner and inner != re.sub(r"\\.", "", text):
        # An anchor belongs to one side of it alone, unless it is in brackets.
        depth = 0
        for letter in inner:
            depth += (letter == "(") - (letter == ")")
            if letter == "|" and depth == 0:
                return False
    return "^" not in inner and "$" not in inner
