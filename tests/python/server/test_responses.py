"""/v1/responses, in the SDK's types."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.conversations import _clock
from gemmakv.conversations._store import Conversations
from gemmakv.server.app import App
from support import tiny_gguf
from support.asgi import NAME, USER, Exchange, get, make_app, post, sse_events
from support.chat_cases import Refusing
from support.extras import needs
from support.kept import (
    KEYS,
    bearer,
    delete,
    error,
    history,
    prompts_of,
    serving,
)
from support.waits import LIMIT_S

pytestmark = needs("openai")
PATH = "/v1/responses"
SAID = {"model": NAME, "temperature": 1, "max_output_tokens": 6}
# What the original says cannot be null.
NEVER_NULL = (
    "background", "metadata", "output", "parallel_tool_calls", "service_tier",
    "store", "temperature", "text", "tool_choice", "tools", "top_logprobs",
    "top_p", "truncation", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def respond(app: App, given: Any, **fields: Any) -> dict[str, Any]:
    response = post(app, PATH, {**SAID, "input": given, **fields})
    assert response.status_code == 200, response.text
    return checked(response.json())


@functools.cache
def events_type() -> Any:
    """Makes what reads events as the SDK does."""
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    return TypeAdapter(ResponseStreamEvent)


def checked(found: dict[str, Any]) -> dict[str, Any]:
    from openai.types.responses import Response

    Response.model_validate(found, strict=True)
    assert all(found[name] is not None for name in NEVER_NULL)
    assert found["id"].startswith("resp_")
    return found


def stream(app: App, given: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {**SAID, "input": given, "stream": True, **fields}
    response = post(app, PATH, body)
    assert response.status_code == 200, response.text
    events = sse_events(response.text)
    found = []
    for i, (name, data) in enumerate(events):
        events_type().validate_python(data, strict=True)
        assert data["type"] == name and data["sequence_number"] == i
        found.append(data)
    return found


def text_of(response: dict[str, Any]) -> str:
    [message] = response["output"]
    [part] = message["content"]
    return str(part["text"])


def test_whole(app: App, shared: gemmakv.Gemma) -> None:
    """Also where nothing is kept."""
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    expected = shared.chat(messages, temperature=1, seed=5, max_tokens=6)
    found = respond(app, USER, instructions="Be brief.", metadata={"a": "b"})
    assert text_of(found) == expected.text
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["store"] is False and found["instructions"] == "Be brief."
    assert found["metadata"] == {"a": "b"}
    assert found["usage"]["input_tokens"] == shared.count_tokens(messages)
    assert found["usage"]["output_tokens"] == 6
    same = [
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": USER[0]["content"]}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
    ]  # fmt: skip
    assert text_of(respond(app, same, instructions="Be brief.")) == (
        expected.text
    )


def test_stop_is_completed(app: App) -> None:
    whole = text_of(respond(app, "hello"))
    stop = next(c for c in whole if c.isascii() and c.isalnum())
    found = respond(app, "hello", stop=[stop])
    assert text_of(found) == whole[: whole.index(stop)].strip()
    assert found["status"] == "completed"
    assert found["incomplete_details"] is None


_TOLD = {"token", "logprob", "top_logprobs"}


def test_stream(kept: App) -> None:
    for more in ({}, {"include": ["message.output_text.logprobs"]}):
        whole = respond(kept, "hello", **more)
        events = stream(kept, "hello", **more)
        kinds = [event["type"] for event in events]
        deltas = kinds.count("response.output_text.delta")
        assert kinds == [
            "response.created", "response.in_progress",
            "response.output_item.added", "response.content_part.added",
            *["response.output_text.delta"] * deltas,
            "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.incomplete",
        ]  # fmt: skip
        said = "".join(e["delta"] for e in events if "delta" in e)
        last = checked(events[-1]["response"])
        assert said == text_of(whole) == text_of(last)
        assert events[0]["response"]["status"] == "in_progress"
        assert events[0]["response"]["output"] == []
        ids = {e["response"]["id"] for e in events if "response" in e}
        assert ids == {last["id"]}
        [item] = last["output"]
        assert {e["item_id"] for e in events if "item_id" in e} == {item["id"]}
        listed = item["content"][0]["logprobs"]
        # Only parts of a text have the bytes.
        told = [one for e in events for one in e.get("logprobs", ())]
        assert all(set(one) == _TOLD for one in told)
        assert bool(told) == bool(more)
        assert bool(listed) == bool(more)
        assert listed == whole["output"][0]["content"][0]["logprobs"]
        again = get(kept, f"{PATH}/{last['id']}")
        again_text = text_of(checked(again.json()))
        assert again_text == said


def _merged(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without numbers, and with the parts of a text as one."""
    found: list[dict[str, Any]] = []
    for event in events:
        one = {k: v for k, v in event.items() if k != "sequence_number"}
        last = found[-1] if found else {}
        if "delta" in one and last.get("type") == one["type"]:
            last["delta"] += one["delta"]
        else:
            found.append(one)
    return found


