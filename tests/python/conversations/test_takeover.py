"""What earlier versions have left: folders of chats, databases of servers."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `cli`")
pytest.importorskip("alembic", reason="the extra `cli`")

import gemmakv
from gemmakv import Gemma, PrefixCache, Session
from gemmakv.chat.store import FolderStore, Record, from_store
from gemmakv.conversations import _database, _takeover
from gemmakv.conversations._chat import ChatStore
from gemmakv.conversations._database import FILE
from gemmakv.conversations._store import Conversations
from gemmakv.conversations._takeover import take_over
from support.records import TALK
from support.sessions import said
from support.stored import records_of, stored_sessions, token_count
from support.tiny_gguf import write_talker
from support.token_files import token_file

WEIGHTS = "ab" * 16


def opened(folder: Path, weights: str = WEIGHTS) -> ChatStore:
    return ChatStore.open(folder, weights)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def kept_by(store: FolderStore, record: Record) -> Record:
    assert store.hold(record.id)
    store.write_record(record)
    store.release(record.id)
    return record


@pytest.mark.parametrize("version", [1, 2])
def test_a_folder_of_each_format(
    golden: Path, tmp_path: Path, version: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = write_talker(tmp_path / "talker.gguf", endless=False)
    talker = Gemma.load(path, prefix_cache=False)
    old = tmp_path / "s"
    shutil.copytree(golden / f"store_v{version}", old)
    before = contents(old)
    reader = FolderStore(old)
    wanted = {one.id: one for one in reader.listing().records}
    current = reader.current_id
    reader.close()
    store = opened(tmp_path / "new")
    assert take_over(old, store) == []
    assert not old.exists()
    assert contents(tmp_path / "s.taken-over").items() >= before.items()
    found = records_of(store)
    assert {one.id: one for one in found} == wanted
    assert store.current_id == current and not store.listing().lines
    monkeypatch.setattr(
        gemmakv.Gemma, "fingerprint", gemmakv.Gemma.weights_fingerprint
    )
    for record in found:
        session, line = from_store(
            talker, record, store.open_session(record.id),
            lambda: Session(talker),
        )  # fmt: skip
        assert line == "" and len(session.cache) == record.tokens
        assert session.options == {"max_tokens": 5, "top_k": 3, "seed": 1}
    # Forks share the turns that they have in common.
    turns = {turn["id"] for one in stored_sessions(tmp_path / "new")
             for turn in one["turns"]}  # fmt: skip
    assert len(turns) < sum(record.turns for record in found)
    assert take_over(old, store) == []
    store.close()


@pytest.fixture
def gemma(talker_path: Path, tmp_path: Path) -> Gemma:
    prefix = PrefixCache("64MiB", disk=tmp_path / "prefix")
    return Gemma.load(talker_path, prefix_cache=prefix)


def test_tokens_and_trash(gemma: Gemma, tmp_path: Path) -> None:
    old = tmp_path / "old"
    folder = FolderStore(old)
    session = Session(gemma, "Be brief.", options={"max_tokens": 5})
    said(session, "one", "two")

    def record_of(name: str, **more: object) -> Record:
        record = Record(name, system="Be brief.", **more)  # type: ignore[arg-type]
        record.messages = [m for m in session.messages if m.role != "system"]
        record.options = dict(session.options)
        kept_by(folder, record)
        assert folder.hold(record.id)
        data = token_file(session)
        folder.write_session(record.id, lambda file: file.write(data))
        return record

    whole = record_of("whole", draft="and")
    gone = record_of("gone")
    folder.delete(gone.id)
    newer = record_of("newer", parent=whole.id, forked_at=2)
    newer.messages = [*newer.messages, *TALK[:2]]
    folder.write_record(newer)
    folder.close()
    store = opened(tmp_path / "new")
    assert take_over(old, store) == []
    assert records_of(store) == [whole, newer]
    assert [one.name for one in store.deleted()] == ["gone"]
    for record in (whole, newer):
        state = store.read_state(record.id)
        assert state is not None
        assert state.kept.ids.tolist() == session.cache.tokens.tolist()
    again, line = from_store(
        gemma, whole, store.read_state(whole.id), lambda: Session(gemma)
    )
    assert line == "" and again._talk.ends == session._talk.ends
    assert again.send("three").token_ids == session.send("three").token_ids
    assert store.undelete(gone.id) is not None
    for one in stored_sessions(tmp_path / "new"):
        state = store.read_state(one["id"])
        assert state is not None
        assert token_count(one) == len(state.kept.ids)
    store.close()


def test_of_keys_and_values_only_the_head_is_read(
    talker: Gemma, tmp_path: Path
) -> None:
    """The file is larger than any memory, with nothing in it."""
    old = tmp_path / "old"
    folder = FolderStore(old)
    record = kept_by(folder, Record("main", messages=TALK))
    assert folder.hold(record.id)
    data = Session(talker).to_bytes()
    folder.write_session(record.id, lambda file: file.write(data))
    folder.close()
    os.truncate(old / f"{record.id}.session", 1 << 42)
    store = opened(tmp_path / "new")
    assert take_over(old, store) == []
    assert records_of(store) == [record]
    file = store.open_session(record.id)
    assert file is not None
    with file:
        assert file.read(len(data)) == data
        assert os.fstat(file.fileno()).st_size == 1 << 42
    store.close()


def test_what_cannot_be_read_is_left_there(tmp_path: Path) -> None:
    old = tmp_path / "old"
    folder = FolderStore(old)
    kept_by(folder, Record("good", messages=TALK))
    bad, newer = (kept_by(folder, Record(name)) for name in ("bad", "newer"))
    folder.close()
    path = old / f"{bad.id}.json"
    path.write_bytes(path.read_bytes()[:-20])
    path = old / f"{newer.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mood": 1}))
    os.mkfifo(old / "pipe.json")
    (old / "device.json").symlink_to("/dev/zero")
    store = opened(tmp_path / "new")
    lines = take_over(old, store)
    assert [one.name for one in records_of(store)] == ["good"]
    assert len(lines) == 4
    assert sum("newer gemmakv" in line for line in lines) == 1
    assert sum("expected a regular file" in line for line in lines) == 2
    left = tmp_path / "old.taken-over"
    assert (left / f"{bad.id}.json").exists()
    assert all(str(left) in line for line in lines)
    store.close()


def test_one_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    old = tmp_path / "old"
    folder = FolderStore(old)
    record = kept_by(folder, Record("main", messages=TALK))
    before = contents(old)
    store = opened(tmp_path / "new")
    [line] = take_over(old, store)
    assert str(old) in line and "older gemmakv chat" in line
    assert records_of(store) == [] and contents(old) == before
    folder.close()
    assert take_over(old, store) == []
    assert records_of(store) == [record]
    store.close()


def test_killed_before_it_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is there twice, and what was said since stays."""
    old = tmp_path / "old"
    folder = FolderStore(old)
    record = kept_by(folder, Record("main", messages=TALK))
    other = kept_by(folder, Record("other", messages=TALK[:2]))
    folder.close()
    before = contents(old)
    store = opened(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(_takeover.os, "rename", lambda old, new: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            take_over(old, store)
    assert contents(old) == before
    assert store.hold(record.id) and store.hold(other.id)
    record.messages = [*TALK, *TALK]
    store.write_record(record)
    store.delete(other.id)
    assert take_over(old, store) == []
    assert records_of(store) == [record]
    assert [one.name for one in store.deleted()] == ["other"]
    store.close()


def test_others_write_while_a_folder_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock was held for as long as all of it took."""
    old = tmp_path / "old"
    folder = FolderStore(old)
    wanted = [kept_by(folder, Record(str(i), messages=TALK)) for i in range(3)]
    folder.close()
    before = contents(old)
    store, other = opened(tmp_path / "new"), opened(tmp_path / "new")
    other._database.be_patient(0)
    real = _takeover._taken
    count = 0

    def taken(*rest: object) -> object:
        nonlocal count
        assert records_of(other) == wanted[:count]
        assert other.hold(wanted[0].id)
        if count:
            other.write_record(wanted[0])
        other.release(wanted[0].id)
        if count == 2:
            raise OSError(5, "Input/output error")
        count += 1
        return real(*rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(_takeover, "_taken", taken)
        with pytest.raises(OSError, match="output error"):
            take_over(old, store)
    assert contents(old) == before
    assert records_of(store) == wanted[:2]
    assert take_over(old, store) == []
    assert records_of(store) == wanted and not old.exists()
    store.close()
    other.close()


def test_a_home_that_can_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sessions of before are there, as copies."""
    old = tmp_path / "old"
    folder = FolderStore(old)
    record = kept_by(folder, Record("main", messages=TALK))
    assert folder.hold(record.id)
    folder.write_session(record.id, lambda file: file.write(b"kv"))
    folder.close()

    def read_only(folder: str, path: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(_database, "_make_private", read_only)
    store = opened(tmp_path / "new")
    assert not store.writable
    assert take_over(old, store) == []
    assert records_of(store) == [record] and old.exists()
    file = store.open_session(record.id)
    assert file is not None
    with file:
        assert file.read() == b"kv"
    assert not store.hold(record.id)
    assert not (tmp_path / "new").exists()
    store.close()


def test_a_servers_database_of_before(golden: Path, tmp_path: Path) -> None:
    shutil.copy(golden / "sessions_v1.sqlite3", tmp_path / FILE)
    server = Conversations.open(tmp_path)
    found, _ = server.sessions.newest("", 9, None)
    assert [(one.name, one.turns) for one in found] == [
        ("calls", 3), (None, 1), ("my trip", 2),
    ]  # fmt: skip
    trip = found[-1]
    path = server.turns.path(trip.head, tokens=True)
    assert [turn.tokens.tolist() for turn in path] == [[2, 5, 6, 7], [8, 9]]
    assert server.turns.tokens(path[-1].id).tolist() == [2, 5, 6, 7, 8, 9]
    [kept] = sqlite3.connect(tmp_path / FILE).execute(
        "SELECT id FROM turns WHERE state = 1"
    )
    tenant = server.tenant_of("key")
    assert server.turns.get(tenant, kept[0]).reply["content"] == "k"
    assert [one.parent for one in server.sessions.tree("", 9, None)[0]] == [
        trip.id, trip.id, None,
    ]  # fmt: skip
    # Chats have those that they can go on with.
    store = opened(tmp_path)
    names = [one.name for one in records_of(store)]
    assert sorted(names)[0] == "my-trip" and len(names) == 2
    store.close()
    server.close()
