"""Backups of a whole database in one file, taken while services work with it, and their restoration.

A SQLite file is copied by SQLite's own backup, a PostgreSQL database by its ``pg_dump`` and ``pg_restore``.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

from penstock.schemas.errors import Conflict, InvalidDocument, MissingExtra, Unreachable
from penstock.service.db import migrations
from penstock.service.db.database import Database
from penstock.service.db.tables import now_ms, workers

STARTS = {True: b"SQLite format 3\0", False: b"PGDMP"}
"""First bytes of a backup of SQLite (True) and of PostgreSQL (False)."""

ALIVE_MS = 60_000
"""A worker with a heartbeat within this time may still write."""


def backup(database: Database, file: Path) -> int:
    """Write a copy of the database as of one moment; return its size in bytes.

    Raises Conflict when ``file`` exists already, MissingExtra without ``pg_dump``, Unreachable when it fails.
    """
    if file.exists():
        raise Conflict(f"{str(file)!r} already exists", remedy="name another file, or remove it first")
    database.revision()
    with _whole(file) as new:
        if database.is_sqlite:
            with closing(_sqlite(database)) as source, closing(sqlite3.connect(new)) as copy:
                source.backup(copy)
        else:
            _run(database, "pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={new}")
    return file.stat().st_size


def restore(database: Database, file: Path, *, replace: bool = False) -> str | None:
    """Fill a database from a backup; return its revision afterwards.

    Raises Conflict when the database holds something and ``replace`` is not given, or while workers use it. Raises
    InvalidDocument for a file that is not a backup of this engine, or is damaged; nothing is changed then.
    """
    with file.open("rb") as opened:
        if not opened.read(16).startswith(STARTS[database.is_sqlite]):
            engine = "a SQLite file" if database.is_sqlite else "a PostgreSQL database"
            raise InvalidDocument(
                f"{str(file)!r} is not a backup of {engine}",
                remedy=f"name a file that `penstock db backup` wrote from {engine}",
            )
    if database.is_sqlite:
        with _sound(file) as source:
            _refuse_in_use(database, replace)
            with closing(_sqlite(database)) as target:
                source.backup(target)
    else:
        _read_whole(file)
        _refuse_in_use(database, replace)
        clean = ["--clean", "--if-exists"] if replace else []
        _run(database, "pg_restore", *clean, "--no-owner", "--no-privileges", "--single-transaction", str(file))
    database.close()
    with database.read() as connection:
        return migrations.revision_of(connection)


@contextmanager
def _sound(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a SQLite backup and check all of it. Raises InvalidDocument for a damaged one."""
    tables: set[str] = set()
    with closing(sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro", uri=True)) as source:
        try:
            damage = str(source.execute("PRAGMA quick_check(1)").fetchone()[0])
            if damage == "ok":
                tables = {name for (name,) in source.execute("SELECT name FROM sqlite_master")}
        except sqlite3.DatabaseError as error:
            damage = str(error)
        if damage != "ok":
            raise _damaged(file, damage)
        if not tables & {"alembic_version", "schema_version"}:
            raise InvalidDocument(
                f"{str(file)!r} is a SQLite file, but not a database of Penstock",
                remedy="give a file that `penstock db backup` wrote",
            )
        yield source


def _read_whole(file: Path) -> None:
    """Have PostgreSQL read a backup to its end, keeping nothing. Raises InvalidDocument for a truncated one."""
    path = _program("pg_restore")
    done = subprocess.run([path, "--file=/dev/null", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise _damaged(file, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0])


def _damaged(file: Path, damage: str) -> InvalidDocument:
    return InvalidDocument(
        f"the backup {str(file)!r} is damaged or not complete: {damage} ({file.stat().st_size} bytes)",
        remedy="restore another backup, or copy this one again from where it was written; nothing was changed",
    )


def _refuse_in_use(database: Database, replace: bool) -> None:
    with database.read() as connection:
        revision = migrations.revision_of(connection)
        if revision is None:
            return
        if not replace:
            raise Conflict(
                f"the database {database.name} is not empty",
                remedy="restore into a new one, or give --replace to discard its contents",
            )
        if revision == migrations.HEAD:
            seen = sa.select(workers.c.host, workers.c.pid).where(workers.c.seen_ms > now_ms() - ALIVE_MS)
            alive = connection.execute(seen).first()
            if alive is not None:
                raise Conflict(
                    f"a worker is using the database {database.name}: process {alive.pid} on {alive.host}",
                    remedy="stop all services and workers first; a killed worker counts as running for "
                    f"{ALIVE_MS // 1000} s",
                )


@contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Yield a temporary name next to ``file``; it is renamed to ``file`` once all of it is on disk, else removed."""
    new = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        new.touch(mode=0o600)
        yield new
        with new.open("rb") as written:
            os.fsync(written.fileno())
        new.rename(file)
    finally:
        new.unlink(missing_ok=True)


def _sqlite(database: Database) -> sqlite3.Connection:
    return sqlite3.connect(database.url.database or "", timeout=10)


def _run(database: Database, program: str, *arguments: str) -> None:
    path = _program(program)
    url = database.url.set(drivername="postgresql")._replace(password=None)
    environment = dict(os.environ)
    if database.url.password is not None:
        environment["PGPASSWORD"] = str(database.url.password)
    command = [path, "--dbname", url.render_as_string(), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise Unreachable(f"{program} failed: {lines[0] if lines else f'exit code {done.returncode}'}")


def _program(name: str) -> str:
    """Return the path of one of PostgreSQL's programs. Raises MissingExtra."""
    path = shutil.which(name)
    if path is None:
        raise MissingExtra(
            f"{name} is not installed; Penstock backs up and restores PostgreSQL with PostgreSQL's own programs",
            remedy="install Debian's postgresql-client, or run this where PostgreSQL is",
        )
    return path
