"""Documents by their content hash, and the answers to requests that were asked before."""

from __future__ import annotations

import sqlalchemy as sa

from penstock.service.db.tables.base import Packed, metadata, tenant_column

documents = sa.Table(
    "documents",
    metadata,
    tenant_column(key=True),
    sa.Column("hash", sa.String(71), primary_key=True),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("body", Packed, nullable=False, comment="canonical JSON, as it is or deflated"),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("name", sa.String(512), comment="what it calls itself"),
    sa.Column("size_bytes", sa.BigInteger, comment="of its canonical JSON"),
    sa.Column("used_ms", sa.BigInteger, comment="when it was stored again, to the day"),
    sa.Index("ix_documents_newest", "tenant", "kind", "created_ms"),
)

answers = sa.Table(
    "answers",
    metadata,
    tenant_column(key=True),
    sa.Column("cache_key", sa.String(64), primary_key=True),
    sa.Column("job_id", sa.String(36), nullable=False),
    sa.Column("body", Packed, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
)
