"""/v1/sessions, and chat requests that go on with one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import sqlite3
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy

import gemmakv
from gemmakv.chat._templates import template_for
from gemmakv.conversations import BUSY_S, LEASE_S, SessionBusy, _clock
from gemmakv.conversations._database import FILE
from gemmakv.conversations._store import Conversations
from gemmakv.server.app import App
from gemmakv.server.service import history as _history
from support import tiny_gguf
from support.asgi import (
    NAME,
    USER,
    Exchange,
    get,
    post,
    sse_events,
    until,
)
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

pytestmark = needs("openai")
CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"


def create(app: App, **fields: Any) -> Any:
    response = post(app, SESSIONS, fields)
    assert response.status_code == 200, response.text
    return response.json()


def say(app: App, session: str, text: str, **fields: Any) -> dict[str, Any]:
    import openai

    body = {
        "model": NAME, "session": session, "temperature": 1, "max_tokens": 6,
        "messages": [{"role": "user", "content": text}], **fields,
    }  # fmt: skip
    response = post(app, CHAT, body)
    assert response.status_code == 200, response.text
    found = response.json()
    openai.types.chat.ChatCompletion.model_validate(found, strict=True)
    assert found["session"]["id"] == session
    return dict(found)


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def act(app: App, session: str, verb: str, body: Any) -> Any:
    response = post(app, f"{SESSIONS}/{session}{verb}", body)
    assert response.status_code == 200, response.text
    return response.json()


def look(app: App, session: str) -> Any:
    response = get(app, f"{SESSIONS}/{session}")
    assert response.status_code == 200, response.text
    return response.json()


# Sessions.


def test_off_says_how(app: App) -> None:
    for response in (
        get(app, SESSIONS),
        post(app, SESSIONS, {}),
        get(app, SESSIONS + "/sess_x"),
        post(app, CHAT, {"messages": USER, "session": "sess_x"}),
        post(
            app,
            "/v1/messages",
            {"messages": USER, "session": "sess_x", "max_tokens": 1},
        ),
    ):
        assert "--sessions" in error(response, 400)["message"]


def test_create_get_rename_list_delete(kept: App) -> None:
    made = [create(kept, name=f"s{i}", system="Be brief.") for i in range(5)]
    assert made[0]["head"] is None and made[0]["turn_count"] == 0
    renamed = act(kept, made[1]["id"], "", {"name": "other"})
    assert renamed["name"] == "other"
    assert act(kept, made[2]["id"], "", {"name": None})["name"] is None
    assert look(kept, made[1]["id"])["turns"] == []
    ids, after = [], ""
    while True:
        page = get(kept, f"{SESSIONS}?limit=2{after}").json()
        ids += [one["id"] for one in page["data"]]
        assert len(page["data"]) <= 2
        if not page["has_more"]:
            break
        after = "&after=" + page["last_id"]
    assert ids == [one["id"] for one in reversed(made)]
    gone = made[3]["id"]
    assert delete(kept, f"{SESSIONS}/{gone}").json()["deleted"] is True
    assert error(get(kept, f"{SESSIONS}/{gone}"), 404)["param"] == "session"
    assert len(get(kept, SESSIONS).json()["data"]) == 4
    found = error(get(kept, f"{SESSIONS}?after={gone}"), 404)
    assert found["param"] == "after"
    assert found["message"].startswith("after: ")


@pytest.mark.parametrize(
    "path, body, name",
    [
        ("", {"name": 3}, "name"),
        ("", {"name": "x" * 201}, "name"),
        ("", {"system": ["x"]}, "system"),
        ("/ID/rewind", {}, "turn"),
        ("/ID/rewind", {"turn": 3}, "turn"),
        ("/ID/fork", {"turn": 3}, "turn"),
        ("/ID", {}, "name"),
    ],
)
def test_bad_bodies(kept: App, path: str, body: Any, name: str) -> None:
    id = create(kept)["id"]
    found = error(post(kept, SESSIONS + path.replace("ID", id), body), 400)
    assert found["param"] == name and found["message"].startswith(name)


@pytest.mark.parametrize("limit", ["0", "101", "x", "-1", "9" * 5000])
def test_bad_limit(kept: App, limit: str) -> None:
    assert error(get(kept, f"{SESSIONS}?limit={limit}"), 400)["param"] == (
        "limit"
    )


def test_turns_go_on(kept: App, shared: gemmakv.Gemma) -> None:
    id = create(kept, system="Be brief.")["id"]
    said = {"role": "user", "content": "hello there " * 40}
    first = say(kept, id, said["content"])
    expected = shared.chat(
        [{"role": "system", "content": "Be brief."}, said],
        temperature=1, seed=5, max_tokens=6,
    )  # fmt: skip
    assert text_of(first) == expected.text
    second = say(kept, id, "and now?")
    before = first["usage"]
    usage = second["usage"]
    assert usage["prompt_tokens"] > before["total_tokens"]
    # The reply's last token has not been computed yet.
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == before["total_tokens"] - 1
    found = look(kept, id)
    assert found["turn_count"] == 2 and found["system"] == "Be brief."
    one, two = found["turns"]
    assert one["messages"] == [said] and one["parent"] is None
    assert one["reply"]["content"] == text_of(first)
    assert two["parent"] == one["id"] == first["session"]["turn"]
    assert found["head"] == two["id"] == second["session"]["turn"]
    assert two["finish_reason"] == "length"
    assert two["usage"]["completion_tokens"] == 6


def test_stream_says_the_same(kept: App) -> None:
    from openai.types.chat import ChatCompletionChunk

    a, b = (create(kept)["id"] for _ in "ab")
    for text in ("hello", "more", "and more"):
        whole = text_of(say(kept, a, text))
        body = {
            "session": b, "temperature": 1, "max_tokens": 6, "stream": True,
            "messages": [{"role": "user", "content": text}],
        }  # fmt: skip
        events = sse_events(post(kept, CHAT, body).text)
        assert events[-1] == ("", "[DONE]")
        chunks = [data for _, data in events[:-1]]
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)
        assert {c["session"]["id"] for c in chunks} == {b}
        assert whole == "".join(
            c["choices"][0]["delta"].get("content") or "" for c in chunks
        )
    said = [
        [(t["messages"], t["reply"]) for t in look(kept, id)["turns"]]
        for id in (a, b)
    ]
    assert said[0] == said[1] and len(said[0]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_other_apis_go_on(kept: App, stream: bool) -> None:
    """Turns of one session by all three, as by one of them."""
    a, b = (create(kept, system="Be brief.")["id"] for _ in "ab")
    sampling = {"temperature": 1, "num_predict": 6}
    for turn in range(2):
        message = {"role": "user", "content": f"say {turn}"}
        say(kept, a, message["content"])
        body = {
            "model": NAME, "messages": [message], "session": b,
            "options": sampling, "stream": stream,
        }  # fmt: skip
        for line in post(kept, "/api/chat", body).text.splitlines():
            found = json.loads(line)
            assert found["session"]["id"] == b, found
        assert found["session"]["turn"] == look(kept, b)["head"]
        say(kept, a, "and?")
        body = {
            "model": NAME, "session": b, "max_tokens": 6, "temperature": 1,
            "system": "Be brief.", "stream": stream,
            "messages": [{"role": "user", "content": "and?"}],
        }  # fmt: skip
        response = post(kept, "/v1/messages", body)
        assert response.status_code == 200, response.text
        found = (
            sse_events(response.text)[0][1]["message"]
            if stream
            else response.json()
        )
        assert found["session"] == {"id": b, "turn": look(kept, b)["head"]}
    one, other = (
        [(t["reply"], t["usage"]) for t in look(kept, id)["turns"]]
        for id in (a, b)
    )
    assert one == other and len(one) == 4


def test_another_system_in_a_turn(kept: App, shared: gemmakv.Gemma) -> None:
    """It is what the model is told, instead of the session's."""
    id = create(kept, system="Be brief.")["id"]
    body = {
        "session": id, "max_tokens": 6, "temperature": 1, "messages": USER,
        "system": [{"type": "text", "text": t} for t in ("Be", "rude.")],
    }  # fmt: skip
    found = post(kept, "/v1/messages", body).json()
    expected = shared.chat(
        [{"role": "system", "content": "Be\nrude."}, *USER],
        temperature=1, seed=5, max_tokens=6,
    )  # fmt: skip
    assert found["content"][0]["text"] == expected.text


