"""Tokens that are counted before and after, what a response was given, salts,
diagnostics, and conversations that are cut to fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from gemmakv.server.service.diagnostics import Diagnostics, fingerprint
from support.asgi import NAME, USER, get, make_app, post
from support.extras import needs
from support.kept import KEYS, bearer, error, prompts_of, serving

pytestmark = needs("openai", "anthropic")
RESPONSES, CHAT, MESSAGES = (
    "/v1/responses", "/v1/chat/completions", "/v1/messages",
)  # fmt: skip
INPUT_TOKENS, COUNT = f"{RESPONSES}/input_tokens", f"{MESSAGES}/count_tokens"
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
FUNCTION = {"name": "rain", "description": "Rain.", "parameters": SCHEMA}
LONG = [{"role": "user", "content": "some longer text " * 120}]


def respond(app: App, given: Any, **more: Any) -> dict[str, Any]:
    from openai.types.responses import Response

    body = {"input": given, "max_output_tokens": 4, **more}
    answer = post(app, RESPONSES, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    Response.model_validate(found, strict=True)
    return found


# Counted before.


@pytest.mark.parametrize("more", [
    {},
    {"instructions": "Be kind."},
    {"tools": [{"type": "function", **FUNCTION}]},
    {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "none"},
    {"input": [{"role": "user", "content": "x"},
               {"role": "assistant", "content": "the"}]},
])  # fmt: skip
def test_input_tokens_are_those_that_are_read(
    kept: App, more: dict[str, Any]
) -> None:
    from openai.types.responses.input_token_count_response import (
        InputTokenCountResponse,
    )

    body = {"input": "Where to?", **more}
    found = post(kept, INPUT_TOKENS, body).json()
    InputTokenCountResponse.model_validate(found, strict=True)
    made = respond(kept, body.pop("input"), **body)
    assert found["input_tokens"] == made["usage"]["input_tokens"]
    more = {"previous_response_id": made["id"], "input": "And?"}
    if "tools" not in body:
        counted = post(kept, INPUT_TOKENS, {**body, **more}).json()
        then = respond(kept, "And?", **{**body, **more, "input": "And?"})
        assert counted["input_tokens"] == then["usage"]["input_tokens"]


def test_input_tokens_of_a_session(kept: App) -> None:
    id = post(kept, "/v1/sessions", {"system": "Be kind."}).json()["id"]
    for _ in range(2):
        body = {"input": "Where to?", "conversation": id}
        found = post(kept, INPUT_TOKENS, body).json()["input_tokens"]
        assert found == respond(kept, **_given(body))["usage"]["input_tokens"]


def _given(body: dict[str, Any]) -> dict[str, Any]:
    return {("given" if k == "input" else k): v for k, v in body.items()}


@pytest.mark.parametrize("body, param", [
    ({"input": "x", "previous_response_id": "resp_none"},
     "previous_response_id"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    ({"input": "x", "tools": [{"type": "function", "name": "a b"}]},
     "tools[0].name"),
])  # fmt: skip
def test_input_tokens_of_what_is_bad(
    kept: App, body: dict[str, Any], param: str
) -> None:
    answer = post(kept, INPUT_TOKENS, body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("more", [
    {}, {"system": "Be kind."},
    {"tools": [{"name": "rain", "input_schema": SCHEMA}]},
    {"tools": [{"name": "rain", "input_schema": SCHEMA}],
     "tool_choice": {"type": "none"}},
    {"tools": [{"name": "rain", "input_schema": SCHEMA}],
     "tool_choice": {"type": "any"}},
    {"session": True},
])  # fmt: skip
def test_count_tokens_says_what_a_message_reads(
    kept: App, more: dict[str, Any]
) -> None:
    from anthropic.types import Message

    if more.get("session"):
        id = post(kept, "/v1/sessions", {"system": "Be kind."}).json()["id"]
        more = {"session": id}
        post(kept, MESSAGES, {"messages": USER, "max_tokens": 3, **more})
    body = {"messages": USER, **more}
    counted = post(kept, COUNT, body).json()["input_tokens"]
    answer = post(kept, MESSAGES, {**body, "max_tokens": 3}).json()
    usage = Message.model_validate(answer).usage
    assert counted == (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )


def test_count_tokens_refuses_what_a_message_refuses(kept: App) -> None:
    twice = [{"name": "a", "input_schema": SCHEMA}] * 2
    for path, more in ((COUNT, {}), (MESSAGES, {"max_tokens": 1})):
        found = error(
            post(kept, path, {"messages": USER, "tools": twice, **more}), 400
        )
        assert found["message"].startswith("tools[1]: ")


# Counted after.


def test_written_tokens_are_what_the_cache_has_more(
    shared: gemmakv.Gemma, folder: Path
) -> None:
    """Together with those that it had, they are what `match` finds."""
    for app in serving(shared, folder):
        body = {"messages": LONG, "max_tokens": 2, "cache_salt": "written"}
        asked = {"messages": LONG, "cache_salt": "written"}
        known = []
        for _ in range(3):
            match = post(app, "/v1/cache/match", asked).json()
            known.append(match["cached_tokens"])
            found = post(app, CHAT, body).json()["usage"]
            details = found["prompt_tokens_details"]
            assert details["cached_tokens"] == known[-1]
            match = post(app, "/v1/cache/match", asked).json()
            written = match["cached_tokens"] - known[-1]
            assert details["cache_write_tokens"] == written
        # A prefix that is seen again may be kept up to its very end.
        assert known[0] == 0 < known[1] <= known[2]
        assert written == 0
        written = known[1]
        off = {**body, "cache_salt": "off", "prefix_cache": "off"}
        details = post(app, CHAT, off).json()["usage"]["prompt_tokens_details"]
        assert details["cache_write_tokens"] == 0
        several = {**body, "cache_salt": "n", "n": 3}
        details = post(app, CHAT, several).json()["usage"]
        assert details["prompt_tokens_details"]["cache_write_tokens"] == written


def test_written_tokens_of_a_response_are_kept(kept: App) -> None:
    made = respond(kept, LONG[0]["content"], cache_salt="kept")
    details = made["usage"]["input_tokens_details"]
    assert details["cache_write_tokens"] > 0
    again = get(kept, f"{RESPONSES}/{made['id']}").json()
    assert again["usage"] == made["usage"]


# Salts.


@pytest.mark.parametrize("path, more", [
    (CHAT, {}), (MESSAGES, {}), (RESPONSES, {}), ("/api/chat", {}),
    ("/v1/completions", {}), ("/completion", {}), ("/api/generate", {}),
])  # fmt: skip
def test_a_salt_narrows_the_cache(
    shared: gemmakv.Gemma, path: str, more: dict[str, Any]
) -> None:
    """Nobody finds another salt's prefix, and a salt no other key's."""
    text = "some longer text " * 40 + path

    def cached(app: App, key: str, salt: str | None) -> int:
        body: dict[str, Any] = {
            "model": NAME, "prompt": text, "stream": False,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1, "cache_salt": salt,
        }  # fmt: skip
        if path == RESPONSES:
            body = {"input": text, "max_output_tokens": 1, "cache_salt": salt}
        answer = post(app, path, body, **bearer(key))
        assert answer.status_code == 200, answer.text
        stats = get(app, "/metrics", **bearer(key)).text
        number = KEYS.index(key) + 1
        name = f'gemmakv_cached_tokens_total{{key="{number}"}} '
        lines = [one for one in stats.splitlines() if one.startswith(name)]
        return int(float(lines[0][len(name) :])) if lines else 0

    app = make_app(shared, max_model_len=4096, api_keys=KEYS)
    for key, salt in (
        ("one", None), ("one", "a"), ("one", "b"), ("two", "a"),
        ("two", None),
    ):  # fmt: skip
        assert cached(app, key, salt) == 0, (key, salt)
    once = cached(app, "one", "a")
    assert once > 0
    assert cached(app, "one", None) > once


@pytest.mark.parametrize("salt", ["", "x" * 257, 5])
def test_bad_salts(app: App, salt: Any) -> None:
    body = {"messages": USER, "cache_salt": salt}
    assert error(post(app, CHAT, body), 400)["param"] == "cache_salt"


# What a response was given.


@pytest.fixture
def talked(kept: App) -> tuple[App, list[dict[str, Any]]]:
    call = {"type": "function_call", "call_id": "call_1", "name": "rain",
            "arguments": '{"city": "Rome"}'}  # fmt: skip
    first = respond(
        kept,
        [
            {"role": "user", "content": "one"},
            call,
            {"type": "function_call_output", "call_id": "call_1",
             "output": "3 mm"},
        ],
    )  # fmt: skip
    second = respond(kept, "two", previous_response_id=first["id"])
    return kept, [first, second]


def test_input_items(talked: tuple[App, list[dict[str, Any]]]) -> None:
    from openai.types.responses import ResponseItemList

    app, (first, second) = talked
    path = f"{RESPONSES}/{first['id']}/input_items"
    found = get(app, path + "?order=asc").json()
    ResponseItemList.model_validate(found, strict=True)
    kinds = [one["type"] for one in found["data"]]
    assert kinds == ["message", "function_call", "function_call_output"]
    assert found["data"][1]["arguments"] == '{"city": "Rome"}'
    assert found["data"][2]["output"] == "3 mm"
    then = get(app, f"{RESPONSES}/{second['id']}/input_items?order=asc").json()
    ResponseItemList.model_validate(then, strict=True)
    assert then["data"][:3] == found["data"]
    assert then["data"][3]["id"] == first["output"][0]["id"]
    assert then["data"][4]["content"] == [{"type": "input_text", "text": "two"}]
    ids = [one["id"] for one in then["data"]]
    assert len(set(ids)) == len(ids) == 5


def test_input_items_page_by_page(
    talked: tuple[App, list[dict[str, Any]]],
) -> None:
    app, (_, second) = talked
    path = f"{RESPONSES}/{second['id']}/input_items"
    newest = [one["id"] for one in get(app, path).json()["data"]]
    oldest = [one["id"] for one in get(app, path + "?order=asc").json()["data"]]
    assert newest == oldest[::-1]
    for order, expected in (("asc", oldest), ("desc", newest)):
        seen: list[str] = []
        more = True
        while more:
            asked = f"{path}?order={order}&limit=2"
            found = get(app, asked + (f"&after={seen[-1]}" if seen else ""))
            page = found.json()
            ids = [one["id"] for one in page["data"]]
            assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
            seen += ids
            more = page["has_more"]
        assert seen == expected


@pytest.mark.parametrize("query, param", [
    ("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"),
    ("after=msg_none", "after"),
])  # fmt: skip
def test_input_items_of_bad_queries(
    talked: tuple[App, list[dict[str, Any]]], query: str, param: str
) -> None:
    app, (first, _) = talked
    path = f"{RESPONSES}/{first['id']}/input_items?{query}"
    assert error(get(app, path), 400)["param"] == param


def test_input_items_of_another_key(keyed: App) -> None:
    body = {"input": "x", "max_output_tokens": 1}
    made = post(keyed, RESPONSES, body, **bearer(KEYS[0])).json()
    path = f"{RESPONSES}/{made['id']}/input_items"
    assert get(keyed, path, **bearer(KEYS[0])).status_code == 200
    found = error(get(keyed, path, **bearer(KEYS[1])), 404)
    assert found["param"] == "response_id"


# Diagnostics.


def diagnosed(app: App, before: str | None, **more: Any) -> dict[str, Any]:
    from anthropic.types import Message

    body = {"messages": LONG, "max_tokens": 1, "system": "Be kind.",
            "diagnostics": {"previous_message_id": before}, **more}  # fmt: skip
    answer = post(app, MESSAGES, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    Message.model_validate(found)
    return found


def test_diagnostics_name_what_changed(app: App) -> None:
    first = diagnosed(app, None)
    assert first["diagnostics"] is None
    usage = first["usage"]
    tokens = sum(usage[k] for k in usage if k != "output_tokens")
    reply = {"role": "assistant", "content": "x"}
    tool = {"name": "rain", "input_schema": SCHEMA}
    for more, expected in (
        ({"messages": [*LONG, reply, *USER]}, None),
        ({"system": "Be brief."}, "system_changed"),
        ({"tools": [tool]}, "tools_changed"),
        ({"messages": [*USER, reply, *USER]}, "messages_changed"),
        ({"system": "Be brief.", "tools": [tool]}, "system_changed"),
        ({"model": f"{NAME}:latest"}, "model_changed"),
    ):
        found = diagnosed(app, first["id"], **more)["diagnostics"]
        if expected is None:
            assert found is None
            continue
        assert found == {
            "cache_miss_reason": {
                "type": expected,
                "cache_missed_input_tokens": tokens,
            }
        }
    reason = {"type": "previous_message_not_found"}
    found = diagnosed(app, "msg_none")["diagnostics"]
    assert found == {"cache_miss_reason": reason}
    plain = post(app, MESSAGES, {"messages": USER, "max_tokens": 1}).json()
    assert "diagnostics" not in plain


def test_diagnostics_are_of_one_key(keyed: App) -> None:
    body = {"messages": LONG, "max_tokens": 1, "diagnostics": {}}
    made = post(keyed, MESSAGES, body, **bearer(KEYS[0])).json()
    asked = {**body, "diagnostics": {"previous_message_id": made["id"]}}
    found = post(keyed, MESSAGES, asked, **bearer(KEYS[1])).json()
    assert found["diagnostics"]["cache_miss_reason"] == {
        "type": "previous_message_not_found"
    }
    found = post(keyed, MESSAGES, asked, **bearer(KEYS[0])).json()
    assert found["diagnostics"] is None


def test_diagnostics_are_bounded() -> None:
    known = Diagnostics()
    made_of = fingerprint("m", None, None, [1] * 1000)
    for i in range(5000):
        known.note("", f"msg_{i}", made_of, 1)
    assert len(known._known) <= (1 << 20) // 1000
    assert known._messages == 1000 * len(known._known) <= 1 << 20
    assert known.reason("", "msg_0", made_of) is not None
    assert known.reason("", "msg_4999", made_of) is None


# Truncation.


@pytest.fixture
def small(shared: gemmakv.Gemma, folder: Path) -> Iterator[App]:
    yield from serving(shared, folder, max_model_len=200)


def turns(count: int) -> list[dict[str, str]]:
    found = [{"role": "system", "content": "Be kind."}]
    for i in range(count):
        found += [
            {"role": "user", "content": f"question number {i} of many"},
            {"role": "assistant", "content": f"answer {i}"},
        ]
    return [*found, {"role": "user", "content": "the last question"}]


def test_truncation_leaves_out_the_oldest_turns(
    small: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(small, monkeypatch)
    talk = turns(12)
    refused = post(small, RESPONSES, {"input": talk})
    assert error(refused, 400)["code"] == "context_length_exceeded"
    made = respond(small, talk, truncation="auto", max_output_tokens=30)
    dropped = made["dropped_messages"]
    assert made["truncation"] == "auto" and 0 < dropped < 24
    assert dropped % 2 == 0
    service = small.service
    assert service is not None
    expected = service.prompts.render([talk[0], *talk[1 + dropped :]]).tolist()
    assert prompts[-1] == expected and len(expected) <= 170
    fuller = service.prompts.render([talk[0], *talk[dropped - 1 :]])
    assert len(fuller) > 170, "no more than needed"
    fits = respond(small, "short", truncation="auto")
    assert fits["dropped_messages"] == 0
    assert "dropped_messages" not in respond(small, "short")


@pytest.mark.parametrize("keeps", [False, True])
def test_truncation_where_nothing_is_kept(
    shared: gemmakv.Gemma, small: App, keeps: bool
) -> None:
    """It was a 400, as if the response had not asked for it."""
    app = small if keeps else make_app(shared, max_model_len=200)
    fields = {"truncation": "auto", "max_output_tokens": 30, "store": False}
    made = respond(app, turns(12), **fields)
    kept = respond(small, turns(12), **{**fields, "store": True})
    assert made["dropped_messages"] == kept["dropped_messages"] > 0
    assert made["usage"]["input_tokens"] == kept["usage"]["input_tokens"]


@pytest.mark.parametrize("keeps", [False, True])
def test_input_tokens_of_what_is_cut(
    shared: gemmakv.Gemma, small: App, keeps: bool
) -> None:
    """They were those of all of it."""
    app = small if keeps else make_app(shared, max_model_len=200)
    for more in ({}, {"max_output_tokens": 30}):
        body = {"input": turns(12), "truncation": "auto", **more}
        counted = post(app, INPUT_TOKENS, body).json()["input_tokens"]
        made = post(app, RESPONSES, {**body, "store": False}).json()
        assert made["dropped_messages"] > 0
        assert counted == made["usage"]["input_tokens"]
    if keeps:
        id = respond(small, turns(4), truncation="auto")["id"]
        body = {"input": "question " * 8, "previous_response_id": id,
                "truncation": "auto"}  # fmt: skip
        counted = post(app, INPUT_TOKENS, body).json()["input_tokens"]
        made = post(app, RESPONSES, body).json()
        assert made["dropped_messages"] > 0
        assert counted == made["usage"]["input_tokens"]


@pytest.mark.parametrize("truncation", ["disabled", "auto", None])
def test_input_tokens_of_what_has_no_room(
    small: App, truncation: str | None
) -> None:
    """A 400, as OpenAI has it: the response would be one."""
    body = {"input": "x" * 900, "truncation": truncation}
    found = error(post(small, INPUT_TOKENS, body), 400)
    made = error(post(small, RESPONSES, body), 400)
    assert found["code"] == made["code"] == "context_length_exceeded"
    assert found["param"] == made["param"] == "input"
    assert found["n_ctx"] == 200 <= found["n_prompt_tokens"]


def test_count_tokens_of_what_has_no_room(small: App) -> None:
    """Anthropic's says how many there are."""
    body = {"messages": [{"role": "user", "content": "x" * 900}]}
    assert post(small, COUNT, body).json()["input_tokens"] > 900


