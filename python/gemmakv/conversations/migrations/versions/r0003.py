"""Columns and indexes that list sessions and find equal tokens in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("turns", sa.Column("plain", sa.Integer))
    op.add_column("turns", sa.Column("follows", sa.LargeBinary))
    op.add_column("sessions", sa.Column("number", sa.Integer))
    op.execute("UPDATE sessions SET number = rowid")
    op.drop_index("sessions_made", "sessions")
    op.create_index("sessions_made", "sessions", ["tenant", "number"])
    op.create_index("sessions_parent", "sessions", ["parent"])
    plain, follows = _plain_turns(), _followed()
    notes = [
        {"id": id, "plain": is_plain, "follows": follows.get(id)}
        for id, is_plain in plain.items()
    ]
    if notes:
        op.get_bind().execute(
            sa.text(
                "UPDATE turns SET plain = :plain, follows = :follows "
                "WHERE id = :id"
            ),
            notes,
        )
    op.execute(
        "CREATE INDEX turns_follows ON turns "
        "(follows, substr(tokens, 1, 512)) WHERE follows IS NOT NULL"
    )


def _rows(query: str) -> Iterator[Any]:
    return iter(op.get_bind().exec_driver_sql(query))


def _plain_turns() -> dict[str, bool | None]:
    """Says whether chats can go on from turns; None: they cannot be read."""
    plain: dict[str, bool | None] = {}
    for id, parent, tools, messages, reply in _rows(
        "SELECT id, parent, tools, messages, reply FROM turns ORDER BY depth"
    ):
        plain[id] = parent is None or plain[parent]
        if not plain[id]:
            continue
        try:
            said = [*json.loads(messages), json.loads(reply)]
            roles = [one.get("role") for one in said]
            calls = any(one.get("tool_calls") for one in said)
        except (ValueError, TypeError, AttributeError, RecursionError):
            plain[id] = None  # a list, or whoever opens it, says so
            continue
        plain[id] = (
            roles == ["user", "assistant"] and not calls and tools == "[]"
        )
    return plain


def _followed() -> dict[str, bytes]:
    """Gives the digests of what the tokens of turns follow: those of chats, as
    their sessions' settings have the KV cache's type.
    """
    parents = dict(_rows("SELECT id, parent FROM turns"))
    kinds: dict[str, str] = {}
    for turn, text in _rows("SELECT head, settings FROM sessions"):
        try:
            kind = json.loads(text).get("kv_dtype")
        except (ValueError, AttributeError, RecursionError):
            continue
        while isinstance(kind, str) and turn is not None and turn not in kinds:
            kinds[turn], turn = kind, parents[turn]
    ends: dict[str, hashlib.blake2b] = {}
    found: dict[str, bytes] = {}
    for id, parent, whole, tokens in _rows(
        "SELECT id, parent, whole, tokens FROM turns "
        "WHERE basis LIKE 'cache:%' AND length(tokens) > 0 ORDER BY depth"
    ):
        if id not in kinds or not (whole or parent in ends):
            continue
        if whole:
            end = hashlib.blake2b(kinds[id].encode() + b"\0", digest_size=16)
        else:
            end = ends[parent].copy()
        found[id] = end.digest()
        end.update(tokens)
        ends[id] = end
    return found
