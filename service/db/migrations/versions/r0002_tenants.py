"""Tenants, API keys, sweeps, workers, retries; changes are announced; the version is in Alembic's own table.

Revision ID: 0002
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from penstock.service.db.tables.telling import Telling, statements

revision = "0002"
down_revision = "0001"

TENANT_OF_ALL = "default"

TELLINGS = (
    Telling("jobs", "INSERT", "'jobs'"),
    Telling("jobs", "UPDATE OF state", "'jobs'", "NEW.state = 'queued'"),
    Telling("jobs", "UPDATE OF stop", "'stop:' || NEW.id", "NEW.stop IS NOT NULL"),
    Telling("job_events", "INSERT", "'job:' || NEW.job_id"),
    Telling("run_events", "INSERT", "'run:' || NEW.run_id"),
    Telling("sweeps", "UPDATE OF state", "'sweep:' || NEW.id"),
)


def upgrade() -> None:
    """Give what is there to the tenant of those who need no key, and make the new tables."""
    _add_tenant("documents", key=["tenant", "hash"])
    with op.batch_alter_table("documents") as batch:
        batch.add_column(sa.Column("name", sa.String(512), comment="what it calls itself"))
        batch.add_column(sa.Column("size_bytes", sa.BigInteger(), comment="of its canonical JSON"))
        batch.add_column(sa.Column("used_ms", sa.BigInteger(), comment="when it was stored again, to the day"))
        batch.alter_column("body", comment="canonical JSON, as it is or deflated")
    op.create_index("ix_documents_newest", "documents", ["tenant", "kind", "created_ms"])
    _add_tenant("answers", key=["tenant", "cache_key"])
    _add_tenant("agents", key=["tenant", "id"])
    _add_tenant("runs")
    op.create_index("ix_runs_newest", "runs", ["tenant", "id"])
    _change_jobs()
    _create_tables()
    for statement in statements(op.get_context().dialect.name, TELLINGS):
        op.execute(statement)
    op.drop_table("schema_version")


def _add_tenant(table: str, key: Sequence[str] | None = None) -> None:
    column = sa.Column("tenant", sa.String(64), nullable=False, server_default=TENANT_OF_ALL)
    with op.batch_alter_table(table) as batch:
        batch.add_column(column)
    with op.batch_alter_table(table) as batch:
        batch.alter_column("tenant", server_default=None)
        if key is not None:
            batch.drop_constraint(f"pk_{table}", type_="primary")
            batch.create_primary_key(f"pk_{table}", list(key))


def _change_jobs() -> None:
    op.drop_index("ix_jobs_ready", "jobs")
    op.drop_index("uq_jobs_active", "jobs")
    _add_tenant("jobs")
    with op.batch_alter_table("jobs") as batch:
        batch.add_column(sa.Column("profile_hash", sa.String(71)))
        batch.add_column(sa.Column("planner", sa.String(64)))
        batch.add_column(sa.Column("tag", sa.String(128)))
        batch.add_column(sa.Column("key_id", sa.String(36), comment="the API key that asked: its jobs are limited"))
        batch.add_column(sa.Column("parent_id", sa.String(36), comment="the sweep that it belongs to"))
        batch.add_column(sa.Column("request_id", sa.String(128), comment="the HTTP request that made it"))
        batch.add_column(sa.Column("not_before_ms", sa.BigInteger(), comment="when it may be tried again"))
        batch.alter_column("lease_owner", type_=sa.String(128))
    op.create_index("ix_jobs_newest", "jobs", ["tenant", "id"])
    op.create_index("ix_jobs_parent", "jobs", ["parent_id"])
    op.create_index("ix_jobs_ready", "jobs", ["state", sa.text("priority DESC"), "id"])
    active = sa.column("state").in_(("queued", "running"))
    op.create_index(
        "uq_jobs_active", "jobs", ["tenant", "cache_key"], unique=True, sqlite_where=active, postgresql_where=active
    )


def _create_tables() -> None:
    op.create_table(
        "sweeps",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("request_hash", sa.String(71), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("finished_ms", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_sweeps"),
    )
    op.create_index("ix_sweeps_newest", "sweeps", ["tenant", "id"])
    op.create_table(
        "workers",
        sa.Column("id", sa.String(128), nullable=False, comment="the owner of its leases"),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("started_ms", sa.BigInteger(), nullable=False),
        sa.Column("seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("hash", sa.String(128), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger()),
        sa.Column("revoked_ms", sa.BigInteger()),
        sa.Column("last_used_ms", sa.BigInteger()),
        sa.Column("max_running", sa.Integer()),
        sa.Column("max_queued", sa.Integer()),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    op.create_index("uq_api_keys_hash", "api_keys", ["hash"], unique=True)
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_hash", sa.String(71), nullable=False),
        sa.Column("status", sa.Integer(), comment="none while the request is under way"),
        sa.Column("body", sa.LargeBinary()),
        sa.Column("job_id", sa.String(36)),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", name="pk_idempotency"),
    )
