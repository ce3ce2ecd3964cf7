"""Turns and sessions in a SQLite database.

Turns are a tree: each has the messages that came, the reply and the tokens of
both. A session is a name for a turn, its head; forks share all turns, and
nothing is copied. A turn goes when neither a session, a response that is kept
nor another turn leads to it.

Every function is one transaction and may block: on disk when it returns, or
nothing of it. Any number of processes may have one folder open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gemmakv.generation._prompts import TokenArray
from gemmakv.server._errors import RequestError

LOG = logging.getLogger("gemmakv.server")
FILE = "sessions.sqlite3"
LEASE_S = 10.0  # a holder that was killed blocks no longer
_SCHEMA = 1
_APPLICATION = 0x676B7653
BUSY_S = 10.0  # for another process that writes
_POLL_S = 0.01
_EXPIRED_AT_ONCE = 32
_NOTE_S = 60.0

# Who may name a turn.
ANYBODY = 0  # whoever may see what leads to it
KEPT = 1  # as long as it is kept as a response, too
NOBODY = 2  # its response was deleted or has expired

_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE turns (
  id TEXT PRIMARY KEY,
  tenant TEXT NOT NULL,
  parent TEXT REFERENCES turns (id),
  depth INTEGER NOT NULL,
  state INTEGER NOT NULL,
  created REAL NOT NULL,
  system TEXT,
  tools TEXT NOT NULL,
  messages TEXT NOT NULL,
  reply TEXT NOT NULL,
  reason TEXT NOT NULL,
  usage TEXT NOT NULL,
  params TEXT NOT NULL,
  basis TEXT NOT NULL,
  whole INTEGER NOT NULL,
  tokens BLOB NOT NULL,
  since REAL
) STRICT;
CREATE INDEX turns_parent ON turns (parent);
CREATE TABLE sessions (
  id TEXT PRIMARY KEY,
  tenant TEXT NOT NULL,
  name TEXT,
  system TEXT,
  head TEXT REFERENCES turns (id),
  created REAL NOT NULL,
  updated REAL NOT NULL,
  lease TEXT,
  lease_until REAL NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX sessions_head ON sessions (head);
"""

