"""Folders that cannot be written: refused ones, full disks, quotas."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `cli`")
pytest.importorskip("alembic", reason="the extra `cli`")

from sqlalchemy import event

from gemmakv.chat.store import Record
from gemmakv.conversations import StoreError, StoreFailed, StoreFull, _database
from gemmakv.conversations._chat import ChatStore
from gemmakv.conversations._database import FILE
from gemmakv.conversations._store import Conversations
from support.records import TALK
from support.stored import records_of
from support.waits import wait_for_child

WEIGHTS = "ab" * 16
NOBODY = 65534


def keep(folder: Path, record: Record, *, killed: bool = False) -> None:
    """Stores a record, by a process that ends without closing if `killed`."""
    child = os.fork() if killed else 0
    if not child:
        store = ChatStore.open(folder, WEIGHTS)
        assert store.hold(record.id)
        store.write_record(record)
        if killed:
            os._exit(0)
        store.close()
    else:
        assert wait_for_child(child) == 0
        assert (folder / f"{FILE}-wal").stat().st_size > 0


def as_nobody(root: Path, call: Callable[[Path], None]) -> None:
    """Calls where all rights are those of the files, with their folder."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:
                os.chroot(root)
                os.chdir("/")
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                root = Path("/")
            call(root)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert wait_for_child(child) == 0


def read_there(store: ChatStore, record: Record, why: int) -> None:
    """Checks that it is read, and that all that is to be kept is refused."""
    assert not store.writable and store.read_only == os.strerror(why)
    assert records_of(store) == [record]
    assert not store.hold(record.id)
    with pytest.raises(StoreError, match=os.strerror(why)):
        store.write_record(record)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("what", ["folder", "file", "both"])
def test_what_only_others_may_write(
    tmp_path: Path, what: str, killed: bool
) -> None:
    record = Record("main", messages=TALK)
    folder = tmp_path / "root" / "kept"
    folder.mkdir(parents=True)
    (folder.parent / "tmp").mkdir()
    keep(folder, record, killed=killed)
    for path in [*folder.rglob("*"), folder, folder.parent, tmp_path]:
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder.parent / "tmp").chmod(0o777)
    (folder / f"{FILE}-shm").unlink(missing_ok=True)
    if what != "folder":
        (folder / FILE).chmod(0o444)
    if what != "file":
        folder.chmod(0o555)
    before = {path: path.read_bytes() for path in folder.glob(f"{FILE}*")}

    def look(root: Path) -> None:
        store = ChatStore.open(root / "kept", WEIGHTS)
        read_there(store, record, errno.EACCES)
        store.close()

    as_nobody(folder.parent, look)
    assert all(path.read_bytes() == was for path, was in before.items())
    folder.chmod(0o755)
    (folder / FILE).chmod(0o644)
    store = ChatStore.open(folder, WEIGHTS)
    assert store.writable and records_of(store) == [record]
    store.close()


def fails(name: str) -> Callable[..., Any]:
    def fail(*rest: Any) -> Any:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = name
        raise error

    return fail


