"""What chats have stored, as a reader of the database sees it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemmakv.chat.store import Record
    from gemmakv.conversations._chat import ChatStore

FILE = "sessions.sqlite3"


def stored_sessions(
    folder: Path, deleted: bool = False
) -> list[dict[str, Any]]:
    """Sessions of the database somewhere in a folder, in the order in which
    they were made, each with its `messages`; none where there is no database.
    """
    files = list(folder.rglob(FILE))
    if not files:
        return []
    [path] = files
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA query_only = ON")
        db.execute("BEGIN")
        rows = db.execute("SELECT * FROM sessions ORDER BY rowid").fetchall()
        turns = {
            row["id"]: row for row in db.execute("SELECT * FROM turns")
        }
    found = []
    for row in rows:
        session = dict(row)
        session["settings"] = json.loads(row["settings"])
        session["messages"], session["turns"] = [], []
        turn = turns.get(row["head"])
        while turn is not None:
            said = json.loads(turn["messages"])
            session["messages"][:0] = [*said, json.loads(turn["reply"])]
            session["turns"].insert(0, dict(turn))
            turn = turns.get(turn["parent"])
        if (row["deleted"] is None) != deleted:
            found.append(session)
    return found


def stored_session(folder: Path) -> dict[str, Any]:
    """The only one."""
    [found] = stored_sessions(folder)
    return found


def said_in(session: dict[str, Any]) -> list[str]:
    """What the user said."""
    return [one["content"] for one in session["messages"][::2]]


def token_count(session: dict[str, Any]) -> int:
    """How many tokens the database has of a session."""
    return sum(len(turn["tokens"]) for turn in session["turns"]) // 4


def records_of(store: ChatStore) -> list[Record]:
    """All that it lists, with their messages."""
    found = []
    for listed in store.listing().records:
        record = store.read_record(listed.id)
        assert record is not None
        assert (record.turns, record.last_text) == (
            listed.turns, listed.last_text,
        )  # fmt: skip
        found.append(record)
    return found
