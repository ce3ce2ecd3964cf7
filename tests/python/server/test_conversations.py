"""/v1/conversations, by the SDK's own client and types."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from gemmakv.server.settings import Limits
from support.asgi import NAME, get, post
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

pytestmark = needs("openai", "httpx2")
PATH, RESPONSES = "/v1/conversations", "/v1/responses"


def by_sdk(app: App, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `work` gives with a client that takes no other types than its
    own.
    """
    import httpx2
    import openai

    async def main() -> Any:
        transport = httpx2.ASGITransport(app=app)
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport),
            _strict_response_validation=True,
        ) as client:
            return await work(client)

    return asyncio.run(main())


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def respond(app: App, conversation: str, text: str, **fields: Any) -> Any:
    body = {
        "model": NAME, "input": text, "conversation": conversation,
        "max_output_tokens": 4, "temperature": 1, **fields,
    }  # fmt: skip
    response = post(app, RESPONSES, body)
    assert response.status_code == 200, response.text
    return response.json()


def make(app: App, *items: dict[str, Any], **fields: Any) -> str:
    response = post(app, PATH, {"items": [*items], **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def add(app: App, conversation: str, *items: dict[str, Any]) -> list[str]:
    response = post(app, f"{PATH}/{conversation}/items", {"items": [*items]})
    assert response.status_code == 200, response.text
    return [one["id"] for one in response.json()["data"]]


def listed(app: App, conversation: str, query: str = "order=asc") -> Any:
    response = get(app, f"{PATH}/{conversation}/items?{query}")
    assert response.status_code == 200, response.text
    return response.json()["data"]


def texts(items: list[Any]) -> list[Any]:
    return [
        one["content"][0]["text"] if one["type"] == "message" else one["type"]
        for one in items
    ]


def test_the_sdk_has_a_conversation(kept: App) -> None:
    async def work(client: Any) -> None:
        items = client.conversations.items
        made = await client.conversations.create(
            items=[said("user", "My name is Ada.")], metadata={"topic": "me"}
        )
        assert made.object == "conversation" and made.created_at > 0
        assert made.metadata == {"topic": "me"}
        id = made.id
        assert await client.conversations.retrieve(id) == made
        changed = await client.conversations.update(id, metadata={"a": "b"})
        assert changed.metadata == {"a": "b"}
        reply = await client.responses.create(
            model=NAME, conversation=id, input="Who am I?",
            max_output_tokens=4,
        )  # fmt: skip
        assert reply.conversation.id == id
        added = await items.create(id, items=[said("user", "And you?")])
        assert [one.role for one in added.data] == ["user"]
        assert not added.has_more
        found = [one async for one in items.list(id, order="asc", limit=2)]
        assert [one.role for one in found] == ["user"] * 2 + [
            "assistant", "user",
        ]  # fmt: skip
        assert found[2].id == reply.output[0].id
        assert found[2].content[0].text == reply.output_text
        newest = await items.list(id, limit=1)
        assert newest.data == found[-1:] and newest.has_more
        one = await items.retrieve(found[0].id, conversation_id=id)
        assert one.content[0].text == "My name is Ada."
        assert await items.delete(found[3].id, conversation_id=id) == changed
        left = await items.list(id)
        assert left.data == found[2::-1]
        gone = await client.conversations.delete(id)
        assert gone.deleted and gone.id == id

    by_sdk(kept, work)


def test_a_conversation_is_a_session(kept: App) -> None:
    id = make(kept, said("user", "one"), metadata={"k": "v"})
    found = get(kept, f"/v1/sessions/{id}").json()
    assert (found["object"], found["turns"]) == ("session", [])
    session = post(kept, "/v1/sessions", {"name": "mine"}).json()["id"]
    shown = get(kept, f"{PATH}/{session}").json()
    assert (shown["id"], shown["metadata"]) == (session, {})
    delete(kept, f"{PATH}/{session}")
    assert get(kept, f"/v1/sessions/{session}").status_code == 404


def test_items_without_a_reply_are_read_first(
    kept: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts are those of the same items in one request."""
    prompts = prompts_of(kept, monkeypatch)
    begin = [said("user", "one"), said("assistant", "two")]
    id = make(kept, *begin)
    first = respond(kept, id, "three")
    respond(kept, make(kept), [*begin, said("user", "three")])
    assert prompts[0] == prompts[1]
    more = said("user", "four")
    add(kept, id, more)
    counted = post(
        kept, f"{RESPONSES}/input_tokens", {"conversation": id, "input": "five"}
    ).json()
    respond(kept, id, "five")
    fields = {"input": [more, said("user", "five")], "max_output_tokens": 4}
    fields |= {"previous_response_id": first["id"], "temperature": 1}
    assert post(kept, RESPONSES, fields).status_code == 200
    assert prompts[2] == prompts[3]
    assert counted["input_tokens"] == len(prompts[2])


def test_items_have_their_ids_for_good(kept: App) -> None:
    id = make(kept, said("user", "one"))
    call = {
        "type": "function_call", "call_id": "call_1", "name": "f",
        "arguments": '{"a": 1}',
    }  # fmt: skip
    result = {
        "type": "function_call_output", "call_id": "call_1", "output": "3",
    }  # fmt: skip
    search = {"type": "web_search_call", "status": "completed", "action": {}}
    add(kept, id, call, result, search)
    before = listed(kept, id)
    assert texts(before) == [
        "one", "function_call", "function_call_output", "web_search_call",
    ]  # fmt: skip
    assert before[1]["arguments"] == call["arguments"]
    respond(kept, id, "two")
    after = listed(kept, id)
    assert after[:4] == before and texts(after[4:5]) == ["two"]
    respond(kept, id, "three")
    ids = [one["id"] for one in listed(kept, id)]
    assert ids[:6] == [one["id"] for one in after]
    assert len(set(ids)) == len(ids) == 8
    for one in after:
        found = get(kept, f"{PATH}/{id}/items/{one['id']}").json()
        assert found == one


def test_a_turn_that_fails_leaves_them(kept: App) -> None:
    id = make(kept, said("user", "one"))
    body = {"conversation": id, "input": "long " * 9000}
    assert post(kept, RESPONSES, body).status_code == 400
    assert texts(listed(kept, id)) == ["one"]


def test_forks_and_turns_that_are_taken_back(kept: App) -> None:
    id = make(kept)
    turn = respond(kept, id, "one")["id"]
    add(kept, id, said("user", "two"))
    path = f"/v1/sessions/{id}"
    fork = post(kept, f"{path}/fork", {}).json()["id"]
    other = post(kept, f"{path}/fork", {"turn": turn}).json()["id"]
    assert listed(kept, fork) == listed(kept, id)
    assert listed(kept, other) == listed(kept, id)[:2]
    again = {
        "session": id, "replaces": turn, "max_tokens": 4,
        "messages": [{"role": "user", "content": "one"}],
    }  # fmt: skip
    assert post(kept, "/v1/chat/completions", again).status_code == 200
    assert texts(listed(kept, id))[::2] == ["one", "two"]
    post(kept, f"{path}/rewind", {"turn": None})
    assert listed(kept, id) == []


def test_only_items_without_a_reply_are_deleted(kept: App) -> None:
    id = make(kept, said("user", "one"))
    respond(kept, id, "two")
    gone, stays = add(kept, id, said("user", "three"), said("user", "four"))
    path = f"{PATH}/{id}/items"
    assert delete(kept, f"{path}/{gone}").json()["id"] == id
    assert texts(listed(kept, id))[3:] == ["four"]
    for one in listed(kept, id)[:3]:
        found = error(delete(kept, f"{path}/{one['id']}"), 400)
        assert (found["param"], found["code"]) == ("item_id", "item_has_reply")
    for response in (delete(kept, f"{path}/{gone}"), get(kept, path + "/x")):
        found = error(response, 404)
        assert (found["param"], found["code"]) == ("item_id", "item_not_found")
    assert listed(kept, id)[-1]["id"] == stays


def test_a_conversation_in_use_takes_no_items(kept: App) -> None:
    id = make(kept)
    store = history(kept).store
    store.leases.take("", id, "somebody")
    found = error(
        post(kept, f"{PATH}/{id}/items", {"items": [said("user", "x")]}), 409
    )
    assert (found["param"], found["code"]) == (
        "conversation_id", "session_busy",
    )  # fmt: skip
    changed = post(kept, f"{PATH}/{id}", {"metadata": {"a": "b"}})
    assert changed.json()["metadata"] == {"a": "b"}
    store.leases.release(id, "somebody")


def test_there_are_as_many_items_as_a_request_may_have(
    shared: gemmakv.Gemma, folder: Path
) -> None:
    for app in serving(shared, folder, limits=Limits(messages=3)):
        id = make(app, said("user", "x"), said("user", "y"))
        body = {"items": [said("user", "x")] * 2}
        found = error(post(app, f"{PATH}/{id}/items", body), 400)
        assert found["param"] == "items"
        assert texts(listed(app, id)) == ["x", "y"]


def test_what_means_nothing_here_is_named(kept: App) -> None:
    name = "x-gemmakv-ignored"
    id = make(kept)
    body = {"items": [said("user", "x"), {"type": "web_search_call"}]}
    added = post(kept, f"{PATH}/{id}/items?include[]=reasoning", body)
    assert added.headers[name] == "items[1], include"
    first = added.json()["first_id"]
    for path in ("items?include=a", f"items/{first}?include[]=a"):
        assert get(kept, f"{PATH}/{id}/{path}").headers[name] == "include"
    assert name not in get(kept, f"{PATH}/{id}/items").headers


MANY = [said("user", "x")] * 21


@pytest.mark.parametrize("body, param", [
    ({"items": MANY}, "items"),
    ({"items": "x"}, "items"),
    ({"items": [{"role": "user"}]}, "items[0].content"),
    ({"items": [{"content": "x"}]}, "items[0].type"),
    ({"items": [said("king", "x")]}, "items[0].role"),
    ({"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
    ({"items": [{"type": "function_call", "call_id": "c", "name": "f",
                 "arguments": "{"}]}, "items[0].arguments"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a" * 65: "x"}}, "metadata." + "a" * 65),
])  # fmt: skip
def test_bad_bodies(kept: App, body: dict[str, Any], param: str) -> None:
    assert error(post(kept, PATH, body), 400)["param"] == param
    assert get(kept, "/v1/sessions").json()["data"] == []


@pytest.mark.parametrize("query, param", [
    ("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"),
    ("after=msg_none", "after"),
])  # fmt: skip
def test_bad_queries(kept: App, query: str, param: str) -> None:
    path = f"{PATH}/{make(kept)}/items?{query}"
    assert error(get(kept, path), 400)["param"] == param


def test_others_conversations_are_not_there(keyed: App) -> None:
    mine, others = bearer(KEYS[0]), bearer(KEYS[1])
    made = post(keyed, PATH, {"items": [said("user", "x")]}, **mine).json()
    path = f"{PATH}/{made['id']}"
    item = get(keyed, f"{path}/items", **mine).json()["first_id"]
    for response in (
        get(keyed, path, **others),
        post(keyed, path, {"metadata": None}, **others),
        delete(keyed, path, **others),
        get(keyed, f"{path}/items", **others),
        post(keyed, f"{path}/items", {"items": []}, **others),
        get(keyed, f"{path}/items/{item}", **others),
        delete(keyed, f"{path}/items/{item}", **others),
    ):
        assert error(response, 404)["param"] == "conversation_id"
    assert get(keyed, path, **mine).json() == made


def test_off_says_how(app: App) -> None:
    assert error(post(app, PATH, {}), 400)["code"] == "sessions_off"
    assert error(get(app, f"{PATH}/x"), 400)["code"] == "sessions_off"
