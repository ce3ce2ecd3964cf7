"""Sessions: names for turns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gemmakv.conversations._database import Database
from gemmakv.conversations._errors import NoSession, NoTurn
from gemmakv.conversations._leases import Leases
from gemmakv.conversations._tables import session_of, sessions, turns
from gemmakv.conversations._tree import (
    insert_session,
    insert_turn,
    leads_to,
    pass_on_forks,
    prune,
    read_session,
    select_sessions,
    update_session,
)
from gemmakv.conversations._types import (
    Branch,
    Pending,
    SessionInfo,
    Turn,
    new_id,
)


class Sessions:
    """Sessions that are not in the trash, each of a tenant."""

    def __init__(self, database: Database, leases: Leases) -> None:
        self._database = database
        self._leases = leases

    def create(
        self,
        tenant: str,
        name: str | None,
        system: str | None,
        turns: Sequence[Turn] = (),
        model: str | None = None,
        metadata: dict[str, str] | None = None,
        pending: Pending | None = None,
    ) -> SessionInfo:
        """Makes a session. With `turns`, whose ids are new, each is the next
        one's parent.
        """
        now = time.time()
        found = SessionInfo(
            new_id("sess"), name, system, turns[-1].id if turns else None,
            len(turns), now, now, model, metadata=metadata, pending=pending,
        )  # fmt: skip
        with self._database.write() as db:
            for turn in turns:
                insert_turn(db, turn, self._database.clock.now())
            insert_session(db, tenant, found)
        return found

    def get(self, tenant: str, id: str) -> SessionInfo:
        """Raises NoSession."""
        with self._database.read() as db:
            return read_session(db, tenant, id)

    def newest(
        self, tenant: str, limit: int, after: str | None
    ) -> tuple[list[SessionInfo], bool]:
        """Gives the newest first, those after the one of that id; and whether
        there are more. Raises NoSession.
        """
        with self._database.read() as db:
            return self._listed(db, tenant, limit, after)

    def tree(
        self, tenant: str, limit: int, after: str | None
    ) -> tuple[list[Branch], bool]:
        """Gives what `newest` does, with what they branch off each other."""
        with self._database.read() as db:
            found, more = self._listed(db, tenant, limit, after)
            return branches(found, _lines(db, found)), more

    def rename(self, tenant: str, id: str, name: str | None) -> SessionInfo:
        """Also while a turn runs. Raises NoSession, SessionBusy."""
        with self._database.write() as db:
            read_session(db, tenant, id)
            self._leases.check_not_held(id)
            update_session(db, id, name=name, updated=time.time())
            return read_session(db, tenant, id)

    def annotate(
        self, tenant: str, id: str, metadata: dict[str, str] | None
    ) -> SessionInfo:
        """Replaces the metadata, also while somebody has the session. Raises
        NoSession.
        """
        with self._database.write() as db:
            read_session(db, tenant, id)
            update_session(db, id, metadata=metadata, updated=time.time())
            return read_session(db, tenant, id)

    def change_pending(
        self,
        tenant: str,
        id: str,
        change: Callable[[Pending | None], Pending | None],
    ) -> SessionInfo:
        """Replaces what has no reply by what `change` makes of it. Raises
        NoSession, SessionBusy, and what `change` raises.
        """
        with self._database.write() as db:
            one = read_session(db, tenant, id)
            self._leases.check_idle(db, id)
            self._leases.end_lapsed(db, id)
            pending = change(one.pending)
            update_session(db, id, pending=pending, updated=time.time())
            return read_session(db, tenant, id)

    def fork(
        self, tenant: str, id: str, turn: str | None, name: str | None
    ) -> SessionInfo:
        """Makes another session with the same turns, up to `turn`. Raises
        NoSession, NoTurn.
        """
        now = time.time()
        with self._database.write() as db:
            one = read_session(db, tenant, id)
            head = one.head
            if turn is not None:
                head = _checked_turn(db, one, turn)
            depth = sa.select(turns.c.depth).where(turns.c.id == head)
            at = db.execute(depth).scalar() or 0
            other = dataclasses.replace(
                one, id=new_id("sess"), name=name, head=head, created=now,
                updated=now, draft=None, parent=id,
                pending=one.pending if turn is None else None,
                settings=one.settings | {"forked_at": at},
            )  # fmt: skip
            insert_session(db, tenant, other)
            return read_session(db, tenant, other.id)

    def rewind(self, tenant: str, id: str, turn: str | None) -> SessionInfo:
        """Makes `turn` the last one; None: there are none any more. Raises
        NoSession, NoTurn, SessionBusy.
        """
        with self._database.write() as db:
            one = read_session(db, tenant, id)
            if turn is not None:
                _checked_turn(db, one, turn)
            self._leases.check_idle(db, id)
            self._leases.end_lapsed(db, id)
            update_session(
                db, id, head=turn, updated=time.time(), pending=None
            )
            prune(db, one.head)
            return read_session(db, tenant, id)

    def delete(self, tenant: str, id: str) -> None:
        """Removes a session for good. Raises NoSession, SessionBusy."""
        with self._database.write() as db:
            one = read_session(db, tenant, id)
            self._leases.check_idle(db, id)
            pass_on_forks(db, one)
            db.execute(sa.delete(sessions).where(sessions.c.id == id))
            prune(db, one.head)

    def _listed(
        self,
        db: Connection,
        tenant: str,
        limit: int,
        after: str | None,
    ) -> tuple[list[SessionInfo], bool]:
        query, number = select_sessions(tenant), sessions.c.number
        if after is not None:
            last = _last_shown(db, tenant, after)
            other = sa.select(number).where(sessions.c.id == last.id)
            place = db.execute(other).scalar_one()
            query = query.where(number < place)
        rows = db.execute(query.order_by(number.desc()).limit(limit + 1))
        found = [session_of(row) for row in rows.mappings()]
        return found[:limit], len(found) > limit


def _last_shown(db: Connection, tenant: str, id: str) -> SessionInfo:
    try:
        return read_session(db, tenant, id)
    except NoSession:
        raise NoSession(
            f"after: there is no session {id[:60]!r} among yours, or none any "
            "more; expected the last_id of a page, or none to begin again",
            "after",
        ) from None


def _checked_turn(db: Connection, session: SessionInfo, turn: str) -> str:
    if not leads_to(db, session.head, turn):
        raise NoTurn(f"turn: session {session.id!r} has no {turn[:60]!r}")
    return turn


def _lines(
    db: Connection, found: Sequence[SessionInfo]
) -> dict[str, tuple[str | None, int]]:
    """Gives the parent and the depth of each turn that leads to a session."""
    heads = [one.head for one in found if one.head is not None]
    columns = turns.c.id, turns.c.parent, turns.c.depth
    start = sa.select(*columns).where(turns.c.id.in_(heads))
    up = start.cte("up", recursive=True)
    up = up.union(
        sa.select(*columns).join_from(turns, up, turns.c.id == up.c.parent)
    )
    return {row[0]: (row[1], row[2]) for row in db.execute(sa.select(up))}


def branches(
    found: Sequence[SessionInfo],
    lines: Mapping[str, tuple[str | None, int]],
) -> list[Branch]:
    """Says what each of the sessions, the newest first, branches off."""
    listed = {session.id for session in found}
    first: dict[str, str] = {}  # the oldest session that has a turn
    result = []
    for session in reversed(found):
        turn, own = session.head, []
        while turn is not None and turn not in first:
            own.append(turn)
            turn = lines[turn][0]
        branch = Branch(session)
        if turn is not None:
            branch = Branch(session, first[turn], turn, lines[turn][1])
        elif session.parent in listed:  # they part at the first turn
            branch = Branch(session, session.parent)
        result.append(branch)
        first.update(dict.fromkeys(own, session.id))
    return result[::-1]
