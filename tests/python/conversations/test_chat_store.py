"""What chats keep in the database: whole after any crash, a writer for each.

These are the tests of a folder store (test_folder_store.py) on the database.
Not among them: files that are half written, swept or put aside, as there are
none; damaged and newer records, which are in test_chat_pipe.py and
test_takeover.py; who holds a lock, in test_holding.py; the thread that writes
files of keys and values, and live sessions of records, which are the same.
"""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

pytest.importorskip("sqlalchemy", reason="the extra `cli`")

from gemmakv import Gemma, PrefixCache, Session
from gemmakv.chat._session import Message
from gemmakv.chat.store import Record, forget, from_store
from gemmakv.conversations import (
    KEPT,
    NoSession,
    StoreError,
    StoreFailed,
    StoreFull,
    Turn,
    _chat,
    _clock,
    _database,
    new_id,
)
from gemmakv.conversations._chat import ChatStore
from gemmakv.conversations._store import Conversations
from support.records import TALK
from support.sessions import said
from support.stored import (
    records_of,
    stored_session,
    stored_sessions,
    token_count,
)
from support.waits import wait_for_child

WEIGHTS = "ab" * 16


def opened(folder: Path, weights: str = WEIGHTS) -> ChatStore:
    return ChatStore.open(folder, weights)


def kept_by(store: ChatStore, *records: Record) -> None:
    for record in records:
        assert store.hold(record.id)
        store.write_record(record)


def turns_in(folder: Path) -> set[str]:
    [path] = folder.rglob("sessions.sqlite3")
    with sqlite3.connect(path) as db:
        found = {row[0] for row in db.execute("SELECT id FROM turns")}
    db.close()
    return found


def writes(data: bytes) -> Callable[[Any], None]:
    return lambda file: file.write(data)


def file_of(store: ChatStore, id: str) -> bytes | None:
    file = store.open_session(id)
    if file is None:
        return None
    with file:
        return file.read()


# Records.


def test_write_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    store = opened(folder)
    record = Record("main", messages=[*TALK[:3]], system="é")
    record.messages.append(Message("model", "cut", incomplete=True))
    record.options = {"logit_bias": {3: -float("inf")}, "stop": ["x"]}
    record.draft, record.think, record.tokens = "and then", False, 9
    record.overflow = "drop_oldest_turns"
    child = Record("child", parent=record.id, forked_at=1, messages=TALK[:2])
    kept_by(store, record, child)
    store.write_session(record.id, writes(b"bytes"))
    store.write_current(record.id)
    store.close()
    again = opened(folder)
    assert records_of(again) == [record, child]
    assert again.read_record(record.id) == record
    assert again.read_record("none") is None
    assert file_of(again, record.id) == b"bytes"
    assert file_of(again, child.id) is None
    assert again.current_id == record.id
    assert records_of(opened(folder, "cd" * 16)) == []
    assert opened(folder, "cd" * 16).current_id is None
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    again.close()


def test_halves_of_pairs_are_no_end(tmp_path: Path) -> None:
    store = opened(tmp_path)
    record = Record("main", system="a\ud800", draft="b\udcff", messages=TALK)
    record.messages = [Message("user", "c\ud800"), Message("model", "d")]
    kept_by(store, record)
    found = store.read_record(record.id)
    assert found is not None and found.messages == record.messages
    assert (found.system, found.draft) == ("a?", "b?")
    store.close()


def test_only_what_differs_is_new(tmp_path: Path) -> None:
    """Forks share turns; what nothing leads to goes."""
    store = opened(tmp_path)
    one = Record("one", messages=TALK)
    kept_by(store, one)
    before = turns_in(tmp_path)
    assert len(before) == 2
    fork = Record("fork", parent=one.id, forked_at=2, messages=[*TALK])
    kept_by(store, fork)
    assert turns_in(tmp_path) == before
    fork.messages = [*TALK[:2], Message("user", "2b"), Message("model", "b")]
    store.write_record(fork)
    store.write_record(fork)
    assert len(turns_in(tmp_path)) == 3 and turns_in(tmp_path) > before
    one.messages = TALK[2:]  # the oldest turn had no room
    store.write_record(one)
    assert len(turns_in(tmp_path)) == 3
    one.messages = []
    store.write_record(one)
    assert len(turns_in(tmp_path)) == 2
    for record in (one, fork):
        assert store.read_record(record.id) == record
    fork.messages = []
    store.write_record(fork)
    assert turns_in(tmp_path) == set()
    store.close()


