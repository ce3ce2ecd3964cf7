"""The store alone: what there is, is what something leads to."""

from __future__ import annotations

import random
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sqlalchemy", reason="the extra `server`")

from gemmakv.conversations import (
    ANYBODY,
    KEPT,
    NoResponse,
    SessionBusy,
    StoreClosed,
    StoreError,
    StoreFailed,
    Turn,
    _clock,
    _database,
    new_id,
)
from gemmakv.conversations._database import FILE
from gemmakv.conversations._store import Conversations

TENANT = "t"


def turn_after(
    store: Conversations, parent: str | None, **fields: object
) -> Turn:
    depth = 1
    if parent is not None:
        depth += len(store.turns.path(parent))
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
    store = Conversations.open(tmp_path)
    db = sqlite3.connect(tmp_path / FILE)
    sessions: dict[str, list[str]] = {}
    responses: dict[str, list[str]] = {}  # those that are kept
    for _ in range(120):
        act = chance.choice(
            ["create", "say", "say", "say", "fork", "rewind", "delete",
             "respond", "respond", "forget"]
        )  # fmt: skip
        one = chance.choice(list(sessions)) if sessions else None
        if act == "create":
            sessions[store.sessions.create(TENANT, None, None).id] = []
        elif act == "respond":
            known = [*responses, *(p[-1] for p in sessions.values() if p)]
            parent = chance.choice([None, *known])
            path = [] if parent is None else ids(store, parent)
            turn = turn_after(store, parent, state=KEPT)
            store.turns.add(turn, None, None)
            responses[turn.id] = [*path, turn.id]
        elif act == "forget" and responses:
            gone = chance.choice(list(responses))
            store.turns.delete_response(TENANT, gone)
            del responses[gone]
        elif one is None:
            continue
        elif act == "say":
            store.leases.take(TENANT, one, "me")
            parent = sessions[one][-1] if sessions[one] else None
            turn = turn_after(store, parent)
            store.turns.add(turn, one, "me")
            sessions[one].append(turn.id)
        elif act == "fork":
            path = sessions[one]
            length = chance.randint(1, len(path)) if path else 0
            at = path[length - 1] if length else None
            other = store.sessions.fork(TENANT, one, at, None)
            sessions[other.id] = path[:length]
            assert other.turns == length
        elif act == "rewind":
            length = chance.randint(0, len(sessions[one]))
            at = sessions[one][length - 1] if length else None
            assert store.sessions.rewind(TENANT, one, at).turns == length
            del sessions[one][length:]
        elif act == "delete":
            store.sessions.delete(TENANT, one)
            del sessions[one]
        paths = [*sessions.values(), *responses.values()]
        check(store, tmp_path, paths, db)
        for id, path in sessions.items():
            found = store.sessions.get(TENANT, id)
            assert found.head == (path[-1] if path else None)
            assert found.turns == len(path)
    db.close()
    store.close()


def ids(store: Conversations, turn: str) -> list[str]:
    return [one.id for one in store.turns.path(turn)]


def check(
    store: Conversations,
    folder: Path,
    paths: list[list[str]],
    db: sqlite3.Connection | None = None,
) -> None:
    """Exactly the turns of `paths` are there, with all their tokens."""
    db = db or sqlite3.connect(folder / FILE)
    found = {row[0] for row in db.execute("SELECT id FROM turns")}
    assert not db.execute("PRAGMA foreign_key_check").fetchall()
    assert found == {turn for path in paths for turn in path}
    for path in paths:
        if path:
            assert ids(store, path[-1]) == path
            tokens = store.turns.tokens(path[-1]).astype(np.uint8).tobytes()
            assert tokens == "".join(path).encode()


def test_a_new_database_waits_for_who_makes_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that began at once with an empty folder: of 400 four said that
    the database was locked, as SQLite waits for nobody there.
    """
    maker = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    maker.execute("BEGIN IMMEDIATE")
    with monkeypatch.context() as patch:
        # It ends while the other waits.
        patch.setattr(_database.time, "sleep", lambda seconds: maker.rollback())
        store = Conversations.open(tmp_path)
    assert not maker.in_transaction
    assert store.sessions.create(TENANT, None, None).turns == 0
    store.close()
    maker.close()


def test_tokens_begin_where_they_are_whole(tmp_path: Path) -> None:
    store = Conversations.open(tmp_path)
    parent = None
    for i in range(5):
        turn = turn_after(store, parent, whole=i in (0, 3), tokens=[i, i])
        store.turns.add(turn, None, None)
        parent = turn.id
    assert parent is not None
    assert store.turns.tokens(parent).tolist() == [3, 3, 4, 4]
    store.close()


def test_nothing_half(tmp_path: Path) -> None:
    """A turn whose session is somebody else's is not kept either."""
    store = Conversations.open(tmp_path)
    session = store.sessions.create(TENANT, None, None)
    store.leases.take(TENANT, session.id, "other")
    turn = turn_after(store, None, state=ANYBODY)
    with pytest.raises(SessionBusy):
        store.turns.add(turn, session.id, "me")
    check(store, tmp_path, [])
    gone = turn_after(store, None)
    with pytest.raises(StoreFailed):
        store.turns.add(turn_after(store, gone.id), None, None)
    check(store, tmp_path, [])
    store.close()
    with pytest.raises(StoreClosed):
        store.sessions.get(TENANT, session.id)


