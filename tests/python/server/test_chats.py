"""Chats and a server on one folder: each goes on with what the other has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv import Session
from gemmakv.chat._messages import Message
from gemmakv.chat.store import Record, from_store
from gemmakv.conversations._chat import ChatStore
from gemmakv.server.app import App
from support.asgi import get, post
from support.kept import error
from support.stored import records_of

CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"


def say(app: App, session: str, text: str) -> Any:
    body = {"session": session, "messages": [{"role": "user", "content": text}]}
    response = post(app, CHAT, body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def look(app: App, session: str) -> Any:
    return get(app, f"{SESSIONS}/{session}").json()


@pytest.fixture
def store(
    kept: App, folder: Path, shared: gemmakv.Gemma
) -> Iterator[ChatStore]:
    found = ChatStore.open(folder, shared.weights_fingerprint)
    yield found
    found.close()


def opened(store: ChatStore, gemma: gemmakv.Gemma, record: Record) -> Session:
    assert store.hold(record.id)
    state = store.read_state(record.id)
    session, _ = from_store(
        gemma, record, state, lambda: Session(gemma, options={"max_tokens": 5})
    )
    return session


def save(store: ChatStore, record: Record, session: Session) -> None:
    record.messages = [m for m in session.messages if m.role != "system"]
    record.system = session.system
    store.write_record(record, session._published())


def test_a_chat_goes_on_with_a_servers_session(
    kept: App, store: ChatStore, shared: gemmakv.Gemma
) -> None:
    made = post(kept, SESSIONS, {"name": "my trip", "system": "Be brief."})
    id = made.json()["id"]
    first = say(kept, id, "one")
    [record] = records_of(store)
    assert (record.name, record.turns) == ("my-trip", 1)
    assert record.messages == [Message("user", "one"), Message("model", first)]
    session = opened(store, shared, record)
    body = {"session": id, "messages": [{"role": "user", "content": "no"}]}
    found = error(post(kept, CHAT, body), 409)
    assert found["code"] == "session_busy" and "has it open" in found["message"]
    session.options["max_tokens"] = 5
    second = session.send("two").text
    save(store, record, session)
    store.release(id)
    seen = look(kept, id)
    assert (seen["name"], seen["turn_count"]) == ("my trip", 2)
    assert [turn["reply"]["content"] for turn in seen["turns"]] == [
        first, second,
    ]  # fmt: skip
    third = say(kept, id, "three")
    [record] = records_of(store)
    assert [m.text for m in record.messages[1::2]] == [first, second, third]
    # What the chat's cache held comes back, and the rest is computed.
    again = opened(store, shared, record)
    assert again.turns == 3 and len(again.cache) > 0
    assert again.send("four", max_tokens=5).text
    document = get(kept, f"{SESSIONS}/{id}/export").json()
    assert post(kept, f"{SESSIONS}/import", document).status_code == 200


def test_a_chat_is_on_the_page(
    kept: App, store: ChatStore, shared: gemmakv.Gemma
) -> None:
    session = Session(shared, "Be brief.", options={"max_tokens": 5})
    record = Record("main", options=dict(session.options))
    assert store.hold(record.id)
    session.send("one")
    session.messages = [
        *session.messages,
        Message("user", "two"),
        Message("model", "cut", incomplete=True),
    ]
    save(store, record, session)
    fork = Record("fork", parent=record.id, forked_at=1)
    other = session.fork()
    other.undo()
    assert store.hold(fork.id)
    save(store, fork, other)
    nodes = get(kept, f"{SESSIONS}/tree").json()["data"]
    assert [(one["name"], one["parent"]) for one in nodes] == [
        ("fork", record.id), ("main", None),
    ]  # fmt: skip
    assert nodes[0]["parent_turn_count"] == 1
    seen = look(kept, record.id)
    assert [turn["finish_reason"] for turn in seen["turns"]] == [
        "stop", "cancelled",
    ]  # fmt: skip
    for one in (record, fork):
        store.release(one.id)
    say(kept, record.id, "three")
    assert look(kept, record.id)["turn_count"] == 3
    document = get(kept, f"{SESSIONS}/{record.id}/export").json()
    taken = post(kept, f"{SESSIONS}/import", document)
    assert taken.status_code == 200, taken.text
    assert taken.json()["rendered"]["other_model"]
    # What a chat deletes is in the trash, and nowhere else.
    assert store.hold(fork.id)
    store.delete(fork.id)
    store.release(fork.id)
    assert get(kept, f"{SESSIONS}/{fork.id}").status_code == 404
    assert store.undelete(fork.id) is not None
    assert look(kept, fork.id)["turn_count"] == 1
