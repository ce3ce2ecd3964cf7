"""kill -9 at every statement: what was there is there, or what was to be."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `cli`")
pytest.importorskip("alembic", reason="the extra `cli`")

from gemmakv.chat._session import Message
from gemmakv.chat.store import FolderStore, Record
from gemmakv.conversations import _database
from gemmakv.conversations._chat import ChatStore
from gemmakv.conversations._database import FILE
from gemmakv.conversations._store import Conversations
from gemmakv.conversations._takeover import take_over
from support.stored import records_of

WEIGHTS = "ab" * 16
ONE = [Message("user", "one"), Message("model", "1")]
TWO = [Message("user", "two"), Message("model", "2")]

pytestmark = pytest.mark.slow


def is_killed(number: int, call: Callable[[], object]) -> bool:
    """Calls in a process that is killed as it begins with a statement of the
    database; tells whether there are so many.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            count = 0

            def look(statement: str) -> None:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            connect = _database._connect

            def watched(*rest: Any) -> sqlite3.Connection:
                db = connect(*rest)
                db.set_trace_callback(look)
                return db

            _database._connect = watched
            call()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def kills(folder: Path, call: Callable[[], object]) -> Iterator[bool]:
    """For each statement of a call, a copy of the folder in its place after a
    kill; the last time, and then it is true, there was none.
    """
    saved = folder.with_name("saved")
    shutil.copytree(folder, saved)
    number, killed = 0, True
    while killed:
        number += 1
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)
        killed = is_killed(number, call)
        yield not killed
    assert number > 5


def test_a_new_schema(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    shutil.copy(golden / "sessions_v1.sqlite3", folder / FILE)
    for _ in kills(folder, lambda: Conversations.open(folder).close()):
        store = Conversations.open(folder)
        found, _more = store.sessions.newest("", 9, None)
        assert [one.turns for one in found] == [3, 1, 2]
        path = store.turns.path(found[0].head, tokens=True)
        assert [turn.tokens.tolist() for turn in path] == [
            [2, 5, 6, 7], [8, 9], [4],
        ]  # fmt: skip
        store.close()


def test_a_turn(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    store = ChatStore.open(folder, WEIGHTS)
    record = Record("main", messages=ONE, draft="two")
    assert store.hold(record.id)
    store.write_record(record)
    fork = Record("fork", parent=record.id, messages=ONE)
    assert store.hold(fork.id)
    store.write_record(fork)
    store.close()
    later = Record(
        "main", id=record.id, created=record.created, messages=[*ONE, *TWO]
    )

    def say() -> None:
        own = ChatStore.open(folder, WEIGHTS)
        assert own.hold(record.id)
        own.write_record(later)

    seen = set()
    for ended in kills(folder, say):
        again = ChatStore.open(folder, WEIGHTS)
        found = again.read_record(record.id)
        assert found in ([later] if ended else [record, later])
        seen.add(found == later)
        assert again.read_record(fork.id) == fork
        assert again.hold(record.id)  # the lock went with the process
        again.close()
    assert seen == {True, False}


def test_a_folder_that_is_taken_over(tmp_path: Path) -> None:
    home = tmp_path / "home"
    old, new = home / "old", home / "new"
    home.mkdir()
    folder = FolderStore(old)
    first = Record("first", messages=[*ONE, *TWO], draft="and")
    second = Record("second", parent=first.id, forked_at=1, messages=ONE)
    gone = Record("gone", messages=TWO)
    for record in (first, second, gone):
        assert folder.hold(record.id)
        folder.write_record(record)
    folder.write_session(first.id, lambda file: file.write(b"kv"))
    folder.delete(gone.id)
    folder.close()

    def take() -> list[str]:
        return take_over(old, ChatStore.open(new, WEIGHTS))

    seen = set()
    for ended in kills(home, take):
        assert old.exists() != ended
        store = ChatStore.open(new, WEIGHTS)
        there = len(records_of(store))
        seen.add(there)
        assert there in ([2] if ended else [0, 1, 2])
        assert take_over(old, store) == []
        assert records_of(store) == [first, second]
        assert [one.name for one in store.deleted()] == ["gone"]
        file = store.open_session(first.id)
        assert file is not None
        with file:
            assert file.read() == b"kv"
        assert not old.exists() and (home / "old.taken-over").exists()
        store.close()
    assert seen == {0, 1, 2}