def test_a_lease_whose_end_cannot_be_written_is_over(tmp_path: Path) -> None:
    """A full disk: the next turn must not wait for a lease of nobody."""
    store = Conversations.open(tmp_path)
    other = Conversations.open(tmp_path)
    id = store.sessions.create(TENANT, None, None).id
    store.leases.take(TENANT, id, "first")
    store.database.driver.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError):
        store.leases.release(id, "first")
    store.database.driver.execute("PRAGMA query_only = OFF")
    with pytest.raises(SessionBusy):
        other.leases.take(TENANT, id, "second")
    store.leases.take(TENANT, id, "second")
    # Of the second one nothing was given up.
    with pytest.raises(SessionBusy):
        store.leases.take(TENANT, id, "third")
    store.close()
    other.close()


def test_a_session_was_updated_when_its_turn_ended(tmp_path: Path) -> None:
    """Not when it began: a new name meanwhile was later than the turn."""
    store = Conversations.open(tmp_path)
    id = store.sessions.create(TENANT, None, None).id
    store.leases.take(TENANT, id, "me")
    turn = turn_after(store, None)
    named = store.sessions.rename(TENANT, id, "while it runs")
    store.turns.add(turn, id, "me")
    assert turn.created < named.updated
    assert store.sessions.get(TENANT, id).updated >= named.updated
    store.close()


DAY = 86400.0


