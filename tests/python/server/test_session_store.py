"""The store alone: what there is, is what something leads to."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from gemmakv.server._store import (
    ANYBODY,
    FILE,
    KEPT,
    RequestError,
    Store,
    Turn,
    new_id,
)

TENANT = "t"


def turn_after(store: Store, parent: str | None, **fields: object) -> Turn:
    depth = 1
    if parent is not None:
        depth += len(store.path(parent))
    id = new_id("resp")
    given = {
        "id": id, "tenant": TENANT, "parent": parent, "depth": depth,
        "system": None, "tools": [], "reply": {"role": "assistant"},
        "messages": [{"role": "user", "content": id}], "reason": "stop",
        "usage": {}, "basis": "", "whole": parent is None,
        "tokens": np.frombuffer(id.encode(), np.uint8), **fields,
    }  # fmt: skip
    return Turn(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_random_trees(tmp_path: Path, seed: int) -> None:
    """Against a model that keeps paths as lists."""
    chance = random.Random(seed)
    store = Store(str(tmp_path), 30)
    sessions: dict[str, list[str]] = {}
    responses: dict[str, list[str]] = {}  # those that are kept
    for _ in range(120):
        act = chance.choice(
            ["create", "say", "say", "say", "fork", "rewind", "delete",
             "respond", "respond", "forget"]
        )  # fmt: skip
        one = chance.choice(list(sessions)) if sessions else None
        if act == "create":
            sessions[store.create(TENANT, None, None).id] = []
        elif act == "respond":
            known = [*responses, *(p[-1] for p in sessions.values() if p)]
            parent = chance.choice([None, *known])
            path = [] if parent is None else ids(store, parent)
            turn = turn_after(store, parent, state=KEPT)
            store.add(turn, None, None)
            responses[turn.id] = [*path, turn.id]
        elif act == "forget" and responses:
            gone = chance.choice(list(responses))
            store.delete_response(TENANT, gone)
            del responses[gone]
        elif one is None:
            continue
        elif act == "say":
            store.lease(TENANT, one, "me")
            parent = sessions[one][-1] if sessions[one] else None
            turn = turn_after(store, parent)
            store.add(turn, one, "me")
            sessions[one].append(turn.id)
        elif act == "fork":
            path = sessions[one]
            length = chance.randint(1, len(path)) if path else 0
            at = path[length - 1] if length else None
            other = store.fork(TENANT, one, at, None)
            sessions[other.id] = path[:length]
            assert other.turns == length
        elif act == "rewind":
            length = chance.randint(0, len(sessions[one]))
            at = sessions[one][length - 1] if length else None
            assert store.rewind(TENANT, one, at).turns == length
            del sessions[one][length:]
        elif act == "delete":
            store.delete(TENANT, one)
            del sessions[one]
        paths = [*sessions.values(), *responses.values()]
        check(store, tmp_path, paths)
        for id, path in sessions.items():
            found = store.session(TENANT, id)
            assert found.head == (path[-1] if path else None)
            assert found.turns == len(path)
    store.close()


def ids(store: Store, turn: str) -> list[str]:
    return [one.id for one in store.path(turn)]


def check(store: Store, folder: Path, paths: list[list[str]]) -> None:
    """Exactly the turns of `paths` are there, with all their tokens."""
    with sqlite3.connect(folder / FILE) as db:
        found = {row[0] for row in db.execute("SELECT id FROM turns")}
        assert not db.execute("PRAGMA foreign_key_check").fetchall()
    assert found == {turn for path in paths for turn in path}
    for path in paths:
        if path:
            assert ids(store, path[-1]) == path
            tokens = store.tokens(path[-1]).astype(np.uint8).tobytes()
            assert tokens == "".join(path).encode()


def test_tokens_begin_where_they_are_whole(tmp_path: Path) -> None:
    store = Store(str(tmp_path), 30)
    parent = None
    for i in range(5):
        turn = turn_after(store, parent, whole=i in (0, 3), tokens=[i, i])
        store.add(turn, None, None)
        parent = turn.id
    assert parent is not None
    assert store.tokens(parent).tolist() == [3, 3, 4, 4]
    store.close()


def test_nothing_half(tmp_path: Path) -> None:
    """A turn whose session is somebody else's is not kept either."""
    store = Store(str(tmp_path), 30)
    session = store.create(TENANT, None, None)
    store.lease(TENANT, session.id, "other")
    with pytest.raises(RequestError) as caught:
        store.add(turn_after(store, None, state=ANYBODY), session.id, "me")
    assert caught.value.status == 409
    check(store, tmp_path, [])
    gone = turn_after(store, None)
    with pytest.raises(RequestError) as caught:
        store.add(turn_after(store, gone.id), None, None)
    assert caught.value.code == "sessions_failed"
    check(store, tmp_path, [])
    store.close()
    with pytest.raises(RequestError) as caught:
        store.session(TENANT, session.id)
    assert caught.value.code == "server_stopping"


def test_a_lease_whose_end_cannot_be_written_is_over(tmp_path: Path) -> None:
    """A full disk: the next turn must not wait for a lease of nobody."""
    store = Store(str(tmp_path), 30)
    other = Store(str(tmp_path), 30)
    id = store.create(TENANT, None, None).id
    store.lease(TENANT, id, "first")
    assert store._db is not None
    store._db.execute("PRAGMA query_only = ON")
    with pytest.raises(RequestError):
        store.release(id, "first")
    store._db.execute("PRAGMA query_only = OFF")
    with pytest.raises(RequestError, match="runs in it"):
        other.lease(TENANT, id, "second")
    store.lease(TENANT, id, "second")
    # Of the second one nothing was given up.
    with pytest.raises(RequestError, match="runs in it"):
        store.lease(TENANT, id, "third")
    store.close()
    other.close()


def test_a_session_was_updated_when_its_turn_ended(tmp_path: Path) -> None:
    """Not when it began: a new name meanwhile was later than the turn."""
    store = Store(str(tmp_path), 30)
    id = store.create(TENANT, None, None).id
    store.lease(TENANT, id, "me")
    turn = turn_after(store, None)
    named = store.rename(TENANT, id, "while it runs")
    store.add(turn, id, "me")
    assert turn.created < named.updated
    assert store.session(TENANT, id).updated >= named.updated
    store.close()
