"""The schema: of a new database, of earlier ones, of newer ones."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `server`")
pytest.importorskip("alembic", reason="the extra `server`")

from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import event
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

import gemmakv.conversations
from gemmakv.conversations import NewerStore, StoreFailed, _database, _tables
from gemmakv.conversations._chat import ChatStore
from gemmakv.conversations._database import _APPLICATION, FILE, Database
from gemmakv.conversations._store import Conversations
from support.stored import records_of

STEPS = Path(gemmakv.conversations.__file__).parent / "migrations"
# What servers made before there were revisions.
FIRST = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE turns (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL,
  parent TEXT REFERENCES turns (id), depth INTEGER NOT NULL,
  state INTEGER NOT NULL, created REAL NOT NULL, system TEXT,
  tools TEXT NOT NULL, messages TEXT NOT NULL, reply TEXT NOT NULL,
  reason TEXT NOT NULL, usage TEXT NOT NULL, params TEXT NOT NULL,
  basis TEXT NOT NULL, whole INTEGER NOT NULL, tokens BLOB NOT NULL%s
) STRICT;
CREATE INDEX turns_parent ON turns (parent);
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT, system TEXT,
  head TEXT REFERENCES turns (id), created REAL NOT NULL,
  updated REAL NOT NULL, lease TEXT, lease_until REAL NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX sessions_head ON sessions (head);
INSERT INTO facts VALUES ('secret', x'01020304');
INSERT INTO turns (id, tenant, parent, depth, state, created, system, tools,
  messages, reply, reason, usage, params, basis, whole, tokens)
VALUES ('resp_1', 't', NULL, 1, 0, 1.5, 'brief', '[]',
  '[{"role": "user", "content": "hi"}]',
  '{"role": "assistant", "content": "ho"}', 'stop', '{}', '{}', 'b', 1,
  x'0100000002000000');
INSERT INTO sessions VALUES ('sess_1', 't', 'my trip', 'brief', 'resp_1', 1.5,
  2.5, NULL, 0);
"""
LATER = """
CREATE INDEX turns_since ON turns (coalesce(since, created)) WHERE state = 1;
CREATE INDEX sessions_made ON sessions (tenant);
"""
EARLIER = """
CREATE INDEX turns_kept ON turns (created) WHERE state = 1;
CREATE INDEX sessions_tenant ON sessions (tenant, created, id);
"""


def make_first(folder: Path, later: bool = True) -> None:
    db = sqlite3.connect(folder / FILE)
    db.executescript(FIRST % (", since REAL" if later else ""))
    db.executescript(LATER if later else EARLIER)
    db.execute(f"PRAGMA application_id = {_APPLICATION}")
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()


def columns_of(folder: Path) -> dict[str, Any]:
    """Tables with their columns, and indexes."""
    db = sqlite3.connect(folder / FILE)
    tables = [
        row[0]
        for row in db.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table'"
        )
    ]
    found: dict[str, Any] = {
        # A primary key may be null in what SQLite was told first.
        name: [
            (row[1], row[2], bool(row[3]) or bool(row[5]), row[4], row[5])
            for row in db.execute(f"PRAGMA table_info({name})")
        ]
        for name in tables
    }
    found["strict"] = {
        row[1]: row[5]
        for row in db.execute("PRAGMA table_list")
        if row[1] in tables
    }
    found["indexes"] = {
        name: None if sql is None else "".join(sql.split()).lower()
        for name, sql in db.execute(
            "SELECT name, sql FROM sqlite_schema WHERE type = 'index'"
        )
    }
    found["user_version"] = db.execute("PRAGMA user_version").fetchone()
    db.close()
    return found


def test_the_last_step_is_the_schema_of_this_version() -> None:
    config = Config()
    config.set_main_option("script_location", str(STEPS))
    scripts = ScriptDirectory.from_config(config)
    steps = [one.revision for one in scripts.walk_revisions()]
    assert steps[::-1] == list(_tables.REVISIONS)


@pytest.mark.parametrize("later", [False, True])
def test_an_earlier_database_becomes_like_a_new_one(
    tmp_path: Path, later: bool
) -> None:
    (tmp_path / "old").mkdir()
    make_first(tmp_path / "old", later)
    Conversations.open(tmp_path / "new").close()
    store = Conversations.open(tmp_path / "old")
    [found], more = store.sessions.newest("t", 9, None)
    assert (found.name, found.turns, more) == ("my trip", 1, False)
    assert (found.model, found.settings, found.draft) == (None, {}, None)
    assert (found.metadata, found.pending) == (None, None)
    [turn] = store.turns.path(found.head, tokens=True)
    assert turn.tokens.tolist() == [1, 2]
    assert turn.reply == {"role": "assistant", "content": "ho"}
    store.close()
    old, new = columns_of(tmp_path / "old"), columns_of(tmp_path / "new")
    assert old == new
    Conversations.open(tmp_path / "old").close()
    assert columns_of(tmp_path / "old") == old


