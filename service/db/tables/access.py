"""API keys, and the answers to requests with an idempotency key."""

from __future__ import annotations

import sqlalchemy as sa

from penstock.service.db.tables.base import metadata, tenant_column

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    tenant_column(),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("hash", sa.String(128), nullable=False),
    sa.Column("scopes", sa.JSON, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("expires_ms", sa.BigInteger),
    sa.Column("revoked_ms", sa.BigInteger),
    sa.Column("last_used_ms", sa.BigInteger),
    sa.Column("max_running", sa.Integer),
    sa.Column("max_queued", sa.Integer),
    sa.Column("node", sa.String(128), comment="the one agent that it is for"),
    sa.Column("end_set_ms", sa.BigInteger, comment="when a rotation set expires_ms"),
    sa.Index("uq_api_keys_hash", "hash", unique=True),
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    tenant_column(key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("request_hash", sa.String(71), nullable=False),
    sa.Column("status", sa.Integer, comment="none while the request is under way"),
    sa.Column("body", sa.LargeBinary),
    sa.Column("job_id", sa.String(36)),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
)
"""``job_id``: the job, sweep or run that a request has made. ``body``: its answer; before that, who does it."""
