"""Requests with the shapes that coding agents and group chats send."""

from __future__ import annotations

from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from support.asgi import NAME, post
from support.kept import prompts_of
from support.role_orders import template_of

pytest.importorskip("llguidance", reason="the extra `grammar`")
CHAT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(params=["plain", "gemma", "file gemma 3"])
def agent_app(app: App, request: pytest.FixtureRequest) -> App:
    assert app.service is not None
    service = app.service
    service.prompts.template = template_of(request.param, service.tokenizer)
    return app


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def schema(**properties: Any) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(properties)[:1],
        "additionalProperties": False,
    }


def claude_code(call: bool, nonce: str = "a1") -> dict[str, Any]:
    """What Claude Code 2.1 sends first, and after a call."""
    mark = {} if call else MARK
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                text("<system-reminder>\nIt is Monday.\n</system-reminder>\n"),
                text("Where to?", **mark),
            ],
        },
        {"role": "system", "content": "Kinds of agents:\n- one: It looks."},
    ]
    if call:
        asked = {"type": "tool_use", "id": "call_1", "name": "Read",
                 "input": {"file_path": "/notes"}}  # fmt: skip
        result = {"type": "tool_result", "tool_use_id": "call_1",
                  "content": "No such file.", "is_error": True,
                  **MARK}  # fmt: skip
        messages += [
            {"role": "assistant", "content": [text("I look."), asked]},
            {"role": "user", "content": [result]},
        ]
    size = {"type": "integer", "minimum": 0, "maximum": (1 << 53) - 1}
    anything = {
        "type": "object", "propertyNames": {"type": "string"},
        "additionalProperties": {},
    }  # fmt: skip
    tools = [
        ("Read", {"file_path": {"type": "string"}, "limit": {
            **size, "exclusiveMinimum": 0}}),
        ("Note", {"status": {"anyOf": [{"type": "string", "enum": ["new"]},
                                       {"type": "string", "const": "old"}]},
                  "more": anything}),
        ("Fetch", {"url": {"type": "string", "format": "uri"}}),
        ("Run", {"id": {"type": "string", "pattern": "^wf_[a-z0-9-]{6,}$"}}),
    ]  # fmt: skip
    return {
        "model": NAME,
        "max_tokens": 2,
        "stream": True,
        "system": [
            text(f"x-anthropic-billing-header: cc_version=2; cch={nonce};"),
            text("You help.", **MARK),
            text("\nYou help with software.", **MARK),
        ],
        "messages": messages,
        "tools": [
            {"name": name, "description": "It helps.",
             "input_schema": schema(**properties)}
            for name, properties in tools
        ],
        "metadata": {"user_id": '{"device_id": "0", "session_id": "1"}'},
        "output_config": {"effort": "high"},
    }  # fmt: skip


def codex(call: bool) -> dict[str, Any]:
    """What Codex 0.171 sends first, and after a call."""

    def said(role: str, *words: str) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": one} for one in words]
        return {"type": "message", "id": "msg_1", "role": role,
                "content": parts}  # fmt: skip

    items = [
        said("developer", "You are a coding agent."),
        said("developer", "<skills>\nNone.\n</skills>", "Ask for nothing."),
        said("user", "<environment>\n/work\n</environment>"),
        said("user", "Where to?"),
    ]
    if call:
        items += [
            {"type": "message", "id": "msg_2", "role": "assistant",
             "status": "completed", "content": [
                 {"type": "output_text", "text": "I look.",
                  "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "status": "completed",
             "call_id": "call_1", "name": "exec_command",
             "arguments": '{"cmd": "ls"}'},
            {"type": "function_call_output", "id": "fco_1",
             "call_id": "call_1", "output": "notes"},
        ]  # fmt: skip
    parameters = {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "wait": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    }
    return {
        "model": NAME,
        "input": items,
        "max_output_tokens": 2,
        "tools": [
            {"type": "function", "name": "exec_command", "strict": False,
             "description": "Runs.", "parameters": parameters},
            {"type": "namespace", "name": "agents", "description": "Others.",
             "tools": []},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "one",
        "client_metadata": {"session_id": "one"},
    }  # fmt: skip


def group_chat() -> dict[str, Any]:
    """What one of AutoGen's agents sends when the others have spoken."""
    return {
        "model": NAME,
        "max_tokens": 2,
        "messages": [
            {"role": "system", "content": "You are the writer."},
            {"role": "user", "name": "user", "content": "A line on rain."},
            {"role": "assistant", "name": "writer", "content": "It rains."},
            {"role": "user", "name": "critic", "content": "Too short."},
            {"role": "user", "name": "editor", "content": "It will do."},
        ],
    }


@pytest.mark.parametrize("call", [False, True])
def test_claude_code(
    agent_app: App, call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(agent_app, monkeypatch)
    body = claude_code(call)
    answer = post(agent_app, MESSAGES + "?beta=true", body)
    assert answer.status_code == 200, answer.text
    assert "event: message_stop" in answer.text
    counted = post(agent_app, MESSAGES + "/count_tokens?beta=true", {
        key: body[key] for key in ("model", "messages", "system", "tools")
    })  # fmt: skip
    assert counted.json()["input_tokens"] == len(prompts[0])
    assert agent_app.service is not None
    prompt = agent_app.service.tokenizer.decode(prompts[0])
    words = ["You help.", "with software", "It is Monday", "Where to?",
             "Kinds of agents"]  # fmt: skip
    words += ["I look.", "No such file."] if call else []
    places = [prompt.index(one) for one in words]
    assert places == sorted(places) and "billing" not in prompt


def test_claude_code_finds_its_prompt_again(agent_app: App) -> None:
    used = []
    for call in (False, True):
        body = claude_code(call, nonce=f"n{call}") | {"stream": False}
        answer = post(agent_app, MESSAGES, body)
        used.append(answer.json()["usage"])
    first = sum(used[0][key] for key in used[0] if key != "output_tokens")
    assert used[1]["cache_read_input_tokens"] >= 0.9 * first


@pytest.mark.parametrize("call", [False, True])
def test_codex(
    agent_app: App, call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(agent_app, monkeypatch)
    answer = post(agent_app, RESPONSES, codex(call))
    assert answer.status_code == 200, answer.text
    assert "event: response.incomplete" in answer.text
    assert agent_app.service is not None
    prompt = agent_app.service.tokenizer.decode(prompts[0])
    words = ["a coding agent", "None.", "Ask for nothing", "/work", "Where to?"]
    words += ["I look.", "notes"] if call else []
    places = [prompt.index(one) for one in words]
    assert places == sorted(places)


def test_a_group_chat(agent_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(agent_app, monkeypatch)
    answer = post(agent_app, CHAT, group_chat())
    assert answer.status_code == 200, answer.text
    assert agent_app.service is not None
    prompt = agent_app.service.tokenizer.decode(prompts[0])
    if agent_app.service.prompts.template.name != "plain":
        assert "critic: Too short.\n\neditor: It will do." in prompt


def test_a_library_reads_a_group_chat(talker: gemmakv.Gemma) -> None:
    messages = group_chat()["messages"]
    for template in ("plain", "gemma"):
        assert talker.chat(messages, template=template, max_tokens=1).token_ids
