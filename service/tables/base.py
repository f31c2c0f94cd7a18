"""What all tables share: their metadata, the tenant column, and the database's clock.

Times are integer milliseconds since 1970 by the database's own clock, so that leases of several hosts agree.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

DEFAULT_TENANT = "default"
"""Whose everything is while nobody has to say who he is, and what was there before tenants were."""

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

metadata = sa.MetaData(naming_convention=NAMING)


def tenant_column(*, key: bool = False) -> sa.Column[str]:
    """Whose row it is; with ``key`` a part of the table's primary key."""
    return sa.Column("tenant", sa.String(64), primary_key=key, nullable=False, default=DEFAULT_TENANT)


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


def iso(milliseconds: int) -> str:
    """Milliseconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
