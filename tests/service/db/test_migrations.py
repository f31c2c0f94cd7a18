"""Databases of every released revision reach the newest one with all they hold, on both engines."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command

from penstock.schemas.errors import Conflict
from penstock.service.db import migrations
from penstock.service.db.database import Database
from penstock.service.db.migrations import HEAD, alembic_config
from penstock.service.db.store import Stores
from penstock.service.db.tables import DEFAULT_TENANT
from penstock.service.jobs.leases import Leases
from penstock.service.jobs.queue import JobQueue
from penstock.service.runs.runs import Runs

RELEASED = Path(__file__).parent / "released"
"""Dumps of SQLite files that released versions wrote, with a row or more in each table."""


def released() -> sqlite3.Connection:
    """What the first release wrote, in memory."""
    connection = sqlite3.connect(":memory:")
    connection.executescript((RELEASED / "0001.sql").read_text())
    connection.row_factory = sqlite3.Row
    return connection


@pytest.fixture
def old(engine_url: str) -> Iterator[Database]:
    """A database as the first release left it, on each engine; nobody upgrades it without being told."""
    database = Database(engine_url, upgrade=False)
    with closing(released()) as rows:
        if database.is_sqlite:
            with closing(sqlite3.connect(database.url.database or "")) as file:
                rows.backup(file)
        else:
            fill(database, rows)
    yield database
    database.close()


def fill(database: Database, rows: sqlite3.Connection) -> None:
    """The released rows in tables of revision 0001 on PostgreSQL; the table that Alembic keeps is not of that time."""
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0001")
        connection.execute(sa.text("DROP TABLE alembic_version"))
        tables = sa.MetaData()
        tables.reflect(connection)
        for table in tables.sorted_tables:
            if table.name != "schema_version":
                found = rows.execute(f"SELECT * FROM {table.name}").fetchall()
                connection.execute(table.insert(), [typed(table, row) for row in found])


def typed(table: sa.Table, row: Any) -> dict[str, Any]:
    """A row of SQLite as the columns' types have it in Python."""
    values = {name: row[name] for name in row.keys()}  # noqa: SIM118  (a row iterates over its values)
    for name, value in values.items():
        kind = table.c[name].type
        if value is not None and isinstance(kind, sa.JSON):
            values[name] = json.loads(value)
        elif isinstance(kind, sa.Boolean):
            values[name] = bool(value)
    return values