@pytest.mark.parametrize(
    "path, body",
    [
        ("/api/generate", {"model": NAME, "prompt": "hello"}),
        ("/v1/completions", {"prompt": "hello"}),
    ],
)
def test_routes_without_sessions_say_so(
    kept: App, path: str, body: dict[str, Any]
) -> None:
    response = post(kept, path, {**body, "session": create(kept)["id"]})
    assert response.status_code == 400 and "session" in response.text


def test_resending_gives_the_same(
    kept: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the tokenizer makes the tokens that were sampled."""
    id = create(kept, system="Be brief.")["id"]
    prompts = prompts_of(kept, monkeypatch)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    agreed = 0
    for turn in range(6):
        text = f"question {turn}"
        messages.append({"role": "user", "content": text})
        said = text_of(say(kept, id, text, seed=turn))
        body = {
            "messages": messages, "temperature": 1, "max_tokens": 6,
            "seed": turn,
        }  # fmt: skip
        again = text_of(post(kept, CHAT, body).json())
        one, other = prompts[-2:]
        if one == other:
            agreed += 1
            assert said == again
        messages.append({"role": "assistant", "content": said})
    assert agreed


def test_tokens_stay_as_they_were_sampled(
    kept: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt begins with the one before and what was sampled."""
    id = create(kept)["id"]
    prompts = prompts_of(kept, monkeypatch)
    store = history(kept).store
    before: list[int] = []
    for turn in range(4):
        head = say(kept, id, f"question {turn}", seed=turn)["session"]["turn"]
        tokens = store.turns.tokens(head).tolist()
        assert tokens[: len(prompts[-1])] == prompts[-1]
        assert len(tokens) > len(prompts[-1])
        assert prompts[-1][: len(before)] == before
        before = tokens
    path = store.turns.path(head, tokens=True)
    assert [one.whole for one in path] == [True, False, False, False]
    assert sum(len(one.tokens) for one in path) == len(tokens)


def test_fork_and_rewind(kept: App) -> None:
    id = create(kept, name="a")["id"]
    turns = [
        say(kept, id, t)["session"]["turn"] for t in ("one", "two", "three")
    ]
    other = act(kept, id, "/fork", {"turn": turns[1], "name": "b"})
    assert other["head"] == turns[1] and other["turn_count"] == 2
    whole = act(kept, id, "/fork", {})
    assert whole["head"] == turns[2] and whole["name"] is None
    same = say(kept, other["id"], "three")
    assert text_of(same) == look(kept, id)["turns"][2]["reply"]["content"]
    back = act(kept, id, "/rewind", {"turn": turns[0]})
    assert back["head"] == turns[0] and back["turn_count"] == 1
    again = say(kept, id, "two")
    assert look(kept, other["id"])["turns"][1]["reply"]["content"] == (
        text_of(again)
    )
    assert act(kept, id, "/rewind", {"turn": None})["head"] is None
    missing = post(kept, f"{SESSIONS}/{id}/rewind", {"turn": turns[0]})
    assert error(missing, 404)["param"] == "turn"
    missing = post(kept, f"{SESSIONS}/{id}/fork", {"turn": "resp_none"})
    assert error(missing, 404)["param"] == "turn"


def test_a_turn_takes_the_place_of_the_last(kept: App) -> None:
    """In one step: until it is whole, the session is as it was."""
    id = create(kept, name="a")["id"]
    one, two = (say(kept, id, t)["session"]["turn"] for t in ("one", "two"))
    fork = act(kept, id, "/fork", {})["id"]
    before = look(kept, id)["turns"]
    again = say(kept, id, "two", replaces=two)
    now = look(kept, id)["turns"]
    assert [turn["id"] for turn in now] == [one, again["session"]["turn"]]
    assert now[1]["parent"] == one
    assert text_of(again) == before[1]["reply"]["content"]  # the same seed
    assert look(kept, fork)["turns"] == before
    # The beginning of a reply that gets longer is kept with it.
    said = [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": text_of(again)},
    ]
    more = say(kept, id, "", messages=said, replaces=now[1]["id"])
    [_, longer] = look(kept, id)["turns"]
    assert longer["reply"]["content"] == text_of(again) + text_of(more)
    assert longer["messages"] == said[:1]
    # The first one, of which nothing else is left then.
    act(kept, id, "/rewind", {"turn": one})
    delete(kept, f"{SESSIONS}/{fork}")
    first = say(kept, id, "one", replaces=one)["session"]["turn"]
    assert look(kept, id)["head"] == first
    gone = post(kept, f"{SESSIONS}/{id}/fork", {"turn": one})
    assert error(gone, 404)["param"] == "turn"


def test_the_thoughts_of_a_reply_that_gets_longer_stay(kept: App) -> None:
    said = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "the in", "reasoning": "hm"},
    ]
    turn = {"messages": said[:1], "reply": said[1], "finish_reason": "length"}
    document = {"format": "gemmakv session", "version": 1, "turns": [turn]}
    made = post(kept, f"{SESSIONS}/import", document).json()
    del said[1]["reasoning"]
    say(kept, made["id"], "", messages=said, replaces=made["head"])
    [longer] = look(kept, made["id"])["turns"]
    assert longer["reply"]["reasoning"] == "hm"
    assert longer["reply"]["content"].startswith("the in")


