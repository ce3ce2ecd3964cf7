"""Grammars: the form that a text is to have, before a model compiles it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gemmakv._support.arguments import choice
from gemmakv._support.json import plain_json
from gemmakv._support.text import encode_utf8
from gemmakv.errors import ArgumentError, brief, renamed, unexpected
from gemmakv.generation._schema_check import SchemaError, checked_schema
from gemmakv.generation._schema_fit import Attempt, Fitting, Tried

# What one may be at most: compiling takes time and memory with its size.
MAX_BYTES = 128 << 10
MAX_TOOLS_BYTES = 512 << 10  # of many tools
MAX_DEPTH = 64
KINDS = ("json_schema", "regex", "lark", "tools")
# Of JSON. One without an end goes on to the end of the text.
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
# What holds no brackets of a Lark grammar: strings, regular expressions,
# comments, names of control tokens.
_LARK_TEXTS = re.compile(
    r'"(?:[^"\\]|\\.)*+"?|/(?P<regex>(?:\\.|[^/\\])++)/?'
    r"|(?:#|//)[^\n]*|<[^<>\s]+>",
    re.DOTALL,
)
_BRACKETS = re.compile(r"[][(){}]")
# Of a regular expression. A ] that comes first in a class is a character.
_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?|[]()]", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[a-zA-Z-]*x")  # comments may have brackets, too


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What form a text is to have: `grammar=` of a call.

    Made by `json_schema`, `regex` or `lark`. Compiled by the first call that
    uses it with a model, and kept there.

    Attributes:
      kind: "json_schema", "regex" or "lark"; "tools" for a Lark one that
        `tools` of a chat became.
      text: its source; a schema's is JSON.

    Raises ValueError for a text that is longer than 128 KiB or nested deeper
    than 64 brackets.
    """

    kind: str
    text: str
    # Where in its option a schema stands; an instance may have its own.
    _place: ClassVar[str] = ""

    def __post_init__(self) -> None:
        choice("grammar: kind", self.kind, KINDS)
        if not isinstance(self.text, str) or not self.text.strip():
            raise unexpected(
                f"grammar: {self.kind}", "a text that is not empty", self.text
            )
        size = len(encode_utf8("grammar", self.text))
        most = MAX_TOOLS_BYTES if self.kind == "tools" else MAX_BYTES
        if size > most:
            raise ValueError(
                f"grammar: expected at most {most} bytes, found {size}"
            )
        if _DEPTHS[self.kind](self.text) > MAX_DEPTH:
            raise ArgumentError(
                "grammar",
                f"at most {MAX_DEPTH} brackets in each other",
                self.text,
                shown="more",
            )
        if self.kind == "json_schema":
            object.__setattr__(self, "text", _checked_text(self.text))

    def _fitted(
        self, name: str, attempt: Attempt
    ) -> tuple[Grammar, tuple[str, ...]]:
        """Gives the grammar as far as a compiler takes it, and the paths of
        what is left out of it.

        Raises ValueError that begins with `name` and says why it does not take
        the grammar, and which keyword of a schema.
        """
        if self.kind == "json_schema":
            _check_fits(name, self.text, attempt)
            return self, ()
        [why] = attempt([Tried(self.kind, self.text)])
        if why is not None:
            raise ValueError(f"{name}: {why}")
        return self, ()

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """Allows the JSON that a JSON Schema allows, on one line with a space
        after each comma and colon.

        A keyword that cannot be enforced is a ValueError that names it, when
        a model first uses the grammar.
        """
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise unexpected("grammar: json_schema", "a JSON schema", schema)
        # Writing all of a large one takes as long as it is, at one piece.
        if not _may_fit(schema, 2 * MAX_BYTES):
            raise ValueError(
                f"grammar: expected at most {MAX_BYTES} bytes, found more"
            )
        plain = plain_json(
            "grammar", schema, "a JSON schema of what JSON can say"
        )
        return cls("json_schema", json.dumps(plain))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Allows text that a regular expression matches as a whole.

        The syntax is that of Rust's `regex`, without look-around but (?!...) at
        its ends, and without back references.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Allows text of a context-free grammar in Lark's syntax as llguidance
        has it; its rule `start` is the whole.
        """
        return cls("lark", grammar)


def _depth_of_regex(pattern: str) -> int:
    """Counts the groups and classes that stand in each other, at most."""
    verbose = _VERBOSE.search(pattern) is not None
    depth = most = classes = 0
    for part in _REGEX_PARTS.finditer(pattern):
        letter = part[0][0]
        if letter == "[" and not verbose:
            classes += 1
            depth += 1
        elif letter == "]" and classes:
            classes -= 1
            depth -= 1
        elif letter == "(" and not classes:
            depth += 1
        elif letter == ")" and not classes and depth:
            depth -= 1
        most = max(most, depth)
    return most


def _depth_of_lark(grammar: str) -> int:
    """Counts the brackets that stand in each other, at most, in the grammar
    or in a regular expression of it.
    """
    most = _depth(_LARK_TEXTS.sub("", grammar))
    for text in _LARK_TEXTS.finditer(grammar):
        if text["regex"]:
            most = max(most, _depth_of_regex(text["regex"]))
    return most


def _depth_of_json(schema: str) -> int:
    return _depth(_STRINGS.sub("", schema))


def _depth(text: str) -> int:
    depth = most = 0
    for bracket in _BRACKETS.finditer(text):
        if bracket[0] in "([{":
            depth += 1
            most = max(most, depth)
        elif depth:
            depth -= 1
    return most


_DEPTHS = {
    "json_schema": _depth_of_json,
    "lark": _depth_of_lark,
    "regex": _depth_of_regex,
    "tools": _depth_of_lark,
}


def _may_fit(value: object, room: int) -> bool:
    """Tells whether a value can have at most `room` bytes in JSON; one that
    certainly has more is not looked through.
    """
    rest = [value]
    while rest and room >= 0:
        one = rest.pop()
        room -= 2
        if isinstance(one, str):
            room -= len(one)
        elif isinstance(one, Mapping):
            rest += one.values()
            room -= sum(len(str(name)) + 4 for name in one)
        elif isinstance(one, list | tuple):
            rest += one
    return room >= 0


def of_response_format(name: str, value: object) -> Grammar | None:
    """Makes the grammar of {"type": "json_object"}, maybe with a "schema", or
    of {"type": "json_schema", "json_schema": {"schema": ...}}, or with the
    "schema" beside the type; None of {"type": "text"}. Raises ValueError that
    begins with `name`.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if (
        not isinstance(value, Mapping)
        or not isinstance(kind, str)
        or kind not in _FORMATS
    ):
        raise unexpected(
            name,
            "{'type': 'text'}, {'type': 'json_object'} or {'type': "
            "'json_schema', 'json_schema': {'schema': ...}}",
            value,
        )
    _check_known(name, value, _FORMATS[kind])
    schema: Any = {"type": "object"}
    place = ""
    if kind == "text":
        return None
    if value.get("schema") is not None:
        schema, place = value["schema"], ".schema"
        if value.get("json_schema") is not None:
            raise ValueError(
                f"{name}.schema: expected it or json_schema, found both"
            )
    elif kind == "json_schema":
        named, place = value.get("json_schema"), ".json_schema.schema"
        schema = None
        if isinstance(named, Mapping):
            _check_known(f"{name}.json_schema", named, _NAMED_SCHEMA)
            schema = named.get("schema")
    if not isinstance(schema, Mapping):
        raise unexpected(f"{name}{place}", "a JSON schema", schema)
    try:
        found = Grammar.json_schema(schema)
    except SchemaError as error:
        path = error.field.removeprefix("grammar: json_schema")
        raise SchemaError(name + place + path, error.why) from None
    except ValueError as error:
        raise renamed(
            error, lambda words: name + place + words.removeprefix("grammar")
        ) from None
    object.__setattr__(found, "_place", place)
    return found


