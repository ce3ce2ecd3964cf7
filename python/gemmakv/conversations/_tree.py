"""Turns inside a transaction: what leads to what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gemmakv.conversations._tables import TURN, sessions, turn_of, turns
from gemmakv.conversations._types import KEPT, NOBODY, Turn


def insert_turn(db: Connection, turn: Turn, age: float) -> None:
    """Adds a turn, which is kept since `age`."""
    fields = {column.name: getattr(turn, column.name) for column in TURN}
    db.execute(sa.insert(turns).values(**fields, since=age))


def has_turn(db: Connection, id: str) -> bool:
    query = sa.select(sa.literal_column("1")).where(turns.c.id == id)
    return db.execute(query).first() is not None


def turn_with_id(db: Connection, tenant: str, id: str) -> Turn | None:
    query = sa.select(*TURN).where(turns.c.tenant == tenant, turns.c.id == id)
    row = db.execute(query).mappings().first()
    return None if row is None else turn_of(row)


def up_from(turn: str | None) -> sa.CTE:
    """Gives `id` and `parent` of a turn and of all before it."""
    up = sa.select(turns.c.id, turns.c.parent).where(turns.c.id == turn)
    up_to_it = up.cte("up", recursive=True)
    return up_to_it.union_all(
        sa.select(turns.c.id, turns.c.parent).join_from(
            turns, up_to_it, turns.c.id == up_to_it.c.parent
        )
    )


def turns_up_to(
    db: Connection, turn: str | None, columns: Sequence[Any]
) -> list[Turn]:
    """Gives a turn and all before it, the first one first."""
    up = up_from(turn)
    query = (
        sa.select(*columns)
        .join_from(up, turns, turns.c.id == up.c.id)
        .order_by(turns.c.depth)
    )
    return [turn_of(row) for row in db.execute(query).mappings()]


def leads_to(db: Connection, head: str | None, turn: str) -> bool:
    """Says whether `turn` is `head` or before it."""
    up = up_from(head)
    query = sa.select(sa.literal_column("1")).select_from(up)
    return db.execute(query.where(up.c.id == turn)).first() is not None


def prune(db: Connection, turn: str | None) -> None:
    """Removes a turn and those before it that nothing leads to."""
    after = sa.alias(turns)
    while turn is not None:
        query = sa.select(turns.c.parent).where(
            turns.c.id == turn,
            turns.c.state != KEPT,
            ~sa.exists().where(after.c.parent == turn),
            ~sa.exists().where(sessions.c.head == turn),
        )
        row = db.execute(query).first()
        if row is None:
            return
        db.execute(sa.delete(turns).where(turns.c.id == turn))
        turn = row[0]


def forget_response(db: Connection, turn: str) -> None:
    """Has nobody name a turn any more; it goes if nothing leads to it."""
    db.execute(
        sa.update(turns).where(turns.c.id == turn).values(state=NOBODY)
    )
    prune(db, turn)
