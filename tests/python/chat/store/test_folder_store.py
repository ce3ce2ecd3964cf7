"""Sessions on disk: whole after any crash, private, a writer for each."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import gemmakv
from gemmakv._support import folders
from gemmakv._support.files import PathOrFile, piecewise_writer
from gemmakv.chat._session import Message, Session
from gemmakv.chat.store import (
    FolderStore,
    NewerRecord,
    Record,
    Saver,
    SaveTo,
    SessionStore,
    _folder,
    _records,
    folder_of,
    from_store,
)
from gemmakv.errors import CorruptFile
from support.records import TALK
from support.tiny_gguf import write_talker
from support.waits import wait_for_child, wait_until


def writes(data: bytes) -> SaveTo:
    def save(place: PathOrFile) -> None:
        with piecewise_writer(place) as write:
            write(data)

    return save


def kept_by(store: SessionStore, *records: Record) -> None:
    for record in records:
        assert store.hold(record.id)
        store.write_record(record)


def session_file(store: SessionStore, id: str) -> bytes | None:
    file = store.open_session(id)
    if file is None:
        return None
    with file:
        return file.read()


def talk(talker: gemmakv.Gemma, *texts: str) -> Session:
    session = Session(talker, options={"max_tokens": 5})
    for text in texts:
        session.send(text)
    return session


def record_of(session: Session) -> Record:
    return Record(
        "main", messages=session.messages, options=dict(session.options)
    )


def restored(
    talker: gemmakv.Gemma, record: Record, data: bytes | None
) -> tuple[Session, str]:
    file = None if data is None else io.BytesIO(data)
    return from_store(talker, record, file, lambda: Session(talker))


# ---- Records ----


def test_record_as_json() -> None:
    record = Record(
        "\u00e9", parent="x", forked_at=1, system="a\ud800", messages=TALK
    )
    record.messages = [*TALK[:3], Message("model", "cut", incomplete=True)]
    record.options = {"logit_bias": {3: -float("inf")}, "stop": ["x"]}
    record.draft = "and then"
    assert _records.from_json(record.to_json()) == record
    assert record.turns == 2 and record.last_text == "and then"


@pytest.mark.parametrize(
    "old, new",
    [
        (b'"format": 2', b'"format": true'),
        (b'"tokens": 0', b'"tokens": "0"'),
        (b'"tokens": 0', b'"token": 0'),
        (b'"error"', b'"sometimes"'),
        (b'"content": "two"', b'"content": 2'),
        (b'"options": {}', b'"options": {"top_k": "x"}'),
        (b'"options": {}', b'"options": {"logit_bias": 3}'),
        (b'"options": {}', b'"options": ' + b"[" * 200_000 + b"]" * 200_000),
        (b"{", b"["),
        (b"}", b""),
    ],
)
def test_a_record_that_is_none(old: bytes, new: bytes) -> None:
    data = Record("main", messages=TALK).to_json()
    assert old in data
    with pytest.raises(CorruptFile) as error:
        _records.from_json(data.replace(old, new))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


NEWER = [
    (b'"format": 2', b'"format": 3, "mood": []'),
    (b'"tokens": 0', b'"tokens": 0, "mood": 1'),
    (b'"options": {}', b'"options": {"mood": 1}'),
]


@pytest.mark.parametrize("old, new", NEWER)
def test_a_newer_record_is_left_alone(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    store = FolderStore(tmp_path)
    record = Record("main", messages=TALK)
    kept_by(store, record)
    store.write_session(record.id, writes(b"kv"))
    path = tmp_path / f"{record.id}.json"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    with pytest.raises(NewerRecord, match="update gemmakv"):
        store.read_record(record.id)
    store.close()
    again = FolderStore(tmp_path)
    listing = again.listing()
    assert listing.records == [] and listing.taken == {"main"}
    assert len(listing.lines) == 1 and "newer gemmakv" in listing.lines[0]
    assert path.read_bytes() == data.replace(old, new)
    assert session_file(again, record.id) == b"kv"
    again.close()


# ---- The folder ----


def test_write_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    store: SessionStore = FolderStore(folder)
    record = Record("main", messages=TALK)
    kept_by(store, record)
    store.write_session(record.id, writes(b"bytes"))
    store.write_current(record.id)
    store.close()
    again = FolderStore(folder)
    assert again.listing().records == [record] and not again.listing().lines
    assert again.read_record(record.id) == record
    assert session_file(again, record.id) == b"bytes"
    assert again.current_id == record.id
    assert folder.stat().st_mode & 0o077 == 0
    again.close()


def test_only_what_has_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = FolderStore(tmp_path), FolderStore(tmp_path)
    records = [Record(name, messages=TALK) for name in ("a", "b", "c")]
    kept_by(other, *records)
    read = []

    def from_json(data: bytes) -> Record:
        read.append(data)
        return records_from_json(data)

    records_from_json = _records.from_json
    monkeypatch.setattr(_records, "from_json", from_json)
    for record in store.listing().records:
        record.name = "changed here, and not stored"
        record.messages.clear()
        record.options["seed"] = 1
    again = store.listing().records
    assert sorted(again, key=lambda one: one.name) == records
    assert len(read) == 3
    records[1].name = "B"  # as long as before
    other.write_record(records[1])
    other.delete(records[2].id)
    names = sorted(one.name for one in store.listing().records)
    assert names == ["B", "a"]
    assert len(read) == 4


def test_two_at_once_keep_everything(tmp_path: Path) -> None:
    """A session has one writer, a store has many."""
    first, second = FolderStore(tmp_path), FolderStore(tmp_path)
    assert first.writable and second.writable
    mine, yours = Record("mine"), Record("yours")
    kept_by(first, mine)
    kept_by(second, yours)
    assert not second.hold(mine.id) and not first.hold(yours.id)
    assert second.holder(mine.id) == f"process {os.getpid()}"
    with pytest.raises(OSError, match="not held"):
        second.write_record(mine)
    with pytest.raises(OSError, match="not held"):
        second.write_session(mine.id, writes(b"x"))
    with pytest.raises(OSError, match="not held"):
        second.delete(mine.id)
    for store in (first, second):
        found = {record.name for record in store.listing().records}
        assert found == {"mine", "yours"}
    first.release(mine.id)
    assert second.hold(mine.id)
    second.close()
    assert first.hold(mine.id)
    first.close()


@pytest.mark.parametrize("id", ["", "../other", "/etc/x", "a/b", "a\0"])
def test_an_id_is_no_path(tmp_path: Path, id: str) -> None:
    folder = tmp_path / "store"
    store = FolderStore(folder)
    (tmp_path / "other.json").write_bytes(Record("x", id="other").to_json())
    calls: list[Callable[[str], object]] = [
        store.hold,
        store.read_record,
        store.open_session,
        store.undelete,
        store.holder,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="id: expected the id"):
            call(id)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.json", "store"]
    assert [p.name for p in folder.iterdir()] == ["lock"]
    store.close()


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"kept")
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store" / "a.lock").symlink_to(other)
    with pytest.raises(OSError):
        store.hold("a")
    assert other.read_bytes() == b"kept"
    store.close()


class Clock:
    """The clock of a store, which goes on while the store sleeps."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self._now = 0.0
        self._calls: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        due = [one for one in self._calls if one[0] <= self._now]
        for one in due:
            self._calls.remove(one)
            one[1]()

    def call_at(self, now: float, call: Callable[[], object]) -> None:
        self._calls.append((self._now + now, call))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_folder, "time", clock)
    return clock


