"""Tool calls in each API's own form, in its SDK's types."""

from __future__ import annotations

import json
from typing import Any

import pytest

import gemmakv
from gemmakv.chat._tools import tool_use
from gemmakv.server.app import App
from gemmakv.server.service import checks as _service
from support import tiny_gguf
from support.asgi import NAME, USER, make_app, post, sse_events
from support.extras import needs

pytestmark = needs("llguidance", "openai", "anthropic", "ollama", "jsonschema")
CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8},
                   "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {
    "name": "rain", "description": "Rain.", "parameters": SCHEMA}}]
CLAUDE = [{"name": "rain", "description": "Rain.", "input_schema": SCHEMA}]
PIECES = tiny_gguf.vocabulary()[0]
CLOSING = {PIECES.index(c): 6.0 for c in '"}'}
SAID: dict[str, Any] = {
    "model": NAME, "messages": USER, "temperature": 1, "max_tokens": 250,
}  # fmt: skip


@pytest.fixture
def app(shared: gemmakv.Gemma) -> App:
    app = make_app(shared, max_model_len=4096, default_seed=6)
    assert app.service is not None
    # For the APIs that know no such option, too.
    app.service.defaults["logit_bias"] = CLOSING
    return app


def openai_body(**more: Any) -> dict[str, Any]:
    return {**SAID, "tools": TOOLS, "tool_choice": "required",
            "parallel_tool_calls": False, **more}  # fmt: skip


def test_openai(app: App) -> None:
    import jsonschema
    from openai.types.chat import ChatCompletion

    response = post(app, CHAT, openai_body())
    assert response.status_code == 200, response.text
    found = ChatCompletion.model_validate(response.json(), strict=True)
    [choice] = found.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "rain"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    more = [
        *USER,
        response.json()["choices"][0]["message"],
        {"role": "tool", "tool_call_id": call.id, "content": "3 mm"},
    ]
    said = post(app, CHAT, openai_body(messages=more, tool_choice="auto"))
    assert said.status_code == 200, said.text
    assert said.json()["usage"]["prompt_tokens"] > found.usage.prompt_tokens


def test_openai_stream(app: App) -> None:
    from openai.types.chat import ChatCompletionChunk

    whole = post(app, CHAT, openai_body()).json()["choices"][0]["message"]
    response = post(app, CHAT, openai_body(stream=True, logprobs=True))
    events = sse_events(response.text)
    chunks = [
        ChatCompletionChunk.model_validate(data, strict=True)
        for _, data in events[:-1]
    ]
    deltas = [
        call for c in chunks for call in c.choices[0].delta.tool_calls or []
    ]
    assert len(deltas) > 3 and all(d.index == 0 for d in deltas)
    assert deltas[0].id and deltas[0].type == "function"
    assert [d.function.name for d in deltas] == ["rain"] + [None] * (
        len(deltas) - 1
    )
    arguments = "".join(d.function.arguments or "" for d in deltas)
    assert json.loads(arguments) == json.loads(
        whole["tool_calls"][0]["function"]["arguments"]
    )
    assert not "".join(c.choices[0].delta.content or "" for c in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    cut = post(app, CHAT, openai_body(max_tokens=40)).json()["choices"][0]
    assert cut["finish_reason"] == "length"


def test_openai_choices(app: App) -> None:
    named = {"type": "function", "function": {"name": "rain"}}
    found = post(app, CHAT, openai_body(tool_choice=named)).json()
    assert found["choices"][0]["message"]["tool_calls"]
    none = post(app, CHAT, openai_body(tool_choice="none", max_tokens=9))
    plain = post(app, CHAT, {**SAID, "max_tokens": 9})
    assert none.json()["choices"] == plain.json()["choices"]
    many = post(app, CHAT, openai_body(n=2)).json()["choices"]
    assert len(many) == 2 and all(c["message"]["tool_calls"] for c in many)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tool_choice": "snow"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": 5}, "tools"),
        ({"tools": [{"function": {"name": "f", "strict": True,
                                  "parameters": {"not": {}}}}]},
         "tools[0].function.parameters.not"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)  # fmt: skip
