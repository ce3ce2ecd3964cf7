"""Tables of the database of conversations.

Turns are a tree: each has the messages that came, the reply and the tokens of
both. A session is a name for a turn, its head; forks share all turns, and
nothing is copied. A turn goes when neither a session, a response that is kept
nor another turn leads to it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from sqlalchemy import (
    REAL,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    func,
    literal,
    literal_column,
    select,
    text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import ColumnElement
from sqlalchemy.types import TypeDecorator

from gemmakv.conversations._types import KEPT, SessionInfo, Turn, bytes_of
from gemmakv.generation._prompts import TokenArray

if TYPE_CHECKING:
    from sqlalchemy import Select

    # A query with any columns.
    Query = Select[*tuple[Any, ...]]

# Schemas in the order in which they follow each other; the last is today's.
REVISIONS = ("0001", "0002", "0003", "0004")
HEAD = REVISIONS[-1]

# The execution option of transactions that write.
WRITES = "gemmakv_writes"

FIRST_BYTES = 512  # SQLite has 1,000 of a key on its page

# REAL has eight bytes in SQLite, and four in PostgreSQL.
_Seconds: REAL[float] = REAL().with_variant(Double(), "postgresql")


class Json(TypeDecorator[Any]):
    """JSON as text, whatever types the database has."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        text = json.dumps(value, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # half a pair, which only an escape says
            text = json.dumps(value)
        return text

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Flag(TypeDecorator[bool]):
    """A bool as 0 or 1."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> int | None:
        return None if value is None else int(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> bool | None:
        return None if value is None else bool(value)


class Tokens(TypeDecorator[TokenArray]):
    """Token ids as bytes, four each, the lowest first."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes:
        return bytes_of(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> TokenArray:
        return np.frombuffer(value, "<i4").astype(np.int32)


metadata = MetaData()

# The revision, where Alembic looks for it.
revisions = Table(
    "alembic_version",
    metadata,
    Column("version_num", String(32), primary_key=True),
)

facts = Table(
    "facts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
    sqlite_strict=True,
)

turns = Table(
    "turns",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("parent", Text, ForeignKey("turns.id")),
    Column("depth", Integer, nullable=False),
    Column("state", Integer, nullable=False),
    Column("created", _Seconds, nullable=False),
    Column("system", Text),
    Column("tools", Json, nullable=False),
    Column("messages", Json, nullable=False),
    Column("reply", Json, nullable=False),
    Column("reason", Text, nullable=False),
    Column("usage", Json, nullable=False),
    Column("params", Json, nullable=False),
    Column("basis", Text, nullable=False),
    Column("whole", Flag, nullable=False),
    Column("tokens", Tokens, nullable=False),
    # By the database's own clock. Null: an earlier version added the turn.
    Column("since", _Seconds),
    # Whether a chat can go on from it: it and all before are plain messages.
    # Null: a process of an earlier version added it, and nobody can tell.
    Column("plain", Flag),
    # For a chat's tokens, a digest of those that they follow.
    Column("follows", LargeBinary),
    sqlite_strict=True,
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("name", Text),
    Column("system", Text),
    Column("head", Text, ForeignKey("turns.id")),
    Column("created", _Seconds, nullable=False),
    Column("updated", _Seconds, nullable=False),
    Column("lease", Text),
    Column("lease_until", _Seconds, nullable=False, server_default=text("0")),
    Column("model", Text),
    Column("settings", Json, nullable=False, server_default="{}"),
    Column("draft", Text),
    Column("parent", Text),
    # When it was put into the trash, by the database's own clock.
    Column("deleted", _Seconds),
    # The order in which a tenant's were made, whatever the clock said. Null
    # until the next start where a process of an earlier version made it.
    Column("number", Integer),
    Column("metadata", Json),
    # What has no reply so far.
    Column("pending", Json),
    sqlite_strict=True,
)

# Since when a turn is kept. An index has it for responses, of which a query
# has to speak by this very condition.
since: ColumnElement[float] = func.coalesce(turns.c.since, turns.c.created)
is_response = turns.c.state == literal_column(str(KEPT))

# The first 128 tokens of a turn, by which an index has the others in order.
first_tokens: ColumnElement[bytes] = func.substr(
    turns.c.tokens,
    literal_column("1"),
    literal_column(str(FIRST_BYTES)),
    type_=LargeBinary,
)

Index("turns_parent", turns.c.parent)
Index(
    "turns_follows",
    turns.c.follows,
    first_tokens,
    sqlite_where=turns.c.follows.is_not(None),
    postgresql_where=turns.c.follows.is_not(None),
)
Index(
    "turns_since", since, sqlite_where=is_response, postgresql_where=is_response
)
Index("sessions_head", sessions.c.head)
Index("sessions_parent", sessions.c.parent)
Index("sessions_made", sessions.c.tenant, sessions.c.number)
Index(
    "sessions_deleted",
    sessions.c.deleted,
    sqlite_where=sessions.c.deleted.is_not(None),
    postgresql_where=sessions.c.deleted.is_not(None),
)

TURN = tuple(turns.c[field.name] for field in dataclasses.fields(Turn))
# The same without tokens, which are long.
LIGHT = tuple(
    column
    if column is not turns.c.tokens
    else literal((), Tokens).label("tokens")
    for column in TURN
)
_depth = func.coalesce(turns.c.depth, 0).label("turns")
SESSION = tuple(
    _depth if field.name == "turns" else sessions.c[field.name]
    for field in dataclasses.fields(SessionInfo)
)


def next_number(tenant: str) -> ColumnElement[int]:
    """Gives the `number` of the next session of a tenant."""
    last = select(func.coalesce(func.max(sessions.c.number), 0))
    return last.where(sessions.c.tenant == tenant).scalar_subquery() + 1


def turn_of(row: Mapping[Any, Any]) -> Turn:
    """Makes a turn of a row with the columns TURN or LIGHT."""
    return Turn(**row)


def session_of(row: Mapping[Any, Any]) -> SessionInfo:
    """Makes a session of a row with the columns SESSION."""
    return SessionInfo(**row)
