"""Requests that are sent twice and done once: what was answered to an ``Idempotency-Key`` is kept for a day.

Only success is kept. A request that was refused, or that failed, is done anew when it is sent again.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]
import sqlalchemy as sa

from penstock.schemas.errors import Conflict, Fault
from penstock.service.database import Database
from penstock.service.problems import Refusal
from penstock.service.tables import idempotency, now_ms

KEPT_MS = 24 * 3600 * 1000
LONGEST_KEY = 255


class KeyInUse(Conflict):
    """The first request with this key has not been answered yet."""

    title = "A request with this key is under way"
    code = "idempotency-key-in-use"


class WrongKey(Refusal):
    """A key that was given with another request, or that is none."""

    title = "The Idempotency-Key does not fit"
    code = "wrong-idempotency-key"
    status = 422
    exit_code = 65


@dataclass(frozen=True)
class Kept:
    """An answer that is given again."""

    status: int
    headers: dict[str, str]
    body: bytes


class Idempotency:
    """Keys of all tenants. ``lost_s``: a request that has had no answer for so long was lost with its process."""

    def __init__(self, database: Database, *, lost_s: float) -> None:
        self._database = database
        self._lost_ms = int(lost_s * 1000)

    def begin(self, tenant: str, key: str, request_hash: str) -> Kept | None:
        """The answer that was given to this request; None: it is to be done now, and `keep` or `forget` follows.

        Raises KeyInUse while it is being done, WrongKey when the key came with another request.
        """
        row_of = self._row(tenant, key)
        too_old = idempotency.c.created_ms < now_ms() - KEPT_MS
        is_lost = idempotency.c.status.is_(None) & (idempotency.c.created_ms < now_ms() - self._lost_ms)
        with self._database.write() as connection:
            connection.execute(idempotency.delete().where(idempotency.c.tenant == tenant, too_old | is_lost))
            row = connection.execute(sa.select(idempotency).where(row_of)).first()
            if row is None:
                values = {"tenant": tenant, "key": key, "request_hash": request_hash}
                connection.execute(idempotency.insert().values(created_ms=now_ms(), **values))
                return None
        if row.request_hash != request_hash:
            raise WrongKey(
                f"the Idempotency-Key {key!r} came with another request before",
                faults=(Fault("/header/idempotency-key", "it belongs to another request", "key-reused"),),
                remedy="make a new key for each request; only a repetition has the key of the first one",
            )
        if row.status is None:
            raise KeyInUse(
                f"the first request with the Idempotency-Key {key!r} has not been answered yet",
                remedy="wait a moment, and send it again",
            )
        headers, body = msgpack.unpackb(row.body)
        return Kept(row.status, headers, body)

    def keep(self, tenant: str, key: str, kept: Kept) -> None:
        """Keep what was answered."""
        body = msgpack.packb([kept.headers, kept.body])
        with self._database.write() as connection:
            connection.execute(idempotency.update().where(self._row(tenant, key)).values(status=kept.status, body=body))

    def forget(self, tenant: str, key: str) -> None:
        """Let the next request with this key be done."""
        with self._database.write() as connection:
            connection.execute(idempotency.delete().where(self._row(tenant, key), idempotency.c.status.is_(None)))

    @staticmethod
    def _row(tenant: str, key: str) -> sa.ColumnElement[bool]:
        return sa.and_(idempotency.c.tenant == tenant, idempotency.c.key == key)
