"""Thoughts and calls of Gemma 4's form, in each API's own form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from support import gemma4_files
from support.asgi import NAME, get, make_app, post, sse_events
from support.extras import needs
from support.gemma4_files import IDS, script
from support.kept import error, prompts_of, serving

pytestmark = needs("llguidance", "tokenizers")
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", (
    "/v1/responses"
)  # fmt: skip
OLLAMA, SESSIONS = "/api/chat", "/v1/sessions"
USER = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {
    "name": "rain", "parameters": SCHEMA}}]  # fmt: skip
CALL = '<|tool_call>call:rain{city:<|"|>the<|"|>}<tool_call|>'
REPLY = "<|channel>thought\nthe in\n<channel|>Yes and no"
CALLING = f"<|channel>thought\nthe in\n<channel|>{CALL}<|tool_response>"
THOUGHTS, TEXT = "the in", "Yes and no"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> gemmakv.Gemma:
    path = tmp_path_factory.mktemp("gemma4") / "tiny-it.gguf"
    gemma4_files.write(path, gemma4_files.TEMPLATE)
    return gemmakv.Gemma.load(path, packed_cache=False)


def says(app: App, reply: str) -> None:
    assert app.service is not None
    app.service.defaults["grammar"] = script(reply)


@pytest.fixture
def app(gemma: gemmakv.Gemma, monkeypatch: pytest.MonkeyPatch) -> App:
    gemma4_files.force(monkeypatch)
    made = make_app(gemma, max_model_len=2048, default_max_tokens=200)
    says(made, REPLY)
    return made


@pytest.fixture
def kept(gemma: gemmakv.Gemma, tmp_path: Path) -> Iterator[App]:
    for made in serving(gemma, tmp_path, default_max_tokens=200):
        says(made, REPLY)
        yield made


def body(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": USER, "max_tokens": 200, **more}


def streamed(app: App, path: str, **more: Any) -> list[tuple[str, Any]]:
    response = post(app, path, body(stream=True, **more))
    assert response.status_code == 200, response.text
    return [one for one in sse_events(response.text) if one[1] != "[DONE]"]


def whole(app: App, path: str, **more: Any) -> dict[str, Any]:
    response = post(app, path, body(**more))
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_openai(app: App) -> None:
    found = whole(app, CHAT, reasoning_effort="low")
    [choice] = found["choices"]
    assert choice["message"]["content"] == TEXT
    assert choice["message"]["reasoning_content"] == THOUGHTS
    assert choice["finish_reason"] == "stop"
    details = found["usage"]["completion_tokens_details"]
    assert 2 < details["reasoning_tokens"] < found["usage"]["completion_tokens"]
    deltas = [
        event["choices"][0]["delta"]
        for _, event in streamed(app, CHAT, reasoning_effort="low")
    ]
    thought = "".join(d.get("reasoning_content", "") for d in deltas)
    text = "".join(d.get("content", "") for d in deltas)
    assert (thought, text) == (THOUGHTS, TEXT)
    last = max(i for i, d in enumerate(deltas) if "reasoning_content" in d)
    assert all(not d.get("content") for d in deltas[:last])
    says(app, TEXT)
    plain = whole(app, CHAT)
    assert "reasoning_content" not in plain["choices"][0]["message"]


@pytest.mark.parametrize(
    "field, on, off",
    [
        ("reasoning_effort", "high", "none"),
        ("chat_template_kwargs", {"enable_thinking": True},
         {"enable_thinking": False}),
        ("thinking", {"type": "enabled"}, {"type": "disabled"}),
    ],
)  # fmt: skip
def test_openai_switches(
    app: App,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    on: Any,
    off: Any,
) -> None:
    prompts = prompts_of(app, monkeypatch)
    for value in (on, off):
        whole(app, CHAT, **{field: value})
    assert [p.count(IDS["<|think|>"]) for p in prompts] == [1, 0]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}},
         "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}},
         "reasoning_effort"),
    ],
)  # fmt: skip
def test_openai_errors(app: App, fields: dict[str, Any], param: str) -> None:
    found = error(post(app, CHAT, body(**fields)), 400)
    assert found["param"] == param
    assert found["message"].startswith(f"{param}: ")


def test_calls(app: App) -> None:
    says(app, CALLING)
    [choice] = whole(app, CHAT, tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == THOUGHTS
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "the"}
    parts = [
        part["function"]
        for _, event in streamed(app, CHAT, tools=TOOLS)
        for part in event["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert "".join(p.get("name", "") for p in parts) == "rain"
    assert json.loads("".join(p["arguments"] for p in parts)) == {"city": "the"}
    # The result goes on in the same turn, with its thought.
    result = {"role": "tool", "tool_call_id": call["id"], "name": "rain",
              "content": "3 mm"}  # fmt: skip
    says(app, TEXT)
    more = whole(app, CHAT, messages=[*USER, message, result], tools=TOOLS)
    assert more["choices"][0]["message"]["content"] == TEXT


def test_choices_hold(gemma: gemmakv.Gemma) -> None:
    """Whatever the model wants to say; and its thought may come before."""
    app = make_app(gemma, max_model_len=2048)
    schema = {
        "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]
    }
    tools = [{"type": "function", "function": {
        "name": name, "parameters": schema}} for name in ("rain", "sun")]
    choice = {"type": "function", "function": {"name": "sun"}}
    for seed in range(4):
        [found] = whole(
            app, CHAT, tools=tools, tool_choice=choice, seed=seed,
            temperature=1, parallel_tool_calls=False,
            logit_bias={IDS["<|channel>"]: -100},
        )["choices"]  # fmt: skip
        assert found["finish_reason"] == "tool_calls"
        [call] = found["message"]["tool_calls"]
        assert call["function"]["name"] == "sun"
        said = json.loads(call["function"]["arguments"])
        assert said["unit"] in ("C", "F")
    bad = {"properties": {"a": {"type": "text"}}}
    tools[1]["function"] |= {  # type: ignore[operator]
        "parameters": bad, "strict": True,
    }  # fmt: skip
    wrong = error(post(app, CHAT, body(tools=tools)), 400)
    assert wrong["param"] == "tools[1].function.parameters.properties.a.type"


def test_anthropic(app: App) -> None:
    thinking = {"type": "enabled", "budget_tokens": 50}
    found = whole(app, MESSAGES, thinking=thinking)
    thought, text = found["content"]
    assert thought["type"] == "thinking" and thought["thinking"] == THOUGHTS
    assert text == {"type": "text", "text": TEXT}
    events = streamed(app, MESSAGES, thinking=thinking)
    starts = [e["content_block"]["type"] for kind, e in events
              if kind == "content_block_start"]  # fmt: skip
    assert starts == ["thinking", "text"]
    deltas = [e["delta"] for kind, e in events if kind == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == THOUGHTS
    assert "".join(d.get("text", "") for d in deltas) == TEXT
    # Blocks of thoughts may come back.
    more = [*USER, {"role": "assistant", "content": found["content"]}, *USER]
    assert whole(app, MESSAGES, messages=more)["content"][-1]["text"] == TEXT
    says(app, CALLING)
    tools = [{"name": "rain", "input_schema": SCHEMA}]
    called = whole(app, MESSAGES, tools=tools, thinking=thinking)
    kinds = [block["type"] for block in called["content"]]
    assert kinds == ["thinking", "tool_use"]
    assert called["stop_reason"] == "tool_use"
    for bad in ({"type": "some"}, {"type": "enabled"},
                {"type": "enabled", "budget_tokens": 200}):  # fmt: skip
        wrong = error(post(app, MESSAGES, body(thinking=bad)), 400)
        assert wrong["message"].startswith("thinking.")


def test_ollama(app: App) -> None:
    found = whole(app, OLLAMA, think=True, stream=False)
    assert found["message"]["thinking"] == THOUGHTS
    assert found["message"]["content"] == TEXT
    response = post(app, OLLAMA, body(think="low"))
    lines = [json.loads(line) for line in response.text.splitlines()]
    said = [line["message"] for line in lines]
    assert "".join(m.get("thinking", "") for m in said) == THOUGHTS
    assert "".join(m["content"] for m in said) == TEXT
    more = {"model": NAME, "prompt": "Hello", "think": True, "stream": False}
    found = post(app, "/api/generate", more).json()
    assert (found["thinking"], found["response"]) == (THOUGHTS, TEXT)
    shown = post(app, "/api/show", {"model": NAME}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    bad = post(app, OLLAMA, body(think="very"))
    assert bad.status_code == 400 and bad.json()["error"].startswith("think:")


def test_responses(app: App) -> None:
    given = {"model": NAME, "input": "Hello", "reasoning": {"effort": "low"}}
    found = post(app, RESPONSES, given).json()
    thought, message = found["output"]
    assert thought["type"] == "reasoning"
    assert thought["content"][0]["text"] == THOUGHTS
    assert message["content"][0]["text"] == TEXT
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 2
    events = sse_events(post(app, RESPONSES, {**given, "stream": True}).text)
    deltas = [e["delta"] for kind, e in events
              if kind == "response.reasoning_text.delta"]  # fmt: skip
    assert "".join(deltas) == THOUGHTS
    [last] = [e for kind, e in events if kind == "response.completed"]
    shown = [item["type"] for item in last["response"]["output"]]
    assert shown == ["reasoning", "message"]
    items = [*USER, *found["output"], *USER]
    again = post(app, RESPONSES, {**given, "input": items})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("effort", ["low", "none"])
def test_a_session_forgets_thoughts(
    kept: App, monkeypatch: pytest.MonkeyPatch, effort: str
) -> None:
    """What is kept of a turn is what the template says of it later on."""
    prompts = prompts_of(kept, monkeypatch)
    id = post(kept, SESSIONS, {}).json()["id"]
    for _ in range(3):
        whole(kept, CHAT, session=id, reasoning_effort=effort)
    turns = get(kept, f"{SESSIONS}/{id}").json()["turns"]
    assert [t["reply"]["reasoning"] for t in turns] == [THOUGHTS] * 3
    said: list[Any] = []
    assert kept.service is not None
    for prompt in prompts:
        said += USER
        expected = kept.service.prompts.render(said, None, effort == "low")
        assert prompt == expected.tolist()
        said.append({"role": "assistant", "content": TEXT})
    assert [len(p) for p in prompts] == sorted(len(p) for p in prompts)
    # And back: another choice has all of it rendered anew.
    whole(kept, CHAT, session=id, reasoning_effort="minimal")
    assert prompts[-1].count(IDS["<|think|>"]) == 1


def test_a_response_is_gone_on_from(kept: App) -> None:
    given = {"model": NAME, "input": "Hello", "reasoning": {"effort": "low"}}
    first = post(kept, RESPONSES, given).json()
    shown = get(kept, f"{RESPONSES}/{first['id']}").json()
    assert [i["type"] for i in shown["output"]] == ["reasoning", "message"]
    assert shown["output"] == first["output"]
    assert shown["usage"] == first["usage"]
    more = post(kept, RESPONSES, {**given, "previous_response_id": first["id"]})
    assert more.status_code == 200, more.text
    usage = more.json()["usage"]
    # The thought is not in it.
    assert usage["input_tokens"] < (
        2 * first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    )


@pytest.mark.parametrize(
    "path, fields, param",
    [
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}},
         "chat_template_kwargs.enable_thinking"),
        (CHAT, {"thinking": {"type": "enabled"}}, "thinking.type"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}},
         "thinking.type"),
        (OLLAMA, {"think": "low"}, "think"),
        (OLLAMA, {"think": True}, "think"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_think(
    shared: gemmakv.Gemma, path: str, fields: dict[str, Any], param: str
) -> None:
    app = make_app(shared, max_model_len=4096, default_max_tokens=2)
    response = post(app, path, body(**fields))
    assert response.status_code == 400
    error = response.json()["error"]
    words = error if isinstance(error, str) else error["message"]
    assert words.startswith(f"{param}: ")
    off: dict[str, Any] = {
        "reasoning_effort": "none", "think": False,
        "thinking": {"type": "disabled"},
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    name = param.partition(".")[0]
    assert whole(app, path, stream=False, **{name: off[name]})