# Databases of earlier versions get these; `since` is null there, and in what
# an earlier version adds to this one.
_COLUMN = "ALTER TABLE turns ADD COLUMN since REAL"
_INDEXES = """
DROP INDEX IF EXISTS turns_kept;
DROP INDEX IF EXISTS sessions_tenant;
CREATE INDEX IF NOT EXISTS turns_since ON turns (coalesce(since, created))
  WHERE state = 1;
CREATE INDEX IF NOT EXISTS sessions_made ON sessions (tenant);
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """Messages and the reply to them.

    Attributes:
      depth: turns up to it, itself included.
      system: what the model was told before the first turn.
      tools: that were said to the model.
      messages: what came.
      reply: the message that came of it.
      reason: "stop", "length" or "deadline".
      usage: numbers of tokens by name.
      params: what else its API wants to know of it later.
      basis: of the tokens: which model and template they are for.
      whole: whether `tokens` are those of the whole conversation. Otherwise
        they follow those of the parent.
      tokens: up to the end of the reply's text.
    """

    id: str
    tenant: str
    parent: str | None
    depth: int
    state: int = ANYBODY
    created: float = dataclasses.field(default_factory=time.time)
    system: str | None
    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    reason: str
    usage: dict[str, int]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    basis: str
    whole: bool
    tokens: TokenArray


_JSON = ("tools", "messages", "reply", "usage", "params")
_COLUMNS = tuple(field.name for field in dataclasses.fields(Turn))
_LIGHT = tuple("x''" if c == "tokens" else c for c in _COLUMNS)


@dataclasses.dataclass(frozen=True)
class Session:
    """A conversation that goes on.

    Attributes:
      head: the last turn; None before the first.
      turns: their number.
      created, updated: seconds since the epoch.
    """

    id: str
    name: str | None
    system: str | None
    head: str | None
    turns: int
    created: float
    updated: float


@dataclasses.dataclass(frozen=True)
class Branch:
    """A session, and the one that it branches off.

    Attributes:
      parent: of those listed with it, the oldest of those that it has the
        most turns in common with; None if it has none with any.
      turn: the last of these turns.
      turns: their number.
    """

    session: Session
    parent: str | None = None
    turn: str | None = None
    turns: int = 0


_SESSION = (
    "SELECT s.id, s.name, s.system, s.head, coalesce(t.depth, 0), s.created, "
    "s.updated FROM sessions s LEFT JOIN turns t ON t.id = s.head WHERE "
    "s.tenant = ?"
)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


class Store:
    """The database of a folder. Of any threads, one after the other.

    Its functions raise RequestError: 404 for what the tenant has not, 409 for
    a session in which another turn runs, 503 for what the disk does not take.
    """

    def __init__(
        self,
        folder: str,
        response_days: float,
        same: tuple[int, int] | None = None,
    ) -> None:
        """Makes the folder and the database where there are none. Responses
        are kept for `response_days`. With `same`, the `file` of another store,
        it has to be that file.

        Raises OSError or ValueError that names the folder.
        """
        self.folder = folder
        self._kept_s = response_days * 86400.0
        self._lock = threading.Lock()
        # Leases whose end could not be written, and when they end anyway.
        self._given_up: dict[str, float] = {}
        self._failure = ""  # of the last write
        path = os.path.join(folder, FILE)
        self._path = path
        if same is None:
            _make_private(folder, path)
        self.file = _file_of(path) or (0, 0)
        if same not in (None, self.file):
            raise ValueError(
                f"sessions: {folder}: expected the database of the server's "
                "start, which was removed or replaced; restart the server"
            )
        self._log = None
        try:
            self._open(path)
            self._log = _file_of(f"{path}-wal")
            while self._expire():
                pass
        except (sqlite3.Error, RequestError) as error:
            self.close()
            cause = error.__cause__ or error
            raise ValueError(
                f"sessions: {folder}: expected a folder that can be written, "
                f"with a sound {FILE} or none, found: {cause}"
            ) from None
        except BaseException:
            self.close()
            raise

    _db: sqlite3.Connection | None = None
    _patience_s = BUSY_S

    def be_patient(self, seconds: float) -> None:
        """Has what follows wait that long for another process that writes.
        """
        if self._db is not None and seconds != self._patience_s:
            self._patience_s = seconds
            self._db.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _open(self, path: str) -> None:
        self._db = db = sqlite3.connect(
            path,
            timeout=BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        _keep_a_log(db)
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("BEGIN IMMEDIATE")
        try:
            self._check_schema(db)
            self._find_age(db)
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
        row = db.execute(
            "SELECT value FROM facts WHERE name = 'secret'"
        ).fetchone()
        if row is None:
            raise sqlite3.DatabaseError("a database without its secret")
        self._secret: bytes = row[0]

    def _check_schema(self, db: sqlite3.Connection) -> None:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        owner = db.execute("PRAGMA application_id").fetchone()[0]
        if (
            version == owner == 0
            and not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[
                0
            ]
        ):
            for statement in _TABLES.split(";"):
                db.execute(statement)
            db.execute(
                "INSERT INTO facts VALUES ('secret', ?)",
                (secrets.token_bytes(32),),
            )
            db.execute(f"PRAGMA application_id = {_APPLICATION}")
            db.execute(f"PRAGMA user_version = {_SCHEMA}")
        elif owner != _APPLICATION:
            raise ValueError(
                f"sessions: {self.folder}: expected a database of this "
                f"program, found another's {FILE}"
            )
        elif version > _SCHEMA:
            raise ValueError(
                f"sessions: {self.folder}: expected a database of schema "
                f"{_SCHEMA}, found {version}, which a newer version made; "
                "update gemmakv to open it"
            )
        columns = db.execute("PRAGMA table_info(turns)").fetchall()
        if "since" not in {column[1] for column in columns}:
            db.execute(_COLUMN)
        for statement in _INDEXES.split(";"):
            db.execute(statement)

    # Responses expire by the database's own clock, which nobody sets: a clock
    # that is wrong for a moment must not delete what was promised. While the
    # machine runs it goes as its uptime does. Over a restart of the machine it
    # goes on by what the wall clock has gained since it was noted.

    def _find_age(self, db: sqlite3.Connection) -> None:
        row = db.execute(
            "SELECT value FROM facts WHERE name = 'clock'"
        ).fetchone()
        uptime, wall = _uptime(), time.time()
        age = wall
        if row is not None:
            noted = json.loads(row[0])
            age, gone = noted["age"], wall - noted["wall"]
            if noted["boot"] == _BOOT and uptime >= noted["uptime"]:
                gone = uptime - noted["uptime"]
            age += max(gone, 0.0)
        self._age_ahead = age - uptime
        self._note_age(db)

    def _note_age(self, db: sqlite3.Connection) -> None:
        self._noted = uptime = _uptime()
        noted = {
            "age": uptime + self._age_ahead, "boot": _BOOT, "uptime": uptime,
            "wall": time.time(),
        }  # fmt: skip
        db.execute(
            "INSERT OR REPLACE INTO facts VALUES ('clock', ?)",
            (json.dumps(noted).encode(),),
        )

    def _age(self) -> float:
        return _uptime() + self._age_ahead

    def tenant_of(self, key: str) -> str:
        """What records call the owner of a key; the same after a restart."""
        return hmac.digest(self._secret, key.encode(), hashlib.sha256).hex()

    # Sessions.

    def create(
        self,
        tenant: str,
        name: str | None,
        system: str | None,
        turns: Sequence[Turn] = (),
    ) -> Session:
        """With `turns`, whose ids are new, each the next one's parent."""
        now = time.time()
        found = Session(
            new_id("sess"), name, system, turns[-1].id if turns else None,
            len(turns), now, now,
        )  # fmt: skip
        with self._write() as db:
            for turn in turns:
                self._insert(db, turn)
            self._insert_session(db, tenant, found)
        return found

    def session(self, tenant: str, id: str) -> Session:
        with self._read() as db:
            return self._session(db, tenant, id)

    def sessions(
        self, tenant: str, limit: int, after: str | None
    ) -> tuple[list[Session], bool]:
        """The newest first, those after the one of that id; and whether there
        are more.
        """
        with self._read() as db:
            return self._listed(db, tenant, limit, after)

    def tree(
        self, tenant: str, limit: int, after: str | None
    ) -> tuple[list[Branch], bool]:
        """As `sessions`, with what they branch off among each other."""
        with self._read() as db:
            found, more = self._listed(db, tenant, limit, after)
            heads = [one.head for one in found if one.head is not None]
            marks = ", ".join("?" * len(heads))
            rows = db.execute(
                "WITH RECURSIVE up (id_, parent_, depth_) AS (SELECT id, "
                f"parent, depth FROM turns WHERE id IN ({marks}) UNION SELECT "
                "t.id, t.parent, t.depth FROM turns t JOIN up ON t.id = "
                "parent_) SELECT id_, parent_, depth_ FROM up",
                heads,
            ).fetchall()
        return _branches(found, {row[0]: row[1:] for row in rows}), more

    def rename(self, tenant: str, id: str, name: str | None) -> Session:
        with self._write() as db:
            self._session(db, tenant, id)
            db.execute(
                "UPDATE sessions SET name = ?, updated = ? WHERE id = ?",
                (name, time.time(), id),
            )
            return self._session(db, tenant, id)

    def fork(
        self, tenant: str, id: str, turn: str | None, name: str | None
    ) -> Session:
        """Another session with the same turns, up to `turn`."""
        now = time.time()
        with self._write() as db:
            one = self._session(db, tenant, id)
            head = one.head
            if turn is not None:
                head = self._of_session(db, one, turn)
            other = Session(new_id("sess"), name, one.system, head, 0, now, now)
            self._insert_session(db, tenant, other)
            return self._session(db, tenant, other.id)

    def rewind(self, tenant: str, id: str, turn: str | None) -> Session:
        """Makes `turn` the last one; None: there are none any more."""
        with self._write() as db:
            one = self._session(db, tenant, id)
            if turn is not None:
                self._of_session(db, one, turn)
            self._check_idle(db, id)
            db.execute(
                "UPDATE sessions SET head = ?, updated = ? WHERE id = ?",
                (turn, time.time(), id),
            )
            self._prune(db, one.head)
            return self._session(db, tenant, id)

    def delete(self, tenant: str, id: str) -> None:
        with self._write() as db:
            one = self._session(db, tenant, id)
            self._check_idle(db, id)
            db.execute("DELETE FROM sessions WHERE id = ?", (id,))
            self._prune(db, one.head)

    # One turn at a time in a session.

    def lease(self, tenant: str, id: str, owner: str) -> Session:
        """The session, which is `owner`'s until it releases it, or has not
        renewed that for LEASE_S.
        """
        with self._write_lease() as db:
            found = self._session(db, tenant, id)
            self._check_idle(db, id)
            db.execute(
                "UPDATE sessions SET lease = ?, lease_until = ? WHERE id = ?",
                (_BOOT + owner, _uptime() + LEASE_S, id),
            )
            return found

    def renew(self, id: str, owner: str) -> None:
        with self._write_lease() as db:
            db.execute(
                "UPDATE sessions SET lease_until = ? WHERE id = ? AND "
                "lease = ?",
                (_uptime() + LEASE_S, id, _BOOT + owner),
            )

    def release(self, id: str, owner: str) -> None:
        """Where that cannot be written, as on a full disk, the session is free
        in this process at once, and in others when the lease ends.
        """
        try:
            with self._write_lease() as db:
                db.execute(
                    "UPDATE sessions SET lease = NULL WHERE id = ? AND "
                    "lease = ?",
                    (id, _BOOT + owner),
                )
        except RequestError:
            now = _uptime()
            self._given_up = {
                lease: end for lease, end in self._given_up.items() if end > now
            }
            self._given_up[_BOOT + owner] = now + LEASE_S
            raise

    def release_all(self, mark: str) -> None:
        """The sessions of owners that begin so: none of them lives."""
        mark = _BOOT + mark
        with self._write_lease() as db:
            db.execute(
                "UPDATE sessions SET lease = NULL WHERE "
                "substr(lease, 1, ?) = ?",
                (len(mark), mark),
            )

    def add(
        self,
        turn: Turn,
        session: str | None,
        owner: str | None,
        before: Sequence[Turn] = (),
    ) -> None:
        """Keeps a turn, and makes it the head of the session, which
        `owner` has, and gives back.

        `before`: the turns up to its parent, as it began. Those that were
        deleted meanwhile stay as if it had led to them then: nobody may name
        them.
        """
        with self._write() as db:
            if turn.parent is not None and not _has(db, turn.parent):
                for one in before:
                    if not _has(db, one.id):
                        kept = dataclasses.replace(one, state=NOBODY)
                        self._insert(db, kept)
            self._insert(db, turn)
            if session is not None:
                moved = db.execute(
                    "UPDATE sessions SET head = ?, updated = ?, lease = NULL "
                    "WHERE id = ? AND lease = ?",
                    (turn.id, time.time(), session, _BOOT + (owner or "")),
                )
                if not moved.rowcount:
                    raise _busy(session, "took over from this turn")
            self._expire_in(db)
            if _uptime() - self._noted > _NOTE_S:
                self._note_age(db)

    # Turns.

    def turn(self, tenant: str, id: str) -> Turn:
        """Raises RequestError 404 also for one whose response is not kept any
        more.
        """
        with self._read() as db:
            return self._turn(db, tenant, id)

    def line(self, tenant: str, id: str) -> list[Turn]:
        """All turns up to that one, with their tokens. Raises as `turn`."""
        with self._read() as db:
            self._turn(db, tenant, id)
            return self._turns_up_to(db, id, _COLUMNS)

    def head(self, tenant: str, session: Session) -> Turn | None:
        """The session's last turn, whoever may name it."""
        if session.head is None:
            return None
        with self._read() as db:
            return self._by_id(db, tenant, session.head)

    def path(self, turn: str | None, tokens: bool = False) -> list[Turn]:
        """All turns up to that one, which is the last of them. Without
        `tokens`, these are empty.
        """
        with self._read() as db:
            return self._turns_up_to(db, turn, _COLUMNS if tokens else _LIGHT)

    def tokens(self, turn: str) -> TokenArray:
        """Of the whole conversation up to that turn."""
        with self._read() as db:
            rows = db.execute(
                "WITH RECURSIVE up (parent_, whole_, depth_, tokens_) AS ("
                "SELECT parent, whole, depth, tokens FROM turns WHERE id = ? "
                "UNION ALL SELECT t.parent, t.whole, t.depth, t.tokens FROM "
                "turns t JOIN up ON t.id = parent_ WHERE NOT whole_) "
                "SELECT tokens_ FROM up ORDER BY depth_",
                (turn,),
            ).fetchall()
        return _tokens_of(b"".join(row[0] for row in rows))

    def delete_response(self, tenant: str, id: str) -> None:
        with self._write() as db:
            self._turn(db, tenant, id)
            self._forget(db, id)

    # Inside a transaction.

    @contextlib.contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._transaction("BEGIN") as db:
            yield db

    @contextlib.contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._write_lease() as db:
            yield db
        self._note("")

    @contextlib.contextmanager
    def _write_lease(self) -> Iterator[sqlite3.Connection]:
        """As `_write`, for what fits also where a turn has no room."""
        with self._transaction("BEGIN IMMEDIATE") as db:
            yield db

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            db = self._db
            if db is None:
                raise RequestError(
                    503, "the sessions are closed", code="server_stopping"
                )
            self.check_place()
            try:
                db.execute(begin)
                try:
                    yield db
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                wrote = begin != "BEGIN"
                if wrote:
                    self._note(f"{error} ({_name_of(error)})")
                raise _failed(error, wrote) from error

    def _note(self, failure: str) -> None:
        """What became of a write. The log has when that changes."""
        if failure and not self._failure:
            LOG.warning(
                "sessions: %s: nothing can be written: %s", self.folder, failure
            )
        elif self._failure and not failure:
            LOG.info("sessions: %s: it can be written again", self.folder)
        self._failure = failure

    def warnings(self) -> list[str]:
        """What keeps turns from being kept, and may pass by itself."""
        found = []
        if _is_read_only(self._path):
            found.append("sessions: their file system is read-only")
        if self._failure:
            found.append(f"sessions: the last write failed: {self._failure}")
        return found

    def check_place(self) -> None:
        """Raises RequestError where the file, or its log, is not there any
        more: what goes to one that was removed is lost, without an error.
        """
        log = f"{self._path}-wal"
        for path, file in (self._path, self.file), (log, self._log):
            found = _file_of(path)
            if file is None or found == file:
                continue
            what = "none" if found is None else "another file"
            raise RequestError(
                503,
                f"sessions: {path}: expected the file that was opened, found "
                f"{what}; the server has to be started again",
                code="sessions_failed",
            )

    def _session(self, db: sqlite3.Connection, tenant: str, id: str) -> Session:
        row = db.execute(f"{_SESSION} AND s.id = ?", (tenant, id)).fetchone()
        if row is None:
            raise RequestError(
                404,
                f"session: there is no {id[:60]!r} among yours",
                param="session",
                code="session_not_found",
            )
        return Session(*row)

    def _listed(
        self,
        db: sqlite3.Connection,
        tenant: str,
        limit: int,
        after: str | None,
    ) -> tuple[list[Session], bool]:
        where, values = "", [tenant]
        if after is not None:
            last = self._last_shown(db, tenant, after)
            where = " AND s.rowid < (SELECT rowid FROM sessions WHERE id = ?)"
            values.append(last.id)
        # In the order in which they were made, whatever the clock said.
        rows = db.execute(
            f"{_SESSION}{where} ORDER BY s.rowid DESC LIMIT ?",
            (*values, limit + 1),
        ).fetchall()
        return [Session(*row) for row in rows[:limit]], len(rows) > limit

    def _last_shown(
        self, db: sqlite3.Connection, tenant: str, id: str
    ) -> Session:
        try:
            return self._session(db, tenant, id)
        except RequestError:
            raise RequestError(
                404,
                f"after: there is no session {id[:60]!r} among yours, or none "
                "any more; expected the last_id of a page, or none to begin "
                "again",
                param="after",
                code="session_not_found",
            ) from None

    def _turn(self, db: sqlite3.Connection, tenant: str, id: str) -> Turn:
        found = self._by_id(db, tenant, id)
        if (
            found is None
            or found.state == NOBODY
            or (found.state == KEPT and self._is_old(db, id))
        ):
            raise RequestError(
                404,
                f"there is no response {id[:60]!r} among yours",
                param="previous_response_id",
                code="response_not_found",
            )
        return found

    def _is_old(self, db: sqlite3.Connection, turn: str) -> bool:
        found = db.execute(
            "SELECT 1 FROM turns WHERE id = ? AND coalesce(since, created) < ?",
            (turn, self._age() - self._kept_s),
        )
        return found.fetchone() is not None

    def _turns_up_to(
        self, db: sqlite3.Connection, turn: str | None, columns: Sequence[str]
    ) -> list[Turn]:
        rows = db.execute(
            "WITH RECURSIVE up (id_, parent_) AS (SELECT id, parent FROM "
            "turns WHERE id = ? UNION ALL SELECT t.id, t.parent FROM "
            f"turns t JOIN up ON t.id = parent_) SELECT {_list(columns)} "
            "FROM up JOIN turns ON id = id_ ORDER BY depth",
            (turn,),
        ).fetchall()
        return [_turn_of(row) for row in rows]

    def _by_id(
        self, db: sqlite3.Connection, tenant: str, id: str
    ) -> Turn | None:
        row = db.execute(
            f"SELECT {_list(_COLUMNS)} FROM turns WHERE tenant = ? AND id = ?",
            (tenant, id),
        ).fetchone()
        return None if row is None else _turn_of(row)

    def _of_session(
        self, db: sqlite3.Connection, session: Session, turn: str
    ) -> str:
        found = db.execute(
            "WITH RECURSIVE up (id_, parent_) AS (SELECT id, parent FROM "
            "turns WHERE id = ? UNION ALL SELECT t.id, t.parent FROM turns t "
            "JOIN up ON t.id = parent_) SELECT 1 FROM up WHERE id_ = ?",
            (session.head, turn),
        ).fetchone()
        if found is None:
            raise RequestError(
                404,
                f"turn: session {session.id!r} has no {turn[:60]!r}",
                param="turn",
                code="turn_not_found",
            )
        return turn

    def _check_idle(self, db: sqlite3.Connection, id: str) -> None:
        now = _uptime()
        found = db.execute(
            "SELECT lease FROM sessions WHERE id = ? AND substr(lease, 1, ?) "
            "= ? AND lease_until > ? AND lease_until <= ?",
            (id, len(_BOOT), _BOOT, now, now + LEASE_S),
        ).fetchone()
        if found is not None and found[0] not in self._given_up:
            raise _busy(id, "runs in it")

    def _insert_session(
        self, db: sqlite3.Connection, tenant: str, session: Session
    ) -> None:
        db.execute(
            "INSERT INTO sessions (id, tenant, name, system, head, created, "
            "updated) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                session.id, tenant, session.name, session.system, session.head,
                session.created, session.updated,
            ),
        )  # fmt: skip

    def _insert(self, db: sqlite3.Connection, turn: Turn) -> None:
        values: list[Any] = []
        for name in _COLUMNS:
            value = getattr(turn, name)
            if name in _JSON:
                value = json.dumps(value, ensure_ascii=False)
            elif name == "tokens":
                value = np.ascontiguousarray(value, "<i4").tobytes()
            values.append(value)
        marks = ", ".join("?" * len(values))
        db.execute(
            f"INSERT INTO turns ({_list(_COLUMNS)}, since) VALUES ({marks}, ?)",
            (*values, self._age()),
        )

    def _prune(self, db: sqlite3.Connection, turn: str | None) -> None:
        """Removes it and those before it that nothing leads to."""
        while turn is not None:
            row = db.execute(
                "SELECT parent FROM turns WHERE id = ?1 AND state != 1 AND "
                "NOT EXISTS (SELECT 1 FROM turns WHERE parent = ?1) AND NOT "
                "EXISTS (SELECT 1 FROM sessions WHERE head = ?1)",
                (turn,),
            ).fetchone()
            if row is None:
                return
            db.execute("DELETE FROM turns WHERE id = ?", (turn,))
            turn = row[0]

    def _forget(self, db: sqlite3.Connection, turn: str) -> None:
        db.execute("UPDATE turns SET state = 2 WHERE id = ?", (turn,))
        self._prune(db, turn)

    def _expire(self) -> int:
        with self._write() as db:
            return self._expire_in(db)

    def _expire_in(self, db: sqlite3.Connection) -> int:
        """Forgets some responses that were kept long enough."""
        rows = db.execute(
            "SELECT id FROM turns WHERE state = 1 AND coalesce(since, created) "
            "< ? ORDER BY coalesce(since, created) LIMIT ?",
            (self._age() - self._kept_s, _EXPIRED_AT_ONCE),
        ).fetchall()
        for row in rows:
            self._forget(db, row[0])
        return len(rows)


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() + " "
    except OSError:
        return ""


