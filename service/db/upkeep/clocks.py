"""Mending of times in the future of the database's clock, written before the clock was set back.

Otherwise an answer would be kept, and a key be valid, for as much longer as the clock was ahead. Leases, and times
before which a job is not tried again, are compared with the longest ones where they are read.
"""

from __future__ import annotations

import sqlalchemy as sa

from penstock.service.db.database import Database
from penstock.service.db.tables import api_keys, idempotency, now_ms

ROUNDING_MS = 1000
"""The least time ahead that is mended: SQLite rounds its clock."""


def set_right(database: Database) -> None:
    """Set times in the future to now, and have keys end as long after that as they were to live.

    A key's end counts from its rotation, or from its making where it was never rotated.
    """
    created, end_set = api_keys.c.created_ms, api_keys.c.end_set_ms
    of_keys, of_answers = sa.or_(is_ahead(created), is_ahead(end_set)), is_ahead(idempotency.c.created_ms)
    with database.read() as connection:
        if not connection.scalar(sa.select(sa.or_(sa.exists().where(of_keys), sa.exists().where(of_answers)))):
            return
    counted_from = sa.func.coalesce(end_set, created)
    ends = api_keys.c.expires_ms - counted_from + _no_later_than_now(counted_from)
    values = {"created_ms": _no_later_than_now(created), "end_set_ms": _no_later_than_now(end_set), "expires_ms": ends}
    with database.write() as connection:
        connection.execute(api_keys.update().where(of_keys).values(values))
        connection.execute(_dated_now().where(of_answers))


def set_answers_right(connection: sa.Connection, tenant: str) -> None:
    """Set the times of a tenant's answers to Idempotency-Keys to now where they lie in the future."""
    connection.execute(_dated_now().where(idempotency.c.tenant == tenant, is_ahead(idempotency.c.created_ms)))


def is_ahead(time_ms: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    """Return whether a time that was the present when it was written lies in the future."""
    return time_ms > now_ms() + ROUNDING_MS


def _no_later_than_now(time_ms: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    return sa.case((is_ahead(time_ms), now_ms()), else_=time_ms)


def _dated_now() -> sa.Update:
    """Return an update of requests that were done; those under way are lost as soon as their lease is in doubt."""
    is_done = sa.or_(idempotency.c.status.is_not(None), idempotency.c.job_id.is_not(None))
    return idempotency.update().where(is_done).values(created_ms=now_ms())
