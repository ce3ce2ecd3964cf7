"""Columns for the metadata of a session and for its unanswered items."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("metadata", sa.Text))
    op.add_column("sessions", sa.Column("pending", sa.Text))
