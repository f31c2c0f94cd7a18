"""Tables, and the one way to open them: SQLAlchemy 2 Core on SQLite (WAL) or PostgreSQL.

Times are integer milliseconds since 1970 by the database's own clock, so that leases of several hosts agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from penstock.schemas.errors import Conflict, Unreachable

SCHEMA_VERSION = 2

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

schema_version = sa.Table("schema_version", metadata, sa.Column("version", sa.Integer, primary_key=True))

documents = sa.Table(
    "documents",
    metadata,
    sa.Column("hash", sa.String(71), primary_key=True),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
)

answers = sa.Table(
    "answers",
    metadata,
    sa.Column("cache_key", sa.String(64), primary_key=True),
    sa.Column("job_id", sa.String(36), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
)

ACTIVE = ("queued", "running")

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("state", sa.String(12), nullable=False),
    sa.Column("request_hash", sa.String(71), nullable=False),
    sa.Column("cache_key", sa.String(64), nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("started_ms", sa.BigInteger),
    sa.Column("finished_ms", sa.BigInteger),
    sa.Column("attempt", sa.Integer, nullable=False, comment="grows with each claim: the fencing token"),
    sa.Column("lost", sa.Integer, nullable=False, comment="leases that ran out"),
    sa.Column("lease_owner", sa.String(64)),
    sa.Column("lease_until_ms", sa.BigInteger),
    sa.Column("stop", sa.String(8), comment="cancel | finish: what its worker shall do with it"),
    sa.Column("limit_ms", sa.BigInteger, nullable=False),
    sa.Column("incumbent_ns", sa.BigInteger),
    sa.Column("bound_ns", sa.BigInteger),
    sa.Column("incumbent", sa.LargeBinary, comment="best result so far"),
    sa.Column("result", sa.LargeBinary),
    sa.Column("plan_hash", sa.String(71)),
    sa.Column("error", sa.JSON),
)
sa.Index("ix_jobs_ready", jobs.c.state, jobs.c.priority.desc(), jobs.c.id)
_active = jobs.c.state.in_(ACTIVE)
sa.Index("uq_jobs_active", jobs.c.cache_key, unique=True, sqlite_where=_active, postgresql_where=_active)

job_events = sa.Table(
    "job_events",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(12), nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)

agents = sa.Table(
    "agents",
    metadata,
    sa.Column("id", sa.String(512), primary_key=True),
    sa.Column("incarnation", sa.String(512), nullable=False),
    sa.Column("devices", sa.JSON, nullable=False),
    sa.Column("models", sa.JSON, nullable=False),
    sa.Column("address", sa.String(512), nullable=False),
    sa.Column("probe_address", sa.String(600)),
    sa.Column("state_version", sa.BigInteger, nullable=False),
    sa.Column("ack", sa.BigInteger, nullable=False),
    sa.Column("last_seen_ms", sa.BigInteger, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("state", sa.String(12), nullable=False),
    sa.Column("plan_hash", sa.String(71), nullable=False),
    sa.Column("model", sa.String(512), nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("steps", sa.BigInteger, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("gradient_check_wanted", sa.Boolean, nullable=False),
    sa.Column("trace_steps", sa.BigInteger, nullable=False),
    sa.Column("layers", sa.JSON, nullable=False),
    sa.Column("predicted_ns", sa.BigInteger, nullable=False),
    sa.Column("store_address", sa.String(600)),
    sa.Column("gradient_check", sa.Float),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("finished_ms", sa.BigInteger),
    sa.Column("error", sa.JSON),
    sa.Column("options", sa.JSON, nullable=False),
    sa.Column("segments", sa.JSON, nullable=False),
    sa.Column("checkpoint_step", sa.BigInteger),
    sa.Column("max_restarts", sa.BigInteger, nullable=False),
    sa.Column("restarts", sa.BigInteger, nullable=False),
    sa.Column("replans", sa.JSON, nullable=False, comment="while recovering: what came of each new plan asked for"),
    sa.Index("ix_runs_state", "state"),
)

run_generations = sa.Table(
    "run_generations",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("plan_hash", sa.String(71), nullable=False),
    sa.Column("agents", sa.JSON, nullable=False),
    sa.Column("began_ms", sa.BigInteger, nullable=False),
    sa.Column("ended_ms", sa.BigInteger),
    sa.Column("why", sa.Text),
)

run_events = sa.Table(
    "run_events",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(12), nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)

run_agents = sa.Table(
    "run_agents",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("agent", sa.String(512), primary_key=True),
    sa.Column("incarnation", sa.String(512), nullable=False),
    sa.Column("phase", sa.String(12), nullable=False, comment="prepare | prepared | start | save | stop | released"),
    sa.Column("hosts_store", sa.Boolean, nullable=False),
    sa.Index("ix_run_agents_agent", "agent", "phase"),
)

run_ranks = sa.Table(
    "run_ranks",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("agent", sa.String(512), nullable=False),
    sa.Column("device", sa.String(512), nullable=False, comment="the agent's own name for it"),
    sa.Column("programs", sa.LargeBinary, nullable=False),
    sa.Column("done", sa.Boolean, nullable=False),
    sa.Column("peak_memory_bytes", sa.BigInteger),
)

run_steps = sa.Table(
    "run_steps",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("loss", sa.Float),
    sa.Column("time_ns", sa.BigInteger),
)

run_traces = sa.Table(
    "run_traces",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)


class now_ms(FunctionElement[int]):  # noqa: N801  (an SQL function is written in lower case)
    """The database's clock in milliseconds."""

    type = sa.BigInteger()
    inherit_cache = True


