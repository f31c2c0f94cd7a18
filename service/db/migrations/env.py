"""Runs Alembic's commands on the connection, and in the transaction, that it was given."""

from __future__ import annotations

from alembic import context

from penstock.service.db.tables import CHANGES, metadata


def _is_ours(name: str | None, kind: str, parents: object) -> bool:
    """Return whether the metadata describes an object; it lacks the table that SQLite's triggers write."""
    return not (kind == "table" and name == CHANGES)


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    compare_type=True,
    include_name=_is_ours,
)
context.run_migrations()
