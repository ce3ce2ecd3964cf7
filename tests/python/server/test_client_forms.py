"""Requests of real clients with a form of the answer beside tools, and of
programs that measure models. Each says which client sends it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemmakv.server.app import App
from support.asgi import NAME, get, post

pytest.importorskip("llguidance", reason="the extra `grammar`")
CHAT, RESPONSES, MESSAGES, COMPLETIONS = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages",
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
