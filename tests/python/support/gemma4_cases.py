"""Conversations that Gemma 4's chat template is tried with."""

from __future__ import annotations

from typing import Any

_HELLO = {"role": "user", "content": " Hello \n"}
_PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "nullable": True},
        "Area": {
            "type": "object",
            "description": "Around it.",
            "properties": {
                "km": {"type": "number"},
                "names": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "description": "One.",
                        "properties": {"a": {"type": "string"}},
                        "required": ["a"],
                    },
                },
            },
            "required": ["km", "names"],
        },
        "tags": {
            "type": "array",
            "description": "Some.",
            "items": {"type": ["string", "null"], "minLength": 2,
                      "default": {"x": [1, True, "y"]}},
        },
        "any": {"type": "object", "additionalProperties": {"type": "string"}},
        "free": {},
    },
    "required": ["city", "days"],
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {
        "name": "weather", "description": "The weather.",
        "parameters": _PLACE}},
    {"type": "function", "function": {
        "name": "now", "description": "The time <|\"|> of day.",
        "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {
        "name": "bare", "description": "", "response": {
            "description": "Text.", "type": "object"}}},
]  # fmt: skip


def _call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


_CALLS = [
    _call("a", "weather", city="Köln <|\"|> <turn|>", days=2, deep={
        "b": [1, 2.5, True, None, "x"], "A": {"c": "d"}}),
    _call("b", "now"),
]  # fmt: skip
_ASKED = {"role": "assistant", "content": "", "tool_calls": _CALLS,
          "reasoning": "I look it up."}  # fmt: skip
_RESULTS = [
    {"role": "tool", "tool_call_id": "a", "content": "rain <tool_response|>"},
    {"role": "tool", "tool_call_id": "b", "content": [
        {"type": "text", "text": "12 "}, {"type": "text", "text": "h"}]},
]  # fmt: skip
_LOOKED_UP = [
    {"role": "assistant", "content": " A moment. ", "tool_calls": _CALLS[1:]},
    _RESULTS[1],
]
_SYSTEM = {"role": "system", "content": "Be brief. <|think|> "}
_ANSWER = {"role": "assistant", "content": "It rains.", "reasoning": "Hm."}

# Messages, tools and variables of the template.
CASES: list[dict[str, Any]] = [
    {"messages": [_HELLO]},
    {"messages": [_HELLO], "enable_thinking": True},
    {"messages": [_HELLO], "enable_thinking": False},
    {"messages": [_SYSTEM, _HELLO], "enable_thinking": True},
    {"messages": [{**_SYSTEM, "role": "developer"}, _HELLO], "tools": TOOLS},
    {"messages": [_HELLO, _ANSWER, _HELLO]},
    {"messages": [_HELLO, _ANSWER, _HELLO, _ANSWER],
     "add_generation_prompt": False},
    {"messages": [_HELLO, _ANSWER, _HELLO, _ANSWER, _HELLO],
     "enable_thinking": True, "tools": TOOLS},
    {"messages": [_HELLO, _ASKED], "tools": TOOLS},
    {"messages": [_HELLO, _ASKED, *_RESULTS], "tools": TOOLS},
    {"messages": [_HELLO, _ASKED, *_RESULTS, _ANSWER, _HELLO],
     "tools": TOOLS, "enable_thinking": True},
    {"messages": [_HELLO, _ASKED, *_RESULTS, _ASKED, *_RESULTS],
     "tools": TOOLS, "enable_thinking": True},
    {"messages": [_HELLO, {**_ASKED, "content": "A moment."}, *_RESULTS,
                  _ANSWER, _HELLO], "tools": TOOLS},
    {"messages": [{"role": "user", "content": [
        {"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}]},
    # Names of control tokens that people and models wrote.
    {"messages": [{"role": "user", "content":
                   "<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"}]},
    {"messages": [_HELLO, {"role": "assistant", "content":
                           "<|channel>thought\nNo.<channel|> Yes <turn|>"},
                  _HELLO]},
    # Replies that follow each other are one turn.
    {"messages": [_HELLO, _ANSWER, {**_ANSWER, "content": " Still."}, _HELLO]},
    {"messages": [_HELLO, _ASKED, *_RESULTS, _HELLO], "tools": TOOLS},
    {"messages": [_HELLO, _ASKED, *_RESULTS, _ANSWER, _HELLO],
     "preserve_thinking": True},
    {"messages": [{**_SYSTEM, "content": [
        {"type": "text", "text": " one "}, {"type": "text", "text": "two"}]},
        _HELLO]},
    # Text and a call, which the template says after the result.
    {"messages": [_HELLO, *_LOOKED_UP]},
    {"messages": [_HELLO, *_LOOKED_UP, _ANSWER],
     "add_generation_prompt": False},
    {"messages": [_HELLO, *_LOOKED_UP, *_LOOKED_UP, _ANSWER, _HELLO]},
]  # fmt: skip
