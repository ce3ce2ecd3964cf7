"""What a session's owner notes of it, and what it has no reply to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("metadata", sa.Text))
    op.add_column("sessions", sa.Column("pending", sa.Text))
