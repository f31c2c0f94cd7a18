"""The queue as workers see it: they claim a job for some time, and renew the lease until they end it.

A worker that loses a lease can no longer write, because every update names the attempt that it belongs to (fencing).
Leases are measured by the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa

from penstock.schemas.api.jobs import JobState, ProblemDetails
from penstock.service import metrics
from penstock.service.db.database import Database
from penstock.service.db.document_store import cache_key
from penstock.service.db.tables import answers, api_keys, jobs, now_ms
from penstock.service.jobs.job_rows import job_body, record_event
from penstock.workers.protocol import Outcome

LONGEST_BACKOFF_MS = 60_000


@dataclass(frozen=True)
class Claim:
    """A job that a worker holds, and the attempt that its updates have to name."""

    job_id: str
    tenant: str
    attempt: int
    request_hash: str
    limit_ms: int
    planner: str
    request_id: str | None = None


class Leases:
    """The jobs of all tenants, for workers."""

    def __init__(self, database: Database, *, lease_s: float, max_attempts: int) -> None:
        self._database = database
        self._lease_ms = int(lease_s * 1000)
        self._max_attempts = max_attempts

    def claim(self, owner: str) -> Claim | None:
        """Claim the next job; jobs whose worker has gone silent are requeued first. Return None if none can run now.

        Higher priorities go first. Within one priority the tenant with the fewest running jobs goes first; of several,
        the tenant whose last job started longest ago, else a single slot would serve the oldest job for ever. Of this
        tenant's jobs the oldest goes first. A key has no more jobs running than it may have.
        Claims are made one at a time, so that these counts are exact.
        """
        if not self._anything_to_do():
            return None
        with self._database.write() as connection:
            self._take_back(connection)
            row = connection.execute(_next_job()).first()
            if row is not None:
                lease = {"lease_owner": owner, "lease_until_ms": now_ms() + self._lease_ms}
                values = {"state": "running", "attempt": row.attempt + 1, "started_ms": now_ms(), **lease}
                connection.execute(jobs.update().where(jobs.c.id == row.id).values(**values))
                record_event(connection, row.id, "state", {"state": "running", "attempt": row.attempt + 1})
        if row is None:
            return None
        if row.attempt == 0:
            metrics.wait_seconds.observe(max(0, row.waited_ms) / 1000)
        return Claim(
            job_id=row.id,
            tenant=row.tenant,
            attempt=row.attempt + 1,
            request_hash=row.request_hash,
            limit_ms=row.limit_ms,
            planner=row.planner or "",
            request_id=row.request_id,
        )

    def heartbeat(self, claim: Claim) -> str | None:
        """Renew the lease; return what is requested of the worker: ``cancel``, ``finish``, ``lost`` or None."""
        with self._database.write(alone=False) as connection:
            renewed = connection.execute(
                jobs.update().where(*_while_leased(claim)).values(lease_until_ms=now_ms() + self._lease_ms)
            ).rowcount
            if not renewed:
                return "lost"
            stop: str | None = connection.scalar(sa.select(jobs.c.stop).where(jobs.c.id == claim.job_id))
            return stop

    def best_of_earlier_attempts(self, claim: Claim) -> tuple[int, bytes] | None:
        """Return the best plan that the job's former workers have reported, as JSON, with its time."""
        if claim.attempt == 1:
            return None
        with self._database.read() as connection:
            columns = sa.select(jobs.c.incumbent_ns, jobs.c.incumbent)
            row = connection.execute(columns.where(jobs.c.id == claim.job_id)).one()
        return None if row.incumbent is None else (row.incumbent_ns, bytes(row.incumbent))

    def report(self, claim: Claim, value_ns: float, plan: bytes, facts: dict[str, str]) -> None:
        """Keep the best plan so far, with an event; a plan that is no better than the kept one is dropped."""
        # Drop a bound above the new value: it was for another plan class; the solver reports the new one next.
        still = sa.case((jobs.c.bound_ns <= value_ns, jobs.c.bound_ns))
        values: dict[str, Any] = {"incumbent": plan, "incumbent_ns": value_ns, "bound_ns": still}
        better = sa.or_(jobs.c.incumbent_ns.is_(None), jobs.c.incumbent_ns > value_ns)
        self._progress(claim, values, facts, better)

    def progress(self, claim: Claim, bound_ns: int, working: list[str]) -> None:
        """Add an event with the bound for the best plan's class, and the planners at work."""
        self._progress(claim, {"bound_ns": bound_ns}, {"working": working})

    def finish(
        self,
        claim: Claim,
        state: JobState,
        *,
        result: tuple[Outcome, bytes] | None = None,
        error: ProblemDetails | None = None,
        keep: bool = False,
    ) -> bool:
        """End a job; False when the lease was lost meanwhile, so that another worker has it.

        With ``keep``, this job answers equal requests from now on.
        """
        values: dict[str, Any] = {"state": state, "finished_ms": now_ms(), **_NO_LEASE}
        event: dict[str, Any] = {"state": state}
        if result is not None:
            figures, body = result
            values |= {"result": body, "plan_hash": figures.plan_hash, "bound_ns": figures.bound_ns}
            event |= {"status": figures.status, "plan_hash": figures.plan_hash}
            if figures.value_ns is not None:
                values["incumbent_ns"] = figures.value_ns
        if error is not None:
            values["error"] = error.model_dump(exclude_none=True)
            event["detail"] = error.detail
        with self._database.write() as connection:
            if not connection.execute(jobs.update().where(*_while_leased(claim)).values(**values)).rowcount:
                return False
            record_event(connection, claim.job_id, "state", event)
            if keep:
                _keep_answer(connection, claim)
        return True

    def hand_back(self, claim: Claim) -> None:
        """Return a job to the queue: its worker ends before the job does."""
        with self._database.write() as connection:
            stop = connection.scalar(sa.select(jobs.c.stop).where(*_while_leased(claim)))
            values = _cancelled() if stop == "cancel" else {"state": "queued", **_NO_LEASE}
            if connection.execute(jobs.update().where(*_while_leased(claim)).values(**values)).rowcount:
                record_event(connection, claim.job_id, "state", {"state": values["state"]})

    def give_up(self, claim: Claim) -> None:
        """Return a job because its process could not be kept alive; after too many such attempts it fails."""
        with self._database.write() as connection:
            row = connection.execute(sa.select(*_LOSABLE).where(*_while_leased(claim))).first()
            if row is not None:
                self._lose(connection, row)

    def try_again(self, claim: Claim) -> bool:
        """Return a job whose process was killed to the queue, once; False where it was lost before."""
        with self._database.write() as connection:
            row = connection.execute(sa.select(*_LOSABLE).where(*_while_leased(claim))).first()
            if row is None or row.lost:
                return False
            self._lose(connection, row)
        return True

    def _anything_to_do(self) -> bool:
        """Return whether there is work, without a lock, since workers find none most of the time."""
        due = sa.and_(jobs.c.state == "queued", _is_due())
        with self._database.read() as connection:
            return bool(
                connection.scalar(sa.select(sa.or_(sa.exists().where(due), sa.exists().where(self._expired()))))
            )

    def _expired(self) -> sa.ColumnElement[bool]:
        """Return which jobs have no worker: a lease of twice the length was given before the clock was set back."""
        ends = jobs.c.lease_until_ms
        over = sa.or_(ends < now_ms(), ends > now_ms() + 2 * max(self._lease_ms, 0))
        return sa.and_(jobs.c.state == "running", over)

    def _take_back(self, connection: sa.Connection) -> None:
        for row in connection.execute(sa.select(*_LOSABLE).where(self._expired())).all():
            self._lose(connection, row)

    def _lose(self, connection: sa.Connection, row: Any) -> None:
        """Requeue a lost job: the first time at once, later after 2 s, 4 s, … at most a minute."""
        lost = row.lost + 1
        metrics.leases_lost.inc()
        if row.stop == "cancel":
            values = _cancelled()
        elif lost < self._max_attempts:
            backoff_ms = 0 if lost == 1 else min(1000 * 2 ** min(lost - 1, 6), LONGEST_BACKOFF_MS)
            values = {"state": "queued", "not_before_ms": now_ms() + backoff_ms, **_NO_LEASE}
            metrics.retries.inc()
        else:
            values = {"state": "failed", "finished_ms": now_ms(), "error": _abandoned(lost), **_NO_LEASE}
        connection.execute(jobs.update().where(jobs.c.id == row.id).values(lost=lost, **values))
        record_event(connection, row.id, "state", {"state": values["state"], "lost": lost})

    def _progress(self, claim: Claim, values: dict[str, Any], data: dict[str, Any], *only: Any) -> None:
        with self._database.write(alone=False) as connection:
            if not connection.execute(jobs.update().where(*_while_leased(claim), *only).values(**values)).rowcount:
                return
            row = connection.execute(
                sa.select(jobs.c.incumbent_ns, jobs.c.bound_ns).where(jobs.c.id == claim.job_id)
            ).one()
            figures = {"incumbent_ns": row.incumbent_ns, "bound_ns": row.bound_ns, "gap": _gap(*row)}
            record_event(connection, claim.job_id, "progress", {**figures, **data})