def test_only_the_last_turn_is_replaced(kept: App) -> None:
    id = create(kept)["id"]
    one, _ = (say(kept, id, t)["session"]["turn"] for t in ("one", "two"))
    body = {"model": NAME, "messages": USER, "replaces": one}
    found = error(post(kept, CHAT, {**body, "session": id}), 409)
    assert (found["code"], found["param"]) == ("session_changed", "replaces")
    assert len(look(kept, id)["turns"]) == 2
    assert error(post(kept, CHAT, body), 400)["param"] == "replaces"


def test_forks_that_part_at_the_first_turn(kept: App) -> None:
    a = create(kept, name="a")["id"]
    one = say(kept, a, "one")["session"]["turn"]
    b = act(kept, a, "/fork", {})["id"]
    say(kept, a, "another", replaces=one)
    parts = ("id", "parent", "parent_turn", "parent_turn_count")
    found = get(kept, f"{SESSIONS}/tree").json()["data"]
    assert [[node[name] for name in parts] for node in found] == [
        [b, a, None, 0], [a, None, None, 0],
    ]  # fmt: skip
    delete(kept, f"{SESSIONS}/{a}")
    [alone] = get(kept, f"{SESSIONS}/tree").json()["data"]
    assert alone["parent"] is None


def test_tree(kept: App) -> None:
    """Each under the oldest that it has the most turns in common with."""
    a = create(kept, name="a")["id"]
    one, two, _ = (
        say(kept, a, t)["session"]["turn"] for t in ("one", "two", "three")
    )
    b = act(kept, a, "/fork", {"turn": two})["id"]
    four = say(kept, b, "four")["session"]["turn"]
    c = act(kept, b, "/fork", {"turn": four})["id"]
    d = act(kept, b, "/fork", {"turn": one})["id"]
    e = create(kept)["id"]

    def tree(query: str = "") -> dict[str, tuple[Any, Any, int]]:
        found = get(kept, f"{SESSIONS}/tree{query}").json()
        assert found["has_more"] == bool(query)
        assert found["last_id"] == found["data"][-1]["id"]
        return {
            one["id"]: (
                one["parent"], one["parent_turn"], one["parent_turn_count"]
            )
            for one in found["data"]
        }  # fmt: skip

    none = (None, None, 0)
    assert tree() == {
        e: none, d: (a, one, 1), c: (b, four, 3), b: (a, two, 2), a: none,
    }  # fmt: skip
    assert list(tree()) == [e, d, c, b, a]
    # Among those that are listed.
    assert tree("?limit=3") == {e: none, d: (c, one, 1), c: none}
    act(kept, a, "/rewind", {"turn": one})
    assert tree()[b] == (a, one, 1)
    delete(kept, f"{SESSIONS}/{a}")
    assert tree() == {e: none, d: (b, one, 1), c: (b, four, 3), b: none}
    assert error(get(kept, f"{SESSIONS}/tree?limit=0"), 400)["param"] == "limit"


def test_what_turns_took(kept: App, folder: Path) -> None:
    """Is said of each, and by the answer."""
    id = create(kept)["id"]
    text = "what no other test says " * 20
    answers = [say(kept, id, text), say(kept, id, "more"), say(kept, id, text)]
    turns = look(kept, id)["turns"]
    for answer, turn in zip(answers, turns):
        spent = turn["spent"]
        assert answer["cache"] == {
            "cached": spent["cached"], "miss_reason": spent["miss_reason"],
        }  # fmt: skip
        assert sum(spent["cached"].values()) == turn["usage"]["cached_tokens"]
        timings = answer["timings"]
        assert spent["prefill_s"] == pytest.approx(timings["prompt_ms"] / 1e3)
        assert spent["decode_s"] == pytest.approx(timings["predicted_ms"] / 1e3)
        assert spent["first_token_s"] >= spent["prefill_s"] - 0.001
    assert turns[0]["spent"]["cached"] == {}
    assert turns[0]["spent"]["miss_reason"] in (
        "divergent", "cheaper to compute",
    )  # fmt: skip
    assert turns[1]["spent"]["cached"]["ram"] > 0
    body = {
        "messages": [{"role": "user", "content": text}], "stream": True,
        "stream_options": {"include_usage": True}, "max_tokens": 2,
    }  # fmt: skip
    last = sse_events(post(kept, CHAT, body).text)[-2][1]
    assert last["cache"]["cached"]["ram"] > 0
    # Of turns that an older version kept, or that were taken in, it is null.
    with sqlite3.connect(folder / FILE) as db:
        db.execute("UPDATE turns SET params = '{}'")
    assert [turn["spent"] for turn in look(kept, id)["turns"]] == [None] * 3


def rows(folder: Path) -> int:
    with sqlite3.connect(folder / FILE) as db:
        return int(db.execute("SELECT count(*) FROM turns").fetchone()[0])


def test_nothing_stays_that_nothing_reaches(kept: App, folder: Path) -> None:
    id = create(kept)["id"]
    turns = [say(kept, id, t)["session"]["turn"] for t in ("one", "two")]
    other = act(kept, id, "/fork", {"turn": turns[0]})["id"]
    say(kept, other, "three")
    assert rows(folder) == 3
    act(kept, id, "/rewind", {"turn": turns[0]})
    assert rows(folder) == 2
    delete(kept, f"{SESSIONS}/{id}")
    assert rows(folder) == 2
    delete(kept, f"{SESSIONS}/{other}")
    assert rows(folder) == 0


