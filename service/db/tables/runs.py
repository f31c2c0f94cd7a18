"""Agents, and runs on them: generations, events, ranks, measured steps and traces."""

from __future__ import annotations

import sqlalchemy as sa

from penstock.service.db.tables.base import Packed, metadata, tenant_column

agents = sa.Table(
    "agents",
    metadata,
    tenant_column(key=True),
    sa.Column("id", sa.String(512), primary_key=True),
    sa.Column("incarnation", sa.String(512), nullable=False),
    sa.Column("devices", sa.JSON, nullable=False),
    sa.Column("models", sa.JSON, nullable=False),
    sa.Column("address", sa.String(512), nullable=False),
    sa.Column("probe_address", sa.String(600)),
    sa.Column("state_version", sa.BigInteger, nullable=False),
    sa.Column("ack", sa.BigInteger, nullable=False),
    sa.Column("last_seen_ms", sa.BigInteger, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    tenant_column(),
    sa.Column("state", sa.String(12), nullable=False),
    sa.Column("plan_hash", sa.String(71), nullable=False),
    sa.Column("model", sa.String(512), nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("steps", sa.BigInteger, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("gradient_check_wanted", sa.Boolean, nullable=False),
    sa.Column("trace_steps", sa.BigInteger, nullable=False),
    sa.Column("layers", sa.JSON, nullable=False),
    sa.Column("boundaries", sa.JSON(none_as_null=True), comment="BoundarySizes of schemas.ranks.assignment"),
    sa.Column("predicted_ns", sa.BigInteger, nullable=False),
    sa.Column("store_address", sa.String(600)),
    sa.Column("gradient_check", sa.Float),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("finished_ms", sa.BigInteger),
    sa.Column("error", sa.JSON),
    sa.Column("options", sa.JSON, nullable=False),
    sa.Column("segments", sa.JSON, nullable=False),
    sa.Column("checkpoint_step", sa.BigInteger),
    sa.Column("max_restarts", sa.BigInteger, nullable=False),
    sa.Column("restarts", sa.BigInteger, nullable=False),
    sa.Column("replans", sa.JSON, nullable=False, comment="while recovering: what came of each new plan asked for"),
    sa.Index("ix_runs_state", "state"),
    sa.Index("ix_runs_newest", "tenant", "id"),
)

run_generations = sa.Table(
    "run_generations",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("plan_hash", sa.String(71), nullable=False),
    sa.Column("agents", sa.JSON, nullable=False),
    sa.Column("began_ms", sa.BigInteger, nullable=False),
    sa.Column("ended_ms", sa.BigInteger),
    sa.Column("why", sa.Text),
)

run_events = sa.Table(
    "run_events",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(12), nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)

run_agents = sa.Table(
    "run_agents",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("agent", sa.String(512), primary_key=True),
    sa.Column("incarnation", sa.String(512), nullable=False),
    sa.Column("phase", sa.String(12), nullable=False, comment="prepare | prepared | start | save | stop | released"),
    sa.Column("hosts_store", sa.Boolean, nullable=False),
    sa.Index("ix_run_agents_agent", "agent", "phase"),
)

run_ranks = sa.Table(
    "run_ranks",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("agent", sa.String(512), nullable=False),
    sa.Column("device", sa.String(512), nullable=False, comment="the agent's own name for it"),
    sa.Column("programs", Packed, nullable=False),
    sa.Column("done", sa.Boolean, nullable=False),
    sa.Column("peak_memory_bytes", sa.BigInteger),
    sa.Column("collectives", sa.JSON(none_as_null=True), comment="how many of each kind ran as predicted"),
    sa.Column("collectives_differ", sa.Text),
    sa.Column("hardware", sa.JSON(none_as_null=True), comment="schemas.trace.Hardware"),
)


class LossColumn(sa.Float[float]):
    """Losses: numbers, and "NaN", "Infinity" or "-Infinity" as texts, since SQLite takes the number NaN for NULL."""

    def bind_processor(self, dialect: sa.Dialect) -> None:
        """Leave texts as they are; PostgreSQL makes numbers of them."""


run_steps = sa.Table(
    "run_steps",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("loss", LossColumn),
    sa.Column("time_ns", sa.BigInteger),
)

run_traces = sa.Table(
    "run_traces",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("body", Packed, nullable=False),
)
