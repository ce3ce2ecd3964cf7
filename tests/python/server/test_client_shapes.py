"""Requests with the shapes that frameworks send (test_agents.py has others).

Each body is what a client of tools/clients/ sends, in words of our own; the
name of the case says whose it is.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemmakv.server.app import App
from support.asgi import NAME, post
from support.role_orders import template_of

pytest.importorskip("llguidance", reason="the extra `grammar`")
CHAT, RESPONSES, MESSAGES, OLLAMA, COMPLETIONS = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat",
    "/v1/completions",
)  # fmt: skip
TRIP = {
    "type": "object",
    "title": "Trip",
    "description": "A trip to a city.",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"], "title": "City", "type": "string"}
    },
    "required": ["city"],
    "additionalProperties": False,
}
OPEN = {key: value for key, value in TRIP.items() if key[:3] != "add"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "rain", "arguments": '{"city":"Rome"}'},
}
WEATHER = {"role": "user", "content": "How much rain fell in Rome?"}


def function(**more: Any) -> dict[str, Any]:
    return {"name": "rain", "description": "Tells the rain.", **more}


def tool(**more: Any) -> dict[str, Any]:
    """A tool of OpenAI's chat API."""
    return {"type": "function", "function": function(parameters=OPEN, **more)}


def form(**more: Any) -> dict[str, Any]:
    named = {"name": "Trip", "schema": TRIP, **more}
    return {"type": "json_schema", "json_schema": named}


def told(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [WEATHER, *messages], **more}


BLOCK = {"type": "text", "text": "Be brief."}
USED = {"id": "c1", "type": "tool_use", "name": "rain",
        "input": {"city": "Rome"}}  # fmt: skip
STEPS = [
    {"role": "assistant", "content": [
        {"type": "text", "text": "Calling tools:\n[{'name': 'rain'}]"}]},
    {"role": "user", "content": [
        {"type": "text", "text": "Observation:\n3 mm"}]},
]  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "pydantic-ai, chat": (CHAT, told(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3 mm"},
        stream=False, tool_choice="auto", tools=[tool(strict=False)],
    )),
    "CrewAI, a result with a name": (CHAT, told(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "rain",
         "content": "3 mm"},
        max_tokens=4, tool_choice="auto", tools=[tool()],
    )),
    "smolagents, calls as text": (CHAT, told(
        *STEPS, max_tokens=4, stop=["Observation:", "Calling tools:"],
        tool_choice="required", tools=[tool()],
    )),
    "smolagents, code as JSON": (CHAT, told(
        max_tokens=4, response_format=form(strict=True),
        stop=["Observation:", "</code>"],
    )),
    "haystack, one choice": (CHAT, told(
        n=1, max_completion_tokens=4, response_format=form(strict=True),
    )),
    "openai-agents, a handoff": (CHAT, told(
        max_tokens=8, parallel_tool_calls=False, tools=[tool()],
        tool_choice={"type": "function", "function": {"name": "rain"}},
    )),
    "Vercel's SDK, a draft-07 schema": (CHAT, told(
        response_format=form(
            schema={"$schema": "http://json-schema.org/draft-07/schema#",
                    **TRIP}),
        stream=True, stream_options={"include_usage": True},
    )),
    "instructor, functions in a stream": (CHAT, told(
        stream=True, tools=[tool()],
        tool_choice={"type": "function", "function": {"name": "rain"}},
    )),
    "openai-agents, responses": (RESPONSES, {
        "model": NAME, "include": [], "instructions": "Be brief.",
        "max_output_tokens": 8, "parallel_tool_calls": False,
        "input": [
            WEATHER,
            {"type": "function_call", "call_id": "c1", "name": "rain",
             "arguments": '{"city":"Rome"}'},
            {"type": "function_call_output", "call_id": "c1",
             "output": "3 mm"},
        ],
        "tools": [{"type": "function", "strict": True,
                   **function(parameters=TRIP)}],
    }),
    "agno, responses": (RESPONSES, {
        "model": NAME, "input": [WEATHER], "reasoning": {},
        "text": {"format": {"type": "json_schema", "name": "Trip",
                            "strict": True, "schema": TRIP}},
    }),
    "strands, responses": (RESPONSES, {
        "model": NAME, "store": False, "stream": True, "input": [WEATHER],
        "instructions": "Be brief.",
    }),
    "pydantic-ai, messages": (MESSAGES, {
        "model": NAME, "max_tokens": 8, "stream": False, "system": [BLOCK],
        "tool_choice": {"type": "auto"},
        "tools": [function(input_schema=OPEN)],
        "messages": [
            {"role": "user", "content": [BLOCK]},
            {"role": "assistant", "content": [USED]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1",
                 "is_error": False,
                 "content": [{"type": "text", "text": "3 mm"}]},
            ]},
        ],
    }),
    "agno, an enum without a type": (MESSAGES, {
        "model": NAME, "max_tokens": 8, "messages": [WEATHER],
        "output_config": {"format": {"type": "json_schema", "schema": {
            **TRIP, "properties": {"city": {"enum": ["Rome", "Oslo"]}}}}},
    }),
    "instructor, one call of messages": (MESSAGES, {
        "model": NAME, "max_tokens": 8, "messages": [WEATHER],
        "tools": [function(input_schema=OPEN)],
        "tool_choice": {"type": "tool", "name": "rain",
                        "disable_parallel_tool_use": True},
    }),
    "strands, Ollama": (OLLAMA, {
        "model": NAME, "stream": True, "options": {}, "tools": [],
        "messages": [{"role": "system", "content": "Be brief."}, WEATHER],
    }),
    "langchain-ollama, JSON": (OLLAMA, {
        "model": NAME, "stream": True, "format": "json",
        "options": {"num_predict": 8}, "messages": [WEATHER],
    }),
    "lm-evaluation-harness, texts": (COMPLETIONS, {
        "model": NAME, "prompt": ["a b", "c d"], "max_tokens": 2,
        "temperature": 0, "stop": ["\n", "."], "seed": 1234,
    }),
}  # fmt: skip


@pytest.fixture(params=["plain", "gemma"])
def either(app: App, request: pytest.FixtureRequest) -> App:
    assert app.service is not None
    tokenizer = app.service.tokenizer
    app.service.prompts.template = template_of(request.param, tokenizer)
    return app


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_taken(either: App, shape: str) -> None:
    path, body = SHAPES[shape]
    answer = post(either, path, body)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text


def test_paths_of_clients_that_add_their_own_version(app: App) -> None:
    """litellm and DSPy call /messages, others /v1/v1/..."""
    _, body = SHAPES["pydantic-ai, messages"]
    for path in ("/messages", "/v1/v1/messages"):
        assert post(app, path, body).status_code == 200


def test_a_function_without_strict_may_have_any_schema(app: App) -> None:
    _, body = SHAPES["pydantic-ai, chat"]
    asked = json.loads(json.dumps(body))
    asked["tools"][0]["function"]["parameters"]["properties"]["city"][
        "pattern"
    ] = "(?<=x)y"
    answer = post(app, CHAT, asked)
    assert answer.status_code == 200, answer.text