def test_other_keys_find_nothing(keyed: App) -> None:
    one, two = (bearer(key) for key in KEYS)
    made = post(keyed, SESSIONS, {"name": "x"}, **one).json()
    path = f"{SESSIONS}/{made['id']}"
    body = {"messages": USER, "session": made["id"]}
    turn = post(keyed, CHAT, body, **one).json()["session"]["turn"]
    assert get(keyed, SESSIONS, **two).json()["data"] == []
    for response in (
        get(keyed, path, **two),
        post(keyed, path, {"name": "y"}, **two),
        post(keyed, path + "/fork", {"turn": turn}, **two),
        post(keyed, path + "/rewind", {"turn": None}, **two),
        post(keyed, CHAT, body, **two),
        get(keyed, f"{SESSIONS}?after={made['id']}", **two),
        delete(keyed, path, **two),
    ):
        assert error(response, 404)["code"] == "session_not_found"
    assert get(keyed, path, **one).json()["turn_count"] == 1


def test_keys_are_the_same_after_a_restart(
    shared: gemmakv.Gemma, folder: Path
) -> None:
    for keys in (KEYS, KEYS[::-1]):
        for app in serving(shared, folder, api_keys=keys):
            if keys == KEYS:
                post(app, SESSIONS, {"name": "x"}, **bearer("one"))
            found = [
                len(get(app, SESSIONS, **bearer(k)).json()["data"])
                for k in KEYS
            ]
            assert found == [1, 0]


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"session": 3}, "session"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
def test_bad_requests_leave_it_alone(kept: App, fields: Any, name: str) -> None:
    id = create(kept)["id"]
    say(kept, id, "one")
    before = look(kept, id)
    body = {"messages": USER, "session": id, **fields}
    assert name in error(post(kept, CHAT, body), 400)["message"]
    assert look(kept, id) == before
    say(kept, id, "two")


