"""The queue: plan jobs as rows with leases, and their events.

A worker claims a job for a while and has to renew its lease; whoever loses it loses the right to write, because every
update names the attempt that it belongs to (fencing). Equal requests that are still running share one job.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from penstock.schemas.errors import Conflict, NotFound
from penstock.schemas.jobs import JobEvent, JobOut, JobState, ProblemDetails, ResultOut
from penstock.schemas.plan import Certificate, Plan
from penstock.service.database import ACTIVE, Database, answers, iso, job_events, jobs, now_ms


@dataclass(frozen=True)
class Claim:
    """A job that a worker holds, and the attempt that its writes have to name."""

    job_id: str
    attempt: int
    request_hash: str
    cache_key: str
    limit_ms: int


def new_id() -> str:
    """A text id that sorts by the time it was made (UUID version 7)."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


class JobQueue:
    """Jobs in the database. ``publish`` is told the topic of every change."""

    def __init__(
        self, database: Database, publish: Callable[[str], None], *, lease_s: float, max_attempts: int
    ) -> None:
        self._database = database
        self._publish = publish
        self._lease_ms = int(lease_s * 1000)
        self._max_attempts = max_attempts

    # ---- for those who ask ---------------------------------------------------------------------------------------

    def enqueue(self, request_hash: str, cache_key: str, limit_ms: int, priority: int = 0) -> tuple[str, bool]:
        """Add a job, unless an equal one is queued or running; return its id and whether it is new."""
        try:
            return self._enqueue(request_hash, cache_key, limit_ms, priority)
        except sa.exc.IntegrityError:  # somebody added an equal one at the same moment
            return self._enqueue(request_hash, cache_key, limit_ms, priority)

    def _enqueue(self, request_hash: str, cache_key: str, limit_ms: int, priority: int) -> tuple[str, bool]:
        with self._database.write() as connection:
            running = connection.scalar(
                sa.select(jobs.c.id).where(jobs.c.cache_key == cache_key, jobs.c.state.in_(ACTIVE))
            )
            if running is not None:
                return running, False
            job_id = new_id()
            connection.execute(
                jobs.insert().values(
                    id=job_id,
                    state="queued",
                    request_hash=request_hash,
                    cache_key=cache_key,
                    priority=priority,
                    created_ms=now_ms(),
                    attempt=0,
                    lost=0,
                    limit_ms=limit_ms,
                )
            )
            _tell(connection, job_id, "state", {"state": "queued"})
        self._publish(f"job:{job_id}")
        self._publish("jobs")
        return job_id, True

    def job(self, job_id: str, *, with_result: bool = True) -> JobOut:
        """The job as it stands. Raises NotFound."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(jobs).where(jobs.c.id == job_id)).mappings().first()
        if row is None:
            raise NotFound(f"no job {job_id!r} here", remedy="GET /v1/plans lists the jobs")
        return job_out(row, with_result=with_result)

    def recent(self, before: str | None, limit: int, state: JobState | None = None) -> list[JobOut]:
        """Jobs, the newest first, older than the job ``before``; without their results."""
        query = sa.select(jobs).order_by(jobs.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(jobs.c.id < before)
        if state is not None:
            query = query.where(jobs.c.state == state)
        with self._database.read() as connection:
            return [job_out(row, with_result=False) for row in connection.execute(query).mappings()]

    def events(self, job_id: str, after: int, limit: int = 1000) -> list[JobEvent]:
        """The events of a job that follow number ``after``."""
        query = (
            sa.select(job_events)
            .where(job_events.c.job_id == job_id, job_events.c.sequence > after)
            .order_by(job_events.c.sequence)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [
                JobEvent(sequence=row["sequence"], kind=row["kind"], at=iso(row["at_ms"]), data=row["data"])
                for row in connection.execute(query).mappings()
            ]

    def incumbent(self, job_id: str) -> Plan | None:
        """The best plan so far, or the final one; None while there is none. Raises NotFound."""
        query = sa.select(jobs.c.incumbent, jobs.c.result).where(jobs.c.id == job_id)
        with self._database.read() as connection:
            row = connection.execute(query).first()
        if row is None:
            raise NotFound(f"no job {job_id!r} here", remedy="GET /v1/plans lists the jobs")
        if row.result is not None and (final := ResultOut.model_validate_json(row.result).plan) is not None:
            return final
        return None if row.incumbent is None else Plan.model_validate_json(row.incumbent)

    def stop(self, job_id: str, how: str) -> JobOut:
        """Ask for the end of a job: ``cancel`` throws its plan away, ``finish`` keeps the best so far.

        Raises NotFound, and Conflict when the job has ended in another way.
        """
        job = self.job(job_id, with_result=False)
        wanted: JobState = "cancelled" if how == "cancel" else "succeeded"
        with self._database.write() as connection:
            queued = sa.and_(jobs.c.id == job_id, jobs.c.state == "queued")
            if (
                how == "cancel"
                and connection.execute(
                    jobs.update().where(queued).values(state="cancelled", finished_ms=now_ms())
                ).rowcount
            ):
                _tell(connection, job_id, "state", {"state": "cancelled"})
            elif not connection.execute(
                jobs.update().where(jobs.c.id == job_id, jobs.c.state.in_(ACTIVE)).values(stop=how)
            ).rowcount:
                state = connection.scalar(sa.select(jobs.c.state).where(jobs.c.id == job_id))
                if state != wanted:
                    raise Conflict(f"job {job_id!r} has {state} already; it cannot {how} any more")
        self._publish(f"job:{job_id}")
        self._publish(f"stop:{job.id}")
        return self.job(job_id)

    # ---- for workers ---------------------------------------------------------------------------------------------

    def claim(self, owner: str) -> Claim | None:
        """Take the next job; jobs whose worker has gone silent come back first. None when nothing waits."""
        with self._database.write() as connection:
            changed = self._take_back(connection)
            query = (
                sa.select(jobs.c.id, jobs.c.attempt, jobs.c.request_hash, jobs.c.cache_key, jobs.c.limit_ms)
                .where(jobs.c.state == "queued")
                .order_by(jobs.c.priority.desc(), jobs.c.id)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            row = connection.execute(query).first()
            if row is not None:
                connection.execute(
                    jobs.update()
                    .where(jobs.c.id == row.id)
                    .values(
                        state="running",
                        attempt=row.attempt + 1,
                        lease_owner=owner,
                        lease_until_ms=now_ms() + self._lease_ms,
                        started_ms=now_ms(),
                    )
                )
                _tell(connection, row.id, "state", {"state": "running", "attempt": row.attempt + 1})
                changed.append(row.id)
        for job_id in changed:
            self._publish(f"job:{job_id}")
        if row is None:
            return None
        return Claim(row.id, row.attempt + 1, row.request_hash, row.cache_key, row.limit_ms)

    def heartbeat(self, claim: Claim) -> str | None:
        """Renew the lease; return what the worker is asked for: ``cancel``, ``finish``, ``lost`` or None."""
        with self._database.write() as connection:
            renewed = connection.execute(
                jobs.update().where(*_held(claim)).values(lease_until_ms=now_ms() + self._lease_ms)
            ).rowcount
            if not renewed:
                return "lost"
            stop: str | None = connection.scalar(sa.select(jobs.c.stop).where(jobs.c.id == claim.job_id))
            return stop

    def report(self, claim: Claim, plan: Plan) -> None:
        """Keep the best plan so far, and tell those who watch."""
        assert plan.prediction is not None
        value_ns = plan.prediction.time_per_global_batch_ns
        # A bound above it was of plans of another kind; the one that holds for it is told next.
        still = sa.case((jobs.c.bound_ns <= value_ns, jobs.c.bound_ns))
        values: dict[str, Any] = {"incumbent": plan.canonical_json(), "incumbent_ns": value_ns, "bound_ns": still}
        self._progress(claim, values, {"planner": plan.planner, "schedule": plan.schedule.name})

    def progress(self, claim: Claim, bound_ns: int, working: list[str]) -> None:
        """Tell those who watch of the bound for plans of the best one's kind, and of who is at work."""
        self._progress(claim, {"bound_ns": bound_ns}, {"working": working})

    def _progress(self, claim: Claim, values: dict[str, Any], data: dict[str, Any]) -> None:
        with self._database.write() as connection:
            if not connection.execute(jobs.update().where(*_held(claim)).values(**values)).rowcount:
                return
            row = connection.execute(
                sa.select(jobs.c.incumbent_ns, jobs.c.bound_ns).where(jobs.c.id == claim.job_id)
            ).one()
            known = {"incumbent_ns": row.incumbent_ns, "bound_ns": row.bound_ns, "gap": _gap(*row)}
            _tell(connection, claim.job_id, "progress", {**known, **data})
        self._publish(f"job:{claim.job_id}")

    def finish(
        self,
        claim: Claim,
        state: JobState,
        *,
        result: ResultOut | None = None,
        error: ProblemDetails | None = None,
        keep: bool = False,
    ) -> bool:
        """End a job; False when the lease was lost meanwhile, so that somebody else has it.

        With ``keep``, equal requests are answered by this job from now on.
        """
        values: dict[str, Any] = {"state": state, "finished_ms": now_ms(), "lease_owner": None, "lease_until_ms": None}
        told: dict[str, Any] = {"state": state}
        if result is not None:
            values |= {"result": result.model_dump_json().encode(), "plan_hash": result.plan_hash}
            told |= {"status": result.status, "plan_hash": result.plan_hash}
            if result.plan is not None and result.plan.prediction is not None:
                values["incumbent_ns"] = result.plan.prediction.time_per_global_batch_ns
            values["bound_ns"] = _request_bound(result.certificates)
        if error is not None:
            values["error"] = error.model_dump(exclude_none=True)
            told["detail"] = error.detail
        with self._database.write() as connection:
            if not connection.execute(jobs.update().where(*_held(claim)).values(**values)).rowcount:
                return False
            _tell(connection, claim.job_id, "state", told)
            if keep:
                _keep_answer(connection, claim)
        self._publish(f"job:{claim.job_id}")
        return True

    def hand_back(self, claim: Claim) -> None:
        """Give a job back to the queue: its worker ends before the job does."""
        with self._database.write() as connection:
            values = {"state": "queued", "lease_owner": None, "lease_until_ms": None}
            if connection.execute(jobs.update().where(*_held(claim)).values(**values)).rowcount:
                _tell(connection, claim.job_id, "state", {"state": "queued"})
        self._publish(f"job:{claim.job_id}")

    def give_up(self, claim: Claim) -> None:
        """Give a job back because its process could not be kept alive; it fails when that happens too often."""
        with self._database.write() as connection:
            row = connection.execute(sa.select(jobs.c.id, jobs.c.lost).where(*_held(claim))).first()
            if row is not None:
                self._lose(connection, row.id, row.lost + 1)
        self._publish(f"job:{claim.job_id}")

    def _take_back(self, connection: sa.Connection) -> list[str]:
        expired = sa.and_(jobs.c.state == "running", jobs.c.lease_until_ms < now_ms())
        rows = connection.execute(sa.select(jobs.c.id, jobs.c.lost).where(expired)).all()
        for row in rows:
            self._lose(connection, row.id, row.lost + 1)
        return [row.id for row in rows]

    def _lose(self, connection: sa.Connection, job_id: str, lost: int) -> None:
        values: dict[str, Any] = {"lost": lost, "lease_owner": None, "lease_until_ms": None}
        if lost < self._max_attempts:
            values["state"] = "queued"
        else:
            values |= {"state": "failed", "finished_ms": now_ms(), "error": _abandoned(lost)}
        connection.execute(jobs.update().where(jobs.c.id == job_id).values(**values))
        _tell(connection, job_id, "state", {"state": values["state"], "lost": lost})


