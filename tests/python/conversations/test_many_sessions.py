"""Lists, and tokens that sessions share, whatever else the database has."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sqlalchemy", reason="the extra `cli`")
pytest.importorskip("alembic", reason="the extra `cli`")

from gemmakv.chat._messages import Message
from gemmakv.chat._session_file import (
    KeptTokens,
    SessionState,
    SessionText,
    TokenPart,
)
from gemmakv.chat._transcript import common_exact
from gemmakv.chat.store import Record
from gemmakv.conversations._chat import ChatStore
from gemmakv.conversations._database import FILE
from gemmakv.conversations._store import Conversations
from support.records import TALK
from support.stored import records_of

WEIGHTS = "ab" * 16
HEAD = [*range(3, 303)]  # as of a long system text


def kept(
    store: ChatStore, turns: Sequence[Sequence[int]], kv_dtype: str = "bf16"
) -> Record:
    """Stores a session whose turns have these tokens."""
    messages = []
    for turn in turns:
        messages += [Message("user", f"{turn}"), Message("model", "so")]
    record = Record("main", messages=messages)
    assert store.hold(record.id)
    store.write_record(record, state_of(record, turns, kv_dtype))
    return record


def state_of(
    record: Record, turns: Sequence[Sequence[int]], kv_dtype: str = "bf16"
) -> SessionState:
    ids = np.array([id for turn in turns for id in turn], np.int32)
    ends = np.cumsum([len(turn) for turn in turns]).tolist()
    text = SessionText(
        template="gemma", system=None, messages=record.messages,
        overflow="error", options={}, capacity_tokens=8192, kv_dtype=kv_dtype,
        saved_prefill_tokens=0, ends=ends, think=None,
    )  # fmt: skip
    return SessionState(text, TokenPart("f" * 32, ids))


def tokens_of(store: ChatStore, record: Record) -> KeptTokens:
    state = store.read_state(record.id)
    assert state is not None
    return state.kept


def put_away(store: ChatStore, record: Record) -> KeptTokens:
    gone = tokens_of(store, record)
    store.delete(record.id)
    return gone


def test_the_most_that_a_session_shares(tmp_path: Path) -> None:
    """As when the tokens of each were compared."""
    chance = random.Random(1)
    store = ChatStore.open(tmp_path, WEIGHTS)

    def turns() -> list[list[int]]:
        found = [[chance.randrange(2) for _ in range(chance.randrange(1, 4))]
                 for _ in range(chance.randrange(1, 4))]  # fmt: skip
        if chance.random() < 0.5:
            found[0] = HEAD[: chance.choice([5, 127, 128, 300])] + found[0]
        return found

    records = [kept(store, turns()) for _ in range(80)]
    while len(records) > 20:
        gone = put_away(store, records.pop())
        others = [tokens_of(store, one) for one in records]
        found = store.shared(gone)
        most = max(common_exact(gone.ids, other.ids) for other in others)
        assert len(found.ids) <= most
        # Others may have ended their turns elsewhere in the same tokens.
        alike = [
            common_exact(gone.ids, one.ids) == most
            and {end for end in one.ends if end < most} <= {*gone.ends}
            for one in others
        ]
        assert len(found.ids) == most or not any(alike)
    store.close()


def test_who_shares_tokens(tmp_path: Path) -> None:
    store = ChatStore.open(tmp_path, WEIGHTS)
    one = kept(store, [[*HEAD, 7, 8], [1, 2, 3]])
    gone = tokens_of(store, one)
    assert len(store.shared(gone).ids) == len(gone.ids)
    fork = Record("fork", parent=one.id, messages=one.messages[:2])
    assert store.hold(fork.id)
    store.write_record(fork, state_of(fork, [[*HEAD, 7, 8]]))
    assert len(put_away(store, one).ids) == len(HEAD) + 5
    assert len(store.shared(gone).ids) == len(HEAD) + 2
    put_away(store, fork)
    assert len(store.shared(gone).ids) == 0
    kept(store, [[*HEAD, 9]], "int8")
    other = ChatStore.open(tmp_path, "cd" * 16)
    kept(other, [[*HEAD, 7]])
    other.close()
    assert len(store.shared(gone).ids) == 0
    kept(store, [[*HEAD, 9]])
    assert len(store.shared(gone).ids) == len(HEAD)
    assert store.undelete(fork.id) is not None
    assert len(store.shared(gone).ids) == len(HEAD) + 2
    store.close()


def statements(store: ChatStore, call: Any) -> list[str]:
    found: list[str] = []
    driver = store._database.driver
    driver.set_trace_callback(found.append)
    call()
    driver.set_trace_callback(None)
    return found


def test_others_are_not_read(tmp_path: Path) -> None:
    """Each `/undo` had read the tokens of all sessions, and each list all that
    was ever said.
    """
    store = ChatStore.open(tmp_path, WEIGHTS)
    gone = put_away(store, kept(store, [[1, 2], [3, 4], [5]]))
    counts = []
    for _ in range(2):
        for _ in range(9):
            kept(store, [[1, 2], [3, 4], [len(counts), 6], [7]])
        undo = statements(store, lambda: store.shared(gone))
        listed = statements(store, store.listing)
        counts.append((len(undo), len(listed)))
    assert counts[0] == counts[1]
    [query, *_] = [one for one in undo if "substr" in one]
    plan = store._database.driver.execute(f"EXPLAIN QUERY PLAN {query}")
    steps = [row[3] for row in plan]
    assert any("turns_follows" in step for step in steps), steps
    assert "RECURSIVE" not in "".join(listed)
    assert "turns.tokens" not in "".join(listed)
    store.close()


def test_nothing_is_read_where_nothing_was_written(tmp_path: Path) -> None:
    store, other = (ChatStore.open(tmp_path, WEIGHTS) for _ in range(2))
    before = store.version()
    assert store.version() == before
    record = Record("main", messages=TALK)
    assert other.hold(record.id)
    other.write_record(record)
    after = store.version()
    assert after != before
    assert store.version() == after
    assert store.hold(new := Record("new").id)
    store.write_record(Record("new", id=new))
    assert store.version() != after
    store.close()
    other.close()


def test_an_earlier_database_has_the_same_lists(tmp_path: Path) -> None:
    """Its sessions are found by what they share, and those for chats listed."""
    store = ChatStore.open(tmp_path, WEIGHTS)
    one = kept(store, [[*HEAD, 1], [2, 3]])
    kept(store, [[*HEAD, 4], [5]], "f32")
    bad = kept(store, [[8]])
    kept(store, [[9]])
    plain = store.listing().records
    store.close()
    columns = "SELECT id, plain, follows FROM turns ORDER BY id"
    with sqlite3.connect(tmp_path / FILE) as db:
        before = db.execute(columns).fetchall()
        [(calls,)] = db.execute(
            "SELECT head FROM sessions ORDER BY number DESC LIMIT 1"
        )
        db.execute(
            "UPDATE turns SET tools = '[{}]', plain = 0 WHERE id = ?", [calls]
        )
        [(damaged,)] = db.execute(
            "SELECT head FROM sessions WHERE id = ?", [bad.id]
        )
        db.execute("UPDATE turns SET messages = '[' WHERE id = ?", [damaged])
        db.execute("DROP INDEX turns_follows")
        db.execute("DROP INDEX sessions_made")
        db.execute("DROP INDEX sessions_parent")
        for table, column in (
            ("turns", "plain"), ("turns", "follows"), ("sessions", "number"),
            ("sessions", "metadata"), ("sessions", "pending"),
        ):  # fmt: skip
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        db.execute("CREATE INDEX sessions_made ON sessions (tenant)")
        db.execute("UPDATE alembic_version SET version_num = '0002'")
        db.execute("PRAGMA user_version = 2")
    db.close()
    server = Conversations.open(tmp_path)
    names = [found.id for found in server.sessions.newest("", 9, None)[0]]
    server.close()
    store = ChatStore.open(tmp_path, WEIGHTS)
    assert names[::-1] == [found.id for found in plain]
    listing = store.listing()
    assert listing.records == plain[:2]
    [line] = listing.lines
    assert bad.id in line and "cannot be read" in line
    with sqlite3.connect(tmp_path / FILE) as db:
        after = db.execute(columns).fetchall()
    db.close()
    assert [(row[0], row[2]) for row in after] == [
        (row[0], row[2]) for row in before
    ]
    assert {row[0]: row[1] for row in after if not row[1]} == {
        calls: 0, damaged: None,
    }  # fmt: skip
    assert store.hold(one.id)
    assert len(store.shared(put_away(store, one)).ids) == 0
    store.close()


def test_what_an_earlier_version_makes_later(tmp_path: Path) -> None:
    """Its process had the database open when this one brought it up."""
    store = ChatStore.open(tmp_path, WEIGHTS)
    one, two = kept(store, [[1]]), kept(store, [[2]])
    store.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE turns SET plain = NULL, follows = NULL")
        db.execute("UPDATE sessions SET number = NULL WHERE id = ?", [two.id])
    db.close()
    store = ChatStore.open(tmp_path, WEIGHTS)
    assert [found.id for found in records_of(store)] == [one.id, two.id]
    one.messages += TALK[:2]
    assert store.hold(one.id)
    store.write_record(one)
    three = kept(store, [[3]])
    assert [found.id for found in records_of(store)] == [
        one.id, two.id, three.id,
    ]  # fmt: skip
    store.close()
    server = Conversations.open(tmp_path)
    after, found = None, []
    for _ in range(3):
        [page], _more = server.sessions.newest("", 1, after)
        after = page.id
        found.append(after)
    assert found == [three.id, two.id, one.id]
    server.close()
