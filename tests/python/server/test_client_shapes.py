"""Requests with the shapes that frameworks send (test_agents.py has others).

Each body is what a client of tools/clients/ sends, in words of our own; the
name of the case says whose it is.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemmakv.server.app import App
from support.asgi import NAME, get, post
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


# instructor (RESPONSES_TOOLS), pydantic-ai (NativeOutput and tools), openai-
# agents (tools and output_type), agno (tools and output_schema), Vercel's
# SDK, haystack: a form and tools in one request. The reply is a call, or text
# of this form.
FORMED = {"format": {"type": "json_schema", "name": "Trip", "strict": True,
                     "schema": TRIP}}  # fmt: skip
RESPONSE_TOOL = {"type": "function", **function(parameters=OPEN)}


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_a_chat_has_a_form_and_tools(app: App, choice: str) -> None:
    body = told(tools=[tool()], tool_choice=choice, max_tokens=60,
                response_format=form(strict=True))  # fmt: skip
    answer = post(app, CHAT, body)
    assert answer.status_code == 200, answer.text
    choice_made = answer.json()["choices"][0]
    message = choice_made["message"]
    for call in message.get("tool_calls") or []:
        assert call["function"]["name"] == "rain" and choice != "none"
    if not message.get("tool_calls") and choice_made["finish_reason"] == "stop":
        assert json.loads(message["content"])["city"] in ("Rome", "Oslo")


def test_a_response_has_a_form_and_tools(app: App) -> None:
    body = {"model": NAME, "input": [WEATHER], "text": FORMED,
            "max_output_tokens": 60, "tools": [RESPONSE_TOOL]}  # fmt: skip
    for choice in ("auto", {"type": "function", "name": "rain"}):
        answer = post(app, RESPONSES, {**body, "tool_choice": choice})
        assert answer.status_code == 200, answer.text


def test_messages_have_a_form_and_tools(app: App) -> None:
    config = {"format": {"type": "json_schema", "schema": TRIP}}
    body = {"model": NAME, "messages": [WEATHER], "max_tokens": 60,
            "tools": [function(input_schema=OPEN)],
            "output_config": config}  # fmt: skip
    answer = post(app, MESSAGES, body)
    assert answer.status_code == 200, answer.text


# lm-evaluation-harness, tasks of likelihoods over local-completions: logprobs
# of the prompt.
LIKELIHOODS = {
    "model": NAME, "prompt": [[2, 5, 6, 7]], "max_tokens": 1,
    "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234,
    }  # fmt: skip


def test_likelihoods_have_a_value_for_each_token(app: App) -> None:
    path, body = COMPLETIONS, LIKELIHOODS
    found = post(app, path, body).json()["choices"][0]["logprobs"]
    values, best = found["token_logprobs"], found["top_logprobs"]
    # The first token has none; the last one is the model's.
    assert len(values) == len(best) == 5 and values[0] is None
    assert all(value <= 0 for value in values[1:])
    assert all(max(one.values()) <= 0 for one in best[1:])


# The same, with tokenizer_backend=remote: vLLM's routes, beside llama-
# server's of the same names. (`content` there, `prompt` here.)
def test_tokens_as_vllm_gives_them(app: App) -> None:
    info = get(app, "/tokenizer_info")
    assert info.status_code == 200, info.text
    assert info.json()["eos_token"]
    body = {"prompt": "hello", "add_special_tokens": False}
    found = post(app, "/tokenize", body)
    assert found.status_code == 200, found.text
    back = post(app, "/detokenize", {"tokens": found.json()["tokens"]})
    assert back.json()["prompt"] == "hello"


# agno, AutoGen, langchain-ollama (`format`), instructor (JSON_SCHEMA): schemas
# made by pydantic do not say `additionalProperties: false`.
@pytest.mark.parametrize("api", ["chat", "ollama", "tool"])
def test_an_object_has_the_named_properties_alone(app: App, api: str) -> None:
    for seed in range(5):
        if api == "ollama":
            body = {
                "model": NAME,
                "messages": [WEATHER],
                "stream": False,
                "format": OPEN,
                "options": {"num_predict": 60, "seed": seed, "temperature": 1},
            }
            made = post(app, "/api/chat", body).json()["message"]["content"]
        else:
            more = {"response_format": form(schema=OPEN)}
            if api == "tool":
                more = {"tools": [tool()], "tool_choice": "required"}
            body = told(max_tokens=200, seed=seed, temperature=1, **more)
            message = post(app, CHAT, body).json()["choices"][0]["message"]
            made = (
                message["tool_calls"][0]["function"]["arguments"]
                if api == "tool"
                else message["content"]
            )
        assert list(json.loads(made)) == ["city"]