_NO_LEASE: dict[str, Any] = {"lease_owner": None, "lease_until_ms": None}
_LOSABLE = (jobs.c.id, jobs.c.lost, jobs.c.stop)


@cache
def _next_job() -> sa.Select[Any]:
    waiting = sa.select(jobs.c.tenant).where(jobs.c.state == "queued").distinct().subquery("waiting")
    of_them = jobs.alias("of_them")
    last_ms = sa.select(sa.func.max(of_them.c.started_ms)).where(of_them.c.tenant == waiting.c.tenant).scalar_subquery()
    served = sa.select(waiting.c.tenant, last_ms.label("last_ms")).subquery("served")
    running = sa.select(jobs.c.tenant, jobs.c.key_id).where(jobs.c.state == "running").subquery()
    of_tenant = (
        sa.select(running.c.tenant, sa.func.count().label("running")).group_by(running.c.tenant).subquery("of_tenant")
    )
    of_key = sa.select(running.c.key_id, sa.func.count().label("running")).group_by(running.c.key_id).subquery("of_key")
    source = (
        jobs.outerjoin(served, served.c.tenant == jobs.c.tenant)
        .outerjoin(of_tenant, of_tenant.c.tenant == jobs.c.tenant)
        .outerjoin(of_key, of_key.c.key_id == jobs.c.key_id)
        .outerjoin(api_keys, api_keys.c.id == jobs.c.key_id)
    )
    waited_ms = (now_ms() - jobs.c.created_ms).label("waited_ms")
    named = ("id", "tenant", "attempt", "request_hash", "limit_ms", "planner", "request_id")
    columns = [jobs.c[name] for name in named]
    may_run = sa.or_(api_keys.c.max_running.is_(None), sa.func.coalesce(of_key.c.running, 0) < api_keys.c.max_running)
    return (
        sa.select(*columns, waited_ms)
        .select_from(source)
        .where(jobs.c.state == "queued", _is_due(), may_run)
        .order_by(
            jobs.c.priority.desc(),
            sa.func.coalesce(of_tenant.c.running, 0),
            sa.func.coalesce(served.c.last_ms, 0),
            jobs.c.id,
        )
        .limit(1)
        .with_for_update(skip_locked=True, of=jobs)
    )


