"""Who may write a session: one at a time.

A request of a server has a lease of it: for a while, and again as long as it
runs. A chat holds it until it lets go or its process ends: by a lock of the
system, which tells that however it ends, and also while it is stopped. Locks
are files beside the database, in a folder of their own. Both are asked for
inside a transaction that writes, so one after the other.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gemmakv._support.locks import lock
from gemmakv.conversations import _clock
from gemmakv.conversations._database import Database
from gemmakv.conversations._errors import NoSession, SessionBusy, StoreError
from gemmakv.conversations._tables import sessions
from gemmakv.conversations._tree import read_session, update_session
from gemmakv.conversations._types import LEASE_S, SessionInfo

_HELD = "held"  # the folder of locks


def busy(session: str, why: str, holder: str = "") -> SessionBusy:
    """Makes the error of a session that somebody else has."""
    return SessionBusy(
        f"session: {why}; {session!r} takes one turn at a time", holder
    )


class Leases:
    """Who has which session."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Leases whose end could not be written, and when they end anyway.
        self._given_up: dict[str, float] = {}
        self._held: dict[str, int] = {}  # descriptors of locks by session

    def take(self, tenant: str, id: str, owner: str) -> SessionInfo:
        """Gives the session, which is `owner`'s until it releases it, or has
        not renewed that for LEASE_S. Raises NoSession, SessionBusy.
        """
        with self._database.write_lease() as db:
            found = read_session(db, tenant, id)
            self.check_idle(db, id)
            until = _clock.uptime() + LEASE_S
            lease = _clock.BOOT + owner
            update_session(db, id, lease=lease, lease_until=until)
            return found

    def renew(self, id: str, owner: str) -> None:
        """Has a lease end LEASE_S from now, unless somebody took the session
        meanwhile.
        """
        with self._database.write_lease() as db:
            db.execute(
                sa.update(sessions)
                .where(
                    sessions.c.id == id,
                    sessions.c.lease == _clock.BOOT + owner,
                )
                .values(lease_until=_clock.uptime() + LEASE_S)
            )

    def release(self, id: str, owner: str) -> None:
        """Gives the session back. Where that cannot be written, as on a full
        disk, it is free in this process at once, and in others when the lease
        ends.
        """
        lease = _clock.BOOT + owner
        try:
            with self._database.write_lease() as db:
                self._free(db, sessions.c.id == id, sessions.c.lease == lease)
        except StoreError:
            now = _clock.uptime()
            self._given_up = {
                lease: end for lease, end in self._given_up.items() if end > now
            }
            self._given_up[lease] = now + LEASE_S
            raise

    def release_all(self, mark: str) -> None:
        """Frees the sessions of owners that begin so: none of them lives."""
        mark = _clock.BOOT + mark
        with self._database.write_lease() as db:
            begins = sa.func.substr(sessions.c.lease, 1, len(mark))
            self._free(db, begins == mark)

    def hold(self, id: str) -> None:
        """Has a session, which need not exist, be this process's until it lets
        go of it or ends. Raises SessionBusy; OSError if there can be no lock.
        """
        if id in self._held:
            return
        try:
            with self._database.write_lease() as db:
                self._check_lease(db, id)
                self.end_lapsed(db, id)
                self._held[id] = self._lock(id)
        except StoreError:
            self.let_go(id)
            raise

    def holds(self, id: str) -> bool:
        return id in self._held

    def holder(self, id: str) -> str:
        """Says who holds a session, for people; "" if nobody does."""
        if id in self._held:
            return f"process {os.getpid()}"
        try:
            descriptor = os.open(self._path(id), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            if lock(descriptor, wait=False):
                return ""
            number = os.pread(descriptor, 32, 0).decode("ascii", "replace")
            return f"process {number or '?'}"
        finally:
            os.close(descriptor)

    def let_go(self, id: str) -> None:
        """Gives back a session that was held. Idempotent."""
        descriptor = self._held.pop(id, -1)
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path(id))
            os.close(descriptor)

    def close(self) -> None:
        """Lets go of all that this process holds. Idempotent."""
        for id in [*self._held]:
            self.let_go(id)

    # Inside a transaction.

    def check_idle(self, db: Connection, id: str) -> None:
        """Raises SessionBusy if somebody else has the session."""
        self._check_lease(db, id)
        self.check_not_held(id)

    def end_lapsed(self, db: Connection, id: str) -> None:
        """Has the turn of a lease that is over, and still runs, not end in
        the session any more. Requires: nobody else has the session.
        """
        self._free(db, sessions.c.id == id, sessions.c.lease.is_not(None))

    def check_not_held(self, id: str) -> None:
        """Raises SessionBusy if a chat elsewhere has the session."""
        if id not in self._held and (holder := self.holder(id)):
            raise busy(id, f"{holder} has it open", holder)

    def _check_lease(self, db: Connection, id: str) -> None:
        query = sa.select(sessions.c.lease, sessions.c.lease_until)
        query = query.where(sessions.c.id == id).with_for_update()
        row = db.execute(query).first()
        if row is None or row[0] is None:
            return
        lease, until = row
        now = _clock.uptime()
        if (
            lease.startswith(_clock.BOOT)
            and now < until <= now + LEASE_S
            and lease not in self._given_up
        ):
            raise busy(id, "another turn runs in it")

    def _free(self, db: Connection, *which: Any) -> None:
        db.execute(sa.update(sessions).where(*which).values(lease=None))

    def _lock(self, id: str) -> int:
        """Takes the lock of a session and gives its descriptor."""
        if self._database.folder is None:  # nobody else sees the database
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        path = self._path(id)
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            descriptor = os.open(path, flags, 0o600)
            if not lock(descriptor, wait=False):
                os.close(descriptor)
                holder = self.holder(id)
                raise busy(id, f"{holder or 'a process'} has it open", holder)
            # Whoever let go of it meanwhile has removed the file.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    break
            os.close(descriptor)
        with contextlib.suppress(OSError):  # it is for people
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor

    def _path(self, id: str) -> str:
        if not id or "/" in id or "\0" in id:
            raise NoSession(f"session: expected an id, found {id[:60]!r}")
        folder = self._database.folder or os.devnull  # where no file can be
        return os.path.join(folder, _HELD, id)
