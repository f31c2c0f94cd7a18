"""The tables' history (Alembic): a new database begins at the newest revision, an older one is brought there.

There is no downgrade: restore the backup from before. To add a revision, write `versions/r0002_….py`, name it in
``REVISIONS``, and keep a dump of a database at revision 0001 beside the tests, which then upgrade it.

May import: `service.db`.
Start reading at this file; revisions are in `versions/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from penstock.schemas.errors import Conflict
from penstock.service.db.tables import metadata

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0001"
"""The newest revision: the tables as ``service.db.tables`` describes them."""

REVISIONS = (HEAD,)

VERSIONS = Path(__file__).parent / "versions"
"""The folder with a file for each revision."""

MIGRATORS = 0x70656E74
"""The advisory lock of those who create or upgrade tables on PostgreSQL."""

alembic_version = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def prepare(engine: sa.Engine, *, may_upgrade: bool) -> None:
    """Migrate an empty database to the newest revision, and an older one if that is allowed.

    Raises Conflict for an older one that must not be upgraded, a newer one, and another program's database.
    """
    if _revision(engine) == HEAD:
        return
    if may_upgrade or _revision(engine) is None:
        upgrade(engine)
        return
    name = engine.url.render_as_string()
    raise Conflict(
        f"the database {name} is at revision {_revision(engine)}, but this Penstock needs revision {HEAD}",
        remedy=f"take a backup, then `penstock db upgrade --database {name}`; or start with upgrade_database=true",
    )


def upgrade(engine: sa.Engine) -> str | None:
    """Migrate a database to the newest revision in one transaction under a lock; return the revision it had.

    Raises Conflict for one that a newer Penstock made, or another program's database.
    """
    with _alone(engine) as connection:
        revision = revision_of(connection)
        if revision is None:
            metadata.create_all(connection)
            alembic_version.create(connection)
            connection.execute(alembic_version.insert().values(version_num=HEAD))
        elif revision != HEAD:
            _run(connection)
    return revision


def revision_of(connection: sa.Connection) -> str | None:
    """Return the revision of a database, None for an empty one. Raises Conflict for an unknown revision."""
    there = set(sa.inspect(connection).get_table_names())
    if alembic_version.name in there:
        revision = connection.scalar(sa.select(alembic_version.c.version_num))
        if revision in REVISIONS:
            return str(revision)
        raise Conflict(
            f"the database {_name(connection)} is at revision {revision}, but this Penstock knows only "
            f"{', '.join(REVISIONS)}",
            remedy="use the Penstock version that upgraded the database, or a newer one; or restore a backup from "
            "before the upgrade",
        )
    if strangers := sorted(there & metadata.tables.keys()):
        raise Conflict(
            f"the database {_name(connection)} has tables {', '.join(strangers)} that are not Penstock's",
            remedy="give Penstock a separate database",
        )
    return None


def _revision(engine: sa.Engine) -> str | None:
    with engine.connect() as connection:
        return revision_of(connection)


@contextmanager
def _alone(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a transaction that excludes every other one that creates or upgrades, without a time limit."""
    with engine.connect() as connection, _unchecked(connection), connection.begin():
        if connection.dialect.name == "postgresql":
            for setting in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
                connection.exec_driver_sql(f"SET LOCAL {setting} = 0")
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATORS)))
        yield connection


@contextmanager
def _unchecked(connection: sa.Connection) -> Iterator[None]:
    """Suspend foreign keys: SQLite changes a table by copying it, and dropping the old one must not cascade.

    The pragma has no effect within a transaction, so it is set around it.
    """
    if connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    driver.execute("PRAGMA foreign_keys=OFF")
    try:
        yield
    finally:
        driver.execute("PRAGMA foreign_keys=ON")


def _run(connection: sa.Connection) -> None:
    from alembic import command

    command.upgrade(alembic_config(connection), HEAD)
    if connection.dialect.name != "sqlite":
        return
    if broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first():
        raise Conflict(
            f"the database {_name(connection)} has a row in table {broken[0]} that refers to a missing row of "
            f"{broken[2]}",
            remedy="restore an older backup and upgrade that: the database was damaged before this upgrade",
        )


def alembic_config(connection: sa.Connection) -> Config:
    """Return Alembic's configuration of the revisions on one connection, for its commands."""
    from alembic.config import Config

    configuration = Config(attributes={"connection": connection})
    configuration.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    configuration.set_main_option("version_locations", str(VERSIONS).replace("%", "%%"))
    configuration.set_main_option("path_separator", "newline")
    return configuration


def _name(connection: sa.Connection) -> str:
    return connection.engine.url.render_as_string()
