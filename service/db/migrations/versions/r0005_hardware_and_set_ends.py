"""Store what a run's ranks computed on, and when the end of a key was set.

Revision ID: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("run_ranks", sa.Column("hardware", sa.JSON, comment="schemas.trace.Hardware"))
    op.add_column("api_keys", sa.Column("end_set_ms", sa.BigInteger, comment="when a rotation set expires_ms"))