def test_messages_are_counted_from_the_request(
    shared: gemmakv.Gemma, folder: Path
) -> None:
    """An error of the template names the place in what was sent."""
    for app in serving(shared, folder):
        assert app.service is not None
        id = create(app)["id"]
        say(app, id, "one")
        app.service.prompts.template = Refusing()
        body = {
            "session": id,
            "messages": [*USER, {"role": "assistant", "content": "x"}, *USER],
        }
        message = error(post(app, CHAT, body), 400)["message"]
        assert message.startswith("messages[2].content: ")


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("name", ["plain", "gemma"])
def test_a_late_system_message(
    shared: gemmakv.Gemma,
    folder: Path,
    role: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands where it was said, or begins what the user says there."""
    late = [{"role": role, "content": "Be brief."}, *USER]
    for app in serving(shared, folder):
        assert app.service is not None
        app.service.prompts.template = template_for(shared, name)
        prompts = prompts_of(app, monkeypatch)
        id = create(app)["id"]
        first = text_of(say(app, id, "one"))
        before = [{"role": "user", "content": "one"},
                  {"role": "assistant", "content": first}]  # fmt: skip
        say(app, id, "", messages=late)
        if name == "gemma":
            late = [{"role": "user", "content": "Be brief.\n\nhello there"}]
        said = shared.apply_chat_template([*before, *late], template=name)
        # The reply keeps the tokens that it was sampled with, and no space.
        assert shared.tokenizer is not None
        read, expected = (
            "".join(shared.tokenizer.decode(one).split())
            for one in (prompts[-1], said.tolist())
        )
        assert read == expected
        assert look(app, id)["turn_count"] == 2


def test_store_false_in_a_session(kept: App) -> None:
    id = create(kept)["id"]
    body = {"session": id, "messages": USER, "store": False}
    assert error(post(kept, CHAT, body), 400)["param"] == "store"
    say(kept, id, "one", store=True)
    del body["session"]
    assert post(kept, CHAT, {**body, "max_tokens": 1}).status_code == 200


def test_prompt_too_long(shared: gemmakv.Gemma, folder: Path) -> None:
    for app in serving(shared, folder, max_model_len=64):
        id = create(app)["id"]
        say(app, id, "one")
        body = {
            "session": id,
            "messages": [{"role": "user", "content": "long " * 20}],
        }
        found = error(post(app, CHAT, body), 400)
        assert found["code"] == "context_length_exceeded"
        assert look(app, id)["turn_count"] == 1


def test_another_template_renders_anew(
    shared: gemmakv.Gemma, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for app in serving(shared, folder):
        id = create(app, system="Be brief.")["id"]
        first = text_of(say(app, id, "one"))
    for app in serving(shared, folder):
        found = history(app)
        found.basis = "another"
        assert app.service is not None
        app.service.prompts.template = gemmakv.templates.GemmaTemplate()
        prompts = prompts_of(app, monkeypatch)
        say(app, id, "two")
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "two"},
        ]
        expected = shared.apply_chat_template(messages, template="gemma")
        assert prompts == [expected.tolist()]
        turns = found.store.turns.path(look(app, id)["head"])
        assert [t.whole for t in turns] == [True, True]
        say(app, id, "three")
        assert not found.store.turns.path(look(app, id)["head"])[2].whole


# One turn at a time.

LONG = {"max_tokens": 500_000, "ignore_eos": True, "stream": True}


@pytest.fixture
def endless(shared: gemmakv.Gemma, folder: Path) -> Iterator[App]:
    """With room for a turn that is still running whenever one looks."""
    yield from serving(shared, folder, max_model_len=600_000)


def test_two_turns_at_once(endless: App) -> None:
    id = create(endless)["id"]
    say(endless, id, "one")
    body = {"session": id, "messages": USER}

    async def main() -> None:
        running = Exchange(endless, CHAT, {**body, **LONG})
        await running.holds(b'"role"')
        refused = Exchange(endless, CHAT, body)
        await refused.done()
        assert refused.status == 409 and b"session_busy" in refused.data
        for verb in ("rewind",):
            other = Exchange(endless, f"{SESSIONS}/{id}/{verb}", {"turn": None})
            await other.done()
            assert other.status == 409
        running.leave()
        await running.done()
        again = Exchange(endless, CHAT, body)
        await again.done()
        assert again.status == 200, again.data

    asyncio.run(main())
    # What was cut off is not kept.
    assert look(endless, id)["turn_count"] == 2


def test_a_turn_outlives_the_store(endless: App) -> None:
    """Where a server has waited long enough for it: its end had nowhere to
    go, and was a RuntimeError in place of the cancellation.
    """
    id = create(endless)["id"]

    async def main() -> None:
        body = {"session": id, "messages": USER, **LONG}
        running = Exchange(endless, CHAT, body)
        await running.holds(b'"content"')
        history(endless).close()
        late = Exchange(endless, f"{SESSIONS}/{id}/rewind", {"turn": None})
        await late.done()
        assert late.status == 503 and b"server_stopping" in late.data
        running.leave()
        await running.done()

    asyncio.run(main())


def test_many_at_once_on_many(kept: App) -> None:
    ids = [create(kept)["id"] for _ in range(4)]

    async def main() -> list[list[int]]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=kept),
            base_url="http://localhost",
            timeout=60,
        ) as http:

            async def one(id: str) -> list[int]:
                answers = await asyncio.gather(
                    *[
                        http.post(CHAT, json={"session": id, "messages": USER})
                        for _ in range(4)
                    ]
                )
                return [answer.status_code for answer in answers]

            return await asyncio.gather(*[one(id) for id in ids])

    for id, codes in zip(ids, asyncio.run(main())):
        assert set(codes) <= {200, 409}
        assert look(kept, id)["turn_count"] == codes.count(200) >= 1


def test_a_lease_ends_by_itself(
    kept: App, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another process that was killed."""
    id = create(kept)["id"]
    other = Conversations.open(folder)
    uptime = _clock.uptime()
    monkeypatch.setattr(_clock, "uptime", lambda: uptime)
    other.leases.take("", id, "killed")
    body = {"messages": USER, "session": id}
    response = post(kept, CHAT, body)
    assert error(response, 409)["code"] == "session_busy"
    assert int(response.headers["retry-after"]) >= 1
    now = _clock.time.time()
    for late in (-3600, -2, 2, 3600):  # whatever the clock says meanwhile
        monkeypatch.setattr(_clock.time, "time", lambda late=late: now + late)
        assert post(kept, CHAT, body).status_code == 409
    uptime += LEASE_S + 1
    assert post(kept, CHAT, body).status_code == 200
    other.close()


def test_a_lease_from_before_another_start_is_none(
    kept: App, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = create(kept)["id"]
    with monkeypatch.context() as before:
        before.setattr(_clock, "BOOT", "another ")
        other = Conversations.open(folder)
        other.leases.take("", id, "killed")
        other.close()
    say(kept, id, "one")


def test_a_lease_that_was_lost_keeps_nothing(kept: App, folder: Path) -> None:
    id = create(kept)["id"]
    say(kept, id, "one")
    store = history(kept).store
    turn = store.turns.path(look(kept, id)["head"], tokens=True)[0]
    store.leases.take("", id, "mine")
    with sqlite3.connect(folder / FILE) as db:
        db.execute("UPDATE sessions SET lease = 'other'")
    late = dataclasses.replace(turn, id="resp_late", parent=turn.id, depth=2)
    with pytest.raises(SessionBusy):
        store.turns.add(late, id, "mine")
    assert rows(folder) == 1


def test_a_lease_is_renewed(
    endless: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmakv.server.service.history.LEASE_S", 0.03)
    id = create(endless)["id"]
    renewed: list[str] = []
    leases = history(endless).store.leases
    real = leases.renew
    monkeypatch.setattr(
        leases, "renew", lambda *a: (renewed.append(a[0]), real(*a))
    )

    async def main() -> None:
        body = {"session": id, "messages": USER, **LONG}
        running = Exchange(endless, CHAT, body)
        await until(lambda: len(renewed) > 2, "it was renewed")
        running.leave()
        await running.done()

    asyncio.run(main())
    assert set(renewed) == {id}


def test_a_long_system_is_not_repeated_in_lists(kept: App) -> None:
    system = "Be brief. " * 150
    id = create(kept, system=system)["id"]
    for path in (SESSIONS, f"{SESSIONS}/tree"):
        [found] = get(kept, path).json()["data"]
        assert found["system"] == system[:1000]
        assert found["system_length"] == 1500
    found = look(kept, id)
    assert (found["system"], found["system_length"]) == (system, 1500)
    other = create(kept)
    assert (other["system"], other["system_length"]) == (None, 0)


# What goes wrong.


@pytest.mark.parametrize("taken_in", [False, True])
def test_a_system_that_cannot_fit(kept: App, taken_in: bool) -> None:
    """It was kept, and no turn could ever come after it."""
    path, body = SESSIONS, {"system": "ab " * 700_000}
    if taken_in:
        id = create(kept)["id"]
        document = get(kept, f"{SESSIONS}/{id}/export").json()
        path, body = f"{path}/import", {**document, **body}
    before = get(kept, SESSIONS).json()
    found = error(post(kept, path, body), 400)
    assert found["code"] == "context_length_exceeded"
    assert found["param"] == "system"
    assert kept.service is not None
    context = kept.service.context
    numbers = [int(one) for one in re.findall(r"\d+", found["message"])]
    assert context - 1 in numbers
    least = numbers[-1]
    assert context <= least <= 1_400_000
    assert get(kept, SESSIONS).json() == before


def full(store: Conversations) -> None:
    """As if the disk were full."""
    db = store.database.driver
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages}")


@pytest.mark.parametrize("stream", [False, True])
def test_full_disk(kept: App, folder: Path, stream: bool) -> None:
    id = create(kept)["id"]
    say(kept, id, "one")
    before = look(kept, id)
    store = history(kept).store
    full(store)
    body = {
        "session": id, "stream": stream,
        "messages": [{"role": "user", "content": "much " * 800}],
    }  # fmt: skip
    response = post(kept, CHAT, body)
    if stream:
        events = sse_events(response.text)
        assert events[-1][1]["error"]["code"] == "sessions_full"
        assert not any(
            c["choices"] and c["choices"][0]["finish_reason"]
            for _, c in events[:-1]
        )
    else:
        found = error(response, 503)
        assert found["code"] == "sessions_full"
        assert found["type"] == "server_error"
    assert look(kept, id) == before and rows(folder) == 1
    store.database.driver.execute("PRAGMA max_page_count = 1000000")
    say(kept, id, "two")


def test_deleting_on_a_full_disk(kept: App) -> None:
    """A deletion may need room, too; the error has to say so, and nothing is
    lost.
    """
    id = create(kept)["id"]
    say(kept, id, "one")
    before = look(kept, id)
    store = history(kept).store

    def fail(db: Any) -> None:
        """The log cannot grow."""
        cause = sqlite3.OperationalError("database or disk is full")
        cause.sqlite_errorname = "SQLITE_FULL"
        raise sqlalchemy.exc.OperationalError("COMMIT", None, cause)

    engine = store.database.engine
    sqlalchemy.event.listen(engine, "commit", fail)
    found = error(delete(kept, f"{SESSIONS}/{id}"), 503)
    sqlalchemy.event.remove(engine, "commit", fail)
    assert found["code"] == "sessions_full"
    assert look(kept, id) == before
    assert delete(kept, f"{SESSIONS}/{id}").status_code == 200


def test_another_process_writes_for_long(
    kept: App, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_history, "BUSY_S", 0.01)
    id = create(kept)["id"]
    writer = sqlite3.connect(folder / FILE, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    response = post(kept, CHAT, {"messages": USER, "session": id})
    assert error(response, 503)["code"] == "sessions_busy"
    assert look(kept, id)["turn_count"] == 0
    writer.execute("ROLLBACK")
    writer.close()
    say(kept, id, "one")


def test_many_wait_for_another_process_as_long_as_one(
    kept: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They waited one after the other, and so did whoever asked whether the
    server is ready.
    """
    found = history(kept)
    waits: list[int] = []
    now = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(_history, "time", clock)

    def lasts() -> None:
        nonlocal now
        driver = found.store.database.driver
        [patience] = driver.execute("PRAGMA busy_timeout").fetchone()
        waits.append(patience)
        now += patience / 1000

    held = threading.Event()
    found._submit(held.wait)
    calls = [found._submit(lasts) for _ in range(6)]
    held.set()
    for call in calls:
        call.result()
    assert waits == [BUSY_S * 1000] + 5 * [0]
    found._submit(lasts).result()
    assert waits[-1] == waits[0]


def test_ready_waits_for_no_turn(kept: App) -> None:
    """A probe gives up after some seconds."""
    held = threading.Event()
    waits = history(kept)._submit(held.wait)
    assert get(kept, "/health/ready").json() == {"status": "ok"}
    assert not waits.done()
    held.set()


def test_ready_warns_where_nothing_can_be_written(
    kept: App, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever runs the server had no way to see it but by failed turns."""
    caplog.set_level(logging.INFO, "gemmakv.server")
    id = create(kept)["id"]
    store = history(kept).store
    full(store)
    body = {
        "messages": [{"role": "user", "content": "much " * 800}], "session": id,
    }  # fmt: skip
    for _ in range(2):
        error(post(kept, CHAT, body), 503)
    found = get(kept, "/health/ready")
    assert found.status_code == 200
    said = found.json()
    assert said["status"] == "ok"
    [warning] = said["warnings"]
    assert warning.startswith("sessions: ")
    assert "(SQLITE_FULL)" in warning and str(store.folder) not in warning
    store.database.driver.execute("PRAGMA max_page_count = 1000000")
    say(kept, id, "one")
    assert get(kept, "/health/ready").json() == {"status": "ok"}
    lines = [one.message for one in caplog.records if "written" in one.message]
    assert len(lines) == 2
    assert "full" in lines[0] and "full" not in lines[1]


@pytest.mark.skipif(
    not hasattr(os, "statvfs"), reason="needs the flags of a file system"
)
def test_ready_warns_of_a_read_only_file_system(
    kept: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(history(kept).store.folder)
    values = [*real]
    values[8] |= os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    found = get(kept, "/health/ready")
    assert found.status_code == 200
    [warning] = found.json()["warnings"]
    assert warning.startswith("sessions: ") and "read-only" in warning


@pytest.mark.parametrize(
    "ruin, words",
    [
        (lambda f: f.write_bytes(b""), "a file"),
        (lambda f: newer(f), "newer version"),
        (lambda f: (f.mkdir(), (f / FILE).write_bytes(b"x" * 9000)), "sound"),
        (lambda f: another(f), "another's"),
        (lambda f: without_secret(f), "without its secret"),
        (lambda f: damaged(f), "malformed"),
    ],
)
def test_bad_folders(folder: Path, ruin: Any, words: str) -> None:
    ruin(folder)
    with pytest.raises(ValueError, match="sessions: ") as caught:
        Conversations.open(folder)
    assert words in str(caught.value) and str(folder) in str(caught.value)


def newer(folder: Path) -> None:
    Conversations.open(folder).close()
    with sqlite3.connect(folder / FILE) as db:
        db.execute("PRAGMA user_version = 99")


def without_secret(folder: Path) -> None:
    Conversations.open(folder).close()
    with sqlite3.connect(folder / FILE) as db:
        db.execute("DELETE FROM facts")


def damaged(folder: Path) -> None:
    """What begins soundly: the page of the index that says what expires."""
    Conversations.open(folder).close()
    with sqlite3.connect(folder / FILE) as db:
        [size] = db.execute("PRAGMA page_size").fetchone()
        [page] = db.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'turns_since'"
        ).fetchone()
    with open(folder / FILE, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)


def another(folder: Path) -> None:
    folder.mkdir()
    with sqlite3.connect(folder / FILE) as db:
        db.execute("CREATE TABLE t (x)")


def test_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with pytest.raises(ValueError, match=r"sessions: .*/none"):
        Conversations.open(tmp_path / "link")
    (tmp_path / "none").mkdir()
    Conversations.open(tmp_path / "link").close()


def test_folder_that_cannot_be_made(folder: Path) -> None:
    with pytest.raises(OSError, match="sessions: /proc/none"):
        Conversations.open("/proc/none/here")
    (folder / FILE).mkdir(parents=True)
    with pytest.raises(OSError, match="sessions: .*Is a directory"):
        Conversations.open(folder)


def test_disk_that_can_only_be_read(kept: App) -> None:
    id = create(kept)["id"]
    say(kept, id, "one")
    db = history(kept).store.database.driver
    db.execute("PRAGMA query_only = ON")
    body = {"messages": USER, "session": id}
    for response in (
        post(kept, CHAT, body),
        post(kept, SESSIONS, {}),
        post(kept, "/v1/responses", {"input": "x"}),
        delete(kept, f"{SESSIONS}/{id}"),
    ):
        assert error(response, 503)["code"] == "sessions_failed"
    assert look(kept, id)["turn_count"] == 1
    assert post(kept, CHAT, {"messages": USER}).status_code == 200


@pytest.mark.parametrize("again", [False, True])
def test_folder_that_is_removed(
    kept: App, folder: Path, tmp_path: Path, again: bool
) -> None:
    """Nothing is acknowledged that would be lost."""
    id = create(kept)["id"]
    folder.rename(tmp_path / "elsewhere")
    if again:
        Conversations.open(folder).close()
    for response in (
        post(kept, CHAT, {"messages": USER, "session": id}),
        post(kept, SESSIONS, {}),
        get(kept, f"{SESSIONS}/{id}"),
    ):
        found = error(response, 503)
        assert found["code"] == "sessions_failed"
        assert "another file" in found["message"] or not again
    for path in "/health", "/health/ready":
        assert get(kept, path).status_code == 503
    assert get(kept, "/health/live").status_code == 200
    if again:
        folder.rename(tmp_path / "new")
    (tmp_path / "elsewhere").rename(folder)
    say(kept, id, "one")
    assert get(kept, "/health/ready").status_code == 200


def test_log_that_is_removed(kept: App, folder: Path) -> None:
    """Turns that were acknowledged then were gone after the next start."""
    id = create(kept)["id"]
    log = folder / f"{FILE}-wal"
    log.rename(folder / "aside")
    response = post(kept, CHAT, {"messages": USER, "session": id})
    found = error(response, 503)
    assert found["code"] == "sessions_failed"
    assert "-wal: " in found["message"]
    assert get(kept, "/health/ready").status_code == 503
    log.touch()
    assert get(kept, "/health/ready").status_code == 503
    (folder / "aside").replace(log)
    say(kept, id, "one")


def test_damage_is_told(kept: App, folder: Path) -> None:
    """One request's error, in its API's form."""
    id = create(kept)["id"]
    for i in range(30):
        create(kept, name=f"{i}" * 100)
    driver = history(kept).store.database.driver
    driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = (folder / FILE).stat().st_size
    with open(folder / FILE, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    other = sqlite3.connect(folder / FILE)
    other.close()
    store = history(kept).store
    store.database.driver.execute("PRAGMA shrink_memory")
    response = get(kept, f"{SESSIONS}/{id}")
    assert error(response, 503)["code"] == "sessions_failed"
    assert get(kept, "/health").status_code == 200


def test_files_are_private(folder: Path) -> None:
    Conversations.open(folder).close()
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / FILE).stat().st_mode & 0o077 == 0


# Tools.


def test_tools_in_a_session(kept: App) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    pieces = tiny_gguf.vocabulary()[0]
    schema = {
        "type": "object",
        "properties": {"days": {"enum": [1, 2, 3]}},
        "required": ["days"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": "rain", "parameters": schema}}
    ]
    id = create(kept)["id"]
    found = say(
        kept, id, "rain?", tools=tools, tool_choice="required",
        max_tokens=200, parallel_tool_calls=False,
        logit_bias={str(pieces.index(c)): 6 for c in '"}'},
    )  # fmt: skip
    [call] = found["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3 mm"}
    say(kept, id, "", tools=tools, messages=[result])
    one, two = look(kept, id)["turns"]
    assert one["reply"]["tool_calls"][0]["id"] == call["id"]
    assert one["tools"] == tools and two["messages"] == [result]
    path = history(kept).store.turns.path(two["id"])
    assert [t.whole for t in path] == [True, False]
    # Without them the model is told something else from the beginning.
    say(kept, id, "dry?")
    assert history(kept).store.turns.path(look(kept, id)["head"])[2].whole


# Documents.


def exported(app: App) -> tuple[str, dict[str, Any]]:
    """A session of three turns, as a document."""
    id = create(app, name="a", system="Be brief.")["id"]
    for text in ("one", "two", "three"):
        say(app, id, text)
    response = get(app, f"{SESSIONS}/{id}/export")
    assert response.status_code == 200, response.text
    return id, response.json()


def test_export_and_import(
    kept: App, shared: gemmakv.Gemma, tmp_path: Path
) -> None:
    id, document = exported(kept)
    expected = look(kept, id)
    tokens = history(kept).store.turns.tokens(expected["head"]).tolist()
    said = text_of(say(kept, id, "four"))
    for app in serving(shared, tmp_path / "other", api_keys=KEYS):
        mine = bearer("one")
        path = f"{SESSIONS}/import"
        made = post(app, path, document, **mine).json()
        found = get(app, f"{SESSIONS}/{made['id']}", **mine).json()
        assert (found["name"], found["system"]) == ("a", "Be brief.")
        same = ("messages", "reply", "tools", "usage", "finish_reason")
        for name in (*same, "created_at"):
            assert [t[name] for t in found["turns"]] == [
                t[name] for t in expected["turns"]
            ]
        assert history(app).store.turns.tokens(found["head"]).tolist() == tokens
        body = {
            "session": made["id"], "temperature": 1, "max_tokens": 6,
            "messages": [{"role": "user", "content": "four"}],
        }  # fmt: skip
        assert text_of(post(app, CHAT, body, **mine).json()) == said
        error(get(app, f"{SESSIONS}/{made['id']}/export", **bearer("two")), 404)
        again = get(app, f"{SESSIONS}/{made['id']}/export", **mine).json()
        again["turns"].pop()
        for one in (again, document):
            one.pop("created_at")
        assert again == document


def test_import_for_another_model(kept: App) -> None:
    """Its tokens are left out, and the messages rendered."""
    _, document = exported(kept)
    for turn in document["turns"]:
        turn["basis"] = "another"
        turn["tokens"] = [10**9]
    made = post(kept, f"{SESSIONS}/import", document).json()
    say(kept, made["id"], "four")
    turns = history(kept).store.turns.path(look(kept, made["id"])["head"])
    assert [t.basis for t in turns] == ["", "", "", history(kept).basis]
    assert turns[3].whole
    # What it is exported as can be imported as well.
    again = get(kept, f"{SESSIONS}/{made['id']}/export").json()
    assert again["turns"][0]["tokens"] == []
    copy = post(kept, f"{SESSIONS}/import", again).json()
    assert copy["turn_count"] == 4
    said = [text_of(say(kept, id, "five")) for id in (made["id"], copy["id"])]
    assert said[0] == said[1]


def test_import_of_messages_alone(kept: App) -> None:
    turn = {
        "messages": USER, "finish_reason": "stop",
        "reply": {"role": "assistant", "content": "hi"},
    }  # fmt: skip
    document = {"format": "gemmakv session", "version": 1, "turns": [turn]}
    made = post(kept, f"{SESSIONS}/import", document).json()
    say(kept, made["id"], "two")
    assert look(kept, made["id"])["turn_count"] == 2


CALL = {
    "type": "function", "id": "call_1",
    "function": {"name": "rain", "arguments": {"days": 1}},
}  # fmt: skip


def turn(said: Any, reply: Any) -> dict[str, Any]:
    return {
        "messages": said, "finish_reason": "stop",
        "reply": {"role": "assistant", **reply},
    }  # fmt: skip


def imported(app: App, *turns: Any, **fields: Any) -> Any:
    document = {"format": "gemmakv session", "version": 1, "turns": turns}
    return post(app, f"{SESSIONS}/import", {**document, **fields})


def test_import_of_a_call_keeps_its_form(kept: App) -> None:
    reply = {"content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3 mm"}
    given = [
        turn(USER, reply), turn([result], {"content": "3 mm of rain"}),
        turn([*USER, {"role": "assistant", **reply}, result],
             {"content": "x"}),
    ]  # fmt: skip
    found = look(kept, imported(kept, *given).json()["id"])
    assert found["turns"][0]["reply"] == given[0]["reply"]
    assert found["turns"][2]["messages"] == given[2]["messages"]
    # Also where a call is the last thing that was said.
    assert imported(kept, given[0]).status_code == 200


def test_import_refuses_what_cannot_go_on(kept: App, folder: Path) -> None:
    assert kept.service is not None
    good = turn(USER, {"content": "a"})
    assert imported(kept, good, good, system="Be brief.").status_code == 200
    for turns in (
        [turn([*USER, *USER], {"content": "a"})],
        [good, turn([{"role": "system", "content": "x"}], {"content": "a"})],
        [good, turn([{"role": "assistant", "content": "x"}],
                    {"content": "a"})],
    ):  # fmt: skip
        assert imported(kept, *turns).status_code == 200
    before = rows(folder)
    for turns, at, place in (
        ([good], -1, ""),
        ([turn([*USER, *USER], {"content": "a"}), good], 2,
         "turns[1].messages[0].content"),
        ([turn([*USER, *USER], {"content": "a"}), good], 3,
         "turns[1].reply.content"),
    ):  # fmt: skip
        kept.service.prompts.template = Refusing(at)
        found = error(imported(kept, *turns), 400)
        assert found["code"] == "turns_not_continuable"
        assert found["message"].startswith("turns: "), found
        assert place in found["message"]
        assert rows(folder) == before


def test_import_nothing(kept: App) -> None:
    document = {"format": "gemmakv session", "version": 1, "turns": []}
    made = post(kept, f"{SESSIONS}/import", document).json()
    assert made["turn_count"] == 0
    say(kept, made["id"], "one")


@pytest.mark.parametrize(
    "path, value, name",
    [
        (["format"], "x", "format"),
        (["version"], 2, "version"),
        (["turns"], None, "turns"),
        (["name"], 3, "name"),
        (["turns", 1, "tokens"], [], "turns[2].whole"),
        (["turns", 1, "tokens"], [-1], "turns[1].tokens"),
        (["turns", 1, "tokens"], [1 << 31], "turns[1].tokens"),
        (["turns", 1, "tokens"], [1 << 70], "turns[1].tokens"),
        (["turns", 1, "tokens", 0], "x", "turns[1].tokens"),
        (["turns", 1, "tokens", 0], True, "turns[1].tokens"),
        (["turns", 0, "tokens", 0], 300, "turns[0].tokens"),
        (["turns", 0, "whole"], False, "turns[0].whole"),
        (["turns", 1, "basis"], "x", "turns[1].whole"),
        (["turns", 1, "messages"], [], "turns[1].messages"),
        (["turns", 1, "messages", 0, "role"], "x", "turns[1].messages[0].role"),
        (["turns", 1, "reply", "role"], "user", "turns[1].reply.role"),
        (["turns", 1, "reply", "content"], 3, "turns[1].reply.content"),
        (["turns", 1, "reply"], [], "turns[1].reply"),
        (["turns", 1, "tools"], [{"type": "x"}], "turns[1].tools"),
        (["turns", 1, "finish_reason"], "x", "turns[1].finish_reason"),
        (["turns", 1, "usage"], {"prompt_tokens": -1},
         "turns[1].usage.prompt_tokens"),
        (["turns", 1, "created_at"], -1, "turns[1].created_at"),
        (["turns", 1, "created_at"], 1e300, "turns[1].created_at"),
    ],
)  # fmt: skip
def test_import_refuses(
    kept: App, folder: Path, path: list[Any], value: Any, name: str
) -> None:
    _, document = exported(kept)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    before = rows(folder)
    found = error(post(kept, f"{SESSIONS}/import", document), 400)
    assert name in found["message"], found
    assert rows(folder) == before
    assert len(get(kept, SESSIONS).json()["data"]) == 1


@pytest.mark.parametrize("name, found", [
    (" ", "' '"), ("\u00a0", "'\\xa0'"), ("a\0", "U+0000 at 1"),
    ("\u202egnp.exe", "U+202E at 0"), ("a\nb", "U+000A at 1"),
    ("a\u2066b", "U+2066 at 1"), ("\ufeff", "U+FEFF at 0"),
])  # fmt: skip
def test_names_that_lists_and_logs_would_show_wrong(
    kept: App, name: str, found: str
) -> None:
    made = post(kept, "/v1/sessions", {"name": "plain"}).json()["id"]
    document = get(kept, f"/v1/sessions/{made}/export").json()
    for path, body in (
        ("/v1/sessions", {}), (f"/v1/sessions/{made}", {}),
        (f"/v1/sessions/{made}/fork", {}), ("/v1/sessions/import", document),
    ):  # fmt: skip
        refused = error(post(kept, path, {**body, "name": name}), 400)
        assert refused["param"] == "name"
        assert refused["message"].startswith("name: ")
        assert found in refused["message"]
        assert len(refused["message"].splitlines()) == 1
    assert get(kept, f"/v1/sessions/{made}").json()["name"] == "plain"


@pytest.mark.parametrize("name", [
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "می\u200cخواهم", "שלום",
    "a  b", "e\u0301",
])  # fmt: skip
def test_names_of_any_script(kept: App, name: str) -> None:
    assert post(kept, "/v1/sessions", {"name": name}).json()["name"] == name