def test_two_at_once_keep_everything(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    mine, yours = Record("mine"), Record("yours")
    kept_by(first, mine)
    kept_by(second, yours)
    assert not second.hold(mine.id) and not first.hold(yours.id)
    assert second.holder(mine.id) == f"process {os.getpid()}"
    for call in (second.write_record, lambda r: second.delete(r.id)):
        with pytest.raises(StoreFailed, match="not held"):
            call(mine)
    for store in (first, second):
        found = {record.name for record in records_of(store)}
        assert found == {"mine", "yours"}
    mine.name = "changed"
    first.write_record(mine)
    assert mine in records_of(second)
    first.release(mine.id)
    assert second.hold(mine.id)
    second.close()
    assert first.hold(mine.id)
    first.close()


@pytest.mark.parametrize("id", ["", "../other", "/etc/x", "a/b", "a\0"])
def test_an_id_is_no_path(tmp_path: Path, id: str) -> None:
    store = opened(tmp_path)
    with pytest.raises(NoSession):
        store.hold(id)
    store.close()


# Tokens.


@pytest.fixture
def gemma(talker_path: Path, tmp_path: Path) -> Gemma:
    prefix = PrefixCache("64MiB", disk=tmp_path / "prefix")
    return Gemma.load(talker_path, prefix_cache=prefix)


def save(store: ChatStore, record: Record, session: Session) -> None:
    record.messages = [m for m in session.messages if m.role != "system"]
    record.system, record.think = session.system, session.think
    record.overflow = session.overflow
    assert store.hold(record.id)
    store.write_record(record, session._published())


def opened_again(gemma: Gemma, folder: Path, id: str) -> Session:
    store = opened(folder)
    record = store.read_record(id)
    assert record is not None
    assert store.open_session(id) is None
    state = store.read_state(id)
    store.close()
    session, line = from_store(gemma, record, state, lambda: Session(gemma))
    assert line == ""
    return session


def check_as_before(gemma: Gemma, folder: Path, id: str, one: Session) -> None:
    again = opened_again(gemma, folder, id)
    assert again.messages == one.messages
    assert again.cache.tokens.tolist() == one.cache.tokens.tolist()
    assert again._talk.ends == one._talk.ends
    told = again.fork().send("and on", max_tokens=6)
    assert told.token_ids == one.fork().send("and on", max_tokens=6).token_ids


def test_tokens_come_back(gemma: Gemma, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = opened(folder)
    session = Session(gemma, "Be brief.", options={"max_tokens": 5})
    record = Record("main", options=dict(session.options))
    save(store, record, session)
    for text in ("one", "two", "three"):
        said(session, text)
        save(store, record, session)
        check_as_before(gemma, folder, record.id, session)
    kept = stored_session(folder)
    assert [turn["whole"] for turn in kept["turns"]] == [1, 0, 0]
    before = turns_in(folder)
    fork = session.fork()
    other = Record("fork", parent=record.id, forked_at=3)
    save(store, other, fork)
    assert turns_in(folder) == before
    fork.undo(2)
    said(fork, "else")
    save(store, other, fork)
    check_as_before(gemma, folder, other.id, fork)
    check_as_before(gemma, folder, record.id, session)
    # All is computed again, and so has other tokens.
    session.system = "Be long."
    save(store, record, session)
    said(session, "four")
    save(store, record, session)
    again = opened_again(gemma, folder, record.id)
    assert again.messages == session.messages
    assert again.cache.tokens.tolist() == session.cache.tokens.tolist()
    assert again._talk.ends == session._talk.ends
    check_as_before(gemma, folder, other.id, fork)
    session.goto(1)
    save(store, record, session)
    assert len(opened_again(gemma, folder, record.id).cache) <= len(
        session.cache
    )
    store.close()


def test_tokens_of_what_had_no_room(gemma: Gemma, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = opened(folder)
    session = Session(
        gemma, overflow="drop_oldest_turns", capacity_tokens=300,
        options={"max_tokens": 5},
    )  # fmt: skip
    record = Record("main", options=dict(session.options))
    most = 0
    for i in range(12):
        said(session, f"turn {i} of many")
        save(store, record, session)
        most = max(most, session.turns)
        again = opened_again(gemma, folder, record.id)
        assert again.messages == session.messages
        assert again.cache.tokens.tolist() == session.cache.tokens.tolist()
    assert session.turns < 12 and most > 1
    assert len(turns_in(folder)) == session.turns
    store.close()


def test_tokens_are_those_of_the_cache_alone(
    gemma: Gemma, tmp_path: Path
) -> None:
    """A draft, a name and other texts change none; keys in a file go."""
    folder = tmp_path / "store"
    store = opened(folder)
    session = said(Session(gemma, options={"max_tokens": 5}), "one")
    record = Record("main", options=dict(session.options))
    save(store, record, session)
    count = token_count(stored_session(folder))
    assert count == len(session.cache)
    store.write_session(record.id, writes(b"keys"))
    record.draft, record.name = "and", "other"
    store.write_record(record)
    assert token_count(stored_session(folder)) == count
    assert file_of(store, record.id) == b"keys"
    save(store, record, session)
    assert store.open_session(record.id) is None
    state = store.read_state(record.id)
    assert state is not None
    assert state.kept.ids.tolist() == session.cache.tokens.tolist()
    store.close()


# The trash.


def test_deleting_can_be_undone(
    gemma: Gemma, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path / "s")
    session = said(Session(gemma, options={"max_tokens": 5}), "one")
    one, two = Record("one"), Record("two", messages=TALK)
    save(store, one, session)
    kept_by(store, two)
    store.write_session(two.id, writes(b"kv"))
    for record in (one, two):
        store.delete(record.id)
        store.release(record.id)
    assert records_of(store) == []
    assert store.read_record(two.id) is None
    assert [record.name for record in store.deleted()] == ["two", "one"]
    store.close()
    again = opened(tmp_path / "s")
    assert again.undelete(two.id) == two
    assert file_of(again, two.id) == b"kv"
    assert again.undelete("nothing") is None
    again.close()
    late = _clock.uptime() + 31 * 86400
    monkeypatch.setattr(_clock, "uptime", lambda: late)
    again = opened(tmp_path / "s")
    [gone] = again.empty_trash()
    assert again.deleted() == []
    assert gone.ids.tolist() == session.cache.tokens.tolist()
    assert again.empty_trash() == []
    assert [one.name for one in records_of(again)] == ["two"]
    assert forget(gemma, gone, []) >= 0
    again.close()


def test_what_has_no_model_is_in_the_trash_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could bring it back, and it was there for ever."""
    server = Conversations.open(tmp_path)
    ids = [server.sessions.create("", name, None).id for name in ("a", "b")]
    server.sessions.create("", "other", None, model="cd" * 16)
    server.close()
    store = opened(tmp_path)
    for id in ids:
        assert store.hold(id)
        store.delete(id)
        store.release(id)
    assert {one.id for one in store.deleted()} == {*ids}
    found = store.undelete(ids[0])
    assert found is not None and found.name == "a"
    store.close()
    late = _clock.uptime() + 31 * 86400
    monkeypatch.setattr(_clock, "uptime", lambda: late)
    store = opened(tmp_path)
    store.empty_trash()
    assert [one["name"] for one in stored_sessions(tmp_path)] == ["a", "other"]
    assert stored_sessions(tmp_path, deleted=True) == []
    store.close()


def test_a_full_disk_keeps_the_trash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    record = Record("main", messages=TALK)
    kept_by(store, record)
    store.delete(record.id)
    store.close()
    late = _clock.uptime() + 31 * 86400
    monkeypatch.setattr(_clock, "uptime", lambda: late)

    def full(db: Any, turn: str | None) -> None:
        raise StoreFull("sessions: the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(_chat, "prune", full)
        store = opened(tmp_path)
        with pytest.raises(StoreFull):
            store.empty_trash()
        assert [one.name for one in store.deleted()] == ["main"]
        store.close()
    store = opened(tmp_path)
    assert store.empty_trash() == [] and store.deleted() == []
    store.close()


def test_keys_of_what_is_deleted_elsewhere_go(tmp_path: Path) -> None:
    store, other = opened(tmp_path), opened(tmp_path, "cd" * 16)
    kept, put_away, gone = (Record(name) for name in ("a", "b", "c"))
    another = Record("d")
    kept_by(store, kept, put_away, gone)
    kept_by(other, another)
    records = [kept, put_away, gone, another]
    for record in records:
        store.write_session(record.id, writes(b"kv"))
    store.delete(put_away.id)
    store.close()
    other.close()
    server = Conversations.open(tmp_path)
    server.sessions.delete("", gone.id)
    server.close()
    store = opened(tmp_path)
    found = [file_of(store, record.id) for record in records]
    assert found == [b"kv", b"kv", None, b"kv"]
    store.close()


# A server's.


def test_a_servers_sessions_are_there(tmp_path: Path) -> None:
    server = Conversations.open(tmp_path)
    last = None
    turns = []
    for text, more in (
        ("hi", {}),
        ("on", {"basis": "server", "tokens": [1, 2], "whole": True}),
    ):
        fields: dict[str, Any] = {
            "id": new_id("resp"), "tenant": "", "parent": last,
            "depth": len(turns) + 1, "system": None, "tools": [],
            "messages": [{"role": "user", "content": text}],
            "reply": {"role": "assistant", "content": text.upper()},
            "reason": "stop", "usage": {}, "basis": "", "whole": True,
            "tokens": [], **more,
        }  # fmt: skip
        turns.append(Turn(**fields))
        last = turns[-1].id
    pending = {"items": [{"id": "x"}], "messages": [{"role": "user"}]}
    trip = server.sessions.create(
        "", 'my "trip"', None, turns, None, {"a": "b"}, pending
    )
    none = server.sessions.create("", None, None, model=WEIGHTS)
    server.sessions.create("", "other", None, model="cd" * 16)
    server.sessions.create("somebody", "theirs", None)
    store = opened(tmp_path)
    first, second = records_of(store)
    assert (first.name, first.turns) == ('my-"trip', 2)
    assert second.name == f"session-{none.id[-4:]}"
    before = turns_in(tmp_path)
    assert store.hold(first.id)
    first.messages += TALK[:2]
    store.write_record(first)
    assert turns_in(tmp_path) > before and len(turns_in(tmp_path)) == 3
    assert server.sessions.get("", trip.id).name == 'my "trip"'
    assert server.sessions.get("", trip.id).turns == 3
    assert server.sessions.get("", trip.id).metadata == {"a": "b"}
    assert server.sessions.get("", trip.id).pending == pending
    path = server.turns.path(server.sessions.get("", trip.id).head)
    assert [turn.messages[0]["content"] for turn in path] == ["hi", "on", "one"]
    with pytest.raises(StoreError, match="has it open"):
        server.sessions.delete("", trip.id)
    first.name = "renamed"
    store.write_record(first)
    assert server.sessions.get("", trip.id).name == "renamed"
    store.release(first.id)
    server.sessions.delete("", trip.id)
    assert [one.id for one in records_of(store)] == [second.id]
    server.leases.take("", second.id, "me")
    assert not store.hold(second.id)
    assert store.holder(second.id) == ""
    store.close()
    server.close()


def test_a_chat_ends_no_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server had promised to keep them for longer than others do."""
    server = Conversations.open(tmp_path, 365)
    turn = Turn(
        id=new_id("resp"), tenant="t", parent=None, depth=1, state=KEPT,
        system=None, tools=[], messages=[{"role": "user", "content": "hi"}],
        reply={"role": "assistant", "content": "HI"}, reason="stop", usage={},
        basis="", whole=True, tokens=np.empty(0, np.int32),
    )  # fmt: skip
    server.turns.add(turn, None, None)
    server.close()
    late = _clock.uptime() + 100 * 86400
    monkeypatch.setattr(_clock, "uptime", lambda: late)
    store = opened(tmp_path)
    kept_by(store, Record("main", messages=TALK))
    store.close()
    server = Conversations.open(tmp_path, 365)
    assert server.turns.get("t", turn.id).id == turn.id
    server.close()


# Crashes and disks.


def write_turns(folder: Path, name: str, turns: int, told: int) -> None:
    """Writes turn after turn, and tells the number of each that is there."""
    store = opened(folder)
    record = Record(name, id=name * 32)
    assert store.hold(record.id)
    record = store.read_record(record.id) or record
    for i in range(record.turns, turns):
        reply = Message("model", "x" * 999)
        record.messages += [Message("user", str(i)), reply]
        store.write_record(record)
        os.write(told, b"%d\n" % (i + 1))


def writer(folder: Path, name: str, turns: int) -> tuple[int, BinaryIO]:
    """A process that does; its pid and what it tells."""
    reader, told = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            write_turns(folder, name, turns, told)
            code = 0
        finally:
            os._exit(code)
    os.close(told)
    return child, open(reader, "rb")


def test_two_processes_at_once(tmp_path: Path) -> None:
    processes = [writer(tmp_path, name, 25) for name in "ab"]
    for child, told in processes:
        told.read()
        told.close()
        assert wait_for_child(child) == 0
    store = opened(tmp_path)
    records = sorted(records_of(store), key=lambda one: one.name)
    assert [(r.name, r.turns) for r in records] == [("a", 25), ("b", 25)]
    store.close()


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What a process has told is written is there, whole, after kill -9."""
    count = 0
    for moment in range(12):
        child, out = writer(tmp_path, "a", 100_000)
        with out:
            first = int(out.readline())
            time.sleep(0.003 * moment)  # whatever it does then
            os.kill(child, signal.SIGKILL)
            # From the same buffer as the first line, which may hold others.
            lines = out.read().split(b"\n")[:-1]
        assert wait_for_child(child) == -signal.SIGKILL
        count = int(lines[-1]) if lines else first
        store = opened(tmp_path)
        assert store.hold("a" * 32)  # the lock went with the process
        [record] = records_of(store)
        assert count <= record.turns <= count + 1
        said = [int(one.text) for one in record.messages[::2]]
        assert said == list(range(record.turns))
        store.close()
    assert count >= 12


def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    record = Record("main", messages=TALK[:2])
    kept_by(store, record)
    driver = store._database.driver
    [pages] = driver.execute("PRAGMA page_count").fetchone()
    driver.execute(f"PRAGMA max_page_count = {pages}")
    record.messages = [*TALK, Message("user", "x" * 9999), TALK[3]]
    with pytest.raises(StoreFull):
        store.write_record(record)
    found = store.read_record(record.id)
    assert found is not None and found.messages == TALK[:2]
    driver.execute("PRAGMA max_page_count = 1000000")
    record.messages += TALK[:2]
    store.write_record(record)
    assert store.read_record(record.id) == record
    assert records_of(store) == [record]
    store.close()


@pytest.mark.parametrize("what", ["database", "shared memory"])
def test_what_is_on_a_full_disk_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = opened(tmp_path)
    record = Record("main", messages=TALK)
    kept_by(store, record)
    store.close()
    real = _database._connect

    def full(path: str, read_only: bool) -> sqlite3.Connection:
        db = real(path, read_only)
        if not read_only:
            [pages] = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {pages}")
        return db

    def grow(self: _database.Database, db: Any) -> None:
        _database.set_fact(db, "more", b"x" * 99999)

    def no_log(db: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
        raise error

    with monkeypatch.context() as patch:
        if what == "database":
            patch.setattr(_database, "_connect", full)
            patch.setattr(_database.Database, "note_age", grow)
        else:
            patch.setattr(_database, "_keep_a_log", no_log)
        again = opened(tmp_path)
        assert not again.writable and "No space" in again.read_only
        assert records_of(again) == [record]
        again.close()
    again = opened(tmp_path)
    assert again.writable and records_of(again) == [record]
    again.close()


def no_room(folder: str, path: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_others_write_what_can_only_be_read_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk was full for a while: what was read then is of one moment."""
    store = opened(tmp_path)
    records = [Record(str(i), messages=TALK * 2) for i in range(12)]
    kept_by(store, *records)
    store.close()
    with monkeypatch.context() as patch:
        patch.setattr(_database, "_make_private", no_room)
        reader = opened(tmp_path)
    assert not reader.writable and reader.current_id is None
    store = opened(tmp_path)
    for record in records:
        assert store.hold(record.id)
        store.write_record(Record("new", id=record.id, messages=TALK[:2]))
    kept_by(store, *(Record(f"more{i}", system="x" * 5000) for i in range(9)))
    store.close()
    assert records_of(reader) == records
    reader.close()


def test_what_is_written_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path).close()
    record = Record("main", messages=TALK)
    real, made = _database._copy_of, _database._make_private
    copies = []

    def copy_of(name: str) -> sqlite3.Connection:
        copies.append(name)
        found = real(name)
        if len(copies) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(_database, "_make_private", made)
                store = opened(tmp_path)
            kept_by(store, record)
            store.close()
        return found

    monkeypatch.setattr(_database, "_make_private", no_room)
    monkeypatch.setattr(_database, "_copy_of", copy_of)
    reader = opened(tmp_path)
    assert records_of(reader) == [record] and len(copies) == 2
    reader.close()


@pytest.mark.parametrize("there", [False, True])
def test_a_read_only_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Sessions can be read there."""
    record = Record("main", messages=TALK)
    if there:
        store = opened(tmp_path)
        kept_by(store, record)
        store.write_session(record.id, writes(b"kv"))
        store.close()
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            text = os.strerror(errno.EROFS)
            raise OSError(errno.EROFS, text, str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    again = opened(tmp_path)
    assert not again.writable and "Read-only" in again.read_only
    assert records_of(again) == ([record] if there else [])
    if there:
        assert file_of(again, record.id) == b"kv"
    assert not again.hold(record.id)
    again.write_current("other")
    with pytest.raises(StoreFailed, match="Read-only"):
        again.write_record(record)
    again.close()
