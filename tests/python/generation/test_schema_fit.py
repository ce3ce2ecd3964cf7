"""What of a schema a compiler of grammars takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gemmakv.chat._tools import json_grammar, tool_use
from gemmakv.generation import _schema_fit
from gemmakv.generation._schema_check import dotted
from gemmakv.generation._schema_fit import (
    Fitting,
    Tried,
    Unfit,
    pointer,
    with_usual_forms,
)


class Compiler:
    """Refuses schemas in which one of some keywords stands, and all in which
    one stands beside another.
    """

    def __init__(self, *bad: str) -> None:
        self.bad = bad
        self.tried = 0

    def __call__(self, grammars: Sequence[Tried]) -> list[str | None]:
        self.tried += len(grammars)
        return [self._refusal(json.loads(one.text)) for one in grammars]

    def _refusal(self, value: Any) -> str | None:
        if isinstance(value, list):
            value = dict(enumerate(value))
        if not isinstance(value, dict):
            return None
        for bad in self.bad:
            if all(name in value for name in bad.split()):
                return f"{bad} is refused"
        found = (self._refusal(one) for one in value.values())
        return next((why for why in found if why), None)


def written(schema: Mapping[str, Any]) -> Tried:
    return Tried("json_schema", json.dumps(schema))


def places(unfit: Sequence[Unfit]) -> list[str]:
    return [pointer(one.steps) for one in unfit]


def test_only_what_is_refused_goes() -> None:
    schema = {
        "properties": {
            "a": {"type": "string", "bad": 1, "minLength": 2},
            "b": {"items": {"anyOf": [{"bad": 2}, {"type": "null"}]}},
            "bad name": {"$ref": "#/$defs/c"},
        },
        "$defs": {"c": {"bad": 3, "enum": [1]}},
    }
    compiler = Compiler("bad")
    found, unfit = Fitting(compiler).repaired(schema, written)
    assert sorted(places(unfit)) == [
        "#/$defs/c/bad", "#/properties/a/bad",
        "#/properties/b/items/anyOf/0/bad",
    ]  # fmt: skip
    assert all(one.why == "bad is refused" for one in unfit)
    text = json.dumps(found)
    assert json.loads(text) == {
        "properties": {
            "a": {"type": "string", "minLength": 2},
            "b": {"items": {"anyOf": [{}, {"type": "null"}]}},
            "bad name": {"$ref": "#/$defs/c"},
        },
        "$defs": {"c": {"enum": [1]}},
    }


def test_nothing_goes_of_what_is_taken() -> None:
    compiler = Compiler()
    schema = {"properties": {"a": {"bad": 1}}}
    assert Fitting(compiler).repaired(schema, written) == (schema, [])
    assert compiler.tried == 1


def test_what_is_refused_beside_others() -> None:
    """One of the two goes; the reference alone where it is that."""
    schema = {"properties": {"a": {"x": 1, "y": 2}, "b": {"$ref": "#", "x": 1}}}
    found, unfit = Fitting(Compiler("x y", "$ref x")).repaired(schema, written)
    assert places(unfit) == ["#/properties/a/y", "#/properties/b/$ref"]
    assert found == {"properties": {"a": {"x": 1}, "b": {"x": 1}}}


def test_a_schema_goes_where_nothing_else_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, unfit = Fitting(Compiler("")).repaired({"a": {}}, written)
    assert found == {} and places(unfit) == ["#"]
    # Likewise where finding out takes too many trials.
    monkeypatch.setattr(_schema_fit, "MOST_TRIALS", 50)
    many = {"properties": {str(i): {"bad": i} for i in range(100)}}
    compiler = Compiler("bad")
    found, unfit = Fitting(compiler).repaired(many, written)
    assert found == {} and places(unfit) == ["#"]
    assert compiler.tried <= 50


def test_usual_forms() -> None:
    found, unfit = with_usual_forms(
        {
            "type": "OBJECT",
            "required": None,
            "properties": {
                "a": {"type": ["int", "NULL"]},
                "b": {"type": "any", "minLength": 2.0, "enum": None},
                "c": None,
                "required": {"type": "file", "anyOf": [{"type": "list"}, 5]},
            },
        }
    )
    assert found == {
        "type": "object",
        "properties": {
            "a": {"type": ["integer", "null"]},
            "b": {"minLength": 2},
            "c": {},
            "required": {"anyOf": [{"type": "array"}, {}]},
        },
    }
    assert sorted(places(unfit)) == [
        "#/properties/b/enum", "#/properties/c",
        "#/properties/required/anyOf/1", "#/properties/required/type",
        "#/required",
    ]  # fmt: skip
    plain = {"type": "object", "properties": {"x": {"enum": [None, True]}},
             "additionalProperties": False, "x-mine": None}  # fmt: skip
    assert with_usual_forms(plain) == (plain, [])


def test_paths() -> None:
    steps = ("properties", "a/b ~\u00e9", "anyOf", 0, "$ref")
    assert dotted("f", steps) == "f.properties.a/b ~\u00e9.anyOf[0].$ref"
    assert pointer(steps) == "#/properties/a~1b%20~0%C3%A9/anyOf/0/$ref"


def test_many_large_tools_take_few_trials() -> None:
    """As of several servers of tools; one pattern in each cannot be held."""
    tools = []
    for i in range(40):
        properties: Any = {
            f"p{j}_{i}": {"type": "string", "description": "Words. " * 9}
            for j in range(100)
        }
        properties[f"p7_{i}"]["pattern"] = f"(?=x{i})"
        tools.append(
            {"function": {"name": f"f{i}", "parameters": {
                "type": "object", "properties": properties}}}
        )  # fmt: skip
    use = tool_use(tools)
    assert use is not None
    tried = 0

    def attempt(grammars: Sequence[Tried]) -> list[str | None]:
        nonlocal tried
        tried += len(grammars)
        return ["refused" if "(?=" in one.text else None for one in grammars]

    fitted, left = json_grammar(use)._fitted("tools", attempt)
    assert [path.split(".")[-2:] for path in left] == [
        [f"p7_{i}", "pattern"] for i in range(40)
    ]
    assert "(?=" not in fitted.text
    assert tried <= 3 * len(tools)