def job_out(row: Any, *, with_result: bool = True) -> JobOut:
    """A row of ``jobs`` as the document that is sent."""
    job_id = row["id"]
    links = {"self": f"/v1/plans/{job_id}", "events": f"/v1/plans/{job_id}/events"}
    if row["plan_hash"] is not None:
        links |= {
            "plan": f"/v1/plans/{row['plan_hash']}",
            "plan_file": f"/v1/plans/{job_id}/plan",
            "programs": f"/v1/plans/{job_id}/programs",
        }
    elif row["state"] in ACTIVE:
        links |= {"cancel": f"/v1/plans/{job_id}/cancel", "finish": f"/v1/plans/{job_id}/finish"}
    if row["incumbent_ns"] is not None:
        links["incumbent"] = f"/v1/plans/{job_id}/incumbent"
    result = row["result"]
    return JobOut(
        id=job_id,
        state=row["state"],
        request_hash=row["request_hash"],
        created_at=iso(row["created_ms"]),
        started_at=None if row["started_ms"] is None else iso(row["started_ms"]),
        finished_at=None if row["finished_ms"] is None else iso(row["finished_ms"]),
        attempt=row["attempt"],
        result=ResultOut.model_validate_json(result) if with_result and result is not None else None,
        incumbent_ns=row["incumbent_ns"],
        bound_ns=row["bound_ns"],
        error=None if row["error"] is None else ProblemDetails.model_validate_json(json.dumps(row["error"])),
        links=links,
    )