@compiles(now_ms, "sqlite")
def _now_sqlite(element: now_ms, compiler: Any, **options: Any) -> str:
    return "CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"


@compiles(now_ms, "postgresql")
def _now_postgresql(element: now_ms, compiler: Any, **options: Any) -> str:
    return "CAST(extract(epoch from clock_timestamp()) * 1000 AS BIGINT)"


class Database:
    """An engine, and transactions that take SQLite's write lock only where they write."""

    def __init__(self, url: str) -> None:
        self.engine = sa.create_engine(url)
        if self.engine.dialect.name == "sqlite":
            sa.event.listen(self.engine, "connect", _on_sqlite_connect)
            sa.event.listen(self.engine, "begin", _on_sqlite_begin)
        self._reader = self.engine.execution_options(sqlite_begin="DEFERRED")

    def create(self) -> None:
        """Create the tables of a new database; raise Conflict when an older or newer Penstock has made it."""
        try:
            with self.engine.begin() as connection:
                metadata.create_all(connection)
                found = connection.scalar(sa.select(sa.func.max(schema_version.c.version)))
                if found is None:
                    connection.execute(schema_version.insert().values(version=SCHEMA_VERSION))
        except sa.exc.OperationalError as error:
            raise Unreachable(
                f"the database {self.engine.url.render_as_string()} cannot be opened: {error.orig}",
                remedy="give a file in a directory that exists and can be written, or the URL of a running server",
            ) from None
        if found not in (None, SCHEMA_VERSION):
            raise Conflict(
                f"the database {self.engine.url.render_as_string()} has schema version {found}, "
                f"this Penstock writes version {SCHEMA_VERSION}",
                remedy="name a new database, or start the Penstock that made this one",
            )

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that writes (``BEGIN IMMEDIATE`` on SQLite)."""
        with self.engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that only reads, beside any writer."""
        with self._reader.connect() as connection:
            yield connection

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _on_sqlite_connect(connection: Any, record: Any) -> None:
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _on_sqlite_begin(connection: sa.Connection) -> None:
    kind = connection.get_execution_options().get("sqlite_begin", "IMMEDIATE")
    connection.exec_driver_sql(f"BEGIN {kind}")


def iso(milliseconds: int) -> str:
    """Milliseconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
