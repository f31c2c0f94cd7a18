"""Plan jobs with their leases and events, sweeps of them, and the workers that are alive."""

from __future__ import annotations

import sqlalchemy as sa

from penstock.service.db.tables.base import Packed, metadata, now_ms, tenant_column

ACTIVE = ("queued", "running")

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    tenant_column(),
    sa.Column("state", sa.String(12), nullable=False),
    sa.Column("request_hash", sa.String(71), nullable=False),
    sa.Column("cache_key", sa.String(64), nullable=False),
    sa.Column("profile_hash", sa.String(71)),
    sa.Column("planner", sa.String(64)),
    sa.Column("tag", sa.String(128)),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("key_id", sa.String(36), comment="the API key that asked: its jobs are limited"),
    sa.Column("parent_id", sa.String(36), comment="the sweep that it belongs to"),
    sa.Column("request_id", sa.String(128), comment="the HTTP request that made it"),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("not_before_ms", sa.BigInteger, comment="when it may be tried again"),
    sa.Column("started_ms", sa.BigInteger),
    sa.Column("finished_ms", sa.BigInteger),
    sa.Column("attempt", sa.Integer, nullable=False, comment="grows with each claim: the fencing token"),
    sa.Column("lost", sa.Integer, nullable=False, comment="leases that ran out"),
    sa.Column("lease_owner", sa.String(128)),
    sa.Column("lease_until_ms", sa.BigInteger),
    sa.Column("stop", sa.String(8), comment="cancel | finish: what its worker shall do with it"),
    sa.Column("limit_ms", sa.BigInteger, nullable=False),
    sa.Column("incumbent_ns", sa.BigInteger),
    sa.Column("bound_ns", sa.BigInteger),
    sa.Column("incumbent", Packed, comment="best result so far"),
    sa.Column("result", Packed),
    sa.Column("plan_hash", sa.String(71)),
    sa.Column("error", sa.JSON),
    sa.Index("ix_jobs_newest", "tenant", "id"),
    sa.Index("ix_jobs_parent", "parent_id"),
    sa.Index("ix_jobs_served", "tenant", "started_ms"),
)
sa.Index("ix_jobs_ready", jobs.c.state, jobs.c.priority.desc(), jobs.c.id)
_active = jobs.c.state.in_(ACTIVE)
sa.Index("uq_jobs_active", jobs.c.tenant, jobs.c.cache_key, unique=True, sqlite_where=_active, postgresql_where=_active)

job_events = sa.Table(
    "job_events",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(12), nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)

sweeps = sa.Table(
    "sweeps",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    tenant_column(),
    sa.Column("request_hash", sa.String(71), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("state", sa.String(12), nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("finished_ms", sa.BigInteger),
    sa.Index("ix_sweeps_newest", "tenant", "id"),
)

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("id", sa.String(128), primary_key=True, comment="the owner of its leases"),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("started_ms", sa.BigInteger, nullable=False),
    sa.Column("seen_ms", sa.BigInteger, nullable=False),
    sa.Column("version", sa.String(64), nullable=False),
)


def is_alive(lease_ms: int) -> sa.ColumnElement[bool]:
    """Return which workers were seen within a lease; one that was seen later than now was so by another clock."""
    return workers.c.seen_ms.between(now_ms() - lease_ms + 1, now_ms() + lease_ms)