@pytest.mark.parametrize("beside", [False, True])
def test_an_earlier_database_that_can_only_be_read(
    tmp_path: Path, beside: bool
) -> None:
    """It is brought up in memory."""
    make_first(tmp_path)
    other = sqlite3.connect(tmp_path / FILE)
    if beside:  # what is in its log is read, too
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("UPDATE sessions SET name = 'your trip'")
        other.commit()
    before = (tmp_path / FILE).read_bytes()
    store = Conversations(Database(str(tmp_path), read_only=True))
    [found], more = store.sessions.newest("t", 9, None)
    assert found.name == ("your trip" if beside else "my trip")
    assert (found.turns, found.settings, more) == (1, {}, False)
    [turn] = store.turns.path(found.head, tokens=True)
    assert turn.tokens.tolist() == [1, 2]
    with pytest.raises(StoreFailed, match="can only be read"):
        store.sessions.rename("t", found.id, "other")
    store.close()
    assert (tmp_path / FILE).read_bytes() == before
    other.close()


def test_an_earlier_database_of_chats_that_can_only_be_read(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(golden / "sessions_v1.sqlite3", tmp_path / FILE)

    def refuse(folder: str, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(_database, "_make_private", refuse)
        store = ChatStore.open(tmp_path, "ab" * 16)
    found = records_of(store)
    assert not store.writable and len(found) == 2
    store.close()
    store = ChatStore.open(tmp_path, "ab" * 16)
    assert store.writable and records_of(store) == found
    store.close()


def test_a_step_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_first(tmp_path)
    before = columns_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("alembic.op.create_index", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Conversations.open(tmp_path)
    assert columns_of(tmp_path) == before
    Conversations.open(tmp_path).close()


@pytest.mark.parametrize(
    "newer",
    [
        "PRAGMA user_version = 99",
        "UPDATE alembic_version SET version_num = '0099'",
    ],
)
def test_a_newer_database_is_left_alone(tmp_path: Path, newer: str) -> None:
    Conversations.open(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute(newer)
    db.close()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(NewerStore, match="newer version"):
        Conversations.open(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("version", ["another's", "newer"])
def test_what_is_refused_keeps_its_journal(
    tmp_path: Path, version: str
) -> None:
    make_first(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        if version == "newer":
            db.execute("PRAGMA user_version = 99")
        else:
            db.execute("PRAGMA application_id = 99")
    db.close()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ValueError, match=version):
        Conversations.open(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [FILE]


def test_another_database_has_the_same_tables_and_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a transaction reads of a session before it writes is locked where a
    database has more than one writer.
    """
    dialect = postgresql.dialect()
    for table in _tables.metadata.sorted_tables:
        for made in (CreateTable(table), *map(CreateIndex, table.indexes)):
            words = str(made.compile(dialect=dialect))
            assert "STRICT" not in words and "rowid" not in words
    store = Conversations.open(tmp_path)
    id = store.sessions.create("t", "one", None).id
    seen: list[str] = []

    def look(db: Any, query: Any, *rest: Any) -> None:
        seen.append(str(query.compile(dialect=dialect)))

    assert store.database.engine is not None
    event.listen(store.database.engine, "before_execute", look)
    store.sessions.get("t", id)
    store.sessions.newest("t", 9, id)
    store.sessions.tree("t", 9, None)
    assert not any("FOR UPDATE" in query for query in seen)
    for call in (
        lambda: store.leases.take("t", id, "me"),
        lambda: store.leases.release(id, "me"),
        lambda: store.sessions.rename("t", id, "two"),
        lambda: store.sessions.annotate("t", id, {"a": "b"}),
        lambda: store.sessions.change_pending("t", id, lambda _: None),
        lambda: store.sessions.rewind("t", id, None),
        lambda: store.leases.hold(id),
        lambda: store.sessions.delete("t", id),
    ):
        seen.clear()
        call()
        first = seen[0]
        assert first.startswith("UPDATE") or "FOR UPDATE" in first, first
        assert "rowid" not in "".join(seen)
    store.close()


def test_a_response_expires_by_an_index(tmp_path: Path) -> None:
    """Otherwise each turn would read all turns that there ever were."""
    store = Conversations.open(tmp_path)
    plans: list[str] = []
    driver = store.database.driver
    driver.set_trace_callback(plans.append)
    store.turns.expire()
    driver.set_trace_callback(None)
    [query] = [one for one in plans if one.startswith("SELECT turns.id")]
    plan = driver.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()
    assert any("turns_since" in row[3] for row in plan), plan
    store.close()
