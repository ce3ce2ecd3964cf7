"""Sessions and turns inside a transaction: what leads to what."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gemmakv.conversations._errors import NoSession
from gemmakv.conversations._said import Said
from gemmakv.conversations._tables import (
    LIGHT,
    SESSION,
    TURN,
    WRITES,
    next_number,
    session_of,
    sessions,
    turn_of,
    turns,
)
from gemmakv.conversations._types import KEPT, NOBODY, SessionInfo, Turn

if TYPE_CHECKING:
    from gemmakv.conversations._tables import Query


def select_sessions(tenant: str, deleted: bool = False) -> Query:
    """Gives the query for a tenant's sessions: those in the trash, or the
    others.
    """
    is_there = sessions.c.deleted.is_(None)
    return (
        sa.select(*SESSION)
        .join_from(
            sessions, turns, turns.c.id == sessions.c.head, isouter=True
        )
        .where(
            sessions.c.tenant == tenant, ~is_there if deleted else is_there
        )
    )


def find_session(db: Connection, tenant: str, id: str) -> SessionInfo | None:
    """Gives a session, or None. In a transaction that writes, nobody else
    changes it before the end.
    """
    query = select_sessions(tenant).where(sessions.c.id == id)
    if db.get_execution_options().get(WRITES):
        query = query.with_for_update(of=sessions)
    row = db.execute(query).mappings().first()
    return None if row is None else session_of(row)


def read_session(db: Connection, tenant: str, id: str) -> SessionInfo:
    """Gives a session. Raises NoSession."""
    found = find_session(db, tenant, id)
    if found is None:
        raise NoSession(f"session: there is no {id[:60]!r} among yours")
    return found


def insert_session(db: Connection, tenant: str, session: SessionInfo) -> None:
    fields = dataclasses.asdict(session)
    del fields["turns"]
    db.execute(
        sa.insert(sessions).values(
            **fields, tenant=tenant, number=next_number(tenant)
        )
    )


def update_session(db: Connection, id: str, **fields: Any) -> None:
    db.execute(sa.update(sessions).where(sessions.c.id == id).values(**fields))


def pass_on_forks(db: Connection, session: SessionInfo) -> None:
    """Makes the forks of a session, which is deleted, those of its parent."""
    own = session.settings.get("forked_at", 0)
    query = sa.select(sessions.c.id, sessions.c.settings)
    query = query.where(sessions.c.parent == session.id)
    for id, settings in db.execute(query).all():
        at = min(settings.get("forked_at", 0), own)
        settings = settings | {"forked_at": at}
        update_session(db, id, parent=session.parent, settings=settings)


def insert_turn(
    db: Connection, turn: Turn, age: float, follows: bytes | None = None
) -> None:
    """Adds a turn, which is kept since `age`. `follows`: the digest of the
    tokens before a chat's.
    """
    fields = {column.name: getattr(turn, column.name) for column in TURN}
    plain: bool | None = Said.of(turn) is not None
    if plain and turn.parent is not None:
        query = sa.select(turns.c.plain).where(turns.c.id == turn.parent)
        plain = db.execute(query).scalar()
    db.execute(
        sa.insert(turns).values(
            **fields, since=age, plain=plain, follows=follows
        )
    )


def has_turn(db: Connection, id: str) -> bool:
    query = sa.select(turns.c.id).where(turns.c.id == id)
    return db.execute(query).first() is not None


def turn_with_id(db: Connection, tenant: str, id: str) -> Turn | None:
    query = sa.select(*TURN).where(turns.c.tenant == tenant, turns.c.id == id)
    row = db.execute(query).mappings().first()
    return None if row is None else turn_of(row)


def turns_up_to(
    db: Connection, turn: str | None, tokens: bool = True
) -> list[Turn]:
    """Gives a turn and all before it, the first one first. Without `tokens`,
    these are empty.
    """
    query = _PATH if tokens else _LIGHT_PATH
    rows = db.execute(query, {"turn": turn}).mappings()
    return [turn_of(row) for row in rows]


def is_in_use(
    db: Connection, turn: str, *which: sa.ColumnElement[bool]
) -> bool:
    """Says whether one of the sessions has that turn."""
    start = sa.select(turns.c.id).where(turns.c.id == turn)
    down = start.cte("down", recursive=True)
    down = down.union_all(
        sa.select(turns.c.id).join_from(
            turns, down, turns.c.parent == down.c.id
        )
    )
    query = sa.select(sessions.c.id).join_from(
        down, sessions, sessions.c.head == down.c.id
    )
    return db.execute(query.where(*which).limit(1)).first() is not None


def leads_to(db: Connection, head: str | None, turn: str) -> bool:
    """Says whether `turn` is `head` or before it."""
    query = sa.select(_UP.c.id).where(_UP.c.id == turn)
    return db.execute(query, {"turn": head}).first() is not None


def _up() -> sa.CTE:
    """Gives `id` and `parent` of the turn `:turn` and of all before it."""
    columns = turns.c.id, turns.c.parent
    start = sa.select(*columns).where(turns.c.id == sa.bindparam("turn"))
    up = start.cte("up", recursive=True)
    return up.union_all(
        sa.select(*columns).join_from(turns, up, turns.c.id == up.c.parent)
    )


def _path(columns: Sequence[Any]) -> Query:
    return (
        sa.select(*columns)
        .join_from(_UP, turns, turns.c.id == _UP.c.id)
        .order_by(turns.c.depth)
    )


# Made once: that takes longer than running them.
_UP = _up()
_PATH, _LIGHT_PATH = _path(TURN), _path(LIGHT)


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
