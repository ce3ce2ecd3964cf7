"""What chats keep of a session, and its trash."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_SECONDS: sa.REAL[float] = sa.REAL().with_variant(sa.Double(), "postgresql")


def upgrade() -> None:
    _take_in_what_0001_was_given_later()
    for column in (
        sa.Column("model", sa.Text),
        sa.Column("settings", sa.Text, nullable=False, server_default="{}"),
        sa.Column("draft", sa.Text),
        sa.Column("parent", sa.Text),
        sa.Column("deleted", _SECONDS),
    ):
        op.add_column("sessions", column)
    is_deleted = sa.text("deleted IS NOT NULL")
    op.create_index(
        "sessions_deleted",
        "sessions",
        ["deleted"],
        sqlite_where=is_deleted,
        postgresql_where=is_deleted,
    )


def _take_in_what_0001_was_given_later() -> None:
    """Adds a column and indexes that versions of that time added at their
    start, if they were there. `since` is null in what was added before.
    """
    found = sa.inspect(op.get_bind()).get_columns("turns")
    if "since" not in {column["name"] for column in found}:
        op.add_column("turns", sa.Column("since", _SECONDS))
    for name in ("turns_kept", "sessions_tenant"):
        op.execute(f"DROP INDEX IF EXISTS {name}")
    op.execute(
        "CREATE INDEX IF NOT EXISTS turns_since ON turns "
        "(coalesce(since, created)) WHERE state = 1"
    )
    op.execute(
        "CREATE INDEX IF NOT EXISTS sessions_made ON sessions (tenant)"
    )
