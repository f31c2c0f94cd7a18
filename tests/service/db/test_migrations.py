"""A database reaches the newest revision with all its rows, on both engines; the second revision is made here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command

from penstock.schemas.errors import Conflict
from penstock.service.db import migrations
from penstock.service.db.database import Database
from penstock.service.db.migrations import alembic_config
from penstock.service.db.tables import DEFAULT_TENANT, metadata
from penstock.service.jobs.queue import JobQueue, NewJob

SECOND = '''
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

def upgrade():
    """Copy a table that another refers to, which SQLite must not take for its end, and add a table."""
    with op.batch_alter_table("jobs") as batch:
        batch.alter_column("tag", type_=sa.String(200))
    op.create_table("extra", sa.Column("id", sa.Integer, primary_key=True))
'''

NEWER = """
import sys
from pathlib import Path
from penstock.service.db import migrations
from penstock.service.db.database import Database
migrations.VERSIONS, migrations.HEAD, migrations.REVISIONS = Path(sys.argv[2]), "0002", ("0001", "0002")
sys.stdin.readline()
database = Database(sys.argv[1], upgrade=True)
database.create()
print(database.revision())
"""


@pytest.fixture
def filled(database: Database) -> Database:
    """A database at the first revision with two jobs and what happened to them."""
    queue = JobQueue(database)
    for number in (1, 2):
        key = str(number) * 64
        queue.enqueue(DEFAULT_TENANT, NewJob(request_hash=f"sha256:{key}", cache_key=key, limit_ms=1000))
    return database


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    """A folder with the first revision and the one after it."""
    folder = tmp_path / "versions"
    shutil.copytree(migrations.VERSIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "r0002_of_this_test.py").write_text(SECOND)
    return folder


@pytest.fixture
def newer(filled: Database, versions: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """Return the database at the first revision in a process that works with the second."""
    monkeypatch.setattr(migrations, "VERSIONS", versions)
    monkeypatch.setattr(migrations, "HEAD", "0002")
    monkeypatch.setattr(migrations, "REVISIONS", ("0001", "0002"))
    return filled


def rows(database: Database) -> dict[str, list[Any]]:
    """Return all rows of all tables."""
    with database.read() as connection:
        return {table.name: list(connection.execute(sa.select(table))) for table in metadata.sorted_tables}


def test_a_new_database_is_what_the_tables_describe(database: Database):
    assert database.revision() == migrations.HEAD
    with database.engine.begin() as connection:
        command.check(alembic_config(connection))


def test_an_older_database_is_upgraded_only_when_that_is_allowed(newer: Database):
    before = rows(newer)
    strict = Database(str(newer.url.render_as_string(hide_password=False)), upgrade=False)
    with pytest.raises(Conflict, match=r"at revision 0001, but this Penstock needs revision 0002") as refused:
        strict.create()
    strict.close()
    assert "penstock db upgrade" in str(refused.value)
    assert rows(newer) == before


def test_an_upgrade_loses_nothing(newer: Database):
    before = rows(newer)
    assert len(before["jobs"]) == 2
    assert before["job_events"]
    assert migrations.upgrade(newer.engine) == "0001"
    assert rows(newer) == before
    assert newer.revision() == "0002"
    assert sa.inspect(newer.engine).has_table("extra")
    assert migrations.upgrade(newer.engine) == "0002"


@pytest.mark.cases(1)
def test_two_processes_upgrade_at_once(filled: Database, engine_url: str, versions: Path):
    before = rows(filled)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", NEWER, engine_url, str(versions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for one in both:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    assert [one.communicate(timeout=60)[0].strip() for one in both] == ["0002", "0002"]
    assert rows(filled) == before


def test_an_upgrade_that_fails_changes_nothing(newer: Database):
    """A row that refers to nothing on SQLite, and on PostgreSQL a table that is in the way of a new one."""
    with newer.engine.connect() as connection, migrations._unchecked(connection), connection.begin():
        if newer.is_sqlite:
            connection.execute(sa.text("INSERT INTO job_events VALUES ('no-job', 1, 'state', 1, '{}')"))
        else:
            connection.execute(sa.text("CREATE TABLE extra (id integer)"))
    before = rows(newer)
    with pytest.raises((Conflict, sa.exc.ProgrammingError)):
        migrations.upgrade(newer.engine)
    assert rows(newer) == before
    with newer.engine.connect() as connection:
        assert migrations.revision_of(connection) == "0001"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE alembic_version SET version_num = '0099'", "is at revision 0099, but this Penstock knows only 0001"),
        ("DROP TABLE alembic_version", "has tables agents, answers, .* that are not Penstock's"),
    ],
    ids=["newer", "another's"],
)
def test_a_database_of_something_else_is_left_alone(database: Database, statement: str, message: str):
    with database.write() as connection:
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
    assert script.get_heads() == [migrations.HEAD]
    assert tuple(sorted(one.revision for one in script.walk_revisions())) == migrations.REVISIONS