@pytest.mark.parametrize("tools", [False, True])
def test_a_kept_response_can_be_streamed(kept: App, tools: bool) -> None:
    fields: dict[str, Any] = {}
    if tools:
        pieces = tiny_gguf.vocabulary()[0]
        assert kept.service is not None
        ends = {pieces.index(c): 6.0 for c in '"}'}
        kept.service.defaults["logit_bias"] = ends
        fields = {
            "tools": TOOLS, "tool_choice": "required",
            "max_output_tokens": 200, "parallel_tool_calls": False,
        }  # fmt: skip
    live = stream(kept, "hello", **fields)
    path = f"{PATH}/{live[0]['response']['id']}?stream=true"
    again = [data for _, data in sse_events(get(kept, path).text)]
    assert _merged(again) == _merged(live)
    assert [e["sequence_number"] for e in again] == list(range(len(again)))
    rest = get(kept, f"{path}&starting_after=2").text
    assert [data for _, data in sse_events(rest)] == again[3:]
    beyond = get(kept, f"{path}&starting_after=999999")  # was a 500
    assert (beyond.status_code, beyond.text) == (200, "")
    assert beyond.headers["content-type"] == "text/event-stream"
    for query, words in (
        ("&starting_after=x", ("'x'",)),
        ("&starting_after=-1", ("-1",)),
    ):  # fmt: skip
        bad = error(get(kept, path + query), 400)
        assert bad["param"] == "starting_after"
        assert all(word in bad["message"] for word in words)
    plain = path.partition("?")[0]
    bad = error(get(kept, f"{plain}?starting_after=1"), 400)
    assert bad["message"].startswith("starting_after: ")
    assert "stream=true" in bad["message"]
    error(get(kept, f"{PATH}/resp_none?stream=true"), 404)