def test_holding_waits(tmp_path: Path, clock: Clock) -> None:
    first, second = FolderStore(tmp_path), FolderStore(tmp_path)
    assert first.hold("a")
    assert not first.hold("a")  # nor another thread of the same process
    assert not second.hold("a", wait_s=0.05)
    clock.call_at(0.1, lambda: first.release("a"))
    assert second.hold("a", wait_s=30)
    first.close()
    second.close()


def write_turns(folder: Path, name: str, turns: int, said: int) -> None:
    """Writes turn after turn, and says the number of each that is there."""
    store = FolderStore(folder)
    record = Record(name, id=name * 32)
    assert store.hold(record.id, wait_s=30)
    record = store.read_record(record.id) or record
    for i in range(record.turns, turns):
        reply = Message("model", "x" * 999)
        record.messages += [Message("user", str(i)), reply]
        store.write_record(record)
        os.write(said, b"%d\n" % (i + 1))
        store.write_session(record.id, writes(b"%d " % i * 50000))


def writer(folder: Path, name: str, turns: int) -> tuple[int, BinaryIO]:
    """A process that does; its pid and what it says."""
    reader, said = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            write_turns(folder, name, turns, said)
            code = 0
        finally:
            os._exit(code)
    os.close(said)
    return child, open(reader, "rb")


