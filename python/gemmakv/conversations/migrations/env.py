"""What Alembic runs: the steps, in the transaction that is open."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    # Columns of SQLite's tables are added in place.
    render_as_batch=False,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