def _is_due() -> sa.ColumnElement[bool]:
    """Return whether a job may be tried; a time beyond the longest wait was set before the clock was set back."""
    at = jobs.c.not_before_ms
    return sa.or_(at.is_(None), at <= now_ms(), at > now_ms() + LONGEST_BACKOFF_MS)


def _while_leased(claim: Claim) -> tuple[sa.ColumnElement[bool], ...]:
    return jobs.c.id == claim.job_id, jobs.c.attempt == claim.attempt, jobs.c.state == "running"


def _cancelled() -> dict[str, Any]:
    return {"state": "cancelled", "finished_ms": now_ms(), **_NO_LEASE}


def _keep_answer(connection: sa.Connection, claim: Claim) -> None:
    """Keep the finished job as the answer of this process's code to its request; the first answer stays.

    The service that queued the job may have other code, and then asks again.
    """
    key = cache_key(claim.request_hash)
    stored_answer = sa.select(answers.c.job_id).where(answers.c.tenant == claim.tenant, answers.c.cache_key == key)
    if connection.scalar(stored_answer) is not None:
        return
    row = connection.execute(sa.select(jobs).where(jobs.c.id == claim.job_id)).mappings().one()
    values = {"tenant": claim.tenant, "cache_key": key, "job_id": claim.job_id, "body": job_body(row)}
    connection.execute(answers.insert().values(**values, created_ms=now_ms()))


def _gap(value_ns: int | None, bound_ns: int | None) -> float | None:
    return value_ns / bound_ns - 1 if value_ns is not None and bound_ns else None


def _abandoned(times: int) -> dict[str, Any]:
    return ProblemDetails(
        title="The solver's worker vanished",
        status=500,
        code="worker-lost",
        detail=f"this job was started {times} times, and each time its worker or its process vanished before the end",
        remedy="look at the workers' logs (out of memory?) and ask again",
    ).model_dump(exclude_none=True)