def _request_bound(certificates: tuple[Certificate, ...]) -> int | None:
    return max((c.bound_ns for c in certificates if c.scope == "all plans of this request"), default=None)


def _keep_answer(connection: sa.Connection, claim: Claim) -> None:
    """Keep the finished job as the answer to its request; the first answer stays."""
    if connection.scalar(sa.select(answers.c.job_id).where(answers.c.cache_key == claim.cache_key)) is None:
        row = connection.execute(sa.select(jobs).where(jobs.c.id == claim.job_id)).mappings().one()
        body = job_out(row).model_copy(update={"cached": True}).model_dump_json().encode()
        connection.execute(
            answers.insert().values(cache_key=claim.cache_key, job_id=claim.job_id, body=body, created_ms=now_ms())
        )


def _gap(value_ns: int | None, bound_ns: int | None) -> float | None:
    return value_ns / bound_ns - 1 if value_ns is not None and bound_ns else None


def _held(claim: Claim) -> tuple[sa.ColumnElement[bool], ...]:
    return jobs.c.id == claim.job_id, jobs.c.attempt == claim.attempt, jobs.c.state == "running"


def _tell(connection: sa.Connection, job_id: str, kind: str, data: dict[str, Any]) -> None:
    last = connection.scalar(sa.select(sa.func.max(job_events.c.sequence)).where(job_events.c.job_id == job_id))
    connection.execute(
        job_events.insert().values(job_id=job_id, sequence=(last or 0) + 1, kind=kind, at_ms=now_ms(), data=data)
    )


def _abandoned(times: int) -> dict[str, Any]:
    return ProblemDetails(
        title="The solver's worker vanished",
        status=500,
        code="worker-lost",
        detail=f"this job was started {times} times, and each time its worker or its process vanished before the end",
        remedy="look at the workers' logs (out of memory?) and ask again",
    ).model_dump(exclude_none=True)
