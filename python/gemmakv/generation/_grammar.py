"""What form a text is to have: a value, before any model compiles it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from gemmakv._support.arguments import choice
from gemmakv.errors import brief, unexpected
from gemmakv.generation._schema_check import checked_schema

# What one may be at most: compiling takes time and memory with its size.
MAX_BYTES = 128 << 10
MAX_DEPTH = 64
KINDS = ("json_schema", "regex", "lark", "tools")
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
# Of JSON as json.dumps writes it; with a group where one half of a pair of
# surrogates stands alone.
_ESCAPES = re.compile(
    r"\\(?:u(?:d[89ab]..\\ud[c-f]..|(d[89a-f]..)|....)|.)"
)


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

    def __post_init__(self) -> None:
        choice("grammar: kind", self.kind, KINDS)
        if not isinstance(self.text, str) or not self.text.strip():
            raise unexpected(
                f"grammar: {self.kind}", "a text that is not empty", self.text
            )
        try:
            size = len(self.text.encode("utf-8"))
        except UnicodeEncodeError:
            raise ValueError(
                "grammar: found a lone surrogate, which is not Unicode text"
            ) from None
        if size > MAX_BYTES:
            raise ValueError(
                f"grammar: expected at most {MAX_BYTES} bytes, found {size}"
            )
        text = self.text
        if self.kind in ("json_schema", "tools"):
            text = _STRINGS.sub("", text)
        depth = 0
        for letter in text:
            if letter in "([{":
                depth += 1
                if depth > MAX_DEPTH:
                    raise ValueError(
                        f"grammar: expected at most {MAX_DEPTH} brackets in "
                        "each other, found more"
                    )
            elif letter in ")]}" and depth:
                depth -= 1
        if self.kind == "json_schema":
            _check_schema(self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that a JSON Schema allows, on one line with a space behind
        each comma and colon.

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
        try:
            text = json.dumps(dict(schema), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                "grammar: expected a JSON schema of what JSON can say, found "
                + brief(str(error))
            ) from None
        if any(escape[1] for escape in _ESCAPES.finditer(text)):
            raise ValueError(
                "grammar: found a lone surrogate, which is not Unicode text"
            )
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole (syntax of Rust's
        `regex`: no look-around but (?!...) at its ends, no back references).
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text of a context-free grammar in Lark's syntax as llguidance has
        it; its rule `start` is the whole.
        """
        return cls("lark", grammar)


def _may_fit(value: object, room: int) -> bool:
    """Whether a value can have at most `room` bytes in JSON; one that
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
    """Of {"type": "json_object"}, or {"type": "json_schema", "json_schema":
    {"schema": ...}}; None of {"type": "text"}. Raises ValueError that begins
    with `name`.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in _FORMATS:
        raise unexpected(
            name,
            "{'type': 'text'}, {'type': 'json_object'} or {'type': "
            "'json_schema', 'json_schema': {'schema': ...}}",
            value,
        )
    if kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        named = value.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise unexpected(
                f"{name}.json_schema.schema", "a JSON schema", schema
            )
    try:
        return Grammar.json_schema(schema)
    except ValueError as error:
        words = str(error).removeprefix("grammar: ")
        raise ValueError(f"{name}: {words}") from None


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError:
        return  # compiling says more
    if isinstance(schema, dict):
        checked_schema(schema, "grammar: json_schema", strict=True)


_FORMATS = ("text", "json_object", "json_schema")
