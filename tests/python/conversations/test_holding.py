"""Who may write a session: requests for a while, processes for their life."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sqlalchemy", reason="the extra `server`")

from gemmakv.conversations import (
    LEASE_S,
    NoSession,
    SessionBusy,
    Turn,
    _clock,
    new_id,
)
from gemmakv.conversations._store import Conversations


def test_a_held_session_is_nobody_elses(tmp_path: Path) -> None:
    store, other = (Conversations.open(tmp_path) for _ in range(2))
    id = store.sessions.create("t", "one", None).id
    store.leases.hold(id)
    store.leases.hold(id)  # again
    for call in (
        lambda: other.leases.hold(id),
        lambda: other.leases.take("t", id, "me"),
        lambda: other.sessions.rename("t", id, "two"),
        lambda: other.sessions.rewind("t", id, None),
        lambda: other.sessions.delete("t", id),
    ):
        with pytest.raises(SessionBusy) as caught:
            call()
        assert caught.value.holder == f"process {os.getpid()}"
    assert store.sessions.get("t", id).name == "one"
    store.leases.let_go(id)
    store.leases.let_go(id)
    other.leases.hold(id)
    with pytest.raises(SessionBusy):
        store.leases.hold(id)
    other.close()
    store.leases.hold(id)
    store.leases.hold("not there yet")
    with pytest.raises(NoSession):
        store.leases.hold("../elsewhere")
    store.close()
    assert os.listdir(tmp_path / "held") == []


def test_a_request_keeps_it_from_a_chat(tmp_path: Path) -> None:
    store = Conversations.open(tmp_path)
    id = store.sessions.create("t", None, None).id
    store.leases.take("t", id, "me")
    with pytest.raises(SessionBusy):
        store.leases.hold(id)
    store.leases.release(id, "me")
    store.leases.hold(id)
    store.close()


@pytest.mark.parametrize("taker", ["a chat", "a chat that ended", "a rewind"])
def test_a_turn_whose_session_was_taken_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taker: str
) -> None:
    """It had moved the head under a chat: what was said there was lost."""
    store, other = (Conversations.open(tmp_path) for _ in range(2))
    id = store.sessions.create("t", None, None).id
    uptime = _clock.uptime()
    monkeypatch.setattr(_clock, "uptime", lambda: uptime)
    store.leases.take("t", id, "slow")
    uptime += LEASE_S + 1
    if taker == "a rewind":
        other.sessions.rewind("t", id, None)
    else:
        other.leases.hold(id)
    store.leases.renew(id, "slow")
    if taker == "a chat that ended":
        other.leases.let_go(id)
    turn = Turn(
        id=new_id("resp"), tenant="t", parent=None, depth=1, system=None,
        tools=[], messages=[], reply={}, reason="stop", usage={}, basis="",
        whole=True, tokens=np.empty(0, np.int32),
    )  # fmt: skip
    with pytest.raises(SessionBusy, match="took over"):
        store.turns.add(turn, id, "slow")
    assert store.sessions.get("t", id).head is None
    other.leases.let_go(id)
    store.leases.take("t", id, "next")  # nothing was left by the slow one
    store.close()
    other.close()


def test_a_lease_that_nobody_took_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (Conversations.open(tmp_path) for _ in range(2))
    id = store.sessions.create("t", None, None).id
    uptime = _clock.uptime()
    monkeypatch.setattr(_clock, "uptime", lambda: uptime)
    store.leases.take("t", id, "slow")
    uptime += LEASE_S + 1
    store.leases.renew(id, "slow")
    with pytest.raises(SessionBusy):
        other.leases.hold(id)
    assert not other.leases.holds(id)
    store.close()
    other.close()


def test_what_a_killed_process_held_is_free_at_once(tmp_path: Path) -> None:
    store = Conversations.open(tmp_path)
    id = store.sessions.create("t", None, None).id
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            other = Conversations.open(tmp_path)
            other.leases.hold(id)
            os.write(told, b".")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(ready, 1) == b"."
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(SessionBusy, match=f"process {child} has it open"):
        store.leases.hold(id)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store.leases.hold(id)
    store.close()
    os.close(ready)
    os.close(told)


def test_a_home_on_the_network_has_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmakv.conversations import _database

    with monkeypatch.context() as patch:
        patch.setattr(_database, "is_on_network", lambda path: True)
        store, other = (Conversations.open(tmp_path) for _ in range(2))
        ids = [one.sessions.create("t", "a", None).id for one in (store, other)]
        found, _ = store.sessions.newest("t", 9, None)
        assert [one.id for one in found] == ids[::-1]
        assert not any(name.endswith("-wal") for name in os.listdir(tmp_path))
        store.close()
        other.close()
    store = Conversations.open(tmp_path)
    assert len(store.sessions.newest("t", 9, None)[0]) == 2
    store.close()


def test_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the current folder is touched."""
    from gemmakv.conversations._database import Database

    monkeypatch.chdir(tmp_path)
    store = Conversations(Database(None))
    id = store.sessions.create("t", None, "brief").id
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / id).write_text("mine")
    store.leases.hold(id)
    assert store.leases.holds(id)
    store.leases.let_go(id)
    assert (tmp_path / "held" / id).exists()
    store.close()
    store.close()


def test_a_database_that_can_only_be_read(tmp_path: Path) -> None:
    from gemmakv.conversations import StoreFailed
    from gemmakv.conversations._database import FILE, Database

    store = Conversations.open(tmp_path)
    id = store.sessions.create("t", "one", None).id
    for close_first in False, True:
        if close_first:
            store.close()
        before = {one: (tmp_path / one).stat().st_mtime_ns for one in
                  os.listdir(tmp_path)}  # fmt: skip
        reader = Conversations(Database(str(tmp_path), read_only=True))
        assert reader.sessions.get("t", id).name == "one"
        with pytest.raises(StoreFailed):
            reader.sessions.rename("t", id, "two")
        reader.close()
        after = {one: (tmp_path / one).stat().st_mtime_ns for one in
                 os.listdir(tmp_path)}  # fmt: skip
        assert before[FILE] == after[FILE]
        assert before.keys() == after.keys()
