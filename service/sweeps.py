"""Sweeps: one request along many axes, as jobs of the queue, and the table of what came of them.

A case whose answer is known has no job of its own, and one that somebody else is asking already shares that job; so a
sweep remembers which job answers which case. Once all have ended, the table is written down and changes no more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from penstock.schemas.errors import Conflict, NotFound, QuotaExceeded, UnsupportedRequest
from penstock.schemas.jobs import JobOut, ProblemDetails, ResultOut
from penstock.schemas.sweep import SweepOut, SweepRequest, SweepRow
from penstock.service.database import Database, iso
from penstock.service.job_rows import new_id
from penstock.service.jobs import MIN_PRIORITY, RETRY_AFTER_S, JobQueue
from penstock.service.planning import Planning, Wishes
from penstock.service.security.principals import Principal
from penstock.service.store import Stores
from penstock.service.tables import ACTIVE, jobs, now_ms, sweeps
from penstock.sweeping import Case, cases, figures, refused, with_front

PRIORITY = MIN_PRIORITY // 2
"""Of a sweep's jobs: single ones go first."""

REMEMBERED = 4096
"""Results whose rows are kept."""


class Sweeps:
    """The sweeps of all tenants. A sweep has ``max_cases`` at most."""

    def __init__(
        self, database: Database, stores: Stores, planning: Planning, queue: JobQueue, *, max_cases: int
    ) -> None:
        self._database, self._stores, self._planning, self._queue = database, stores, planning, queue
        self._max_cases = max_cases
        self._found = lru_cache(maxsize=REMEMBERED)(self._read_result)

    def submit(self, principal: Principal, request: SweepRequest) -> SweepOut:
        """Ask all cases. One that no planner takes is a row that says so; at least one has to be taken.

        Raises InvalidDocument for too many cases or one that contradicts itself, NotFound for an unknown hash,
        QuotaExceeded when the key may not have so many jobs that wait.
        """
        request = self._inline(principal.tenant, request)
        asked = cases(request, self._max_cases)
        if principal.max_queued is not None and len(asked) > principal.max_queued:
            raise QuotaExceeded(
                f"the sweep has {len(asked)} cases; of this key, {principal.max_queued} jobs may wait",
                remedy="sweep over fewer values",
                retry_after_s=RETRY_AFTER_S,
            )
        sweep_id = new_id()
        entries = [self._ask(principal, case, sweep_id) for case in asked]
        values = {
            "id": sweep_id,
            "tenant": principal.tenant,
            "request_hash": request.content_hash(),
            "body": json.dumps(entries).encode(),
            "state": "running",
            "created_ms": now_ms(),
        }
        with self._database.write() as connection:
            connection.execute(sweeps.insert().values(**values))
        return self.sweep(principal.tenant, sweep_id)

    def sweep(self, tenant: str, sweep_id: str) -> SweepOut:
        """A sweep with its table as it stands. Raises NotFound."""
        row = self._row(tenant, sweep_id)
        rows = self._table(row)
        out = _out(row, rows)
        if row["state"] == "running" and out.ended == out.cases:
            self._settle(sweep_id, rows)
            return self.sweep(tenant, sweep_id)
        return out

    def recent(self, tenant: str, before: str | None, limit: int) -> list[SweepOut]:
        """Sweeps, the newest first, older than the sweep ``before``; without their tables."""
        query = sa.select(sweeps.c.id).where(sweeps.c.tenant == tenant).order_by(sweeps.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(sweeps.c.id < before)
        with self._database.read() as connection:
            found = connection.scalars(query).all()
        return [self.sweep(tenant, sweep_id).model_copy(update={"rows": ()}) for sweep_id in found]

    def stop(self, tenant: str, sweep_id: str, how: str) -> SweepOut:
        """Cancel or finish all jobs of a sweep that have not ended; those that others had asked for go on.

        Raises NotFound, and Conflict when it has ended.
        """
        if (state := self._row(tenant, sweep_id)["state"]) != "running":
            raise Conflict(f"sweep {sweep_id!r} has {state} already; it cannot {how} any more")
        for job_id in self._own_jobs(sweep_id, ACTIVE):
            try:
                self._queue.stop(tenant, job_id, how)
            except (Conflict, NotFound):  # it has just ended, or was deleted
                continue
        return self.sweep(tenant, sweep_id)

    def delete(self, tenant: str, sweep_id: str) -> None:
        """Forget a sweep that has ended, and its own jobs. Raises NotFound, and Conflict while it is under way."""
        if self.sweep(tenant, sweep_id).state == "running":
            raise Conflict(f"sweep {sweep_id!r} is running", remedy=f"POST /v1/sweeps/{sweep_id}/cancel first")
        for job_id in self._own_jobs(sweep_id, ("succeeded", "failed", "cancelled")):
            self._queue.delete(tenant, job_id)
        with self._database.write() as connection:
            connection.execute(sweeps.delete().where(sweeps.c.id == sweep_id))

    # ---- cases ---------------------------------------------------------------------------------------------------

    def _inline(self, tenant: str, request: SweepRequest) -> SweepRequest:
        """The request with its documents inline, so that rows have their names and nothing is looked up per case."""
        store = self._stores.of(tenant)
        topologies = tuple(store.topology(one) if isinstance(one, str) else one for one in request.over.topologies)
        over = request.over.model_copy(update={"topologies": topologies})
        return request.model_copy(update={"request": store.resolve(request.request), "over": over})

    def _ask(self, principal: Principal, case: Case, sweep_id: str) -> dict[str, Any]:
        """What is remembered of a case: its row so far, and the job that answers it."""
        try:
            submitted = self._planning.submit(principal, case.request, Wishes(priority=PRIORITY, parent_id=sweep_id))
        except UnsupportedRequest as error:
            return {"row": refused(case, ProblemDetails.of(error)).model_dump(mode="json"), "job_id": None}
        job_id = submitted.job_id
        if submitted.answer is not None:
            job_id = JobOut.model_validate_json(submitted.answer).id
        row = case.row(state="queued", job_id=job_id)
        return {"row": row.model_dump(mode="json"), "job_id": job_id, "request_hash": submitted.request_hash}

    def _table(self, row: Any) -> tuple[SweepRow, ...]:
        entries = json.loads(row["body"])
        asked = [SweepRow.model_validate(entry["row"]) for entry in entries]
        if row["state"] != "running":
            return tuple(asked)
        known = self._states([entry["job_id"] for entry in entries if entry["job_id"] is not None])
        rows = [self._now(one, known.get(one.job_id)) if one.job_id is not None else one for one in asked]
        return with_front(rows)

    def _states(self, job_ids: Sequence[str]) -> dict[str | None, Any]:
        columns = (jobs.c.id, jobs.c.state, jobs.c.attempt, jobs.c.error)
        found: dict[str | None, Any] = {}
        with self._database.read() as connection:
            for start in range(0, len(job_ids), 500):
                query = sa.select(*columns).where(jobs.c.id.in_(job_ids[start : start + 500]))
                found |= {row["id"]: row for row in connection.execute(query).mappings()}
        return found

    def _now(self, row: SweepRow, job: Any) -> SweepRow:
        """A case's row as its job stands now."""
        if job is None:
            return row.model_copy(update={"state": "deleted", "why": "its job was deleted"})
        if job["state"] == "succeeded":
            return row.model_copy(update=self._found(job["id"], job["attempt"]))
        if job["state"] == "failed":
            return row.model_copy(update={"state": "failed", "why": job["error"]["detail"]})
        return row.model_copy(update={"state": job["state"]})

    def _read_result(self, job_id: str, attempt: int) -> dict[str, Any]:
        """What the table says of a result. ``attempt`` is part of the key: a job may be tried again."""
        with self._database.read() as connection:
            body = connection.scalar(sa.select(jobs.c.result).where(jobs.c.id == job_id, jobs.c.attempt == attempt))
        return figures(ResultOut.model_validate_json(body or b""))

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _own_jobs(self, sweep_id: str, states: Sequence[str]) -> list[str]:
        with self._database.read() as connection:
            query = sa.select(jobs.c.id).where(jobs.c.parent_id == sweep_id, jobs.c.state.in_(states))
            return list(connection.scalars(query))

    def _settle(self, sweep_id: str, rows: Sequence[SweepRow]) -> None:
        state = "cancelled" if any(row.state == "cancelled" for row in rows) else "succeeded"
        body = json.dumps([{"row": row.model_dump(mode="json"), "job_id": row.job_id} for row in rows]).encode()
        open_ = sa.and_(sweeps.c.id == sweep_id, sweeps.c.state == "running")
        with self._database.write() as connection:
            connection.execute(sweeps.update().where(open_).values(state=state, finished_ms=now_ms(), body=body))

    def _row(self, tenant: str, sweep_id: str) -> Any:
        with self._database.read() as connection:
            query = sa.select(sweeps).where(sweeps.c.id == sweep_id, sweeps.c.tenant == tenant)
            row = connection.execute(query).mappings().first()
        if row is None:
            raise NotFound(f"no sweep {sweep_id!r} here", remedy="GET /v1/sweeps lists the sweeps")
        return row


def _out(row: Any, rows: tuple[SweepRow, ...]) -> SweepOut:
    here = f"/v1/sweeps/{row['id']}"
    ways = {"cancel": f"{here}/cancel", "finish": f"{here}/finish"} if row["state"] == "running" else {}
    return SweepOut(
        id=row["id"],
        state=row["state"],
        request_hash=row["request_hash"],
        created_at=iso(row["created_ms"]),
        finished_at=None if row["finished_ms"] is None else iso(row["finished_ms"]),
        cases=len(rows),
        ended=sum(one.state not in ACTIVE for one in rows),
        rows=rows,
        links={"self": here, "jobs": f"/v1/plans?parent={row['id']}", **ways},
    )
