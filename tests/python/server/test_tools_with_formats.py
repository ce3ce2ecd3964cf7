"""Tools together with a form of the answer, in each API: a reply calls, or
answers in that form.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.server.app import App
from support import tiny_gguf
from support.asgi import NAME, USER, make_app, post, sse_events
from support.extras import needs

pytestmark = needs("llguidance", "jsonschema")
PIECES = tiny_gguf.vocabulary()[0]
CLOSING = {PIECES.index(c): 6.0 for c in '"}]'}
CALLING = {**CLOSING, PIECES.index("<"): 40.0}
ANSWERING = {**CLOSING, PIECES.index("{"): 40.0}
PLACE: Any = {
    "type": "object", "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"], "additionalProperties": False,
}  # fmt: skip
# As the clients' libraries make them of classes.
SCHEMA: Any = {
    "title": "Weather",
    "description": "What is known.",
    "$defs": {"Sky": {"enum": ["clear", "<tool_call>"], "type": "string",
                      "title": "Sky"}},
    "type": "object",
    "properties": {
        "sky": {"$ref": "#/$defs/Sky"},
        "mm": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9},
                         {"type": "null"}], "default": None},
    },
    "required": ["sky", "mm"],
    "additionalProperties": False,
}  # fmt: skip


def _chat(schema: Any) -> tuple[str, dict[str, Any]]:
    """As openai-agents, pydantic-ai and agno ask."""
    return "/v1/chat/completions", {
        "messages": USER,
        "max_tokens": 90,
        "tools": [{"type": "function", "function": {
            "name": "rain", "description": "", "parameters": PLACE,
            "strict": True}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {
            "name": "final_output", "strict": True, "schema": schema}},
    }  # fmt: skip


def _responses(schema: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {
        "input": [{"role": "user", "content": "hello"}],
        "max_output_tokens": 90,
        "tools": [{"type": "function", "name": "rain", "parameters": PLACE,
                   "strict": True}],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "final_output",
                            "strict": True, "schema": schema}},
    }  # fmt: skip


def _messages(schema: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {
        "messages": USER,
        "max_tokens": 90,
        "tools": [{"name": "rain", "input_schema": PLACE}],
        "tool_choice": {"type": "auto"},
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }


def _ollama(schema: Any) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {
        "messages": USER,
        "options": {"num_predict": 90},
        "tools": [{"type": "function", "function": {
            "name": "rain", "parameters": PLACE}}],
        "format": schema,
    }  # fmt: skip


APIS = {"chat": _chat, "responses": _responses, "messages": _messages,
        "ollama": _ollama}  # fmt: skip
FIELDS = {
    "chat": "response_format.json_schema.schema",
    "responses": "text.format.schema",
    "messages": "output_config.format.schema",
    "ollama": "format",
}


def _app(gemma: gemmakv.Gemma, bias: dict[int, float]) -> App:
    app = make_app(gemma, max_model_len=4096, default_seed=6)
    assert app.service is not None
    app.service.defaults["logit_bias"] = bias
    return app


def _ask(
    app: App, api: str, stream: bool, schema: Any = SCHEMA, **more: Any
) -> httpx.Response:
    path, body = APIS[api](schema)
    return post(app, path, {"model": NAME, "stream": stream, **body, **more})


def _said(api: str, response: httpx.Response, stream: bool) -> Any:
    """The text of an answer, and the arguments of its calls."""
    assert response.status_code == 200, response.text
    if api == "ollama":
        lines = [json.loads(line) for line in response.text.splitlines()]
        text = "".join(line["message"]["content"] for line in lines)
        return text, [
            call["function"]["arguments"]
            for line in lines
            for call in line["message"].get("tool_calls", [])
        ]
    if not stream:
        found = response.json()
        if api == "chat":
            message = found["choices"][0]["message"]
            calls = message.get("tool_calls") or []
            return message["content"] or "", [
                json.loads(call["function"]["arguments"]) for call in calls
            ]
        if api == "messages":
            parts = found["content"]
            text = "".join(one.get("text", "") for one in parts)
            return text, [one["input"] for one in parts if "input" in one]
        items = found["output"]
    else:
        events = [data for _, data in sse_events(response.text)]
        if api == "chat":
            deltas = [e["choices"][0]["delta"] for e in events[:-1]]
            text = "".join(one.get("content") or "" for one in deltas)
            arguments = "".join(
                call["function"]["arguments"]
                for one in deltas
                for call in one.get("tool_calls", [])
            )
            return text, [json.loads(arguments)] if arguments else []
        if api == "messages":
            deltas = [e["delta"] for e in events
                      if e["type"] == "content_block_delta"]  # fmt: skip
            text = "".join(one.get("text", "") for one in deltas)
            arguments = "".join(one.get("partial_json", "") for one in deltas)
            return text, [json.loads(arguments)] if arguments else []
        items = events[-1]["response"]["output"]
    text = "".join(
        part["text"] for one in items for part in one.get("content") or ()
    )
    return text, [
        json.loads(one["arguments"]) for one in items if "arguments" in one
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_reply_is_an_answer_of_the_schema_or_a_call(
    shared: gemmakv.Gemma, api: str, stream: bool
) -> None:
    import jsonschema

    response = _ask(_app(shared, ANSWERING), api, stream)
    text, calls = _said(api, response, stream)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert calls == []
    response = _ask(_app(shared, CALLING), api, stream)
    text, [call] = _said(api, response, stream)
    jsonschema.validate(call, PLACE)
    assert text == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_spells_a_call_is_text(
    shared: gemmakv.Gemma, api: str, stream: bool
) -> None:
    value = {"sky": "<tool_call>\n{\"name\": \"rain\", \"arguments\": {}}"}
    response = _ask(_app(shared, ANSWERING), api, stream, {"enum": [value]})
    text, calls = _said(api, response, stream)
    assert json.loads(text) == value and calls == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_schema_that_cannot_be_enforced_is_named(
    shared: gemmakv.Gemma, api: str, stream: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    response = _ask(_app(shared, CLOSING), api, stream, schema)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{FIELDS[api]}.properties.a.not: ")


def test_json_of_any_kind_and_no_schema(shared: gemmakv.Gemma) -> None:
    """As DSPy's adapters and semantic-kernel ask."""
    for form in ({"type": "json_object"}, {"type": "text"}, None):
        for bias, calls in ((ANSWERING, 0), (CALLING, 1)):
            response = _ask(
                _app(shared, bias), "chat", False, response_format=form
            )
            text, found = _said("chat", response, False)
            if form == {"type": "json_object"}:
                assert len(found) == calls
                assert calls or text.startswith("{")


def test_a_call_that_must_come_ends_the_reply(shared: gemmakv.Gemma) -> None:
    """As instructor asks: the schema of the answer is a tool's, too."""
    named = {"type": "function", "function": {"name": "rain"}}
    for choice in (named, "required"):
        response = _ask(
            _app(shared, ANSWERING), "chat", False, tool_choice=choice,
            parallel_tool_calls=False,
        )  # fmt: skip
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert _said("chat", response, False)[0] == ""