def test_get_and_delete(kept: App) -> None:
    made = respond(kept, "hello", instructions="x", metadata={"a": "b"})
    path = f"{PATH}/{made['id']}"
    assert made["store"] is True
    assert checked(get(kept, path).json()) == made
    next_one = respond(kept, "more", previous_response_id=made["id"])
    assert next_one["previous_response_id"] == made["id"]
    assert delete(kept, path).json() == {
        "id": made["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    assert error(get(kept, path), 404)["code"] == "response_not_found"
    error(delete(kept, path), 404)
    body = {"input": "x", "previous_response_id": made["id"]}
    assert error(post(kept, PATH, body), 404)["param"] == (
        "previous_response_id"
    )
    # What follows it stays.
    last = respond(kept, "again", previous_response_id=next_one["id"])
    turns = history(kept).store.turns.path(last["id"])
    assert [t.messages[0]["content"] for t in turns] == [
        "hello", "more", "again",
    ]  # fmt: skip
    for one in (next_one, last):
        delete(kept, f"{PATH}/{one['id']}")
    assert history(kept).store.turns.path(last["id"]) == []


def test_forks_are_exact(kept: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two go on from one response; sessions and whole messages agree."""
    prompts = prompts_of(kept, monkeypatch)
    root = respond(kept, "hello " * 60, seed=1)
    store = history(kept).store
    before = store.turns.tokens(root["id"]).tolist()
    found = [
        respond(kept, "more", previous_response_id=root["id"], seed=2)
        for _ in "ab"
    ]
    assert text_of(found[0]) == text_of(found[1])
    assert prompts[-1] == prompts[-2]
    assert prompts[-1][: len(before)] == before
    cached = found[1]["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= len(before) - 1
    paths = [store.turns.path(one["id"], tokens=True) for one in found]
    assert paths[0][0].id == paths[1][0].id
    assert not any(path[1].whole for path in paths)


def test_three_ways_to_the_same(
    kept: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By session, by previous_response_id and with all messages."""
    prompts = prompts_of(kept, monkeypatch)
    session = post(kept, "/v1/sessions", {}).json()["id"]
    messages: list[Any] = []
    previous = None
    agreed = 0
    for turn in range(6):
        text = f"question {turn}"
        options = {"temperature": 1, "seed": turn}
        messages.append({"role": "user", "content": text})
        body = {"session": session, "messages": messages[-1:], **options}
        one = post(kept, "/v1/chat/completions", body).json()
        said = one["choices"][0]["message"]["content"]
        fields = {"max_output_tokens": None, "seed": turn}
        two = respond(kept, text, previous_response_id=previous, **fields)
        previous = two["id"]
        assert text_of(two) == said
        three = respond(kept, messages, store=False, **fields)
        assert prompts[-3] == prompts[-2]
        if prompts[-1] == prompts[-2]:
            agreed += 1
            assert text_of(three) == said
        messages.append({"role": "assistant", "content": said})
    assert agreed


def test_instructions_are_not_carried_over(
    kept: App, monkeypatch: pytest.MonkeyPatch, shared: gemmakv.Gemma
) -> None:
    """As in the original; the conversation is then rendered anew."""
    one = respond(kept, "hello", instructions="Be brief.")
    prompts = prompts_of(kept, monkeypatch)
    two = respond(kept, "more", previous_response_id=one["id"])
    said = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": text_of(one)},
        {"role": "user", "content": "more"},
    ]
    assert prompts == [shared.apply_chat_template(said).tolist()]
    assert two["instructions"] is None
    respond(
        kept, "more", previous_response_id=one["id"], instructions="Be brief."
    )
    before = history(kept).store.turns.tokens(one["id"]).tolist()
    assert prompts[1][: len(before)] == before


def test_not_stored(kept: App) -> None:
    found = respond(kept, "hello", store=False)
    assert found["store"] is False
    error(get(kept, f"{PATH}/{found['id']}"), 404)
    one = respond(kept, "hello")
    two = respond(kept, "x", previous_response_id=one["id"], store=False)
    error(get(kept, f"{PATH}/{two['id']}"), 404)


def test_conversation_is_a_session(kept: App) -> None:
    id = post(kept, "/v1/sessions", {"system": "Be brief."}).json()["id"]
    one = respond(kept, "hello", conversation=id)
    two = respond(kept, "more", conversation={"id": id})
    assert two["conversation"] == {"id": id}
    found = get(kept, f"/v1/sessions/{id}").json()
    assert [t["id"] for t in found["turns"]] == [one["id"], two["id"]]
    # A turn of a chat request is a response, too.
    body = {"session": id, "messages": USER, "max_tokens": 3}
    chat = post(kept, "/v1/chat/completions", body).json()
    turn = chat["session"]["turn"]
    shown = checked(get(kept, f"{PATH}/{turn}").json())
    assert text_of(shown) == chat["choices"][0]["message"]["content"]
    assert shown["instructions"] == "Be brief."
    respond(kept, "x", previous_response_id=turn, instructions="Be brief.")
    assert get(kept, f"/v1/sessions/{id}").json()["head"] == turn


def test_off_says_how(app: App) -> None:
    for more in (
        {"store": True},
        {"previous_response_id": "resp_x"},
        {"conversation": "sess_x"},
        {"session": "sess_x"},
    ):
        found = post(app, PATH, {"input": "x", **more})
        assert "--sessions" in error(found, 400)["message"]
    assert "--sessions" in error(get(app, PATH + "/resp_x"), 400)["message"]
    assert "--sessions" in error(delete(app, PATH + "/resp_x"), 400)["message"]


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]},
         "input[0].arguments"),
        ({"background": True}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"store": False, "conversation": "sess_x"}, "store"),
        ({"conversation": 3}, "conversation"),
        ({"conversation": "sess_x", "previous_response_id": "resp_x"},
         "previous_response_id"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "long " * 4000}, "input"),
    ],
)  # fmt: skip
def test_bad_requests(kept: App, fields: Any, name: str) -> None:
    found = error(post(kept, PATH, {**SAID, "input": "x", **fields}), 400)
    assert found["param"] == name, found


