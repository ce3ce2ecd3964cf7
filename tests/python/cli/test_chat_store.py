"""Conversations on disk: whole after any crash, private, one writer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gemmakv
from gemmakv._support import folders
from gemmakv.chat._session import Message, Session
from gemmakv.cli.chat import records, restore, store
from gemmakv.cli.chat.records import Record
from gemmakv.cli.chat.saver import Saver
from gemmakv.cli.chat.store import Store
from gemmakv.errors import CorruptFile

TALK = [("user", "one"), ("model", "1"), ("user", "two"), ("model", "2")]


def talk(talker: gemmakv.Gemma, *texts: str) -> Session:
    session = Session(talker, options={"max_tokens": 5})
    for text in texts:
        session.send(text)
    return session


def record_of(session: Session) -> Record:
    return Record(
        "main",
        messages=restore.pairs_of(session),
        options=dict(session.options),
    )


def restored(
    talker: gemmakv.Gemma, record: Record, data: bytes | None
) -> tuple[Session, str]:
    return restore.from_store(talker, record, data, lambda: Session(talker))


# ---- Records ----


def test_record_as_json() -> None:
    record = Record(
        "é", parent="x", forked_at=1, system="a\ud800", messages=TALK
    )
    assert records.from_json(record.to_json()) == record
    assert record.turns == 2 and record.last_text == "two"


@pytest.mark.parametrize(
    "old, new",
    [
        (b'"format": 1', b'"format": 2'),
        (b'"tokens": 0', b'"tokens": "0"'),
        (b'"tokens": 0', b'"token": 0'),
        (b'"error"', b'"sometimes"'),
        (b'"user"', b'"model"'),
        (b'"two"', b"2"),
        (b"{", b"["),
        (b"}", b""),
    ],
)
def test_a_record_that_is_none(old: bytes, new: bytes) -> None:
    data = Record("main", messages=TALK).to_json()
    assert old in data
    with pytest.raises(CorruptFile):
        records.from_json(data.replace(old, new))


# ---- The folder ----


def test_write_and_read(tmp_path: Path) -> None:
    kept = Store(tmp_path / "deep" / "folder")
    record = Record("main", messages=TALK)
    kept.write_record(record)
    kept.write_session(record.id, b"bytes")
    kept.write_current(record.id)
    kept.close()
    again = Store(tmp_path / "deep" / "folder")
    assert again.read_records() == ([record], [])
    assert again.read_session(record.id) == b"bytes"
    assert again.current_id == record.id
    again.delete(record.id)
    assert again.read_records() == ([], [])
    assert again.read_session(record.id) is None
    assert (tmp_path / "deep" / "folder").stat().st_mode & 0o077 == 0
    again.close()


def test_one_writer(tmp_path: Path) -> None:
    """The second one reads, and changes nothing."""
    first = Store(tmp_path)
    record = Record("main")
    first.write_record(record)
    second = Store(tmp_path)
    assert first.writable and not second.writable
    assert second.holder == str(os.getpid())
    assert second.read_records() == ([record], [])
    second.write_record(Record("other"))
    second.write_session(record.id, b"other")
    second.delete(record.id)
    assert first.read_records() == ([record], [])
    assert first.read_session(record.id) is None
    second.close()
    first.close()
    third = Store(tmp_path)
    assert third.writable
    third.close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from gemmakv.cli.chat.store import Store\n"
        "store = Store(pathlib.Path(sys.argv[1]))\n"
        "assert store.writable\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    again = Store(tmp_path)
    assert again.writable
    again.close()


def test_damaged_records_are_kept_aside(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    good, bad = Record("good"), Record("bad")
    for record in (good, bad):
        kept.write_record(record)
        kept.write_session(record.id, b"kv")
    path = tmp_path / f"{bad.id}.json"
    path.write_bytes(path.read_bytes()[:-20])
    found, lines = kept.read_records()
    assert found == [good]
    assert len(lines) == 1 and f"{bad.id}.json.damaged-1" in lines[0]
    assert (tmp_path / f"{bad.id}.json.damaged-1").exists()
    assert (tmp_path / f"{bad.id}.session.damaged-1").read_bytes() == b"kv"
    assert kept.read_records() == ([good], [])
    kept.close()


def test_leftovers_are_swept(tmp_path: Path) -> None:
    """Half-written files, and session files without a record."""
    kept = Store(tmp_path)
    record = Record("main")
    kept.write_record(record)
    kept.write_session(record.id, b"kv")
    kept.close()
    (tmp_path / f".{record.id}.session.abc.tmp").write_bytes(b"half")
    (tmp_path / "0123.session").write_bytes(b"orphan")
    again = Store(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"lock", f"{record.id}.json", f"{record.id}.session"}
    again.close()


def test_a_failed_write_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Store(tmp_path)
    record = Record("main")
    kept.write_record(record)
    kept.write_session(record.id, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        kept.write_session(record.id, b"new")
    assert kept.read_session(record.id) == b"old"
    assert not list(tmp_path.glob(".*.tmp"))
    kept.close()


def test_folders_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    one = store.folder_of("gemma3/270m", "a" * 32)
    assert one == Path("/data/gemmakv/chat") / ("gemma3_270m-" + "a" * 16)
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert folders.data_folder().is_relative_to(Path.home())


# ---- The writing thread ----


class SlowStore(Store):
    """Writes when it is told to, and notes what it wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.written: list[bytes] = []

    def write_session(self, id: str, data: bytes) -> None:
        self.begun.release()
        self.go.acquire()
        if data == b"bad":
            raise OSError(errno.ENOSPC, "full")
        self.written.append(data)


