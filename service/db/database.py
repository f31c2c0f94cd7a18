"""Access to the tables: SQLAlchemy 2 Core on a SQLite file (WAL) or a PostgreSQL server.

A writing transaction is exclusive: ``BEGIN IMMEDIATE`` on SQLite, one advisory lock on PostgreSQL, so that the same
code is right on both. One that locks the rows it changes may declare so; on PostgreSQL these run concurrently.
A database that does not answer is ``DatabaseAway`` (503), whatever the driver calls it; the next call may work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import sqlalchemy as sa

from penstock.schemas.errors import Conflict, InvalidDocument, Unreachable, UnsupportedRequest
from penstock.service import metrics
from penstock.service.db import migrations
from penstock.service.db.disks import refuse_shared_disk

log = logging.getLogger("penstock.service")

LOCK_WAIT_MS = 10_000
"""Longest wait of a transaction for another transaction's locks, in milliseconds."""

if TYPE_CHECKING:
    from penstock.service.settings import Settings

Note = Callable[[sa.Connection, str], None]
"""Notes an id in the transaction that makes it. Raises Conflict when another does the request now."""

AGAIN_S = 1.0
"""Delay between two attempts to reach a server that does not answer yet, in seconds."""

STATEMENT_MS = 30_000
"""Longest statement of a service on PostgreSQL; none comes near it on a server in good health."""

WRITERS = 0x70656E73
"""The advisory lock of transactions that write alone."""


class DatabaseAway(Unreachable):
    """The database does not answer, or cannot be written at present."""

    title = "The database does not answer"
    code = "database-away"
    retry_after_s = 5
    public_detail = "the database does not answer"
    """Detail that clients of the service receive, without addresses and names of the database."""
    may_pass = True
    """The chance that waiting helps; False where an operator has to repair something first."""


class Database:
    """An engine and its transactions. ``url`` names a SQLite file or a PostgreSQL server.

    ``connections``: the largest number open at a time; ``upgrade``: whether ``create`` may change the tables of an
    older Penstock, by default on SQLite only. Raises UnsupportedRequest for another kind of URL, and for a SQLite file
    on a disk that several hosts share.
    """

    def __init__(self, url: str, *, connections: int = 20, upgrade: bool | None = None) -> None:
        self.url = _parsed(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._may_upgrade = self.is_sqlite if upgrade is None else upgrade
        self.committed = threading.Event()
        """Event that each writing transaction of this process sets, so that `relay` polls a SQLite file at once."""
        pool: dict[str, Any] = {"pool_size": connections, "max_overflow": 0, "pool_timeout": LOCK_WAIT_MS / 1000}
        if self.is_sqlite:
            refuse_shared_disk(Path(self.url.database or ""))
            self.engine = sa.create_engine(self.url, **pool)
            sa.event.listen(self.engine, "connect", _on_sqlite_connect)
            sa.event.listen(self.engine, "begin", _on_sqlite_begin)
            self._reader = self.engine.execution_options(sqlite_begin="DEFERRED")
        else:
            self.engine = sa.create_engine(self.url, **pool, pool_pre_ping=True, connect_args=_POSTGRESQL)
            self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ")

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the database that the settings name."""
        return cls(
            settings.database_url(), connections=settings.database_connections, upgrade=settings.upgrade_database
        )

    @property
    def name(self) -> str:
        """The URL without its password, fit to be shown."""
        return self.url.render_as_string()

    def create(self, *, wait_s: float = 0.0) -> None:
        """Create a new database's tables, or check that existing ones are of this Penstock's revision.

        A server that does not answer yet, because it is starting or moving, is tried again for ``wait_s`` seconds.
        Raises Conflict naming what to do where an older or a newer Penstock made them, DatabaseAway where they cannot
        be reached.
        """
        until = time.monotonic() + wait_s
        while True:
            try:
                with self._clear_errors():
                    migrations.prepare(self.engine, may_upgrade=self._may_upgrade)
                return
            except DatabaseAway as away:
                if not away.may_pass or time.monotonic() >= until:
                    raise
                log.warning("the database is asked again for %.0f s: %s", until - time.monotonic(), away.detail)
                time.sleep(min(AGAIN_S, max(0.0, until - time.monotonic())))

    def upgrade(self) -> str | None:
        """Create the tables, or migrate them to the newest revision; return the revision that they had before.

        Raises Conflict for tables of a newer Penstock or another program, and DatabaseAway.
        """
        with self._clear_errors():
            return migrations.upgrade(self.engine)

    def revision(self) -> str:
        """Return the revision of the tables. Raises Conflict where it is not this Penstock's, DatabaseAway."""
        with self.read() as connection:
            revision = migrations.revision_of(connection)
        if revision != migrations.HEAD:
            raise Conflict(
                f"the database {self.name} is at revision {revision}, but this Penstock needs {migrations.HEAD}"
            )
        return revision

    @contextmanager
    def write(self, *, alone: bool = True) -> Iterator[sa.Connection]:
        """Open a writing transaction, exclusive; without ``alone`` it may run concurrently with others on PostgreSQL.

        Raises DatabaseAway, and InvalidDocument for a value that no column takes.
        """
        with self._clear_errors(), self.engine.begin() as connection:
            if alone and not self.is_sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(WRITERS)))
            yield connection
        self.committed.set()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a read-only transaction on one state of the database, while others write. Raises DatabaseAway."""
        with self._clear_errors(), self._reader.connect() as connection:
            yield connection

    def close(self) -> None:
        """Close all connections; a connection that another thread uses is closed when it is given back."""
        sa.event.listen(self.engine, "checkin", _close)
        self.engine.dispose()

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Translate what drivers and pools raise into errors of ours."""
        try:
            yield
        except (sa.exc.DataError, OverflowError) as error:
            reason = error.orig if isinstance(error, sa.exc.DataError) else error
            raise InvalidDocument(f"the database cannot store such a value: {_first_line(reason)}") from error
        except sa.exc.TimeoutError as error:
            raise DatabaseAway(
                f"all connections to the database {self.name} were in use for {LOCK_WAIT_MS // 1000} s",
                remedy="try again later; increase database_connections if this happens often",
            ) from error
        except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
            self._away(error)
        except sa.exc.DBAPIError as error:
            is_broken = type(error) is sa.exc.DatabaseError  # a damaged file, or one that is not SQLite's
            if error.connection_invalidated or is_broken or any(sign in str(error.orig) for sign in _STANDBY):
                self._away(error)
            raise

    def _away(self, error: sa.exc.DBAPIError) -> NoReturn:
        metrics.database_errors.inc()
        reason = _first_line(error.orig)
        sign, remedy = next((pair for pair in _REMEDIES.items() if pair[0] in reason), ("", "ask again in a moment"))
        away = DatabaseAway(f"the database {self.name} does not answer: {reason}", remedy=remedy)
        away.public_detail += f": {sign}" if sign else ""
        away.may_pass = not self.is_sqlite and not any(sign in reason for sign in _LASTING)
        raise away from error