class Clocks:
    """What the store takes for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # What turns begin with is the real time.
        self.wall, self.uptime, self.boot = time.time(), 5000.0, "one "
        monkeypatch.setattr(_clock.time, "time", lambda: self.wall)
        monkeypatch.setattr(_clock, "uptime", lambda: self.uptime)
        self._monkeypatch = monkeypatch

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.uptime += seconds

    def restart(self, off_for: float) -> None:
        """The machine is off for so long."""
        self.wall += off_for
        self.uptime = 20.0
        self.boot += "more "
        self._monkeypatch.setattr(_clock, "BOOT", self.boot)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def response_of(store: Conversations) -> str:
    turn = turn_after(store, None, state=KEPT)
    store.turns.add(turn, None, None)
    return turn.id


def is_kept(store: Conversations, id: str) -> bool:
    try:
        return store.turns.get(TENANT, id).id == id
    except NoResponse:
        return False


@pytest.mark.parametrize("days", [1, 31, 20_000, -1, -31, -20_000])
def test_a_clock_that_is_wrong_for_a_while_deletes_no_response(
    tmp_path: Path, clocks: Clocks, days: float
) -> None:
    store = Conversations.open(tmp_path)
    before = response_of(store)
    clocks.pass_by(DAY)
    clocks.wall += days * DAY
    during = response_of(store)
    for id in (before, during):
        assert is_kept(store, id)
    store.close()
    store = Conversations.open(tmp_path)  # and a server that is started then
    clocks.pass_by(3600)
    clocks.wall -= days * DAY
    after = response_of(store)
    for id in (before, during, after):
        assert is_kept(store, id)
    # Their time comes all the same.
    clocks.pass_by(29.5 * DAY)
    response_of(store)
    assert [is_kept(store, id) for id in (before, during, after)] == [
        False, True, True,
    ]  # fmt: skip
    clocks.pass_by(DAY)
    response_of(store)
    for id in (before, during, after):
        assert not is_kept(store, id)
        assert store.turns.path(id) == []
    store.close()


def test_time_goes_on_while_the_machine_is_off(
    tmp_path: Path, clocks: Clocks
) -> None:
    store = Conversations.open(tmp_path)
    first = response_of(store)
    clocks.pass_by(10 * DAY)
    second = response_of(store)  # which notes the time
    store.close()
    clocks.restart(15 * DAY)
    store = Conversations.open(tmp_path)
    assert is_kept(store, first)
    clocks.pass_by(6 * DAY)
    assert [is_kept(store, one) for one in (first, second)] == [False, True]
    store.close()
    # A clock without a battery begins anew, and is set later.
    clocks.restart(-56 * 365 * DAY)
    store = Conversations.open(tmp_path)
    third = response_of(store)
    clocks.wall += 56 * 365 * DAY
    clocks.pass_by(DAY)
    response_of(store)
    assert is_kept(store, second) and is_kept(store, third)
    clocks.pass_by(30 * DAY)
    assert not is_kept(store, second) and not is_kept(store, third)
    store.close()


@pytest.mark.parametrize("writes", [False, True])
def test_a_start_whose_clock_is_behind_ends_nothing_at_the_next(
    tmp_path: Path, clocks: Clocks, writes: bool
) -> None:
    store = Conversations.open(tmp_path)
    first = response_of(store)
    store.close()
    years = 6 * 365 * DAY
    clocks.restart(DAY - years)
    store = Conversations.open(tmp_path)
    other = Conversations.open(tmp_path)
    clocks.pass_by(10 * DAY)
    second = response_of(store) if writes else first
    clocks.pass_by(DAY)
    response_of(other)  # whose clock is of the start, too
    store.close()
    other.close()
    clocks.restart(years + DAY)
    store = Conversations.open(tmp_path)
    assert is_kept(store, first) and is_kept(store, second)
    clocks.pass_by(16.5 * DAY)  # 29.5 in all, two of them off
    assert is_kept(store, first)
    clocks.pass_by(3 * DAY)
    assert not is_kept(store, first)
    assert is_kept(store, second) == writes
    clocks.pass_by(7 * DAY)
    assert is_kept(store, second) == writes
    clocks.pass_by(3 * DAY)
    assert not is_kept(store, second)
    store.close()


def test_the_newest_session_is_the_one_made_last(
    tmp_path: Path, clocks: Clocks
) -> None:
    """A clock that was put back had put new ones behind older ones, and made
    a session branch off its own fork.
    """
    store = Conversations.open(tmp_path)
    first = store.sessions.create(TENANT, None, None).id
    store.leases.take(TENANT, first, "me")
    turn = turn_after(store, None)
    store.turns.add(turn, first, "me")
    clocks.wall -= DAY
    fork = store.sessions.fork(TENANT, first, turn.id, None).id
    last = store.sessions.create(TENANT, None, None).id
    assert [one.id for one in store.sessions.newest(TENANT, 9, None)[0]] == [
        last, fork, first,
    ]  # fmt: skip
    found, more = store.sessions.newest(TENANT, 1, last)
    assert ([one.id for one in found], more) == ([fork], True)
    branches = store.sessions.tree(TENANT, 9, None)[0]
    parents = {b.session.id: b.parent for b in branches}
    assert parents == {first: None, fork: first, last: None}
    store.close()


def test_a_database_of_before_there_was_a_clock_in_it(
    tmp_path: Path, clocks: Clocks
) -> None:
    """Its responses expire as they would have; what an earlier version adds
    to it later, too.
    """
    store = Conversations.open(tmp_path)
    old, new = response_of(store), response_of(store)
    store.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("DROP INDEX turns_since")
        db.execute("DROP INDEX sessions_made")
        db.execute("DROP INDEX turns_follows")
        db.execute("DROP INDEX sessions_parent")
        for column in ("since", "plain", "follows"):
            db.execute(f"ALTER TABLE turns DROP COLUMN {column}")
        db.execute("DROP INDEX sessions_deleted")
        for column in (
            "model", "settings", "draft", "parent", "deleted", "number",
            "metadata", "pending",
        ):  # fmt: skip
            db.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
        db.execute("DROP TABLE alembic_version")
        db.execute("PRAGMA user_version = 1")
        db.execute("DELETE FROM facts WHERE name = 'clock'")
        db.execute(
            "CREATE INDEX turns_kept ON turns (created) WHERE state = 1"
        )
        db.execute(
            "CREATE INDEX sessions_tenant ON sessions (tenant, created, id)"
        )
        db.execute(
            "UPDATE turns SET created = ? WHERE id = ?",
            (clocks.wall - 29 * DAY, old),
        )
    db.close()
    store = Conversations.open(tmp_path)
    assert is_kept(store, old) and is_kept(store, new)
    clocks.pass_by(2 * DAY)
    third = response_of(store)
    store.database.driver.execute(
        "UPDATE turns SET since = NULL, created = ? WHERE id = ?",
        (clocks.wall, third),
    )
    assert not is_kept(store, old) and is_kept(store, new)
    clocks.pass_by(29 * DAY)
    assert not is_kept(store, new) and is_kept(store, third)
    clocks.pass_by(2 * DAY)
    assert not is_kept(store, third)
    store.close()
