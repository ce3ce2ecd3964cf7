"""Items, tools and results in the forms that agents of OpenAI's API send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemmakv.server.app import App
from support.asgi import NAME, USER, get, in_loop, post, sse_events
from support.kept import error, prompts_of

pytest.importorskip("llguidance", reason="the extra `grammar`")
PATH, CHAT = "/v1/responses", "/v1/chat/completions"
IGNORED = "x-gemmakv-ignored"


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text}]
    return {"type": "message", "role": role, "content": content}


@pytest.mark.parametrize(
    "item",
    [
        {"type": "additional_tools", "role": "developer", "tools": []},
        {"type": "tool_search_call", "id": "ts_1", "arguments": {}},
        {"type": "tool_search_output", "id": "ts_2", "tools": []},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "image_generation_call", "id": "ig_1", "result": None},
        {"type": "compaction", "encrypted_content": "gAAAAAB"},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "a_later_invention"},
    ],
)
def test_items_that_say_nothing_here_are_left_out(
    app: App, monkeypatch: pytest.MonkeyPatch, item: dict[str, Any]
) -> None:
    prompts = prompts_of(app, monkeypatch)
    items = [said("user", "hello"), item]
    answer = post(app, PATH, {"input": items, "max_output_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "input[1]"
    post(app, PATH, {"input": items[:1], "max_output_tokens": 1})
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("kind", [5, True, ["message"], {"type": "message"}])
def test_a_type_that_is_no_text(app: App, kind: Any) -> None:
    items = [said("user", "hello"), {"type": kind}]
    found = error(post(app, PATH, {"input": items}), 400)
    assert found["param"] == "input[1].type"


@pytest.mark.parametrize(
    "call, output, function",
    [
        (
            {"type": "custom_tool_call", "call_id": "c1",
             "name": "apply_patch", "input": "*** Begin\n"},
            {"type": "custom_tool_call_output", "call_id": "c1",
             "output": "done"},
            ("apply_patch", {"input": "*** Begin\n"}),
        ),
        (
            {"type": "local_shell_call", "call_id": "c1", "status": "x",
             "action": {"type": "exec", "command": ["ls"], "user": None}},
            {"type": "local_shell_call_output", "call_id": "c1",
             "output": "done"},
            ("local_shell", {"type": "exec", "command": ["ls"]}),
        ),
        (
            {"type": "function_call", "call_id": "c1", "name": "f",
             "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1",
             "output": [{"type": "input_text", "text": "done"}]},
            ("f", {}),
        ),
    ],
)  # fmt: skip
def test_calls_and_their_results_are_read(
    app: App,
    monkeypatch: pytest.MonkeyPatch,
    call: dict[str, Any],
    output: dict[str, Any],
    function: tuple[str, dict[str, Any]],
) -> None:
    """They are read as the same call of a function in a chat."""
    prompts = prompts_of(app, monkeypatch)
    items = [said("user", "hello"), call, output]
    answer = post(app, PATH, {"input": items, "max_output_tokens": 1})
    assert answer.status_code == 200 and IGNORED not in answer.headers
    name, arguments = function
    called = {"id": "c1", "type": "function", "function": {
        "name": name, "arguments": json.dumps(arguments)}}  # fmt: skip
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    post(app, CHAT, {"messages": messages, "max_tokens": 1})
    assert prompts[0] == prompts[1]


def test_results_may_be_null(app: App) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f",
            "arguments": "{}"}  # fmt: skip
    result = {"type": "function_call_output", "call_id": "c", "output": None}
    items = [said("user", "hello"), call, result]
    body: dict[str, Any] = {"input": items, "max_output_tokens": 1}
    assert post(app, PATH, body).status_code == 200
    function = {"name": "f", "arguments": "{}"}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": None},
    ]  # fmt: skip
    body = {"messages": messages, "max_tokens": 1}
    assert post(app, CHAT, body).status_code == 200


def test_refusals_are_texts(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(app, monkeypatch)
    for part in ("refusal", "text"):
        content = [{"type": part, part: "No."}]
        messages = [
            *USER, {"role": "assistant", "content": content}, *USER,
        ]  # fmt: skip
        body: dict[str, Any] = {"messages": messages, "max_tokens": 1}
        assert post(app, CHAT, body).status_code == 200
        items = [{**one, "type": "message"} for one in messages]
        body = {"input": items, "max_output_tokens": 1}
        assert post(app, PATH, body).status_code == 200
    assert all(one == prompts[0] for one in prompts)


def test_references_are_to_what_is_kept(
    kept: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = post(kept, PATH, {"input": "hello", "max_output_tokens": 2}).json()
    [message] = first["output"]
    prompts = prompts_of(kept, monkeypatch)
    for item in (message, {"type": "item_reference", "id": message["id"]}):
        items = [said("user", "hello"), item, said("user", "again")]
        body = {"input": items, "max_output_tokens": 1, "store": False}
        assert post(kept, PATH, body).status_code == 200
    assert prompts[0] == prompts[1]
    for id in ("msg_no", message["id"] + "x", None):
        items = [said("user", "x"), {"type": "item_reference", "id": id}]
        found = error(post(kept, PATH, {"input": items}), 400)
        assert found["param"] == "input[1].id"


TOOLS = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch", "description": "It patches."},
    {"type": "web_search"},
]


def test_tools_that_run_elsewhere_are_named(app: App) -> None:
    body = {"input": "x", "max_output_tokens": 1, "tools": TOOLS}
    answer = post(app, PATH, {**body, "tool_choice": "none"})
    assert answer.headers[IGNORED] == "tools[2]"


def test_a_custom_tool_takes_one_text(app: App) -> None:
    assert app.service is not None
    quotes = {
        str(i): 50.0
        for i in range(app.service.gemma.config.vocab_size)
        if '"' in app.service.tokenizer.piece_of(i)
    }  # the texts end soon
    body = {
        "input": "x", "tools": TOOLS[1:2], "max_output_tokens": 200,
        "tool_choice": {"type": "custom", "name": "patch"}, "seed": 3,
        "logit_bias": quotes,
    }  # fmt: skip
    [item] = post(app, PATH, body).json()["output"]
    assert item["type"] == "custom_tool_call" and item["name"] == "patch"
    assert isinstance(item["input"], str)
    events = sse_events(post(app, PATH, {**body, "stream": True}).text)
    done = [e for n, e in events if n.endswith("custom_tool_call_input.done")]
    assert [one["input"] for one in done] == [item["input"]]
    [_, last] = events[-1]
    assert [one["type"] for one in last["response"]["output"]] == [
        "custom_tool_call"
    ]
    custom = {"type": "custom", "custom": {"name": "patch"}}
    chat = {
        "messages": USER, "max_tokens": 200, "seed": 3,
        "tools": [custom], "tool_choice": custom, "logit_bias": quotes,
    }  # fmt: skip
    message = post(app, CHAT, chat).json()["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert call["type"] == "custom" and call["custom"]["name"] == "patch"
    text = call["custom"]["input"]
    chunks = sse_events(post(app, CHAT, {**chat, "stream": True}).text)
    deltas = [
        one["delta"]["tool_calls"][0]
        for _, chunk in chunks[:-1]
        for one in chunk["choices"]
        if "tool_calls" in one["delta"]
    ]
    assert [one["custom"]["input"] for one in deltas] == [text]
    # And it is read again.
    again = [*USER, {**message, "content": None},
             {"role": "tool", "tool_call_id": call["id"],
              "content": "done"}]  # fmt: skip
    assert post(app, CHAT, {**chat, "messages": again}).status_code == 200


def _function(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object"}}


def test_choices_in_other_forms(app: App) -> None:
    """One function may be chosen flat, and several may be allowed."""
    nested = [
        {"type": "function", "function": _function(name)}
        for name in ("a", "b", "c")
    ]
    named = {"type": "function", "name": "b"}
    allowed = [{"type": "function", "function": {"name": "b"}}]
    chat = {"messages": USER, "max_tokens": 200, "tools": nested, "seed": 1}
    for choice in (named, {"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": allowed}}):  # fmt: skip
        answer = post(app, CHAT, {**chat, "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {"b"}
    flat = [{"type": "function", **one["function"]} for one in nested]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    body = {"input": "x", "max_output_tokens": 200, "tools": flat}
    items = post(app, PATH, {**body, "tool_choice": choice}).json()["output"]
    assert {item["name"] for item in items} == {"b"}
    bad = {"type": "allowed_tools", "mode": "all", "tools": []}
    found = error(post(app, PATH, {**body, "tool_choice": bad}), 400)
    assert found["param"] == "tool_choice.mode"


def test_a_compacted_conversation_goes_on(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [
        said("user", "hello"), said("assistant", "Hi."), said("user", "more"),
    ]  # fmt: skip
    answer = post(app, f"{PATH}/compact", {"model": NAME, "input": items})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["object"] == "response.compaction"
    *users, summary = found["output"]
    assert [one["content"][0]["text"] for one in users] == ["hello", "more"]
    assert summary["type"] == "compaction"
    prompts = prompts_of(app, monkeypatch)
    after = [*found["output"], said("user", "and?")]
    answer = post(app, PATH, {"input": after, "max_output_tokens": 1})
    assert answer.status_code == 200 and IGNORED not in answer.headers
    assert app.service is not None
    text = app.service.tokenizer.decode(prompts[0])
    assert summary["encrypted_content"].partition(": ")[2] in text


def test_codex_lists_models_of_its_own(app: App) -> None:
    found = get(app, "/v1/models?client_version=0.171.0").json()
    [model] = found["models"]
    assert model["slug"] == NAME == found["data"][0]["id"]
    assert model["context_window"] == 4096
    assert "models" not in get(app, "/v1/models").json()


def test_a_websocket_is_refused_by_name(app: App) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    found = in_loop(app, lambda http: http.get(PATH, headers=headers))
    assert found.status_code == 426
    assert found.json()["error"]["code"] == "upgrade_not_supported"
