"""The condition of a database: whether it can be reached and written, is at the newest revision, and is undamaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from penstock.schemas.document import address_of
from penstock.schemas.errors import PenstockError
from penstock.service.db import migrations
from penstock.service.db.database import Database
from penstock.service.db.tables import documents, metadata

AT_A_TIME = 200
"""Documents that are read at once."""


@dataclass(frozen=True)
class Condition:
    """The condition of a database; ``faults`` is empty when all is well.

    ``free_bytes`` are free on the disk of a SQLite file. ``rows`` are their numbers by table, ``documents`` the number
    of documents that were checked.
    """

    database: str
    engine: str
    revision: str | None
    head: str
    size_bytes: int | None
    free_bytes: int | None
    rows: dict[str, int]
    documents: int
    faults: tuple[str, ...]


def check(database: Database) -> Condition:
    """Check everything. Raises DatabaseAway when it cannot be reached, Conflict for another program's database."""
    with database.read() as connection:
        revision = migrations.revision_of(connection)
        engine = _engine(connection)
        size = connection.scalar(sa.text(_SIZE[connection.dialect.name]))
        faults = [] if revision == migrations.HEAD else [_not_newest(revision)]
        rows = _rows(connection) if not faults else {}
        faults += _damage(connection) if database.is_sqlite else []
    if why := _not_writable(database):
        faults.append(why)
    wrong = list(_wrong_documents(database)) if rows else []
    return Condition(
        database=database.name,
        engine=engine,
        revision=revision,
        head=migrations.HEAD,
        size_bytes=size,
        free_bytes=_free_bytes(database),
        rows=rows,
        documents=rows.get("documents", 0),
        faults=(*faults, *wrong),
    )


_SIZE = {
    "sqlite": "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()",
    "postgresql": "SELECT pg_database_size(current_database())",
}


def _engine(connection: sa.Connection) -> str:
    if connection.dialect.name == "sqlite":
        return f"SQLite {connection.scalar(sa.text('SELECT sqlite_version()'))}"
    return f"PostgreSQL {str(connection.scalar(sa.text('SHOW server_version'))).partition(' ')[0]}"


def _not_newest(revision: str | None) -> str:
    if revision is None:
        return "it is empty; `penstock serve` or `penstock db upgrade` makes its tables"
    return f"it is at revision {revision}, this Penstock works with {migrations.HEAD}: `penstock db upgrade`"


def _rows(connection: sa.Connection) -> dict[str, int]:
    return {
        table.name: connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
        for table in metadata.sorted_tables
    }


def _damage(connection: sa.Connection) -> list[str]:
    """Return what SQLite itself finds; PostgreSQL checks references at each write, and its pages by checksums."""
    faults = [str(line) for line in connection.scalars(sa.text("PRAGMA integrity_check(10)")) if line != "ok"]
    dangling = connection.execute(sa.text("PRAGMA foreign_key_check")).all()
    return faults + [f"a row of {row[0]} refers to nothing in {row[2]}" for row in dangling[:10]]


def _not_writable(database: Database) -> str | None:
    """Return why nothing can be written, or None when a trial write, rolled back, succeeds."""
    try:
        with database.write() as connection:
            there = sa.inspect(connection).has_table(migrations.alembic_version.name)
            if there:
                column = migrations.alembic_version.c.version_num
                connection.execute(migrations.alembic_version.update().values(version_num=column))
            connection.rollback()
    except PenstockError as error:
        return f"it cannot be written: {error.detail}"
    return None


def _free_bytes(database: Database) -> int | None:
    if not database.is_sqlite:
        return None
    return shutil.disk_usage(Path(database.url.database or os.curdir).absolute().parent).free


def _wrong_documents(database: Database) -> Iterator[str]:
    """Yield a sentence for each document that does not match its address or names a missing one."""
    last = ("", "")
    columns = (documents.c.tenant, documents.c.hash, documents.c.kind, documents.c.body)
    key = sa.tuple_(documents.c.tenant, documents.c.hash)
    while True:
        query = sa.select(*columns).where(key > last).order_by(documents.c.tenant, documents.c.hash).limit(AT_A_TIME)
        with database.read() as connection:
            rows = connection.execute(query).all()
            for tenant, address, kind, body in rows:
                if kind == "plan request":
                    yield from _missing(connection, tenant, address, body)
                elif address_of(body) != address:
                    yield f"{kind} {address} of tenant {tenant!r} has another content than its address says"
        if len(rows) < AT_A_TIME:
            return
        last = (rows[-1].tenant, rows[-1].hash)


def _missing(connection: sa.Connection, tenant: str, address: str, body: bytes) -> Iterator[str]:
    request = json.loads(body)
    for kind in ("profile", "topology"):
        here = sa.and_(documents.c.tenant == tenant, documents.c.hash == request[kind], documents.c.kind == kind)
        if connection.scalar(sa.select(documents.c.hash).where(here)) is None:
            yield f"plan request {address} of tenant {tenant!r} names {kind} {request[kind]}, which is not there"
