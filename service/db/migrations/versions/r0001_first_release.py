"""What the first release wrote, as schema version 2.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables, and the one that held the version then."""
    op.create_table(
        "agents",
        sa.Column("id", sa.String(512), nullable=False),
        sa.Column("incarnation", sa.String(512), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("probe_address", sa.String(600)),
        sa.Column("state_version", sa.BigInteger(), nullable=False),
        sa.Column("ack", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_agents"),
    )
    op.create_table(
        "answers",
        sa.Column("cache_key", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("cache_key", name="pk_answers"),
    )
    op.create_table(
        "documents",
        sa.Column("hash", sa.String(71), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_documents"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("request_hash", sa.String(71), nullable=False),
        sa.Column("cache_key", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("started_ms", sa.BigInteger()),
        sa.Column("finished_ms", sa.BigInteger()),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="grows with each claim: the fencing token"),
        sa.Column("lost", sa.Integer(), nullable=False, comment="leases that ran out"),
        sa.Column("lease_owner", sa.String(64)),
        sa.Column("lease_until_ms", sa.BigInteger()),
        sa.Column("stop", sa.String(8), comment="cancel | finish: what its worker shall do with it"),
        sa.Column("limit_ms", sa.BigInteger(), nullable=False),
        sa.Column("incumbent_ns", sa.BigInteger()),
        sa.Column("bound_ns", sa.BigInteger()),
        sa.Column("incumbent", sa.LargeBinary(), comment="best result so far"),
        sa.Column("result", sa.LargeBinary()),
        sa.Column("plan_hash", sa.String(71)),
        sa.Column("error", sa.JSON()),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("plan_hash", sa.String(71), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("gradient_check_wanted", sa.Boolean(), nullable=False),
        sa.Column("trace_steps", sa.BigInteger(), nullable=False),
        sa.Column("layers", sa.JSON(), nullable=False),
        sa.Column("predicted_ns", sa.BigInteger(), nullable=False),
        sa.Column("store_address", sa.String(600)),
        sa.Column("gradient_check", sa.Float()),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("finished_ms", sa.BigInteger()),
        sa.Column("error", sa.JSON()),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("segments", sa.JSON(), nullable=False),
        sa.Column("checkpoint_step", sa.BigInteger()),
        sa.Column("max_restarts", sa.BigInteger(), nullable=False),
        sa.Column("restarts", sa.BigInteger(), nullable=False),
        sa.Column(
            "replans", sa.JSON(), nullable=False, comment="while recovering: what came of each new plan asked for"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_table(
        "schema_version",
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_schema_version"),
    )
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("kind", sa.String(12), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "sequence", name="pk_job_events"),
    )
    op.create_table(
        "run_agents",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("agent", sa.String(512), nullable=False),
        sa.Column("incarnation", sa.String(512), nullable=False),
        sa.Column(
            "phase", sa.String(12), nullable=False, comment="prepare | prepared | start | save | stop | released"
        ),
        sa.Column("hosts_store", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_agents_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "agent", name="pk_run_agents"),
    )
    op.create_table(
        "run_events",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("kind", sa.String(12), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_events_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "sequence", name="pk_run_events"),
    )
    op.create_table(
        "run_generations",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("plan_hash", sa.String(71), nullable=False),
        sa.Column("agents", sa.JSON(), nullable=False),
        sa.Column("began_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_ms", sa.BigInteger()),
        sa.Column("why", sa.Text()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_generations_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "generation", name="pk_run_generations"),
    )
    op.create_table(
        "run_ranks",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("agent", sa.String(512), nullable=False),
        sa.Column("device", sa.String(512), nullable=False, comment="the agent's own name for it"),
        sa.Column("programs", sa.LargeBinary(), nullable=False),
        sa.Column("done", sa.Boolean(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_ranks_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "rank", name="pk_run_ranks"),
    )
    op.create_table(
        "run_steps",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("rank", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("loss", sa.Float()),
        sa.Column("time_ns", sa.BigInteger()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_steps_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", "rank", name="pk_run_steps"),
    )
    op.create_table(
        "run_traces",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("rank", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_traces_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", "rank", name="pk_run_traces"),
    )
    op.create_index("ix_jobs_ready", "jobs", ["state", sa.text("priority DESC"), "id"])
    active = sa.column("state").in_(("queued", "running"))
    op.create_index("uq_jobs_active", "jobs", ["cache_key"], unique=True, sqlite_where=active, postgresql_where=active)
    op.create_index("ix_runs_state", "runs", ["state"])
    op.create_index("ix_run_agents_agent", "run_agents", ["agent", "phase"])
    op.execute("INSERT INTO schema_version (version) VALUES (2)")
