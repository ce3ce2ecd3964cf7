"""/v1/messages and count_tokens, in the SDK's types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import gemmakv
from gemmakv.server.app import App
from support.asgi import NAME, USER, get, make_app, post, sse_events
from support.chat_cases import Refusing
from support.extras import needs
from support.kept import prompts_of

if TYPE_CHECKING:
    from anthropic.types import Message

pytestmark = needs("anthropic")
PATH = "/v1/messages"
SAID = {"model": NAME, "messages": USER, "temperature": 1, "max_tokens": 6}


def message(app: App, **fields: Any) -> Message:
    from anthropic.types import Message

    response = post(app, PATH, {**SAID, **fields})
    assert response.status_code == 200, response.text
    return Message.model_validate(response.json(), strict=True)


def blocks(*given: Any) -> dict[str, Any]:
    """Messages with one turn of such blocks."""
    return {"messages": [{"role": "user", "content": list(given)}]}


def text_of(found: Message) -> str:
    [block] = found.content
    assert block.type == "text"
    return block.text


@pytest.mark.slow
def test_reply_is_what_chat_gives(app: App, shared: gemmakv.Gemma) -> None:
    expected = shared.chat(USER, temperature=1, seed=5, max_tokens=6)
    found = message(app)
    assert text_of(found) == expected.text
    assert found.stop_reason == "max_tokens" and found.stop_sequence is None
    usage = found.usage
    assert usage.cache_read_input_tokens is not None
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert total == shared.count_tokens(USER)
    assert usage.output_tokens == 6


def test_events(app: App) -> None:
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    response = post(app, PATH, {**SAID, "stream": True})
    events = sse_events(response.text)
    assert all(kind == data["type"] for kind, data in events)
    assert "ping" in dict(events)
    kinds = [kind for kind, _ in events if kind != "ping"]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    found = [
        event.validate_python(data) for kind, data in events if kind != "ping"
    ]
    text = "".join(e.delta.text for e in found[2 : 2 + deltas])
    assert text == text_of(message(app))
    assert found[0].message.usage.input_tokens > 0
    assert found[-2].usage.output_tokens == 6
    assert found[-2].delta.stop_reason == "max_tokens"


def test_cache_reads_are_counted(app: App) -> None:
    long = [{"role": "user", "content": "another long text " * 120}]
    first = message(app, messages=long)
    again = message(app, messages=long)
    assert text_of(first) == text_of(again)
    usage = again.usage
    assert usage.cache_read_input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == (
        first.usage.input_tokens
        + (first.usage.cache_read_input_tokens or 0)
        + (first.usage.cache_creation_input_tokens or 0)
    )
    assert first.usage.cache_creation_input_tokens
    assert again.usage.cache_creation_input_tokens == 0


def test_stop_sequences(app: App) -> None:
    text = text_of(message(app, max_tokens=30))
    letter = text[10]
    found = message(app, max_tokens=30, stop_sequences=["\u20ac", letter])
    assert found.stop_reason == "stop_sequence"
    assert found.stop_sequence == letter
    assert text_of(found) == text[: text.index(letter)].rstrip()


def test_system_and_blocks(app: App) -> None:
    one = message(app, system="Be kind.")
    billing = "x-anthropic-billing-header: cc_version=1; cch=8f3a;"
    blocks = [
        {"type": "text", "text": billing},
        {
            "type": "text",
            "text": "Be kind.",
            "cache_control": {"type": "ephemeral"},
        },
    ]
    said = [
        {"role": "user", "content": [{"type": "text", "text": "hello there"}]}
    ]
    two = message(app, system=blocks, messages=said)
    assert text_of(one) == text_of(two) != text_of(message(app))


def test_turns_of_one_side_are_one(app: App) -> None:
    """Where the template needs it, with a blank line between them."""
    assert app.service is not None
    app.service.prompts.template = gemmakv.templates.GemmaTemplate()
    halves = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
    ]
    whole = [{"role": "user", "content": "one\n\ntwo"}]
    assert text_of(message(app, messages=halves)) == text_of(
        message(app, messages=whole)
    )


def test_count_tokens(app: App, shared: gemmakv.Gemma) -> None:
    from anthropic.types import MessageTokensCount

    body = {"model": NAME, "messages": USER, "system": "Be kind."}
    response = post(app, "/v1/messages/count_tokens", body)
    found = MessageTokensCount.model_validate(response.json(), strict=True)
    assert found.input_tokens == shared.count_tokens(
        [{"role": "system", "content": "Be kind."}, *USER]
    )


def test_models_in_its_form(app: App) -> None:
    from anthropic.types import ModelInfo

    headers = {"anthropic-version": "2023-06-01"}
    [entry] = get(app, "/v1/models", **headers).json()["data"]
    assert ModelInfo.model_validate(entry).id == NAME


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5}},
            "thinking.type",
        ),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"thinking": 3}, "thinking"),
        ({"output_config": {"effort": "most"}}, "output_config.effort"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_1"}]}},
            "context_management.edits[0].type",
        ),
        ({"context_management": {"edits": {}}}, "context_management.edits"),
        (
            {"messages": [{"role": "judge", "content": "x"}]},
            "messages[0].role",
        ),
        (
            {"messages": [{"role": "assistant", "content": "So"}]},
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        (blocks({"type": "text", "text": "x"}, {"type": "text", "text": 5}),
         "messages[0].content[1].text"),
        (blocks({"text": "x"}), "messages[0].content[0].type"),
        (blocks("x"), "messages[0].content[0]"),
        (blocks({"type": "thinking", "thinking": "x"}),
         "messages[0].content[0].type"),
        (blocks({"type": "tool_result", "content": [
            {"type": "search_result", "title": "a", "source": "b",
             "content": [{"type": "text", "text": {}}]}]}),
         "messages[0].content[0].content[0].content[0].text"),
        (blocks({"type": "document", "source": {"type": "base64", "data": ""}}),
         "messages[0].content[0].source.type"),
        (blocks({"type": "document", "source": {"type": "text"}}),
         "messages[0].content[0].source.data"),
        (blocks({"type": "document", "source": {
            "type": "content", "content": [{"type": "image"}]}}),
         "messages[0].content[0].source.content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools[0].type"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
    ],
)
def test_refused_by_name(app: App, fields: dict[str, Any], words: str) -> None:
    body = {k: v for k, v in {**SAID, **fields}.items() if v is not None}
    response = post(app, PATH, body)
    assert response.status_code == 400, response.text
    said = response.json()
    assert said["type"] == "error"
    assert said["error"]["type"] == "invalid_request_error"
    assert said["error"]["message"].startswith(words + ": ")
    assert said["request_id"] == response.headers["request-id"]


def test_hints_that_ask_for_nothing(app: App) -> None:
    """As Claude Code sends them."""
    for fields in (
        {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "between_tools"}},
        {"output_config": {"effort": "high"}}, {"context_management": {}},
        {"context_management": {"edits": []}},
        {"context_management": {"edits": [
            {"type": "clear_thinking_20251015", "keep": "all"}]}},
    ):  # fmt: skip
        response = post(app, PATH, {**SAID, **fields})
        assert response.status_code == 200, response.text
        response = post(app, PATH + "/count_tokens", {**SAID, **fields})
        assert response.status_code == 200, response.text


def test_hidden_thoughts_of_others_are_left_out(app: App) -> None:
    """A conversation that began elsewhere could not go on here."""
    hidden = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    text = {"type": "text", "text": "Yes."}

    def said(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
        turn = {"role": role, "content": blocks}
        return {**SAID, "messages": [*USER, turn, *USER]}

    for path in (PATH, PATH + "/count_tokens"):
        with_it = post(app, path, said("assistant", hidden, text))
        without = post(app, path, said("assistant", text))
        assert with_it.status_code == without.status_code == 200
        kept = ("content", "stop_reason", "input_tokens")
        for name in kept:
            assert with_it.json().get(name) == without.json().get(name)
    alone = post(app, PATH, said("assistant", hidden))
    assert alone.status_code == 200, alone.text
    for role, block, where in (
        ("user", hidden, "type"),
        ("assistant", {"type": "redacted_thinking"}, "data"),
    ):
        refused = post(app, PATH, said(role, block))
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message.startswith(f"messages[1].content[0].{where}: ")


def test_thoughts_come_back_to_a_model_that_has_none(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(app, monkeypatch)
    thought = {"type": "thinking", "thinking": "Rain?", "signature": "Ev8B"}
    text = {"type": "text", "text": "Yes."}
    for reply in ([thought, text], [text]):
        turn = {"role": "assistant", "content": reply}
        message(app, messages=[*USER, turn, *USER])
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("inner, place", [
    ([{"type": "text", "text": "x"}, {"type": "image"}], "content[1].type"),
    ([{"type": "text"}], "content[0].text"), (5, "content"),
])  # fmt: skip
def test_parts_of_results_are_named(app: App, inner: Any, place: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": inner}
    said = [*USER, {"role": "assistant", "content": "x"},
            {"role": "user", "content": [result]}]  # fmt: skip
    answer = post(app, PATH, {**SAID, "messages": said})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"messages[2].content[0].{place}: "), message


def test_messages_are_named_as_they_were_sent(app: App) -> None:
    assert app.service is not None
    app.service.prompts.template = Refusing()
    said: list[Any] = [
        *USER, *USER, {"role": "assistant", "content": "x"}, *USER,
        {"role": "system", "content": "y"},
    ]  # fmt: skip
    for system in (None, "Be brief."):
        body = {**SAID, "messages": said, "system": system}
        for path in (PATH, PATH + "/count_tokens"):
            message = post(app, path, body).json()["error"]["message"]
            assert message.startswith("messages[3]"), message


TEXT_BLOCKS = [
    ({"type": "search_result", "title": "Rain", "source": "a.org",
      "content": [{"type": "text", "text": "3 mm"},
                  {"type": "text", "text": "4 mm"}],
      "citations": {"enabled": True}}, "Rain\na.org\n3 mm\n4 mm"),
    ({"type": "document", "title": "Rain", "context": "Of May.",
      "source": {"type": "text", "media_type": "text/plain",
                 "data": "3 mm"}}, "Rain\nOf May.\n3 mm"),
    ({"type": "document", "source": {"type": "content", "content": [
        {"type": "text", "text": "3 mm"}]}}, "3 mm"),
    ({"type": "tool_reference", "tool_name": "rain"}, "rain"),
    ({"type": "compaction", "content": "It rained."}, "It rained."),
]  # fmt: skip


@pytest.mark.parametrize("block, text", TEXT_BLOCKS)
def test_blocks_that_are_text(
    app: App, monkeypatch: pytest.MonkeyPatch, block: Any, text: str
) -> None:
    """In a turn, and in what a tool found."""
    prompts = prompts_of(app, monkeypatch)
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    question = {"type": "text", "text": "How much?"}

    def result(content: Any) -> list[dict[str, Any]]:
        found = {"type": "tool_result", "tool_use_id": "a", "content": content}
        return [*USER, {"role": "assistant", "content": [call]},
                {"role": "user", "content": [found]}]  # fmt: skip

    plain = {"type": "text", "text": text + "\n\n"}
    message(app, **blocks(block, question))
    message(app, **blocks(plain, question))
    message(app, messages=result([block]))
    message(app, messages=result(text))
    assert prompts[0] == prompts[1] and prompts[2] == prompts[3]


OF_A_SERVER = [
    {"type": "redacted_thinking", "data": "EmwKAhgB"},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search",
     "input": {"query": "rain"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1",
     "content": [{"type": "web_search_result", "url": "https://a.org",
                  "title": "Rain", "encrypted_content": "Eo8B"}]},
    {"type": "tool_search_tool_result", "tool_use_id": "srvtoolu_2",
     "content": {"type": "tool_search_tool_search_result",
                 "tool_references": [
                     {"type": "tool_reference", "tool_name": "rain"}]}},
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "f",
     "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1",
     "content": [{"type": "text", "text": "3 mm"}]},
    {"type": "compaction", "content": None},
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_of_a_server_are_left_out_by_name(
    app: App, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A conversation that began where tools run in the server goes on."""
    prompts = prompts_of(app, monkeypatch)
    text = {"type": "text", "text": "3 mm."}
    upload = {"type": "container_upload", "file_id": "file_1"}

    def said(user: list[Any], *reply: Any) -> dict[str, Any]:
        turns = [{"role": "user", "content": [*user, text]},
                 {"role": "assistant", "content": reply}, *USER]  # fmt: skip
        return {**SAID, "messages": turns, "stream": stream}

    body = said([upload], *OF_A_SERVER, text)
    answer = post(app, PATH, body)
    assert answer.status_code == 200, answer.text
    assert post(app, PATH, said([], text)).status_code == 200
    assert prompts[0] == prompts[1]
    expected = ["messages[0].content[0]"] + [
        f"messages[1].content[{i}]" for i in range(len(OF_A_SERVER))
    ]
    counted = post(app, PATH + "/count_tokens", body)
    for found in (answer, counted):
        ignored = found.headers["x-gemmakv-ignored"].split(", ")
        assert [one for one in ignored if "messages" in one] == expected


