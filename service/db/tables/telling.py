"""Announcement of the database's changes to every process, by triggers that name topics.

A topic is announced by the transaction that changes something, so also by a process killed right after its commit.
PostgreSQL sends notifications on ``CHANNEL``; on SQLite they are rows of ``changes``, of which the newest are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from penstock.service.db.tables.base import metadata

CHANNEL = "penstock"

CHANGES = "changes"
KEPT = 1000
"""Rows of ``changes`` that stay; a reader that is further behind has to read everything."""


class Telling(NamedTuple):
    """A trigger: announces ``topic``, an SQL expression over the row ``NEW``, ``after`` a change of ``table``."""

    table: str
    after: str
    topic: str
    when: str = "1=1"

    @property
    def name(self) -> str:
        """The trigger's name."""
        return "_".join(["tell", self.table, *self.after.lower().split(" of ")])


TELLINGS = (
    Telling("jobs", "INSERT", "'jobs'"),
    Telling("jobs", "UPDATE OF state", "'jobs'", "NEW.state = 'queued'"),
    Telling("jobs", "UPDATE OF stop", "'stop:' || NEW.id", "NEW.stop IS NOT NULL"),
    Telling("job_events", "INSERT", "'job:' || NEW.job_id"),
    Telling("run_events", "INSERT", "'run:' || NEW.run_id"),
    Telling("sweeps", "UPDATE OF state", "'sweep:' || NEW.id"),
    Telling("runs", "UPDATE", "'run:' || NEW.id"),
    Telling("runs", "UPDATE OF state", "'recovery'", "NEW.state = 'recovering'"),
    Telling("runs", "UPDATE OF replans", "'recovery'", "NEW.state = 'recovering'"),
    Telling("run_ranks", "UPDATE", "'run:' || NEW.run_id"),
    Telling("run_steps", "INSERT", "'run:' || NEW.run_id"),
    Telling("run_agents", "UPDATE OF phase", "'recovery'", "NEW.phase = 'released'"),
    Telling("agents", "UPDATE OF state_version", "'agent:' || NEW.tenant || '/' || NEW.id"),
)


def statements(dialect: str) -> list[str]:
    """Return the SQL that creates the triggers on an engine, and the table that they write to."""
    if dialect == "sqlite":
        table = f"CREATE TABLE {CHANGES} (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL)"
        return [table, *map(_sqlite, TELLINGS)]
    return [statement for one in TELLINGS for statement in _postgresql(one)]


def _sqlite(one: Telling) -> str:
    return (
        f"CREATE TRIGGER {one.name} AFTER {one.after} ON {one.table} WHEN {one.when} BEGIN "
        f"INSERT INTO {CHANGES} (topic) VALUES ({one.topic}); "
        f"DELETE FROM {CHANGES} WHERE id <= last_insert_rowid() - {KEPT}; END"
    )


def _postgresql(one: Telling) -> list[str]:
    return [
        f"CREATE FUNCTION {one.name}() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM pg_notify('{CHANNEL}', {one.topic}); RETURN NULL; END $$",
        f"CREATE TRIGGER {one.name} AFTER {one.after} ON {one.table} FOR EACH ROW WHEN ({one.when}) "
        f"EXECUTE FUNCTION {one.name}()",
    ]


def _after_create(target: sa.MetaData, connection: sa.Connection, **options: object) -> None:
    for statement in statements(connection.dialect.name):
        connection.exec_driver_sql(statement)


sa.event.listen(metadata, "after_create", _after_create)
