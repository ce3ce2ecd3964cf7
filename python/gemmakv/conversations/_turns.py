"""Turns, and responses: turns that are kept for a while by themselves."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gemmakv.conversations import _clock
from gemmakv.conversations._database import Database
from gemmakv.conversations._errors import NoResponse
from gemmakv.conversations._leases import busy
from gemmakv.conversations._tables import (
    is_response,
    sessions,
    since,
    turns,
)
from gemmakv.conversations._tree import (
    forget_response,
    has_turn,
    insert_turn,
    prune,
    turn_with_id,
    turns_up_to,
)
from gemmakv.conversations._types import (
    KEPT,
    NOBODY,
    SessionInfo,
    Turn,
)
from gemmakv.generation._prompts import TokenArray

if TYPE_CHECKING:
    from gemmakv.conversations._tables import Query

_EXPIRED_AT_ONCE = 32


def _tokens() -> Query:
    """Gives tokens from the last turn before `:turn` that has them whole."""
    columns = turns.c.parent, turns.c.whole, turns.c.depth, turns.c.tokens
    start = sa.select(*columns).where(turns.c.id == sa.bindparam("turn"))
    up = start.cte("up", recursive=True)
    up = up.union_all(
        sa.select(*columns)
        .join_from(turns, up, turns.c.id == up.c.parent)
        .where(up.c.whole == sa.literal(False, turns.c.whole.type))
    )
    return sa.select(up.c.tokens).order_by(up.c.depth)


_TOKENS = _tokens()  # made once: that takes longer than running it


class Turns:
    """Turns of all sessions and responses."""

    def __init__(self, database: Database, kept_s: float) -> None:
        """Responses are kept for so many seconds."""
        self._database = database
        self._kept_s = kept_s

    def get(self, tenant: str, id: str) -> Turn:
        """Raises NoResponse, also for one that is not kept any more."""
        with self._database.read() as db:
            return self._response(db, tenant, id)

    def line(self, tenant: str, id: str) -> list[Turn]:
        """Gives all turns up to that one, with their tokens. Raises as `get`.
        """
        with self._database.read() as db:
            self._response(db, tenant, id)
            return turns_up_to(db, id)

    def head(self, tenant: str, session: SessionInfo) -> Turn | None:
        """Gives the session's last turn, whoever may name it."""
        if session.head is None:
            return None
        with self._database.read() as db:
            return turn_with_id(db, tenant, session.head)

    def path(self, turn: str | None, tokens: bool = False) -> list[Turn]:
        """Gives all turns up to that one, which is the last of them. Without
        `tokens`, these are empty.
        """
        with self._database.read() as db:
            return turns_up_to(db, turn, tokens)

    def tokens(self, turn: str) -> TokenArray:
        """Gives those of the whole conversation up to that turn."""
        with self._database.read() as db:
            parts = db.execute(_TOKENS, {"turn": turn}).scalars().all()
        return np.concatenate([np.empty(0, np.int32), *parts])

    def add(
        self,
        turn: Turn,
        session: str | None,
        owner: str | None,
        before: Sequence[Turn] = (),
    ) -> None:
        """Keeps a turn, and makes it the head of the session, which `owner`
        has, and gives back. What was pending has a reply then. If the turn
        does not follow the head so far, that goes, unless something else leads
        to it, and all that is pending stays. Raises SessionBusy if somebody
        took it over.

        `before`: the turns up to its parent, as it began. Those that were
        deleted meanwhile stay as if it had led to them then: nobody may name
        them.
        """
        clock = self._database.clock
        with self._database.write() as db:
            if turn.parent is not None and not has_turn(db, turn.parent):
                for one in before:
                    if not has_turn(db, one.id):
                        kept = dataclasses.replace(one, state=NOBODY)
                        insert_turn(db, kept, clock.now())
            insert_turn(db, turn, clock.now())
            if session is not None:
                query = sa.select(sessions.c.head)
                query = query.where(sessions.c.id == session)
                former = db.execute(query).scalar()
                follows = former == turn.parent
                said = {"pending": None} if follows else {}
                moved = db.execute(
                    sa.update(sessions)
                    .where(
                        sessions.c.id == session,
                        sessions.c.lease == _clock.BOOT + (owner or ""),
                    )
                    .values(
                        head=turn.id, updated=time.time(), lease=None, **said
                    )
                )
                if not moved.rowcount:
                    raise busy(session, "another turn took over from this one")
                if not follows:
                    prune(db, former)
            self._expire_in(db)
            if clock.is_due():
                self._database.note_age(db)

    def delete_response(self, tenant: str, id: str) -> None:
        """Raises as `get`."""
        with self._database.write() as db:
            self._response(db, tenant, id)
            forget_response(db, id)

    def expire(self) -> None:
        """Forgets all responses that were kept long enough."""
        count = _EXPIRED_AT_ONCE
        while count == _EXPIRED_AT_ONCE:
            with self._database.write() as db:
                count = self._expire_in(db)

    # Inside a transaction.

    def _response(self, db: Connection, tenant: str, id: str) -> Turn:
        found = turn_with_id(db, tenant, id)
        if (
            found is None
            or found.state == NOBODY
            or (found.state == KEPT and self._is_old(db, id))
        ):
            raise NoResponse(f"there is no response {id[:60]!r} among yours")
        return found

    def _oldest(self) -> float:
        return self._database.clock.now() - self._kept_s

    def _is_old(self, db: Connection, turn: str) -> bool:
        query = sa.select(turns.c.id).where(
            turns.c.id == turn, since < self._oldest()
        )
        return db.execute(query).first() is not None

    def _expire_in(self, db: Connection) -> int:
        """Forgets some responses that were kept long enough."""
        query = sa.select(turns.c.id).where(is_response, since < self._oldest())
        found = db.execute(query.order_by(since).limit(_EXPIRED_AT_ONCE))
        old = found.scalars().all()
        for turn in old:
            forget_response(db, turn)
        return len(old)
