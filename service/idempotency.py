"""Requests that may be sent twice and are done once: the answer to an ``Idempotency-Key`` is kept for a day.

Only success is kept. A request that was refused, or that failed, is done again when it is repeated.

The transaction that creates a job, a sweep or a run notes its id with the key: from then on it is never created again,
wherever the process dies, and a repetition is answered with it. Before that, a request belongs to the process that
works on it for ``lease_s``, renewed while that is alive; a request whose lease has expired was lost with its process.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

import sqlalchemy as sa

from penstock.schemas.errors import Conflict, Fault
from penstock.service.db.database import Database
from penstock.service.db.tables import idempotency, now_ms
from penstock.service.db.upkeep.clocks import set_answers_right
from penstock.service.problems import Refusal

KEPT_MS = 24 * 3600 * 1000
LONGEST_KEY = 255


class KeyInUse(Conflict):
    """The first request with this key has not been answered yet."""

    title = "A request with this key is under way"
    code = "idempotency-key-in-use"


class WrongKey(Refusal):
    """A key that was sent with another request before, or is malformed."""

    title = "The Idempotency-Key does not fit"
    code = "wrong-idempotency-key"
    status = 422
    exit_code = 65


@dataclass(frozen=True)
class Kept:
    """A stored answer to be sent again."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Creation:
    """The id of a job, a sweep or a run that a request created, where its answer was not kept."""

    id: str
    doing: Doing


@dataclass(frozen=True)
class Doing:
    """A request to be done now; ``token`` distinguishes this attempt from a later one, made after it was lost."""

    tenant: str
    key: str
    token: bytes

    def note(self, connection: sa.Connection, made_id: str) -> None:
        """Note what was created, in the same transaction. Raises Conflict when the request was considered lost."""
        noted = connection.execute(idempotency.update().where(self.row).values(job_id=made_id)).rowcount
        if not noted:
            raise Conflict(
                f"the request with the Idempotency-Key {self.key!r} took too long; another process took it over",
                remedy="send it again to get the result",
            )

    @property
    def row(self) -> sa.ColumnElement[bool]:
        """Return the request's row while it is under way and nothing was created; its body is the token until then."""
        return sa.and_(_row(self.tenant, self.key), _UNDER_WAY, _NOTHING_MADE, idempotency.c.body == self.token)


_UNDER_WAY = idempotency.c.status.is_(None)
_NOTHING_MADE = idempotency.c.job_id.is_(None)


class Idempotency:
    """Keys of all tenants. A request under way that is not renewed for ``lease_s`` seconds is considered lost."""

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database = database
        self.lease_s = lease_s

    def begin(self, tenant: str, key: str, request_hash: str) -> Kept | Creation | Doing:
        """Return the stored answer to this request, the object that was created for it, or the order to handle it now.

        In the latter two cases the caller then calls `keep` or `forget`. Raises KeyInUse while it is under way,
        WrongKey when the key came with another request.
        """
        doing = Doing(tenant, key, secrets.token_bytes(16))
        too_old = idempotency.c.created_ms < now_ms() - KEPT_MS
        lease_ms, since = int(self.lease_s * 1000), idempotency.c.created_ms
        # A renewal in the future: the clock was set back since then, so its age is unknown.
        silent = sa.or_(since < now_ms() - lease_ms, since > now_ms() + lease_ms)
        gone = too_old | (_UNDER_WAY & _NOTHING_MADE & silent)
        with self._database.write() as connection:
            connection.execute(idempotency.delete().where(idempotency.c.tenant == tenant, gone))
            set_answers_right(connection, tenant)
            row = connection.execute(sa.select(idempotency).where(_row(tenant, key))).first()
            if row is None:
                values = {"tenant": tenant, "key": key, "request_hash": request_hash, "body": doing.token}
                connection.execute(idempotency.insert().values(created_ms=now_ms(), **values))
                return doing
        if row.request_hash != request_hash:
            raise WrongKey(
                f"the Idempotency-Key {key!r} was used for another request before",
                faults=(Fault("/header/idempotency-key", "it belongs to another request", "key-reused"),),
                remedy="use a new key for each request; only a repetition of a request has the same key",
            )
        if row.status is not None:
            head, _, body = row.body.partition(b"\n")
            return Kept(row.status, json.loads(head), body)
        if row.job_id is not None:
            return Creation(row.job_id, doing)
        raise KeyInUse(
            f"the first request with the Idempotency-Key {key!r} has not been answered yet",
            remedy="wait a moment and send the request again; if the first one was lost, it can run again after "
            f"{self.lease_s:g} s",
        )

    def renew(self, doing: Doing) -> bool:
        """Renew the lease of a request; return False once it has created something."""
        with self._database.write(alone=False) as connection:
            renewed = connection.execute(idempotency.update().where(doing.row).values(created_ms=now_ms())).rowcount
        return bool(renewed)

    def keep(self, doing: Doing, kept: Kept) -> None:
        """Keep the answer, unless another process works on the request now."""
        mine = sa.or_(idempotency.c.body == doing.token, idempotency.c.job_id.is_not(None))
        body = json.dumps(kept.headers).encode() + b"\n" + kept.body
        with self._database.write() as connection:
            here = sa.and_(_row(doing.tenant, doing.key), _UNDER_WAY, mine)
            connection.execute(idempotency.update().where(here).values(status=kept.status, body=body))

    def forget(self, doing: Doing) -> None:
        """Allow the next request with this key to be done, where nothing was created."""
        with self._database.write() as connection:
            connection.execute(idempotency.delete().where(doing.row))


def _row(tenant: str, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(idempotency.c.tenant == tenant, idempotency.c.key == key)