def test_two_processes_at_once(tmp_path: Path) -> None:
    processes = [writer(tmp_path, name, 40) for name in "ab"]
    for child, said in processes:
        said.read()
        said.close()
        assert wait_for_child(child) == 0
    store = FolderStore(tmp_path)
    records = store.listing().records
    assert [(r.name, r.turns) for r in records] == [("a", 40), ("b", 40)]
    for record in records:
        assert session_file(store, record.id) == b"39 " * 50000
    store.close()


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What a process has said is written is there, whole, after kill -9."""
    said, whole = 0, -1  # of the last process; the session that it has left
    for moment in range(12):
        child, out = writer(tmp_path, "a", 100_000)
        with out:
            first = int(out.readline())
            time.sleep(0.003 * moment)  # whatever it does then
            os.kill(child, signal.SIGKILL)
            # From the same buffer as the first line, which may hold others.
            lines = out.read().split(b"\n")[:-1]
        assert wait_for_child(child) == -signal.SIGKILL
        said = int(lines[-1]) if lines else first
        store = FolderStore(tmp_path)
        assert store.hold("a" * 32)  # the lock went with the process
        listing = store.listing()
        [record] = listing.records
        assert not listing.lines and said <= record.turns <= said + 1
        # A session is whole before its process says the next turn.
        least = said - 2 if said > first else whole
        kept = session_file(store, record.id)
        if kept is None:
            assert least < 0
        else:
            whole = int(kept.split()[0])
            assert kept == b"%d " % whole * 50000
            assert least <= whole < record.turns
        assert not list(tmp_path.glob(".*.tmp"))  # swept
        store.close()
    assert said >= 12


def test_damaged_records_are_kept_aside(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    good, bad = Record("good"), Record("bad")
    for record in (good, bad):
        kept_by(store, record)
        store.write_session(record.id, writes(b"kv"))
        store.release(record.id)
    path = tmp_path / f"{bad.id}.json"
    path.write_bytes(path.read_bytes()[:-20])
    listing = store.listing()
    assert listing.records == [good]
    [line] = listing.lines
    assert f"{bad.id}.json.damaged-1" in line
    assert (tmp_path / f"{bad.id}.json.damaged-1").exists()
    aside = tmp_path / f"{bad.id}.session.damaged-1"
    assert aside.read_bytes() == b"kv"
    assert store.listing().records == [good] and not store.listing().lines
    store.close()


def test_a_record_mended_meanwhile_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = FolderStore(tmp_path), FolderStore(tmp_path)
    record = Record("main")
    kept_by(other, record)
    path = tmp_path / f"{record.id}.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    hold = store.hold

    def hold_late(id: str, wait_s: float = 0) -> bool:
        other.write_record(record)
        other.release(id)
        return hold(id, wait_s)

    monkeypatch.setattr(store, "hold", hold_late)
    listing = store.listing()
    assert listing.records == [record] and not listing.lines
    assert path.read_bytes() == whole
    assert not list(tmp_path.glob("*.damaged-*"))
    assert hold(record.id)  # it was let go of
    # One that somebody holds is left to them.
    path.write_bytes(whole[:-20])
    [line] = other.listing().lines
    assert f"kept as {path}" in line and path.exists()
    store.close()
    other.close()


def test_every_file_is_the_user_s_alone(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    old, new = Record("old"), Record("new")
    kept_by(store, old, new)
    for suffix in ("json", "session"):  # as they once were
        path = tmp_path / f"{old.id}.{suffix}"
        path.write_bytes(path.read_bytes() if path.exists() else b"kv")
        path.chmod(0o644)
    assert store.read_record(old.id) == old
    file = store.open_session(old.id)
    assert file is not None
    with file:
        assert file.read() == b"kv"
    for record in (old, new):
        store.write_record(record)
        store.write_session(record.id, writes(b"kv"))
    store.write_current(new.id)
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert {"lock", "current", f"{new.id}.session", f"{old.id}.json"} <= {
        path.name for path in files
    }
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600, path
    store.close()


def test_leftovers_are_swept_by_whoever_is_alone(tmp_path: Path) -> None:
    """Half-written files, and files without a record."""
    store = FolderStore(tmp_path)
    record = Record("main")
    kept_by(store, record)
    store.write_session(record.id, writes(b"kv"))
    (tmp_path / f".{record.id}.session.abc.tmp").write_bytes(b"half")
    (tmp_path / "0123.session").write_bytes(b"orphan")
    (tmp_path / "0123.lock").write_bytes(b"")
    before = {path.name for path in tmp_path.iterdir()}
    FolderStore(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == before
    store.close()
    FolderStore(tmp_path).close()
    names = {path.name for path in tmp_path.iterdir()}
    kinds = ("json", "session", "lock")
    assert names == {"lock", *(f"{record.id}.{kind}" for kind in kinds)}


def wait_for_the_next_time(folder: Path) -> None:
    """Waits until the folder's file system gives a file a later time."""
    probe = folder / "probe"
    times: list[int] = []

    def is_later() -> bool:
        probe.write_bytes(b"")
        times.append(probe.stat().st_ctime_ns)
        return times[-1] > times[0]

    wait_until(is_later)
    probe.unlink()


