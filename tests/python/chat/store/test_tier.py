"""What goes from the prefix cache when a stored session goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gemmakv import Gemma, PrefixCache, Session
from gemmakv.chat.store import (
    FolderStore,
    Record,
    forget,
    keeps_keys,
    tokens_in,
)
from support.sessions import said
from support.token_files import token_file

SYSTEM = "Of all that is said here nothing is forgotten. " * 9


def objects(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("??/*")}


@pytest.fixture
def prefix(tmp_path: Path) -> PrefixCache:
    return PrefixCache("64MiB", disk=tmp_path / "prefix")


@pytest.fixture
def gemma(talker_path: Path, prefix: PrefixCache) -> Gemma:
    return Gemma.load(talker_path, prefix_cache=prefix)


def stored(store: FolderStore, session: Session) -> Record:
    record = Record("main", messages=session.messages)
    assert store.hold(record.id)
    store.write_record(record)
    data = token_file(session)
    store.write_session(record.id, lambda file: file.write(data))
    return record


def test_what_others_share_stays(
    gemma: Gemma, prefix: PrefixCache, tmp_path: Path
) -> None:
    store = FolderStore(tmp_path / "store")
    kept = said(Session(gemma, SYSTEM), "one " * 80)
    kept_record = stored(store, kept)
    prefix.flush()
    before = objects(tmp_path / "prefix")
    fork = kept.fork()
    gone = stored(store, said(fork, "two " * 90, "three"))
    fork.undo()
    said(fork, "something else " * 30)  # it hangs on what goes
    prefix.flush()
    assert objects(tmp_path / "prefix") > before
    tokens = tokens_in(store, gone.id)
    others = tokens_in(store, kept_record.id)
    assert tokens is not None and others is not None
    removed = forget(gemma, tokens, [others])
    left = objects(tmp_path / "prefix")
    assert removed > 0
    # The end of the fork's first turn is one that both have.
    assert before <= left and len(left - before) <= 1
    assert forget(gemma, others, [others]) == 0
    assert forget(gemma, others, []) > 0
    assert objects(tmp_path / "prefix") == set()
    store.close()


def test_another_dtype_shares_nothing(
    gemma: Gemma, prefix: PrefixCache, tmp_path: Path
) -> None:
    store = FolderStore(tmp_path / "store")
    one = said(Session(gemma, SYSTEM, kv_dtype="int8"), "one")
    two = said(Session(gemma, SYSTEM, kv_dtype="f32"), "one")
    records = [stored(store, session) for session in (one, two)]
    kept = [tokens_in(store, record.id) for record in records]
    assert kept[0] is not None and kept[1] is not None
    prefix.flush()
    whole = len(objects(tmp_path / "prefix"))
    assert forget(gemma, kept[0], [kept[1]]) == whole // 2
    assert len(objects(tmp_path / "prefix")) == whole - whole // 2
    store.close()


def test_who_keeps_keys(gemma: Gemma, talker: Gemma, talker_path: Path) -> None:
    assert keeps_keys(Session(gemma))
    assert not keeps_keys(Session(gemma, options={"prefix_cache": "read"}))
    assert not keeps_keys(Session(talker))
    assert not keeps_keys(Session(Gemma.load(talker_path)))


def test_old_trash_is_told_once(
    gemma: Gemma, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path / "store")
    session = said(Session(gemma), "one")
    record = stored(store, session)
    other = Record("whole", messages=session.messages)
    assert store.hold(other.id)
    store.write_record(other)
    store.write_session(other.id, session._saving())
    store.delete(record.id)
    store.delete(other.id)
    store.close()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 31 * 86400)
    store = FolderStore(tmp_path / "store")
    [kept] = store.take_emptied()
    assert kept.ids.tolist() == session.cache.tokens.tolist()
    assert store.take_emptied() == []
    assert os.listdir(tmp_path / "store" / "trash") == []
    store.close()


def test_what_cannot_be_read_has_no_tokens(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    record = Record("main")
    assert store.hold(record.id)
    assert tokens_in(store, record.id) is None
    store.write_record(record)
    path = tmp_path / "store" / f"{record.id}.session"
    for data in (b"", b"kv", b"GKVSESSN\3" + bytes(90)):
        path.write_bytes(data)
        assert tokens_in(store, record.id) is None
    store.close()