def test_fields_that_mean_nothing_here_are_named(app: App) -> None:
    fields = {"metadata": {"user_id": "me"}, "service_tier": "auto",
              "mcp_servers": []}  # fmt: skip
    thinking = {"type": "adaptive", "display": "omitted"}
    answer = post(app, PATH, {**SAID, **fields, "thinking": thinking})
    assert answer.headers["x-gemmakv-ignored"] == (
        ", ".join([*fields, "thinking.display"])
    )


def test_any_name_if_the_operator_says_so(
    app: App, shared: gemmakv.Gemma
) -> None:
    """As clients ask that have names of their own; the answer repeats it."""
    name = "claude-sonnet-4-5-20250929"
    body = {**SAID, "model": name}
    refused = post(app, PATH, body)
    assert refused.status_code == 404
    assert refused.json()["error"]["type"] == "not_found_error"
    anything = make_app(shared, served_model_name=("*", NAME))
    for path in (PATH, PATH + "/count_tokens"):
        answer = post(anything, path, body)
        assert answer.status_code == 200, answer.text
    found = post(anything, PATH, body)
    assert found.json()["model"] == name
    events = sse_events(post(anything, PATH, {**body, "stream": True}).text)
    assert events[0][1]["message"]["model"] == name
    unnamed = {k: v for k, v in SAID.items() if k != "model"}
    assert post(anything, PATH, unnamed).json()["model"] == NAME
    [listed] = get(anything, "/v1/models").json()["data"]
    assert listed["id"] == NAME
    assert get(anything, f"/v1/models/{name}").json()["id"] == name


@pytest.mark.parametrize("thread", [
    {"type": "create"},
    {"type": "continue", "previous_message_id": "msg_1"},
])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_thread_is_refused_so_that_clients_send_whole_conversations(
    app: App, path: str, thread: dict[str, Any]
) -> None:
    """Tool runners ask the server to keep the conversation, and then send new
    messages alone: who ignores that answers to a result without a question.
    """
    body = {"model": NAME, "messages": USER, "max_tokens": 8}
    answer = post(app, path, {**body, "thread": thread})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["details"] == {
        "error_code": "thread_unsupported_request", "unsupported": ["thread"],
    }  # fmt: skip
    assert post(app, path, {**body, "thread": None}).status_code == 200
