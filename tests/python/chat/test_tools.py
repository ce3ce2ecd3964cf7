"""Tools: said to models, called by them, read from text cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

import gemmakv
from gemmakv.chat._reply import ReplyReader, said
from gemmakv.chat._tools import CallPart, CallReader
from support import tiny_gguf
from support.extras import needs

pytestmark = needs("llguidance", "jsonschema")

PLACE: Any = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/name"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 8}},
}
RAIN = {"type": "function", "function": {
    "name": "rain", "description": "Rain at a place.", "parameters": PLACE}}
STOP = {"type": "function", "function": {"name": "stop.now", "parameters": {
    "type": "object", "properties": {}, "additionalProperties": False}}}
TOOLS = [RAIN, STOP]
SCHEMAS = {"rain": PLACE, "stop.now": {"type": "object", "maxProperties": 0}}
USER = [{"role": "user", "content": "Rain?"}]
PIECES = tiny_gguf.vocabulary()[0]
CLOSING: Any = {PIECES.index(c): 5.0 for c in '"}]'}
TEXT = (
    'Well, <b>\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<'
    '/tool_call>", "b": [{}]}}\n</tool_call>\n<tool_call>\n{"name": "g", '
    '"arguments": {}}\n</tool_call>'
)


def check(calls: list[gemmakv.ToolCall]) -> None:
    import jsonschema

    for call in calls:
        jsonschema.validate(call.arguments, SCHEMAS[call.name])
        assert call.id.startswith("call_")
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_required(
    talker: gemmakv.Gemma, seed: int, temperature: float
) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": "required",
                    "temperature": temperature, "seed": seed,
                    "logit_bias": CLOSING, "max_tokens": 200}  # fmt: skip
    said = talker.chat(USER, parallel_tool_calls=False, **options)
    assert said.finish_reason == "stop" and said.text == ""
    assert len(said.tool_calls) == 1
    check(said.tool_calls)
    check(talker.chat(USER, **options).tool_calls)


def test_named_and_none(talker: gemmakv.Gemma) -> None:
    options: Any = {"tools": TOOLS, "max_tokens": 120,
                    "logit_bias": CLOSING}  # fmt: skip
    said = talker.chat(
        USER, tool_choice="stop.now", parallel_tool_calls=False, **options
    )
    [call] = said.tool_calls
    assert (call.name, call.arguments) == ("stop.now", {})
    named = {"type": "function", "function": {"name": "rain"}}
    said = talker.chat(
        USER, tool_choice=named, parallel_tool_calls=False, **options
    )
    assert said.tool_calls[0].name == "rain"
    free = talker.chat(USER, tool_choice="none", **options)
    alone = talker.chat(USER, max_tokens=120, logit_bias=CLOSING)
    assert free.text == alone.text and free.tool_calls == []


@pytest.mark.parametrize("parallel", [False, True])
def test_a_named_tool_is_called_once(
    talker: gemmakv.Gemma, parallel: bool
) -> None:
    """It was called until max_tokens where the model did not end by itself."""
    said = talker.chat(
        USER, tools=TOOLS, tool_choice="stop.now", max_tokens=400,
        parallel_tool_calls=parallel, logit_bias={PIECES.index("\n"): 40.0},
    )  # fmt: skip
    assert [call.name for call in said.tool_calls] == ["stop.now"]
    assert said.finish_reason == "stop"


def test_what_cannot_be_enforced_is_logged_once(
    talker: gemmakv.Gemma, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "a": {"type": "string", "pattern": r"\bRome\b", "maxLength": 4},
            "b": {"type": "int", "enum": None, "minimum": 1, "maximum": 2},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }  # fmt: skip
    tool = {"function": {"name": "f", "parameters": schema}}
    options: Any = {"tools": [tool], "tool_choice": "f", "max_tokens": 200,
                    "logit_bias": CLOSING}  # fmt: skip
    [call] = talker.chat(USER, **options).tool_calls
    assert len(call.arguments["a"]) <= 4 and call.arguments["b"] in (1, 2)
    [call] = talker.chat(USER, **options).tool_calls
    [record] = [one for one in caplog.records if one.name == "gemmakv"]
    for keyword in ("a.pattern", "b.enum"):
        path = f"tools[0].function.parameters.properties.{keyword}"
        assert path in record.getMessage()


def test_auto_may_be_text(talker: gemmakv.Gemma) -> None:
    said = talker.chat(USER, tools=TOOLS, max_tokens=20)
    assert said.text and said.tool_calls == []


def test_results_go_on(talker: gemmakv.Gemma) -> None:
    said = talker.chat(
        USER, tools=TOOLS, tool_choice="rain", parallel_tool_calls=False,
        logit_bias=CLOSING, max_tokens=120,
    )  # fmt: skip
    [call] = said.tool_calls
    more = [
        *USER,
        {"role": "assistant", "tool_calls": [call.to_dict()]},
        {"role": "tool", "tool_call_id": call.id, "content": {"mm": 3}},
    ]
    ids = talker.apply_chat_template(more, tools=TOOLS)
    assert talker.tokenizer is not None
    text = talker.tokenizer.decode(ids)
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    assert (
        f'<tool_call>\n{{"name": "rain", "arguments": {arguments}}}\n'
        "</tool_call>" in text
    )
    result = '{"name": "rain", "content": {"mm": 3}}'
    assert f"<tool_response>\n{result}\n</tool_response>" in text
    assert '{"name": "rain", "description": "Rain at a place."' in text
    assert talker.chat(more, tools=TOOLS, max_tokens=5).text


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_read_from_pieces(step: int) -> None:
    reader = CallReader()
    parts: list[Any] = []
    for i in range(0, len(TEXT), step):
        parts += reader.push(TEXT[i : i + step])
    parts += reader.end()
    assert "".join(p for p in parts if isinstance(p, str)) == "Well, <b>"
    for number, name in enumerate("fg"):
        own = [p for p in parts if isinstance(p, CallPart)
               and p.call == number]  # fmt: skip
        assert own[0].start is not None and own[0].start[1] == name
        assert all(p.start is None for p in own[1:])
        whole = json.loads("".join(p.arguments for p in own))
        assert own[-1].end is not None and own[-1].end.arguments == whole
    assert whole == {}


@pytest.mark.parametrize("length", range(len(TEXT)))
def test_cut_short(talker: gemmakv.Gemma, length: int) -> None:
    assert talker.tokenizer is not None
    reader = ReplyReader(talker.tokenizer, "json")
    parts = [*reader.push(-1, TEXT[:length]), *reader.end()]
    text, thoughts = said(parts)
    assert not thoughts
    calls = [p.end for p in parts if isinstance(p, CallPart) and p.end]
    assert text.startswith(TEXT[: min(length, 9)].strip())
    assert "<tool_call>".startswith(text[9:].strip())
    assert len(calls) <= 2
    # Behind a call there is no text, but the beginning of another.
    assert not calls or text == TEXT[:9].strip()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tools": [{}]}, r"tools\[0\]: expected"),
        ({"tools": [RAIN, RAIN]}, r"tools\[1\]: a second 'rain'"),
        ({"tools": TOOLS, "tool_choice": "snow"},
         "tool_choice: expected 'auto', 'none', 'required' or the name of a "
         r"tool \(rain, stop.now\), found 'snow'"),
        ({"tools": [], "tool_choice": "required"},
         "tool_choice: expected 'auto' or 'none' where there are no tools, "
         "found 'required'"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [{"function": {"name": "a b"}}]},
         r"tools\[0\].function.name: expected"),
        ({"tools": [{"function": {"name": "f", "parameters": {
            "type": "string"}}}]}, r"tools\[0\].function.parameters"),
        ({"tools": [{"function": {"name": "f", "strict": True, "parameters": {
            "type": "object", "dependentRequired": {"a": ["b"]}}}}]},
         r"tools\[0\]\.function\.parameters\.dependentRequired: "),
    ],
)  # fmt: skip
def test_bad(talker: gemmakv.Gemma, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        talker.chat(USER, max_tokens=5, **options)


def test_what_is_not_strict_is_lenient(talker: gemmakv.Gemma) -> None:
    schema = {"type": "object", "dependentRequired": {"a": ["b"]},
              "properties": {"a": {"type": "null"}},
              "additionalProperties": False}  # fmt: skip
    tool = {"function": {"name": "f", "parameters": schema}}
    said = talker.chat(
        USER, tools=[tool], tool_choice="required", max_tokens=80,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert said.tool_calls[0].arguments in ({}, {"a": None})
