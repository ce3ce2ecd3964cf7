"""FunctionGemma's own form of calls, in each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

import gemmakv
from gemmakv.chat._reply import ReplyReader, rendered_anew
from gemmakv.chat._templates import call_form, stop_ids, template_for
from gemmakv.server.app import App
from support import gemma4_files
from support.asgi import NAME, make_app, post, sse_events
from support.chat_cases import FUNCTIONS
from support.kept import prompts_of
from support.tiny_gguf import ARRAY, STR

pytest.importorskip("llguidance", reason="the extra `grammar` is not there")

# The original has these ids, too.
NAMES = {
    46: "<start_function_declaration>", 47: "<end_function_declaration>",
    48: "<start_function_call>", 49: "<end_function_call>",
    50: "<start_function_response>", 51: "<end_function_response>",
    52: "<escape>", 105: "<start_of_turn>", 106: "<end_of_turn>",
}  # fmt: skip
IDS = {name: token for token, name in NAMES.items()}
USER = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {
    "name": "rain", "description": "Rain.", "parameters": SCHEMA}}]
CLAUDE = [{"name": "rain", "description": "Rain.", "input_schema": SCHEMA}]
CALL = "<start_function_call>call:rain{city:<escape>the<escape>,days:[1,2]}"
SAYS = f"{CALL}<end_function_call><start_function_response>"
ARGUMENTS = {"city": "the", "days": [1, 2]}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> gemmakv.Gemma:
    pieces = list(gemma4_files.PIECES)
    for token, name in NAMES.items():
        pieces[token] = name
    path = tmp_path_factory.mktemp("functions") / "tiny-it.gguf"
    gemma4_files.write(path, FUNCTIONS, tokens=(ARRAY, (STR, pieces)))
    return gemmakv.Gemma.load(path, packed_cache=False)


@pytest.fixture
def app(gemma: gemmakv.Gemma, monkeypatch: pytest.MonkeyPatch) -> App:
    gemma4_files.force(monkeypatch)
    made = make_app(gemma, max_model_len=2048, default_max_tokens=200)
    assert made.service is not None
    made.service.defaults["grammar"] = script(SAYS)
    return made


def script(reply: str) -> str:
    for name, token in IDS.items():
        original = gemma4_files.PIECES[token]
        reply = reply.replace(name, original)
    return gemma4_files.script(reply)


@pytest.mark.slow
def test_openai(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    body: dict[str, Any] = {"messages": USER, "tools": TOOLS}
    found = post(app, "/v1/chat/completions", body).json()["choices"][0]
    assert found["finish_reason"] == "tool_calls"
    message = found["message"]
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "rain"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    # Its result is said in the template's form.
    prompts = prompts_of(app, monkeypatch)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3 mm"}
    more = {**body, "messages": [*USER, message, result]}
    answer = post(app, "/v1/chat/completions", more)
    assert answer.status_code == 200, answer.text
    [ids] = prompts
    assert ids.count(IDS["<start_function_call>"]) == 1
    assert ids.count(IDS["<start_function_response>"]) == 1
    assert ids.count(IDS["<start_function_declaration>"]) == 1
    service = app.service
    assert service is not None
    assert "response:rain{" in service.tokenizer.decode(ids)


def test_openai_stream(app: App) -> None:
    body = {"messages": USER, "tools": TOOLS, "stream": True}
    text = post(app, "/v1/chat/completions", body).text
    deltas = [
        data["choices"][0]["delta"]
        for _, data in sse_events(text)
        if data != "[DONE]"
    ]
    [call] = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert not any(d.get("content") for d in deltas)


def test_anthropic(app: App) -> None:
    body = {"messages": USER, "tools": CLAUDE, "max_tokens": 200}
    found = post(app, "/v1/messages", body).json()
    assert found["stop_reason"] == "tool_use"
    [block] = found["content"]
    assert (block["name"], block["input"]) == ("rain", ARGUMENTS)


def test_responses(app: App) -> None:
    tools = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
    body = {"input": "Hello", "tools": tools}
    [item] = post(app, "/v1/responses", body).json()["output"]
    assert item["type"] == "function_call" and item["name"] == "rain"
    assert json.loads(item["arguments"]) == ARGUMENTS


def test_ollama(app: App) -> None:
    body = {"model": NAME, "messages": USER, "tools": TOOLS, "stream": False}
    found = post(app, "/api/chat", body).json()["message"]
    [call] = found["tool_calls"]
    expected = {"index": 0, "name": "rain", "arguments": ARGUMENTS}
    assert call["function"] == expected
    shown = post(app, "/api/show", {"model": NAME}).json()
    assert "tools" in shown["capabilities"]


def test_choices_hold(gemma: gemmakv.Gemma) -> None:
    app = make_app(gemma, max_model_len=2048)
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required",
            "parallel_tool_calls": False, "max_tokens": 300,
            "temperature": 1, "seed": 2}  # fmt: skip
    for seed in range(4):
        found = post(app, "/v1/chat/completions", {**body, "seed": seed})
        [choice] = found.json()["choices"]
        if choice["finish_reason"] == "length":  # within a text of the call
            continue
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "rain"
        assert json.loads(call["function"]["arguments"]).keys() <= {"city"}


def test_what_is_no_call_is_text(app: App) -> None:
    service = app.service
    assert service is not None
    bad = "<start_function_call>call:rain{city:<end_function_call>"
    service.defaults["grammar"] = script(bad + "<start_function_response>")
    body = {"messages": USER, "tools": TOOLS}
    found = post(app, "/v1/chat/completions", body).json()["choices"][0]
    assert found["finish_reason"] == "stop"
    assert found["message"]["content"] == bad


def test_the_library_reads_it_token_by_token(gemma: gemmakv.Gemma) -> None:
    tokenizer = gemma.tokenizer
    assert tokenizer is not None
    reader = ReplyReader(tokenizer, "functions")
    parts: list[Any] = []
    for token in tokenizer.encode(f"Yes {SAYS}", parse_special=True):
        text = "" if token in NAMES else tokenizer.decode([token])
        parts += reader.push(token, text)
    parts += reader.end()
    *texts, call = parts
    assert "".join(texts) == "Yes"
    assert (call.end.name, call.end.arguments) == ("rain", ARGUMENTS)
    assert reader.calls == 1
    assert IDS["<start_function_call>"] in rendered_anew(tokenizer)


def test_the_library_says_tools_and_the_form(gemma: gemmakv.Gemma) -> None:
    template = template_for(gemma)
    assert call_form(template) == "functions"
    stops = stop_ids(template, tokenizer_of(gemma))
    assert IDS["<start_function_response>"] in stops
    said = gemma.chat(
        USER, tools=TOOLS, tool_choice="required", max_tokens=4
    )
    assert said.token_ids[0] == IDS["<start_function_call>"]


def tokenizer_of(gemma: gemmakv.Gemma) -> Any:
    assert gemma.tokenizer is not None
    return gemma.tokenizer
