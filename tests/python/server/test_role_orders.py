"""Orders of roles that clients send, over all APIs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from gemmakv.templates import GemmaTemplate
from support.asgi import NAME, post
from support.kept import error, prompts_of, serving
from support.role_orders import ALTERNATING, ORDERS, messages, template_of

CHAT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
OLLAMA, TEMPLATE = "/api/chat", "/apply-template"
COUNTS = (f"{MESSAGES}/count_tokens", f"{RESPONSES}/input_tokens")


@pytest.fixture(scope="module")
def kept_app(
    shared: gemmakv.Gemma, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[App]:
    yield from serving(shared, tmp_path_factory.mktemp("kept"))


def with_template(app: App, name: str) -> Any:
    assert app.service is not None
    made = template_of(name, app.service.tokenizer)
    app.service.prompts.template = made
    return made


def items(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As /v1/responses has messages."""
    return [
        {
            "type": "function_call_output",
            "call_id": one["tool_call_id"],
            "output": one["content"],
        }
        if one["role"] == "tool"
        else {"type": "message", **one}
        for one in given
    ]


def blocks(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As /v1/messages has messages."""
    return [
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": one["tool_call_id"],
                    "content": one["content"],
                }
            ],
        }
        if one["role"] == "tool"
        else one
        for one in given
    ]


def bodies(given: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each route a request with the same messages."""
    return {
        CHAT: {"messages": given, "max_tokens": 1},
        RESPONSES: {"input": items(given), "max_output_tokens": 1},
        MESSAGES: {"messages": blocks(given), "max_tokens": 1},
        OLLAMA: {
            "model": NAME, "messages": given, "stream": False,
            "options": {"num_predict": 1},
        },
    }  # fmt: skip


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("name", ["plain", *ALTERNATING])
def test_all_apis_read_the_same(
    kept_app: App,
    shared: gemmakv.Gemma,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    order: str,
) -> None:
    template = with_template(kept_app, name)
    given = messages(order)
    expected = shared.apply_chat_template(given, template=template).tolist()
    prompts = prompts_of(kept_app, monkeypatch)
    for path, body in bodies(given).items():
        answer = post(kept_app, path, body)
        assert answer.status_code == 200, (path, answer.text)
    assert prompts == [expected] * 4
    counts = [
        post(kept_app, path, body).json()["input_tokens"]
        for path, body in zip(
            COUNTS, ({"messages": blocks(given)}, {"input": items(given)})
        )
    ]
    assert counts == [len(expected)] * 2
    prompt = post(kept_app, TEMPLATE, {"messages": given}).json()["prompt"]
    assert all(one["content"] in prompt for one in given)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_kept_conversations_go_on_with_them(
    kept_app: App,
    shared: gemmakv.Gemma,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
) -> None:
    """Their turns are read as in one conversation."""
    with_template(kept_app, "gemma")
    made = post(kept_app, "/v1/sessions", {"system": "Be brief."}).json()
    prompts = prompts_of(kept_app, monkeypatch)
    before: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for _ in range(2):
        given = messages(order)
        body = {"messages": given, "session": made["id"], "max_tokens": 2}
        answer = post(kept_app, CHAT, body)
        assert answer.status_code == 200, answer.text
        before += given
        ids = shared.apply_chat_template(before, template="gemma")
        assert shared.tokenizer is not None
        read, expected = (
            "".join(shared.tokenizer.decode(one).split())  # but white space
            for one in (prompts[-1], ids.tolist())
        )
        assert read == expected
        reply = answer.json()["choices"][0]["message"]
        before.append({"role": "assistant", "content": reply["content"]})


@pytest.mark.parametrize("path", [CHAT, OLLAMA, MESSAGES, RESPONSES])
def test_a_bad_role_is_named(app: App, path: str) -> None:
    given = [*messages("uau"), {"role": "judge", "content": "x"}]
    said = post(app, path, bodies(given)[path])
    assert said.status_code == 400
    found = said.json()["error"]
    words = found if isinstance(found, str) else found["message"]
    field = "input" if path == RESPONSES else "messages"
    assert words.startswith(f"{field}[3].role: ") and "judge" in words


def test_names_of_speakers_are_read(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group chat: who speaks is told where several do in one turn."""
    with_template(app, "gemma")
    given = [
        {"role": "user", "content": "Rain?", "name": "ada"},
        {"role": "user", "content": "No.", "name": "bob"},
    ]
    said = post(app, TEMPLATE, {"messages": given}).json()["prompt"]
    assert "user\nada: Rain?\n\nbob: No.<end_of_turn>" in said
    assert app.service is not None
    prompts = prompts_of(app, monkeypatch)
    assert post(app, CHAT, {"messages": given}).status_code == 200
    assert "ada: Rain?\n\nbob: No." in app.service.tokenizer.decode(prompts[0])


def test_replies_that_begin_the_reply(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several at the end, the template that makes one of them begins it."""
    assert app.service is not None
    prompts = prompts_of(app, monkeypatch)
    for name, end in (("plain", "Assistant: one\n\nAssistant: two"),
                      ("gemma", "model\none\n\ntwo")):  # fmt: skip
        with_template(app, name)
        replies = [
            {"role": "assistant", "content": text} for text in ("one", "two")
        ]
        given = [*messages("u"), *replies]
        answer = post(app, CHAT, {"messages": given, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert app.service.tokenizer.decode(prompts[-1]).endswith(end)
    call = {"id": "a", "function": {"name": "f", "arguments": {}}}
    given[1]["tool_calls"] = [call]
    found = error(post(app, CHAT, {"messages": given}), 400)
    assert found["param"] == "messages[1].tool_calls"


def test_what_was_merged_is_cached(app: App, shared: gemmakv.Gemma) -> None:
    """A conversation that grows by several messages a turn is read once."""
    with_template(app, "gemma")
    given, before = messages("dsuu"), 0
    one, two = (
        shared.count_tokens(
            messages("u"), template="gemma", add_generation_prompt=opens
        )
        for opens in (True, False)
    )
    # The end of the user's turn and the opening of a reply are not kept.
    most = one - two + 2
    for count, order in itertools.zip_longest(range(4), ("us", "suu", "uu")):
        body = {"messages": given, "max_tokens": 4, "seed": count}
        answer = post(app, CHAT, body).json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= before - most
        before = usage["prompt_tokens"]
        text = answer["choices"][0]["message"]["content"]
        given += [{"role": "assistant", "content": text},
                  *messages(order or "u")]  # fmt: skip


def test_turns_that_are_left_out_are_whole(
    shared: gemmakv.Gemma, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`truncation` cuts no turn of several messages in two."""
    for app in serving(shared, tmp_path, max_model_len=128):
        assert app.service is not None
        app.service.prompts.template = GemmaTemplate()
        prompts = prompts_of(app, monkeypatch)
        long = {"role": "user", "content": "long " * 20}
        last = [{"role": "system", "content": "now"},
                {"role": "user", "content": "one"},
                {"role": "user", "content": "two"}]  # fmt: skip
        given = [long, {"role": "assistant", "content": "yes"}, *last]
        body = {"input": items(given), "truncation": "auto",
                "max_output_tokens": 4}  # fmt: skip
        assert post(app, RESPONSES, body).status_code == 200
        text = app.service.tokenizer.decode(prompts[0])
        assert "now\n\none\n\ntwo" in text and "long" not in text


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("name", ["gemma4", "file gemma 4"])
def test_templates_with_a_system_role(app: App, name: str, order: str) -> None:
    """Read as text: the model's vocabulary has no such control tokens."""
    with_template(app, name)
    answer = post(app, TEMPLATE, {"messages": messages(order)})
    assert answer.status_code == 200, answer.text
    prompt = answer.json()["prompt"]
    places = [prompt.index(one["content"]) for one in messages(order)]
    assert places == sorted(places)
