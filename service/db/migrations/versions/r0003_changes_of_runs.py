"""Changes of runs and of what agents shall do are announced by the database.

Revision ID: 0003
"""

from __future__ import annotations

from alembic import op

from penstock.service.db.tables.telling import Telling, triggers

revision = "0003"
down_revision = "0002"

TELLINGS = (
    Telling("runs", "UPDATE", "'run:' || NEW.id"),
    Telling("runs", "UPDATE OF state", "'recovery'", "NEW.state = 'recovering'"),
    Telling("runs", "UPDATE OF replans", "'recovery'", "NEW.state = 'recovering'"),
    Telling("run_ranks", "UPDATE", "'run:' || NEW.run_id"),
    Telling("run_steps", "INSERT", "'run:' || NEW.run_id"),
    Telling("run_agents", "UPDATE OF phase", "'recovery'", "NEW.phase = 'released'"),
    Telling("agents", "UPDATE OF state_version", "'agent:' || NEW.tenant || '/' || NEW.id"),
)


def upgrade() -> None:
    """Make the triggers."""
    for statement in triggers(op.get_context().dialect.name, TELLINGS):
        op.execute(statement)