# Leases are told in the time since the machine's start, which all processes
# share and nobody sets. Those from before another start are none.
_BOOT = _boot()


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _uptime() -> float:
    return time.clock_gettime(_CLOCK)


def _make_private(folder: str, path: str) -> None:
    """Makes them if they are not there, for this user alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        os.close(os.open(path, flags, 0o600))
    except (FileExistsError, NotADirectoryError):
        found = "a file"
        if os.path.islink(folder) and not os.path.exists(folder):
            found = f"a link to {os.readlink(folder)}, which is not there"
        raise ValueError(
            f"sessions: {folder}: expected a folder, found {found}"
        ) from None
    except OSError as error:
        raise OSError(f"sessions: {folder}: {error.strerror}") from None


def _keep_a_log(db: sqlite3.Connection) -> None:
    """Has what is written go to a log first, by which readers and a writer
    wait for nobody. Where another process makes the same new database, SQLite
    gives this up at once, whatever the timeout: it reads already, and waiting
    could be for one that waits for it.
    """
    end = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = _name_of(error).startswith("SQLITE_BUSY")
            if not busy or time.monotonic() >= end:
                raise
        time.sleep(_POLL_S)


def _has(db: sqlite3.Connection, turn: str) -> bool:
    found = db.execute("SELECT 1 FROM turns WHERE id = ?", (turn,))
    return found.fetchone() is not None


def _branches(
    sessions: Sequence[Session],
    turns: Mapping[str, tuple[str | None, int]],
) -> list[Branch]:
    """What each of the sessions, the newest first, branches off. `turns`: the
    parent and the depth of each turn that leads to one of them.
    """
    first: dict[str, str] = {}  # the oldest session that has a turn
    found = []
    for session in reversed(sessions):
        turn, own = session.head, []
        while turn is not None and turn not in first:
            own.append(turn)
            turn = turns[turn][0]
        branch = Branch(session)
        if turn is not None:
            branch = Branch(session, first[turn], turn, turns[turn][1])
        found.append(branch)
        first.update(dict.fromkeys(own, session.id))
    return found[::-1]


def _list(columns: Sequence[str]) -> str:
    return ", ".join(columns)


def _turn_of(row: Sequence[Any]) -> Turn:
    fields: dict[str, Any] = dict(zip(_COLUMNS, row))
    for name in _JSON:
        fields[name] = json.loads(fields[name])
    fields["whole"] = bool(fields["whole"])
    fields["tokens"] = _tokens_of(fields["tokens"])
    return Turn(**fields)


def _tokens_of(data: bytes) -> TokenArray:
    return np.frombuffer(data, "<i4").astype(np.int32)


def _busy(session: str, what: str) -> RequestError:
    return RequestError(
        409,
        f"session: another turn {what}; {session!r} takes one at a time",
        param="session",
        code="session_busy",
        retry_after=1,
    )


def _file_of(path: str) -> tuple[int, int] | None:
    """Which file it is; None where there is none that can be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_read_only(path: str) -> bool:
    """Whether its file system is."""
    if not hasattr(os, "statvfs"):
        return False
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _name_of(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", None) or "SQLITE_ERROR"


def _failed(error: sqlite3.Error, wrote: bool) -> RequestError:
    name = _name_of(error)
    words = f"sessions: {error} ({name})"
    if wrote:
        words += "; nothing of this request is kept"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return RequestError(503, words, code="sessions_busy", retry_after=1)
    full = name.startswith("SQLITE_FULL")
    if full:
        # What is deleted is written to the log first, which may have to grow.
        words += (
            "; the disk of --sessions is full: expected some room on it, which "
            "deleting needs, too"
        )
    return RequestError(
        503, words, code="sessions_full" if full else "sessions_failed"
    )
