"""When a tenant was last served is found by an index; a key may be for the agent of one node.

Revision ID: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the index and the column."""
    op.create_index("ix_jobs_served", "jobs", ["tenant", "started_ms"])
    op.add_column("api_keys", sa.Column("node", sa.String(128), comment="the one agent that it is for"))