@pytest.mark.parametrize(
    "name, number, wanted",
    [
        ("SQLITE_FULL", 0, errno.ENOSPC),
        ("SQLITE_FULL", errno.EDQUOT, errno.EDQUOT),
        ("SQLITE_IOERR_WRITE", 0, errno.ENOSPC),
        ("SQLITE_IOERR_WRITE", errno.EDQUOT, errno.EDQUOT),
        ("SQLITE_IOERR_SHMSIZE", errno.ENOSPC, errno.ENOSPC),
        ("SQLITE_CANTOPEN", errno.ENOSPC, errno.ENOSPC),
        ("SQLITE_CANTOPEN", errno.EROFS, errno.EROFS),
        ("SQLITE_READONLY_DIRECTORY", errno.EACCES, errno.EACCES),
    ],
)
def test_what_keeps_it_from_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int,
    wanted: int,
) -> None:  # fmt: skip
    record = Record("main", messages=TALK)
    keep(tmp_path, record)

    def no_file(**more: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(_database, "_keep_a_log", fails(name))
        if number:
            patch.setattr(_database.tempfile, "TemporaryFile", no_file)
        with pytest.raises(OSError, match=os.strerror(wanted)) as caught:
            Conversations.open(tmp_path)
        assert caught.value.errno == wanted
        assert str(tmp_path) in str(caught.value)
        store = ChatStore.open(tmp_path, WEIGHTS)
        read_there(store, record, wanted)
        store.close()
    store = ChatStore.open(tmp_path, WEIGHTS)
    assert store.writable and records_of(store) == [record]
    store.close()


@pytest.mark.parametrize("name", ["SQLITE_CANTOPEN", "SQLITE_IOERR_READ"])
def test_what_is_broken_is_no_matter_of_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keep(tmp_path, Record("main"))
    monkeypatch.setattr(_database, "_keep_a_log", fails(name))
    with pytest.raises(ValueError, match="disk I/O error"):
        ChatStore.open(tmp_path, WEIGHTS)


@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("SQLITE_FULL", StoreFull, "full, or a quota"),
        ("SQLITE_IOERR_WRITE", StoreFull, "full, or a quota"),
        ("SQLITE_READONLY", StoreFailed, "can only be read"),
        ("SQLITE_READONLY_DBMOVED", StoreFailed, "can only be read"),
        ("SQLITE_IOERR_READ", StoreFailed, "disk I/O error"),
    ],
)
def test_a_write_that_fails_keeps_what_was_there(
    tmp_path: Path, name: str, kind: type[StoreError], words: str
) -> None:
    record = Record("main", messages=TALK[:2])
    keep(tmp_path, record)
    store = ChatStore.open(tmp_path, WEIGHTS)
    assert store.hold(record.id)
    engine = store._database.engine
    assert engine is not None

    def execute(cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("UPDATE"):
            fails(name)()

    later = Record("main", id=record.id, messages=TALK)
    event.listen(engine, "do_execute", execute)
    with pytest.raises(kind, match=words) as caught:
        store.write_record(later)
    assert type(caught.value) is kind
    event.remove(engine, "do_execute", execute)
    assert store.read_record(record.id) == record
    store.write_record(later)
    found = store.read_record(record.id)
    assert found is not None and found.messages == TALK
    store.close()


# Disks.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs the right to do so")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    path = disk / "filler"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return path


@pytest.mark.parametrize("shared", ["memory", "none"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_full_disk(disk: Path, killed: bool, shared: str) -> None:
    """Also where a part of the database is in the log of a killed process."""
    record = Record("main", messages=TALK)
    folder = disk / "kept"
    keep(folder, record, killed=killed)
    if shared == "none":
        (folder / f"{FILE}-shm").unlink(missing_ok=True)
    filler = fill(disk)
    for _ in range(2):
        store = ChatStore.open(folder, WEIGHTS)
        read_there(store, record, errno.ENOSPC)
        store.close()
    filler.unlink()
    store = ChatStore.open(folder, WEIGHTS)
    assert store.writable and records_of(store) == [record]
    store.close()


def test_a_disk_that_fills_up(disk: Path) -> None:
    folder = disk / "kept"
    store = ChatStore.open(folder, WEIGHTS)
    record = Record("main", messages=TALK[:2])
    assert store.hold(record.id)
    store.write_record(record)
    filler = fill(disk)
    later = Record("main", id=record.id, messages=TALK * 9)
    while True:  # the log may have some room
        try:
            store.write_record(later)
        except StoreFull:
            break
        record = later
        later = Record("main", id=record.id, messages=record.messages * 2)
    assert store.read_record(record.id) == record
    store.close()
    store = ChatStore.open(folder, WEIGHTS)
    assert records_of(store) == [record]
    store.close()
    filler.unlink()
    store = ChatStore.open(folder, WEIGHTS)
    assert records_of(store) == [record] and store.hold(record.id)
    store.write_record(later)
    assert store.read_record(record.id) == later
    store.close()


def test_no_room_for_a_first_one(disk: Path) -> None:
    fill(disk)
    store = ChatStore.open(disk / "kept", WEIGHTS)
    assert store.read_only == os.strerror(errno.ENOSPC)
    assert store.listing().records == []
    store.close()
    (disk / "filler").unlink()
    store = ChatStore.open(disk / "kept", WEIGHTS)
    assert store.writable
    store.close()


def test_a_read_only_disk(disk: Path) -> None:
    record = Record("main", messages=TALK)
    folder = disk / "kept"
    keep(folder, record, killed=True)
    remount = ["mount", "-o", "remount,ro", str(disk)]
    if subprocess.run(remount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs the right to do so")
    store = ChatStore.open(folder, WEIGHTS)
    read_there(store, record, errno.EROFS)
    store.close()