def test_deleting_can_be_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    one, two = Record("one", messages=TALK), Record("two")
    kept_by(store, one, two)
    store.write_session(one.id, writes(b"kv"))
    for record in (one, two):
        store.delete(record.id)
        store.release(record.id)
        wait_for_the_next_time(tmp_path)
    assert store.listing().records == []
    assert session_file(store, one.id) is None
    assert [record.name for record in store.deleted()] == ["two", "one"]
    store.close()
    again = FolderStore(tmp_path)
    assert again.undelete(one.id) == one
    assert session_file(again, one.id) == b"kv"
    assert again.undelete("nothing") is None
    again.close()
    late = time.time() + 31 * 86400
    monkeypatch.setattr(time, "time", lambda: late)
    FolderStore(tmp_path).close()
    assert list((tmp_path / "trash").iterdir()) == []
    assert (tmp_path / f"{one.id}.json").exists()


def test_a_failed_write_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    record = Record("main")
    kept_by(store, record)
    store.write_session(record.id, writes(b"old"))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as error:
        store.write_session(record.id, writes(b"new"))
    assert error.value.filename == str(tmp_path / f"{record.id}.session")
    assert "make room" in str(error.value)
    assert session_file(store, record.id) == b"old"
    assert not list(tmp_path.glob(".*.tmp"))
    store.close()


def test_a_read_only_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions can be read there."""
    store = FolderStore(tmp_path)
    record = Record("main", messages=TALK)
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
    again = FolderStore(tmp_path)
    assert not again.writable and "Read-only" in again.read_only
    assert again.listing().records == [record]
    assert session_file(again, record.id) == b"kv"
    assert not again.hold(record.id)
    again.write_current("other")
    with pytest.raises(OSError, match="Read-only"):
        again.write_record(record)
    again.close()

    def no_folder(path: Any, *rest: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", no_folder)
    FolderStore(tmp_path).close()
    with pytest.raises(OSError, match="Read-only"):
        FolderStore(tmp_path / "new")


def test_an_older_version_has_the_folder_for_itself(
    tmp_path: Path, clock: Clock
) -> None:
    FolderStore(tmp_path).close()
    older = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(older, fcntl.LOCK_EX)
    os.pwrite(older, b"4711", 0)
    store = FolderStore(tmp_path)
    assert not store.writable and "process 4711" in store.read_only
    assert store.listing().records == []
    os.close(older)
    store.close()
    # And keeps out of it while this one is there.
    store = FolderStore(tmp_path)
    older = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(older, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(older)
    store.close()


def test_whoever_sweeps_may_be_stopped_for_a_while(
    tmp_path: Path, clock: Clock
) -> None:
    """The machine stood still for 2 s: a chat that began meanwhile took the
    sweeper for an older version, and stored nothing.
    """
    FolderStore(tmp_path).close()
    sweeper = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(sweeper, fcntl.LOCK_EX)
    clock.call_at(2.5, lambda: os.close(sweeper))
    store = FolderStore(tmp_path)
    assert store.writable, store.read_only
    store.close()


def test_folders_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    one = folder_of("gemma3/270m", "a" * 32)
    assert one == Path("/data/gemmakv/chat") / ("gemma3_270m-" + "a" * 16)
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert folders.data_folder().is_relative_to(Path.home())


@pytest.mark.parametrize("version", [1, 2])
def test_a_store_of_each_format_opens(
    golden: Path, tmp_path: Path, version: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = write_talker(tmp_path / "talker.gguf", endless=False)
    talker = gemmakv.Gemma.load(path, prefix_cache=False)
    folder = golden / f"store_v{version}"
    shutil.copytree(folder, tmp_path / "s")
    store = FolderStore(tmp_path / "s")
    listing = store.listing()
    first, fork = listing.records
    assert not listing.lines and store.current_id == fork.id
    assert fork.parent == first.id and fork.forked_at == 1
    assert (first.name, fork.name) == ("main", "caf\u00e9")
    for record in listing.records:
        path = folder / f"{record.id}.json"
        stated = json.loads(path.read_text("ascii"))
        assert record.draft == stated.get("draft")
        contents = [
            one[1] if version == 1 else one["content"]
            for one in stated["messages"]
        ]
        assert stated["tokens"] == record.tokens
        with monkeypatch.context() as patch:
            patch.setattr(
                gemmakv.Gemma, "fingerprint", gemmakv.Gemma.weights_fingerprint
            )
            then, line = restored(
                talker, record, session_file(store, record.id)
            )
        assert line == "" and len(then.cache) == record.tokens
        # Its keys and values have other bits today.
        now, line = restored(talker, record, session_file(store, record.id))
        assert "another version of gemmakv" in line and len(now.cache) == 0
        for session in (then, now):
            assert session.system == "Be brief."
            assert [m.content for m in session.messages[1:]] == contents
            assert session.options == {"max_tokens": 5, "top_k": 3, "seed": 1}
        assert store.hold(record.id)
        store.write_record(record)
        assert store.read_record(record.id) == record
    store.close()


# ---- The writing thread ----


class SlowStore(FolderStore):
    """Writes when it is told to, and notes what it wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.written: list[bytes] = []

    def write_session(self, id: str, save: SaveTo) -> None:
        self.begun.release()
        self.go.acquire()
        file = io.BytesIO()
        save(file)
        if file.getvalue() == b"bad":
            raise OSError(errno.ENOSPC, "full")
        self.written.append(file.getvalue())