def test_bad_tools(app: App, fields: Any, param: str) -> None:
    response = post(app, CHAT, openai_body(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def claude_body(**more: Any) -> dict[str, Any]:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    return {**SAID, "tools": CLAUDE, "tool_choice": choice, **more}


def test_anthropic(app: App) -> None:
    import jsonschema
    from anthropic.types import Message

    response = post(app, MESSAGES, claude_body())
    assert response.status_code == 200, response.text
    found = Message.model_validate(response.json(), strict=True)
    assert found.stop_reason == "tool_use"
    [block] = found.content
    assert block.type == "tool_use" and block.name == "rain"
    jsonschema.validate(block.input, SCHEMA)
    more = [
        *USER,
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": block.id,
             "content": [{"type": "text", "text": "3 mm"}]},
            {"type": "text", "text": "And now?"},
        ]},
    ]  # fmt: skip
    auto = {"type": "auto"}
    said = post(app, MESSAGES, claude_body(messages=more, tool_choice=auto))
    assert said.status_code == 200, said.text
    count = post(app, "/v1/messages/count_tokens",
                 {"messages": more, "tools": CLAUDE})  # fmt: skip
    usage = said.json()["usage"]
    assert count.json()["input_tokens"] == (
        usage["input_tokens"] + usage["cache_read_input_tokens"]
    )


def test_anthropic_events(app: App) -> None:
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    whole = post(app, MESSAGES, claude_body()).json()["content"]
    response = post(app, MESSAGES, claude_body(stream=True))
    events = [e for e in sse_events(response.text) if e[0] != "ping"]
    event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    found = [event.validate_python(data) for _, data in events]
    kinds = [kind for kind, _ in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert found[1].content_block.name == "rain"
    text = "".join(e.delta.partial_json for e in found[2 : 2 + deltas])
    assert json.loads(text) == whole[0]["input"]
    assert found[-2].delta.stop_reason == "tool_use"
    plain = claude_body(stream=True, tool_choice={"type": "auto"},
                        max_tokens=4)  # fmt: skip
    kinds = [k for k, _ in sse_events(post(app, MESSAGES, plain).text)]
    assert kinds.count("content_block_start") == 1
    assert kinds.count("content_block_stop") == 1


def test_ollama(app: App) -> None:
    import ollama

    body = {"model": NAME, "messages": USER, "tools": TOOLS, "stream": False,
            "options": {"num_predict": 30, "seed": 3}}  # fmt: skip
    found = post(app, OLLAMA, body).json()
    said = ollama.ChatResponse.model_validate(found)
    assert said.message.content and not said.message.tool_calls
    call = {"function": {"name": "rain",
                         "arguments": {"city": "a", "days": 1}}}
    more = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "rain", "content": "3 mm"},
    ]
    longer = post(app, OLLAMA, {**body, "messages": more}).json()
    assert longer["prompt_eval_count"] > found["prompt_eval_count"]
    shown = post(app, "/api/show", {"model": NAME}).json()
    assert "tools" in shown["capabilities"]


def test_ollama_calls(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama has no tool_choice: here the model always calls."""
    import jsonschema
    import ollama

    monkeypatch.setattr(
        _service,
        "tool_use",
        lambda tools, choice, parallel: tool_use(tools, "required", False),
    )
    body = {"model": NAME, "messages": USER, "tools": TOOLS,
            "options": {"num_predict": 300, "seed": 3}}  # fmt: skip
    lines = [json.loads(x) for x in post(app, OLLAMA, body).text.splitlines()]
    for line in lines:
        ollama.ChatResponse.model_validate(line)
    calls = [
        call["function"]
        for line in lines
        for call in line["message"].get("tool_calls", [])
    ]
    assert len(calls) == 1
    for call in calls:
        assert call["name"] == "rain"
        jsonschema.validate(call["arguments"], SCHEMA)
    whole = post(app, OLLAMA, {**body, "stream": False}).json()["message"]
    assert [c["function"] for c in whole.get("tool_calls", [])] == calls
    assert [call["index"] for call in calls] == [0]
    for message in (whole, *(line["message"] for line in lines)):
        assert all(call["id"] for call in message.get("tool_calls", []))


def test_ollama_calls_are_told_apart(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an id, and by their place in the reply, streamed or not."""
    monkeypatch.setattr(
        _service,
        "tool_use",
        lambda tools, choice, parallel: tool_use(tools, "required", True),
    )
    body = {"model": NAME, "messages": USER, "tools": TOOLS,
            "options": {"num_predict": 700, "seed": 3}}  # fmt: skip
    streamed = [
        one
        for line in post(app, OLLAMA, body).text.splitlines()
        for one in json.loads(line)["message"].get("tool_calls", [])
    ]
    message = post(app, OLLAMA, {**body, "stream": False}).json()["message"]
    for calls in (streamed, message["tool_calls"]):
        assert len(calls) > 1
        assert [one["function"]["index"] for one in calls] == (
            list(range(len(calls)))
        )
        assert len({one["id"] for one in calls}) == len(calls)