def test_only_the_newest_is_written(tmp_path: Path) -> None:
    slow = SlowStore(tmp_path)
    saver = Saver(slow)
    saver.submit("a", b"1")
    slow.begun.acquire()
    saver.submit("a", b"2")
    saver.submit("b", b"bad")
    saver.submit("a", b"3")
    saver.submit("c", b"dropped")
    saver.drop("c")
    for _ in range(3):
        slow.go.release()
    saver.wait()
    assert slow.written == [b"1", b"3"]
    assert [*saver.take_failures()] == ["b"]
    assert saver.take_failures() == {}
    slow.go.release()
    saver.submit("a", b"last")
    saver.close()
    assert slow.written[-1] == b"last"
    slow.close()


# ---- Live sessions again ----


def test_a_whole_session_needs_no_computing(talker: gemmakv.Gemma) -> None:
    session = talk(talker, "one", "two")
    again, line = restored(talker, record_of(session), session.to_bytes())
    assert line == ""
    assert len(again.cache) == len(session.cache)
    assert again.send("three").token_ids == session.send("three").token_ids


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "empty"])
def test_text_survives_its_kv_cache(
    talker: gemmakv.Gemma, damage: str
) -> None:
    session = talk(talker, "one", "two")
    data = session.to_bytes()
    flipped = data[:-200] + bytes([data[-200] ^ 1]) + data[-199:]
    damaged = {
        "cut": data[:-9], "flipped": flipped, "missing": None, "empty": b""
    }[damage]
    again, line = restored(talker, record_of(session), damaged)
    assert again.messages == session.messages
    assert "the text is kept, and computed again" in line
    assert again.options == session.options
    assert again.send("three").token_ids
    assert again.turns == 3


def test_a_session_file_that_is_older_than_its_record(
    talker: gemmakv.Gemma,
) -> None:
    session = talk(talker, "one")
    older = session.to_bytes()
    session.send("two")
    again, line = restored(talker, record_of(session), older)
    assert again.messages == session.messages
    assert "had not been stored" in line
    assert again.send("three").usage.cached_tokens > 0


def test_a_session_file_that_is_newer_than_its_record(
    talker: gemmakv.Gemma,
) -> None:
    """As after /undo and a kill before its session file was written."""
    session = talk(talker, "one", "two")
    newer = session.to_bytes()
    session.undo()
    again, line = restored(talker, record_of(session), newer)
    assert again.messages == session.messages
    assert line == ""
    assert again.send("three").token_ids == session.send("three").token_ids


def test_system_text_and_settings_come_from_the_record(
    talker: gemmakv.Gemma,
) -> None:
    session = talk(talker, "one")
    record = record_of(session)
    record.system = "Be brief."
    record.options = {"top_k": 3}
    record.overflow = "drop_oldest_turns"
    again, _ = restored(talker, record, session.to_bytes())
    assert again.messages[0] == Message("system", "Be brief.")
    assert again.options == {"top_k": 3}
    assert again.overflow == "drop_oldest_turns"
    assert again.turns == 1


def test_options_that_json_cannot_hold_are_left_out(
    talker: gemmakv.Gemma,
) -> None:
    session = Session(talker, options={"top_k": 3, "progress": print})
    assert restore.plain_options(session) == {"top_k": 3}
