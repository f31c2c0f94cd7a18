"""What Alembic runs for each of its commands: on the connection, and in the transaction, that it was given."""

from __future__ import annotations

from alembic import context

from penstock.service.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    compare_type=True,
)
context.run_migrations()