@pytest.mark.parametrize(
    "items, name",
    [
        ([{"role": "user", "content": "a"}, {"role": "judge", "content": "b"}],
         "input[1].role"),
        ([{"role": "user", "content": "a"}, {"role": "assistant",
          "content": "b"}, *[{"role": "user", "content": "c"}] * 2],
         "input[2].content"),
        ([{"type": "reasoning", "summary": []},
          {"role": "user", "content": "a"},
          {"type": "function_call", "call_id": "a", "name": "f",
           "arguments": "{}"},
          {"type": "function_call", "call_id": "b", "name": "f",
           "arguments": "no"}],
         "input[3].arguments"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("instructions", [None, "Be brief."])
@pytest.mark.parametrize("store", [False, True])
def test_items_are_named_as_they_were_sent(
    kept: App, items: Any, name: str, instructions: Any, store: bool
) -> None:
    assert kept.service is not None
    kept.service.prompts.template = Refusing()
    body = {
        **SAID, "input": items, "instructions": instructions, "store": store,
    }  # fmt: skip
    found = error(post(kept, PATH, body), 400)
    assert found["param"] == name, found
    assert found["message"].startswith(name)


def test_tools_and_ids_are_named_as_they_were_sent(kept: App) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    tools = [{"type": "web_search"}, {"type": "function", "name": "a b"}]
    found = error(post(kept, PATH, {"input": "x", "tools": tools}), 400)
    assert found["param"] == "tools[1].name", found
    form = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
    body = {"input": "x", "text": {"format": form}}
    found = error(post(kept, PATH, body), 400)
    assert found["param"] == "text.format.schema.not", found
    for response in (
        get(kept, PATH + "/resp_x"), delete(kept, PATH + "/resp_x"),
    ):  # fmt: skip
        assert error(response, 404)["param"] == "response_id"


def test_efforts_ask_for_nothing(app: App) -> None:
    for reasoning in ({"effort": "high", "summary": "auto"}, {}, None):
        body = {**SAID, "input": "x", "reasoning": reasoning}
        assert post(app, PATH, body).status_code == 200
    for reasoning, name in (
        ({"effort": "most"}, "reasoning.effort"), ("high", "reasoning"),
    ):  # fmt: skip
        body = {**SAID, "input": "x", "reasoning": reasoning}
        assert error(post(app, PATH, body), 400)["param"] == name


def test_other_keys_find_nothing(keyed: App) -> None:
    one, two = (bearer(key) for key in KEYS)
    made = post(keyed, PATH, {**SAID, "input": "x"}, **one).json()
    path = f"{PATH}/{made['id']}"
    error(get(keyed, path, **two), 404)
    error(delete(keyed, path, **two), 404)
    body = {"input": "x", "previous_response_id": made["id"]}
    error(post(keyed, PATH, body, **two), 404)
    assert get(keyed, path, **one).status_code == 200


def test_responses_expire(
    shared: gemmakv.Gemma, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for app in serving(shared, folder):
        one = respond(app, "hello")
        kept_one = respond(app, "more", previous_response_id=one["id"])
        session = post(app, "/v1/sessions", {}).json()["id"]
        respond(app, "hello", conversation=session)
        late = _clock.uptime() + 31 * 86400
        monkeypatch.setattr(_clock, "uptime", lambda late=late: late)
        for made in (one, kept_one):
            error(get(app, f"{PATH}/{made['id']}"), 404)
        respond(app, "another")
        store = history(app).store
        assert store.turns.path(kept_one["id"]) == []
        # What a session leads to stays.
        assert get(app, f"/v1/sessions/{session}").json()["turn_count"] == 1
    later = late + 31 * 86400
    monkeypatch.setattr(_clock, "uptime", lambda: later)
    store = Conversations.open(folder)
    count = store.database.driver.execute(
        "SELECT count(*) FROM turns"
    ).fetchone()
    assert count == (1,)
    store.close()


def test_client_vanishes(shared: gemmakv.Gemma, folder: Path) -> None:
    """Of a turn that was cut off nothing is kept."""

    async def main(app: App, before: str) -> None:
        # One that still runs when the client leaves, however late that is.
        body = {
            "input": "more", "previous_response_id": before, "stream": True,
            "max_output_tokens": 500_000, "ignore_eos": True,
        }  # fmt: skip
        running = Exchange(app, PATH, body)
        await running.holds(b"output_text.delta")
        running.leave()
        await running.done()

    for app in serving(shared, folder, max_model_len=600_000):
        one = respond(app, "hello")
        asyncio.run(main(app, one["id"]))
        db = history(app).store.database.driver
        assert db.execute("SELECT count(*) FROM turns").fetchone() == (1,)


def test_parent_deleted_meanwhile(
    kept: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = respond(kept, "hello")
    store = history(kept).store
    add, deleted = store.turns.add, threading.Event()

    def add_after(*turn: Any) -> None:
        assert deleted.wait(LIMIT_S)
        add(*turn)

    monkeypatch.setattr(store.turns, "add", add_after)

    async def main() -> bytes:
        body = {
            "input": "more", "previous_response_id": one["id"], "stream": True,
            "max_output_tokens": 40, "ignore_eos": True,
        }  # fmt: skip
        running = Exchange(kept, PATH, body)
        await running.holds(b"output_text.delta")
        store.database.driver.execute("DELETE FROM turns")
        deleted.set()
        await running.done()
        return running.data

    name, data = sse_events(asyncio.run(main()).decode())[-1]
    assert name == "response.incomplete"
    events_type().validate_python(data, strict=True)
    two = data["response"]["id"]
    error(get(kept, f"{PATH}/{one['id']}"), 404)
    three = respond(kept, "and then", previous_response_id=two)
    path = history(kept).store.turns.path(three["id"])
    assert [turn.messages[0]["content"] for turn in path] == [
        "hello", "more", "and then",
    ]  # fmt: skip
    assert three["usage"]["input_tokens_details"]["cached_tokens"] > 40
    for id in (two, three["id"]):
        delete(kept, f"{PATH}/{id}")
    assert history(kept).store.turns.path(three["id"]) == []


# Structured output and tools.

SCHEMA: Any = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2, 3]}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "rain", "parameters": SCHEMA,
     "strict": True, "description": "Rain."},
    {"type": "web_search"},
]  # fmt: skip


def test_tool_calls(kept: App) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    pieces = tiny_gguf.vocabulary()[0]
    assert kept.service is not None
    kept.service.defaults["logit_bias"] = {pieces.index(c): 6.0 for c in '"}'}
    fields: Any = {
        "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 200,
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = respond(kept, "rain?", **fields)
    [call] = whole["output"]
    assert call["type"] == "function_call" and call["name"] == "rain"
    assert whole["status"] == "completed"
    assert json.loads(call["arguments"])["days"] in (1, 2, 3)
    events = stream(kept, "rain?", **fields)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("response.function_call_arguments.delta")
    assert deltas and kinds == [
        "response.created", "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * deltas,
        "response.function_call_arguments.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    last = checked(events[-1]["response"])
    [same] = last["output"]
    assert same["arguments"] == call["arguments"]
    assert same["arguments"] == "".join(
        e["delta"] for e in events if "delta" in e
    )
    assert checked(get(kept, f"{PATH}/{last['id']}").json())["output"] == [same]
    result = {
        "type": "function_call_output", "call_id": same["call_id"],
        "output": "3 mm",
    }  # fmt: skip
    said = respond(kept, [result], previous_response_id=last["id"], tools=TOOLS)
    path = history(kept).store.turns.path(said["id"])
    assert [turn.whole for turn in path] == [True, False]
    # The same with all items, as clients without ids send them.
    items = [{"role": "user", "content": "rain?"}, same, result]
    respond(kept, items, tools=TOOLS, store=False)
    named: Any = {"type": "function", "name": "rain"}
    fields["tool_choice"] = named
    assert respond(kept, "rain?", **fields)["output"][0]["name"] == "rain"


def test_json_schema(app: App) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    format = {
        "type": "json_schema", "name": "rain", "schema": SCHEMA,
        "strict": True,
    }  # fmt: skip
    found = respond(
        app, "rain?", text={"format": format}, max_output_tokens=100
    )
    assert json.loads(text_of(found))["days"] in (1, 2, 3)


def test_many_keys_of_a_body_are_ignored(shared: gemmakv.Gemma) -> None:
    """What programs send that keep the whole history themselves."""
    app = make_app(shared, max_model_len=4096)
    found = respond(
        app,
        [{"type": "message", "role": "developer", "content": "x"}, *USER],
        client_metadata={"a": "b"}, include=["reasoning.encrypted_content"],
        parallel_tool_calls=False, prompt_cache_key="k", store=False,
        reasoning={"effort": "medium"}, tool_choice="auto",
        tools=[{"type": "custom", "name": "x"}],
    )  # fmt: skip
    assert found["prompt_cache_key"] == "k"
    assert found["tools"] == [{"type": "custom", "name": "x"}]


def test_what_a_custom_tool_got_is_listed_as_that(kept: App) -> None:
    tool = {"type": "custom", "name": "run"}
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "run",
            "input": "ls"}  # fmt: skip
    result = {"type": "custom_tool_call_output", "call_id": "c1",
              "output": "a.txt"}  # fmt: skip
    first = respond(kept, [*USER, call, result], tools=[tool])
    assert first["tools"] == [tool]
    path = f"{PATH}/{first['id']}/input_items?order=asc"
    [_, one, other] = get(kept, path).json()["data"]
    assert call.items() <= one.items() and result.items() <= other.items()
    assert one["id"].startswith("ctc_")
    again = [{"type": "item_reference", "id": x["id"]} for x in (one, other)]
    second = respond(kept, [*USER, *again], tools=[tool])
    path = f"{PATH}/{second['id']}/input_items?order=asc"
    shown = [x["type"] for x in get(kept, path).json()["data"]]
    assert shown == ["message", call["type"], result["type"]]