def _check_known(
    name: str, value: Mapping[str, Any], known: Sequence[str]
) -> None:
    """Raises ValueError for a field that would ask for something more."""
    for key, one in value.items():
        if key not in known and one is not None:
            why = (
                f"{name}.{str(key)[:60]}: expected no field of this name, only "
                f"{', '.join(known)}, found {brief(one)}"
            )
            if "schema" in known and not ({"schema", "json_schema"} & {*value}):
                why += "; a schema goes into the field 'schema'"
            raise ValueError(why)


def _check_fits(name: str, text: str, attempt: Attempt) -> None:
    """Raises ValueError that begins with `name` and the path of the first
    keyword of a schema that a compiler does not take.
    """
    try:
        schema = json.loads(text)
    except ValueError:
        return  # compiling says more
    if not isinstance(schema, dict):
        return
    why = attempt([Tried("json_schema", text)])[0]
    fitting = Fitting(attempt)
    unfit = fitting.patterns({"": schema})[""]
    if why is None and not unfit:
        return
    if not unfit:
        _, unfit = fitting.repaired(
            schema, lambda one: Tried("json_schema", json.dumps(one))
        )
    for one in unfit[:1]:
        raise one.error(name)
    raise ValueError(f"{name}: {why}")


def _checked_text(text: str) -> str:
    """Gives a schema's text without parts whose values would have no end."""
    try:
        schema = json.loads(text)
    except ValueError:
        return text  # compiling says more
    if not isinstance(schema, dict):
        return text
    found = checked_schema(schema, "grammar: json_schema", strict=True)
    return text if found == schema else json.dumps(found)


# Types of formats, and their fields.
_FORMATS = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": (
        "type", "json_schema", "schema", "name", "description", "strict",
    ),
}  # fmt: skip
_NAMED_SCHEMA = ("name", "description", "schema", "strict")