_POSTGRESQL = {
    "application_name": "penstock",
    "connect_timeout": 10,
    "options": f"-c statement_timeout={STATEMENT_MS} -c lock_timeout={LOCK_WAIT_MS}"
    " -c idle_in_transaction_session_timeout=60000 -c timezone=UTC",
}

_STANDBY = ("read-only", "during recovery", "recovery is in progress")
"""Messages of a PostgreSQL server that follows another server."""

_LASTING = (*_STANDBY, "authentication failed", "does not exist", "no pg_hba.conf entry", "not permitted to log in")
"""Messages of a fault that lasts until an administrator repairs it."""

_REMEDIES = {
    "unable to open": "give a file in a directory that exists and can be written, or the URL of a running server",
    "readonly": "make the file and its directory writable for the service",
    **dict.fromkeys(_STANDBY, "name a server that takes writes, not a standby"),
    "not a database": "name another file, or restore a backup: penstock db restore",
    "malformed": "the file is damaged: restore a backup, penstock db restore",
    "is full": "make room on its disk; nothing that was accepted is lost",
    "No space left": "make room on its disk; nothing that was accepted is lost",
    "disk I/O error": "its disk is broken or was made read-only: repair it, and start the service again",
    "locked": "another process writes for a long time (a backup, another service?); try again later",
}


def _parsed(text: str) -> sa.URL:
    try:
        url = sa.make_url(text)
    except sa.exc.ArgumentError:
        url = None
    if url is None or url.drivername not in ("sqlite", "postgresql", "postgres", "postgresql+psycopg"):
        driver = "not a URL" if url is None else f"a URL of {url.drivername!r}"
        raise UnsupportedRequest(
            f"the database address is {driver}; Penstock supports SQLite and PostgreSQL",
            remedy="name a file, sqlite:///path, or postgresql://user@host/name",
        )
    return url if url.drivername == "sqlite" else url.set(drivername="postgresql+psycopg")


def _close(_connection: Any, record: sa.pool.ConnectionPoolEntry) -> None:
    record.invalidate()


def _on_sqlite_connect(connection: Any, record: Any) -> None:
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={LOCK_WAIT_MS}", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _on_sqlite_begin(connection: sa.Connection) -> None:
    kind = connection.get_execution_options().get("sqlite_begin", "IMMEDIATE")
    connection.exec_driver_sql(f"BEGIN {kind}")


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
