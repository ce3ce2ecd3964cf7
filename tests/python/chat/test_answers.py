"""Tools together with a form of the answer: a reply is calls, or that."""

from __future__ import annotations

import json
from typing import Any

import pytest

import gemmakv
from gemmakv import Grammar, Session
from gemmakv.chat._tools import MOST_CALLS, CallPart, CallReader
from support import tiny_gguf
from support.extras import needs

pytestmark = needs("llguidance", "jsonschema")

USER = [{"role": "user", "content": "Rain?"}]
PIECES = tiny_gguf.vocabulary()[0]
CLOSING: Any = {PIECES.index(c): 6.0 for c in '"}]'}
CALLING: Any = {**CLOSING, PIECES.index("<"): 40.0}
ANSWERING: Any = {**CLOSING, PIECES.index("{"): 40.0}
SCHEMA: Any = {
    "type": "object",
    "properties": {"mm": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mm"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"], "additionalProperties": False}}}
    for name in ("rain", "snow")
]  # fmt: skip
FORM: Any = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def chat(talker: gemmakv.Gemma, bias: Any, **options: Any) -> Any:
    options = {"tools": TOOLS, "max_tokens": 200, "logit_bias": bias} | options
    whole = talker.chat(USER, **options)
    pieces = list(talker.chat(USER, stream=True, **options))
    assert "".join(piece.text for piece in pieces) == whole.text
    return whole


@pytest.mark.parametrize("parallel", [False, True])
def test_it_answers_in_the_form_or_calls(
    talker: gemmakv.Gemma, parallel: bool
) -> None:
    import jsonschema

    options: Any = {"response_format": FORM, "parallel_tool_calls": parallel}
    said = chat(talker, ANSWERING, **options)
    jsonschema.validate(json.loads(said.text), SCHEMA)
    assert said.tool_calls == [] and said.finish_reason == "stop"
    said = chat(talker, CALLING, **options)
    assert said.text == "" and said.tool_calls
    assert all(call.arguments["n"] in (1, 2) for call in said.tool_calls)
    assert parallel or said.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"response_format": {"type": "json_object", "schema": {
            "enum": [{"a": 1}]}}}, '{"a": 1}'),
        ({"grammar": Grammar.json_schema({"enum": ["{"]})}, '"{"'),
        ({"grammar": Grammar.regex("(\n|x)?tool{2}/x")}, "tooll/x"),
        ({"grammar": Grammar.lark('start: A "}"\nA: "{" | "[" // }')}, "{}"),
        ({"grammar": 'start: "{" inner "}"\ninner: "ab"'}, "{ab}"),
    ],
)  # fmt: skip
def test_each_kind_of_form(
    talker: gemmakv.Gemma, options: Any, text: str
) -> None:
    bias = {**ANSWERING, PIECES.index("t"): 40.0, PIECES.index('"'): 40.0}
    assert chat(talker, bias, **options).text == text
    said = chat(talker, CALLING, parallel_tool_calls=False, **options)
    assert len(said.tool_calls) == 1 and said.text == ""


@pytest.mark.parametrize("choice", ["required", "snow"])
def test_a_call_that_must_come_is_no_answer(
    talker: gemmakv.Gemma, choice: str
) -> None:
    said = chat(
        talker, ANSWERING, response_format=FORM, tool_choice=choice,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert len(said.tool_calls) == 1 and said.finish_reason == "stop"
    said = chat(talker, CALLING, response_format=FORM, tool_choice="none")
    assert json.loads(said.text)["mm"] < 100


def test_an_answer_may_spell_a_call(talker: gemmakv.Gemma) -> None:
    """A string of it is no call, wherever pieces are cut."""
    text = '{"a": "<tool_call>\\n{\\"name\\": \\"rain\\"}"}'
    schema = {"enum": [json.loads(text)]}
    form = {"type": "json_object", "schema": schema}
    said = chat(talker, ANSWERING, response_format=form)
    assert (said.text, said.tool_calls) == (text, [])
    for step in (1, 2, 5, 100):
        reader = CallReader(begins=True)
        parts: list[Any] = []
        for i in range(0, len(text), step):
            parts += reader.push(text[i : i + step])
        assert "".join([*parts, *reader.end()]) == text
        call = '<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>'
        reader, parts = CallReader(begins=True), []
        for i in range(0, len(call), step):
            parts += reader.push(call[i : i + step])
        [start] = [one.start for one in parts if one.start]
        assert start[1] == "rain" and reader.calls == 1
        assert all(isinstance(one, CallPart) for one in parts)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {
            "schema": {"properties": {"a": {"not": {}}}}}}},
         "response_format.json_schema.schema.properties.a.not"),
        ({"response_format": {"type": "json_object", "schema": {
            "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}}},
         "response_format.schema.properties.a.pattern"),
        ({"response_format": {"type": "x"}}, "response_format"),
        ({"grammar": Grammar.regex("a(")}, "grammar"),
        ({"grammar": "start: nowhere"}, "grammar"),
        ({"grammar": "start: \"a\" }\nx: {"}, "grammar"),
    ],
)  # fmt: skip
def test_a_form_that_is_bad_is_named(
    talker: gemmakv.Gemma, options: Any, field: str
) -> None:
    with pytest.raises(ValueError) as found:
        talker.chat(USER, tools=TOOLS, max_tokens=5, **options)
    assert str(found.value).startswith(f"{field}: ")


def test_a_reply_to_results_answers_in_the_form(talker: gemmakv.Gemma) -> None:
    """The call that must come comes before."""
    session = Session(
        talker, tools=TOOLS, tool_choice="rain", response_format=FORM,
        logit_bias=ANSWERING, max_tokens=200,
    )  # fmt: skip
    reply = session.send("Rain?")
    assert len(reply.tool_calls) == 1
    reply = session.give(["3"])
    assert json.loads(reply.text)["mm"] < 100 and not reply.tool_calls


def test_calls_come_to_an_end(talker: gemmakv.Gemma) -> None:
    """A model that repeats its call did so until max_tokens."""
    tools = [{"function": {"name": "f", "parameters": {
        "properties": {}, "additionalProperties": False}}}]  # fmt: skip
    for more in ({"tool_choice": "required"}, {"response_format": FORM}):
        said = talker.chat(
            USER, tools=tools, max_tokens=4000, logit_bias=CALLING, **more
        )
        assert said.finish_reason == "stop"
        assert len(said.tool_calls) == MOST_CALLS
