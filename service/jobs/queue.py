"""The queue as clients see it: plan jobs of a tenant, their states and events, and the operations on them.

Equal requests of one tenant that are still running share a job. Another tenant's jobs are invisible. What workers do
with the rows is in ``leases``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa

from penstock.schemas.api.jobs import JobEvent, JobOut, JobState, ResultOut
from penstock.schemas.errors import Conflict, NotFound, QuotaExceeded
from penstock.schemas.plan import Plan
from penstock.service.db.database import Database, Note
from penstock.service.db.tables import ACTIVE, answers, iso, job_events, jobs, now_ms
from penstock.service.jobs.job_rows import BRIEF, FIRST_EVENT, IS_ACTIVE, job_body, job_out, new_id, record_event
from penstock.service.logs import request_id

MIN_PRIORITY, MAX_PRIORITY = -100, 100
RETRY_AFTER_S = 5
"""Delay before a key whose queue is full may ask again, in seconds."""


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job to queue. ``key_id`` requests it and may have ``max_queued`` waiting jobs; higher priorities go first.

    ``note`` is called with the id of the job that answers, in the transaction that queues it. ``keep`` is called in the
    transaction of a new job, to store the documents that it refers to.
    """

    request_hash: str
    cache_key: str
    limit_ms: int
    profile_hash: str | None = None
    planner: str | None = None
    priority: int = 0
    tag: str | None = None
    parent_id: str | None = None
    key_id: str | None = None
    max_queued: int | None = None
    note: Note | None = None
    keep: Callable[[sa.Connection], None] | None = None


class JobQueue:
    """Jobs in the database, which itself announces each of their changes (`tables.telling`)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def enqueue(self, tenant: str, job: NewJob) -> tuple[str, bool]:
        """Add a job, unless an equal one is queued or running; return its id and whether it is new.

        An equal one that waits gets the higher of both priorities. Raises QuotaExceeded when too many of the key's
        jobs wait.
        """
        job_id = new_id()
        with self._database.write() as connection:
            running = connection.scalar(_ACTIVE_JOB, {"tenant": tenant, "cache_key": job.cache_key})
            if job.note is not None:
                job.note(connection, running or job_id)
            if running is not None:
                connection.execute(
                    jobs.update()
                    .where(jobs.c.id == running, jobs.c.state == "queued", jobs.c.priority < job.priority)
                    .values(priority=job.priority)
                )
                return running, False
            _refuse_more(connection, job)
            if job.keep is not None:
                job.keep(connection)
            connection.execute(_NEW_JOB, _row(tenant, job_id, job))
            connection.execute(FIRST_EVENT, {"job_id": job_id, "kind": "state", "data": {"state": "queued"}})
        return job_id, True

    def job(self, tenant: str, job_id: str, *, with_result: bool = True) -> JobOut:
        """Return the job in its present state. Raises NotFound."""
        columns = (*BRIEF, jobs.c.result) if with_result else BRIEF
        with self._database.read() as connection:
            return job_out(self._row(connection, tenant, job_id, *columns))

    def answer(self, tenant: str, job_id: str) -> tuple[JobState, bytes]:
        """Return the job's present state, and the job with its result as JSON. Raises NotFound."""
        with self._database.read() as connection:
            row = self._row(connection, tenant, job_id, *BRIEF, jobs.c.result)
        return row["state"], job_body(row)

    def recent(
        self,
        tenant: str,
        before: str | None,
        limit: int,
        state: JobState | None = None,
        *,
        tag: str | None = None,
        planner: str | None = None,
        profile: str | None = None,
        parent_id: str | None = None,
    ) -> list[JobOut]:
        """Return jobs without their results, the newest first, older than the job ``before``."""
        wanted = {"state": state, "tag": tag, "planner": planner, "profile_hash": profile, "parent_id": parent_id}
        query = sa.select(*BRIEF).where(jobs.c.tenant == tenant).order_by(jobs.c.id.desc()).limit(limit)
        query = query.where(*(jobs.c[name] == value for name, value in wanted.items() if value is not None))
        if before is not None:
            query = query.where(jobs.c.id < before)
        with self._database.read() as connection:
            return [job_out(row) for row in connection.execute(query).mappings()]

    def events(self, tenant: str, job_id: str, after: int, limit: int = 1000) -> list[JobEvent]:
        """Return the events of a job that follow number ``after``. Raises NotFound."""
        query = (
            sa.select(job_events)
            .where(job_events.c.job_id == job_id, job_events.c.sequence > after)
            .order_by(job_events.c.sequence)
            .limit(limit)
        )
        with self._database.read() as connection:
            self._row(connection, tenant, job_id, jobs.c.id)
            return [
                JobEvent(sequence=row["sequence"], kind=row["kind"], at=iso(row["at_ms"]), data=row["data"])
                for row in connection.execute(query).mappings()
            ]

    def incumbent(self, tenant: str, job_id: str) -> Plan | None:
        """Return the best plan so far, or the final one; None while no plan exists. Raises NotFound."""
        with self._database.read() as connection:
            row = self._row(connection, tenant, job_id, jobs.c.incumbent, jobs.c.result)
        if row["result"] is not None and (final := ResultOut.model_validate_json(row["result"]).plan) is not None:
            return final
        return None if row["incumbent"] is None else Plan.model_validate_json(row["incumbent"])

    def stop(self, tenant: str, job_id: str, how: str) -> JobOut:
        """Request the end of a job: ``cancel`` discards its plan, ``finish`` keeps the best so far.

        Raises NotFound, and Conflict when the job has ended in another way.
        """
        with self._database.write() as connection:
            state = self._row(connection, tenant, job_id, jobs.c.state)["state"]
            if state == "queued" and how == "cancel":
                connection.execute(
                    jobs.update().where(jobs.c.id == job_id).values(state="cancelled", finished_ms=now_ms())
                )
                record_event(connection, job_id, "state", {"state": "cancelled"})
            elif state in ACTIVE:
                connection.execute(jobs.update().where(jobs.c.id == job_id).values(stop=how))
            elif state != ("cancelled" if how == "cancel" else "succeeded"):
                raise Conflict(f"job {job_id!r} has already ended ({state}); cannot {how} it")
        return self.job(tenant, job_id)

    def retry(self, tenant: str, job_id: str) -> JobOut:
        """Queue a job that failed or was cancelled again, as its next attempt.

        Raises NotFound, and Conflict for a job in another state or while an equal one is under way.
        """
        with self._database.write() as connection:
            row = self._row(connection, tenant, job_id, jobs.c.state, jobs.c.cache_key)
            if row["state"] not in ("failed", "cancelled"):
                raise Conflict(
                    f"job {job_id!r} is {row['state']}; only jobs that failed or were cancelled can be retried"
                )
            equal = sa.and_(jobs.c.tenant == tenant, jobs.c.cache_key == row["cache_key"], IS_ACTIVE)
            if (other := connection.scalar(sa.select(jobs.c.id).where(equal))) is not None:
                raise Conflict(
                    f"job {other!r} has the same request and is not finished", remedy=f"wait for job {other!r}"
                )
            cleared = dict.fromkeys(("not_before_ms", "finished_ms", "stop", "error", "result", "plan_hash"))
            connection.execute(jobs.update().where(jobs.c.id == job_id).values(state="queued", lost=0, **cleared))
            record_event(connection, job_id, "state", {"state": "queued"})
        return self.job(tenant, job_id)

    def delete(self, tenant: str, job_id: str) -> None:
        """Delete a job that has ended, with its events and its answer to equal requests. Plans remain.

        Raises NotFound, and Conflict while it is under way.
        """
        with self._database.write() as connection:
            state = self._row(connection, tenant, job_id, jobs.c.state)["state"]
            if state in ACTIVE:
                raise Conflict(
                    f"job {job_id!r} is {state}; only a job that has ended can be deleted",
                    remedy=f"POST /v1/jobs/{job_id}:cancel first",
                )
            connection.execute(answers.delete().where(answers.c.tenant == tenant, answers.c.job_id == job_id))
            connection.execute(jobs.delete().where(jobs.c.id == job_id))

    @staticmethod
    def _row(connection: sa.Connection, tenant: str, job_id: str, *columns: sa.ColumnElement[Any]) -> Any:
        row = connection.execute(_one_job(*columns), {"id": job_id, "tenant": tenant}).mappings().first()
        if row is None:
            raise NotFound(f"there is no job {job_id!r}", remedy="GET /v1/jobs lists the jobs")
        return row


