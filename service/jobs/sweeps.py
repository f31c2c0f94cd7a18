"""Submission of sweeps: one request along several axes, as jobs of the queue.

A case whose answer is stored has no job, and cases with the same request share one job; so a sweep remembers which job
answers which case.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from penstock.planning.sweep import Case, cases, refused
from penstock.schemas.api.jobs import JobOut, ProblemDetails
from penstock.schemas.api.sweep import SweepOut, SweepRequest
from penstock.schemas.errors import Conflict, NotFound, QuotaExceeded, UnsupportedRequest
from penstock.service.db.database import Database, Note
from penstock.service.db.document_store import Stores
from penstock.service.db.tables import ACTIVE, jobs, now_ms, sweeps
from penstock.service.jobs.job_rows import new_id
from penstock.service.jobs.queue import MIN_PRIORITY, RETRY_AFTER_S, JobQueue
from penstock.service.jobs.submit import JobOptions, Planning
from penstock.service.jobs.sweep_tables import SweepTables
from penstock.service.security.principals import Principal

PRIORITY = MIN_PRIORITY // 2
"""Priority of a sweep's jobs: single jobs go first."""


class Sweeps(SweepTables):
    """The sweeps of all tenants, which can also be submitted and stopped; each has at most ``max_cases``."""

    def __init__(
        self, database: Database, stores: Stores, planning: Planning, queue: JobQueue, *, max_cases: int
    ) -> None:
        super().__init__(database)
        self._stores, self._planning, self._queue = stores, planning, queue
        self._max_cases = max_cases

    def submit(self, principal: Principal, request: SweepRequest, note: Note | None = None) -> SweepOut:
        """Submit all cases. A case that no planner supports is a row that says so; at least one has to be supported.

        ``note`` is called with the sweep's id in the transaction that keeps it.
        Raises InvalidDocument for too many cases or one that contradicts itself, NotFound for an unknown hash,
        QuotaExceeded when the key would have too many waiting jobs.
        """
        request = self._inline(principal.tenant, request)
        sweep_cases = cases(request, self._max_cases)
        if principal.max_queued is not None and len(sweep_cases) > principal.max_queued:
            raise QuotaExceeded(
                f"the sweep has {len(sweep_cases)} cases; at most {principal.max_queued} jobs of this key may wait",
                remedy="sweep over fewer values",
                retry_after_s=RETRY_AFTER_S,
            )
        sweep_id = new_id()
        entries = [self._ask(principal, case, sweep_id) for case in sweep_cases]
        values = {
            "id": sweep_id,
            "tenant": principal.tenant,
            "request_hash": request.content_hash(),
            "body": json.dumps(entries).encode(),
            "state": "running",
            "created_ms": now_ms(),
        }
        with self._database.write() as connection:
            if note is not None:
                note(connection, sweep_id)
            connection.execute(sweeps.insert().values(**values))
        return self.sweep(principal.tenant, sweep_id)

    def stop(self, tenant: str, sweep_id: str, how: str) -> SweepOut:
        """Cancel or finish a sweep's jobs that have not ended; jobs that others requested too go on.

        Raises NotFound, and Conflict when it has ended.
        """
        if (state := self._row(tenant, sweep_id)["state"]) != "running":
            raise Conflict(f"sweep {sweep_id!r} has already ended ({state}); cannot {how} it")
        for job_id in self._own_jobs(sweep_id, ACTIVE):
            try:
                self._queue.stop(tenant, job_id, how)
            except (Conflict, NotFound):  # it has just ended, or was deleted
                continue
        return self.sweep(tenant, sweep_id)

    def delete(self, tenant: str, sweep_id: str) -> None:
        """Delete a sweep that has ended, and its own jobs. Raises NotFound, and Conflict while it is under way."""
        if self.sweep(tenant, sweep_id).state == "running":
            raise Conflict(
                f"sweep {sweep_id!r} is running; only a sweep that has ended can be deleted",
                remedy=f"POST /v1/sweeps/{sweep_id}:cancel first",
            )
        for job_id in self._own_jobs(sweep_id, ("succeeded", "failed", "cancelled")):
            self._queue.delete(tenant, job_id)
        with self._database.write() as connection:
            connection.execute(sweeps.delete().where(sweeps.c.id == sweep_id))

    def _inline(self, tenant: str, request: SweepRequest) -> SweepRequest:
        """Return the request with its documents inline, so that rows have names without a look-up per case."""
        store = self._stores.of(tenant)
        topologies = tuple(store.topology(one) if isinstance(one, str) else one for one in request.over.topologies)
        profiles = request.over.profiles
        if profiles is not None:
            profiles = tuple(store.profile(one) if isinstance(one, str) else one for one in profiles)
        over = request.over.model_copy(update={"topologies": topologies, "profiles": profiles})
        return request.model_copy(update={"request": store.resolve(request.request), "over": over})

    def _ask(self, principal: Principal, case: Case, sweep_id: str) -> dict[str, Any]:
        """Submit a case; return its row so far, and the job that answers it."""
        try:
            options = JobOptions(priority=PRIORITY, parent_id=sweep_id)
            submitted = self._planning.submit(principal, case.request, options)
        except UnsupportedRequest as error:
            return {"row": refused(case, ProblemDetails.of(error)).model_dump(mode="json"), "job_id": None}
        job_id = submitted.job_id
        if submitted.answer is not None:
            job_id = JobOut.model_validate_json(submitted.answer).id
        row = case.row(state="queued", job_id=job_id)
        return {"row": row.model_dump(mode="json"), "job_id": job_id, "request_hash": submitted.request_hash}

    def _own_jobs(self, sweep_id: str, states: Sequence[str]) -> list[str]:
        with self._database.read() as connection:
            query = sa.select(jobs.c.id).where(jobs.c.parent_id == sweep_id, jobs.c.state.in_(states))
            return list(connection.scalars(query))
