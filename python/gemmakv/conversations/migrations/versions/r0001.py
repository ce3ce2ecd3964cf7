"""Turns, sessions and facts: what `gemmakv serve` kept first."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

_STATEMENTS = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT",
    """CREATE TABLE turns (
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
      tokens BLOB NOT NULL
    ) STRICT""",
    "CREATE INDEX turns_parent ON turns (parent)",
    """CREATE TABLE sessions (
      id TEXT PRIMARY KEY,
      tenant TEXT NOT NULL,
      name TEXT,
      system TEXT,
      head TEXT REFERENCES turns (id),
      created REAL NOT NULL,
      updated REAL NOT NULL,
      lease TEXT,
      lease_until REAL NOT NULL DEFAULT 0
    ) STRICT""",
    "CREATE INDEX sessions_head ON sessions (head)",
)


def upgrade() -> None:
    for statement in _STATEMENTS:
        op.execute(statement)