def everything(database: Database) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables of the first release, without what came later."""
    with closing(released()) as rows:
        names = [name for (name,) in rows.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {name: [row[1] for row in rows.execute(f"PRAGMA table_info({name})")] for name in names}
    columns.pop("schema_version")
    found = {}
    with database.read() as connection:
        for name, kept in columns.items():
            table = sa.Table(name, sa.MetaData(), autoload_with=connection)
            query = sa.select(*(table.c[column] for column in kept)).order_by(*table.primary_key)
            found[name] = [dict(row) for row in connection.execute(query).mappings()]
    return found


def shape(database: Database) -> dict[str, Any]:
    """Tables with their columns, keys and indexes, and triggers."""
    with database.engine.connect() as connection:
        look = sa.inspect(connection)
        tables = {
            name: (
                sorted(
                    (one["name"], str(one["type"]), one["nullable"], one["default"], one.get("comment"))
                    for one in look.get_columns(name)
                ),
                look.get_pk_constraint(name),
                [
                    (one["name"], one["column_names"], one["unique"], sorted(map(str, one.get("expressions", []))))
                    for one in sorted(look.get_indexes(name), key=lambda one: str(one["name"]))
                ],
                sorted(str(one) for one in look.get_foreign_keys(name)),
            )
            for name in look.get_table_names()
        }
        triggers = (
            "SELECT name || sql FROM sqlite_master WHERE type = 'trigger'"
            if database.is_sqlite
            else "SELECT pg_get_triggerdef(oid) || pg_get_functiondef(tgfoid) FROM pg_trigger WHERE NOT tgisinternal"
        )
        return tables | {"triggers": sorted(connection.scalars(sa.text(triggers)))}


@pytest.mark.tier("quick")
def test_revision_0001_is_what_was_released(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'new.sqlite'}")
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0001")
        connection.execute(sa.text("DROP TABLE alembic_version"))
    dumped = Database(f"sqlite:///{tmp_path / 'released.sqlite'}")
    with closing(released()) as rows, closing(sqlite3.connect(tmp_path / "released.sqlite")) as file:
        rows.backup(file)
    assert shape(database) == shape(dumped)
    database.close()
    dumped.close()


def test_an_old_database_is_upgraded_only_when_that_is_allowed(old: Database):
    before = everything(old)
    with pytest.raises(Conflict, match=r"at revision 0001, this Penstock works with revision") as refused:
        old.create()
    assert "penstock db upgrade" in str(refused.value)
    assert everything(old) == before


def test_nothing_is_lost_on_the_way_and_all_of_it_can_be_read(old: Database):
    before = everything(old)
    assert all(before.values())
    assert migrations.upgrade(old.engine) == "0001"
    assert everything(old) == before
    assert old.revision() == HEAD
    old.create()

    store = Stores(old).of(DEFAULT_TENANT)
    (answer,) = before["answers"]
    assert store.answer(answer["cache_key"]) == answer["body"]
    finished, waiting, cancelled = before["jobs"]
    assert store.plan_file(finished["plan_hash"]).plan.request_hash == finished["request_hash"]
    queue = JobQueue(old)
    job = queue.job(DEFAULT_TENANT, finished["id"])
    assert job.result is not None
    assert job.result.plan_hash == finished["plan_hash"]
    events = queue.events(DEFAULT_TENANT, cancelled["id"], 0)
    assert [event.data["state"] for event in events] == ["queued", "cancelled"]
    claim = Leases(old, lease_s=30, max_attempts=3).claim("me")
    assert claim is not None
    assert (claim.job_id, claim.tenant) == (waiting["id"], DEFAULT_TENANT)
    run = Runs(old).run(DEFAULT_TENANT, before["runs"][0]["id"])
    assert run.losses == (3.5, 3.25)
    assert run.step_times_ns == (120, 130)
    assert run.checkpoint_step == 2


def test_an_upgraded_database_is_what_a_new_one_is(old: Database, tmp_path: Path, request: pytest.FixtureRequest):
    migrations.upgrade(old.engine)
    with old.engine.begin() as connection:
        command.check(alembic_config(connection))
    url = f"sqlite:///{tmp_path / 'new.sqlite'}"
    if not old.is_sqlite:
        url = request.getfixturevalue("postgres").new_database()
    new = Database(url)
    new.create()
    assert shape(old) == shape(new)
    new.close()


UPGRADE = """
import sys
from penstock.service.db.database import Database
sys.stdin.readline()
database = Database(sys.argv[1], upgrade=True)
database.create()
print(database.revision())
"""


@pytest.mark.cases(1)
def test_two_processes_upgrade_at_once(old: Database, engine_url: str):
    before = everything(old)
    old.close()
    both = [
        subprocess.Popen(
            [sys.executable, "-c", UPGRADE, engine_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for one in both:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    assert [one.communicate(timeout=60)[0].strip() for one in both] == [HEAD, HEAD]
    assert everything(old) == before


def test_an_upgrade_that_fails_leaves_everything_as_it_was(old: Database):
    """A row that refers to nothing on SQLite, and on PostgreSQL a table that is in the way of a new one."""
    with old.engine.connect() as connection, migrations._unchecked(connection), connection.begin():
        if old.is_sqlite:
            connection.execute(sa.text("INSERT INTO job_events VALUES ('no-job', 1, 'state', 1, '{}')"))
        else:
            connection.execute(sa.text("CREATE TABLE sweeps (id integer)"))
    before = everything(old)
    with pytest.raises((Conflict, sa.exc.ProgrammingError)):
        migrations.upgrade(old.engine)
    assert everything(old) == before
    with old.engine.connect() as connection:
        assert migrations.revision_of(connection) == "0001"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            ["UPDATE alembic_version SET version_num = '0099'"],
            "is at revision 0099, this Penstock knows 0001",
        ),
        (
            ["DROP TABLE alembic_version", "CREATE TABLE schema_version AS SELECT 1 AS version"],
            "has schema version 1, this Penstock knows 0001",
        ),
        (["DROP TABLE alembic_version"], "has tables agents, answers, .* that are not Penstock's"),
    ],
    ids=["newer", "older than released", "another's"],
)
def test_a_database_that_is_not_known_is_left_alone(database: Database, made: list[str], message: str):
    with database.write() as connection:
        for statement in made:
            connection.execute(sa.text(statement))
    for attempt in (database.create, database.revision, lambda: migrations.upgrade(database.engine)):
        with pytest.raises(Conflict, match=message) as refused:
            attempt()
        assert refused.value.remedy


@pytest.mark.tier("quick")
def test_the_newest_revision_is_the_last_file():
    from alembic.script import ScriptDirectory

    with sa.create_engine("sqlite://", poolclass=sa.NullPool).connect() as connection:
        script = ScriptDirectory.from_config(alembic_config(connection))
    assert script.get_heads() == [HEAD]
    assert tuple(sorted(one.revision for one in script.walk_revisions())) == migrations.REVISIONS