@cache
def _one_job(*columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    return sa.select(*columns).where(jobs.c.id == sa.bindparam("id"), jobs.c.tenant == sa.bindparam("tenant"))


_ACTIVE_JOB = sa.select(jobs.c.id).where(
    jobs.c.tenant == sa.bindparam("tenant"), jobs.c.cache_key == sa.bindparam("cache_key"), IS_ACTIVE
)
_NEW_JOB = jobs.insert().values(created_ms=now_ms())


def _refuse_more(connection: sa.Connection, job: NewJob) -> None:
    if job.key_id is None or job.max_queued is None:
        return
    waiting = sa.select(sa.func.count()).where(jobs.c.state == "queued", jobs.c.key_id == job.key_id)
    number = connection.scalar(waiting) or 0
    if number >= job.max_queued:
        raise QuotaExceeded(
            f"{number} jobs of this key are waiting already; the limit is {job.max_queued}",
            remedy="wait for some of them, or cancel some",
            retry_after_s=RETRY_AFTER_S,
        )


def _row(tenant: str, job_id: str, job: NewJob) -> dict[str, Any]:
    return {
        "id": job_id,
        "tenant": tenant,
        "state": "queued",
        "request_hash": job.request_hash,
        "cache_key": job.cache_key,
        "profile_hash": job.profile_hash,
        "planner": job.planner,
        "priority": job.priority,
        "tag": job.tag,
        "parent_id": job.parent_id,
        "key_id": job.key_id,
        "request_id": request_id(),
        "limit_ms": job.limit_ms,
        "attempt": 0,
        "lost": 0,
    }


__all__ = ["MAX_PRIORITY", "MIN_PRIORITY", "JobQueue", "NewJob", "new_id"]