def test_only_the_newest_is_written(tmp_path: Path) -> None:
    slow = SlowStore(tmp_path)
    saver = Saver(slow)
    saver.submit("a", writes(b"1"))
    slow.begun.acquire()
    saver.submit("a", writes(b"2"))
    saver.submit("b", writes(b"bad"))
    saver.submit("a", writes(b"3"))
    saver.submit("c", writes(b"dropped"))
    saver.drop("c")
    for _ in range(3):
        slow.go.release()
    saver.wait()
    assert slow.written == [b"1", b"3"]
    assert [*saver.take_failures()] == ["b"]
    assert saver.take_failures() == {}
    slow.go.release()
    saver.submit("a", writes(b"last"))
    saver.close()
    assert slow.written[-1] == b"last"
    slow.close()


def test_no_error_ends_the_saver(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    saver = Saver(store)

    def fails(place: object) -> None:
        raise MemoryError("no memory for it")

    assert store.hold("a") and store.hold("b")
    saver.submit("a", fails)
    saver.submit("b", writes(b"b"))
    wait_until(lambda: session_file(store, "b") is not None)
    saver.close()
    [(id, error)] = saver.take_failures().items()
    assert id == "a" and isinstance(error, MemoryError)
    store.close()


# ---- Live sessions again ----


def test_a_whole_session_needs_no_computing(talker: gemmakv.Gemma) -> None:
    session = talk(talker, "one", "two")
    again, line = restored(talker, record_of(session), session.to_bytes())
    assert line == ""
    assert len(again.cache) == len(session.cache)
    assert again.send("three").token_ids == session.send("three").token_ids


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "empty"])
def test_text_survives_its_kv_cache(talker: gemmakv.Gemma, damage: str) -> None:
    session = talk(talker, "one", "two")
    data = session.to_bytes()
    flipped = data[:-200] + bytes([data[-200] ^ 1]) + data[-199:]
    damaged = {
        "cut": data[:-9],
        "flipped": flipped,
        "missing": None,
        "empty": b"",
    }[damage]
    again, line = restored(talker, record_of(session), damaged)
    assert again.messages == session.messages
    assert "the text is kept, and computed again" in line
    # Nothing is wrong with what is not there.
    assert ("cannot be used" in line) == (damage != "missing")
    assert again.options == session.options
    assert again.send("three").token_ids
    assert again.turns == 3


class _Unreadable(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    "file", [_Unreadable(), IsADirectoryError(errno.EISDIR, "Is a directory")]
)
def test_text_survives_a_session_file_that_cannot_be_read(
    talker: gemmakv.Gemma, file: Any
) -> None:
    """It could not be opened, and no chat could start with it."""
    session = talk(talker, "one", "two")
    record = record_of(session)
    again, line = from_store(talker, record, file, lambda: Session(talker))
    assert again.messages == session.messages
    assert "cannot be used (I" in line and "the text is kept" in line


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
    record = Record("main", options=session.options)
    assert _records.from_json(record.to_json()).options == {"top_k": 3}
