"""The tables of the first release, as `service.db.tables` describes them.

Revision ID: 0001
"""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: a new database is made at the newest revision, so none has ever to be brought to this one."""