def test_truncation_of_a_kept_conversation(small: App) -> None:
    """Turns go on from what was read, and are cut again when it is full."""
    id, counts = None, []
    for i in range(8):
        made = respond(
            small, f"question {i}: " + "words " * 4, truncation="auto",
            previous_response_id=id,
        )  # fmt: skip
        id = made["id"]
        counts.append(made["dropped_messages"])
        again = get(small, f"{RESPONSES}/{id}").json()
        assert again["dropped_messages"] == counts[-1]
    assert counts[0] == 0 and max(counts) > 0
    path = f"{RESPONSES}/{id}/input_items?limit=100"
    assert len(get(small, path).json()["data"]) == 15, "nothing is forgotten"
    refused = post(
        small,
        RESPONSES,
        {"input": "x" * 900, "previous_response_id": id, "truncation": "auto"},
    )
    assert error(refused, 400)["code"] == "context_length_exceeded"


def test_waiting_tokens_are_those_that_the_cache_has_not(
    shared: gemmakv.Gemma,
) -> None:
    """With one request running, a long prompt that is known may wait, and one
    that is not may not.
    """
    import asyncio

    from support.asgi import Exchange, until

    app = make_app(
        shared, max_model_len=100_000, max_running=1, max_queue_tokens=300
    )
    known = {"messages": LONG, "max_tokens": 1, "cache_salt": "waits"}
    unknown = {**known, "cache_salt": "does not"}
    for _ in range(2):
        assert post(app, CHAT, known).status_code == 200
    service = app.service
    assert service is not None

    async def main() -> None:
        long = {"messages": USER, "max_tokens": 90_000, "stream": True,
                "ignore_eos": True}  # fmt: skip
        runs = Exchange(app, CHAT, long)
        await runs.holds(b"content")
        small = Exchange(app, CHAT, {"messages": USER, "max_tokens": 1})
        await until(lambda: service.admission.waiting == 1, "one waits")
        refused = Exchange(app, CHAT, unknown)
        await refused.done()
        assert refused.status == 429, refused.data
        waits = Exchange(app, CHAT, known)
        await until(lambda: service.admission.waiting == 2, "two wait")
        runs.leave()
        for one in (small, waits):
            await one.done()
            assert one.status == 200, one.data

    asyncio.run(main())
