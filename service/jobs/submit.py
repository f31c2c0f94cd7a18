"""Handling of a plan request: resolve it, look it up, check it, queue it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from penstock.schemas.errors import Conflict, InvalidDocument
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest
from penstock.service import metrics
from penstock.service.db.database import Note
from penstock.service.db.document_store import Filed, Store, Stores, cache_key
from penstock.service.db.tables import ACTIVE
from penstock.service.jobs import judging
from penstock.service.jobs.queue import JobQueue, NewJob
from penstock.service.security.principals import Principal
from penstock.service.security.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a job that do not affect its plan: they are not part of the request's hash."""

    priority: int = 0
    tag: str | None = None
    parent_id: str | None = None
    note: Note | None = None


@dataclass(frozen=True)
class Submitted:
    """The outcome of a request: the finished job as it is sent, or the id of one that is under way."""

    answer: bytes | None
    request_hash: str
    cache_key: str
    job_id: str = ""
    is_new: bool = False


class Planning:
    """Requests of all tenants and their jobs."""

    def __init__(self, stores: Stores, queue: JobQueue, sizes: Sizes, *, max_solve_s: float) -> None:
        self._stores, self._queue, self._sizes = stores, queue, sizes
        self._max_solve_ms = int(max_solve_s * 1000)

    def of(self, tenant: str) -> TenantPlanning:
        """Return the requests of one tenant."""
        return TenantPlanning(self._stores.of(tenant), self._queue)

    def submit(self, principal: Principal, request: PlanRequest, options: JobOptions | None = None) -> Submitted:
        """Answer a request from the store, or ensure that a job for it is under way.

        Raises NotFound for an unknown hash, InvalidDocument and UnsupportedRequest for what no planner could answer,
        QuotaExceeded when too many of the key's jobs wait.
        """
        store, options = self._stores.of(principal.tenant), options or JobOptions()
        if principal.scopes:
            self._sizes.check(request)
        inline = store.resolve(request)
        filed = Filed.of(inline)
        key = cache_key(filed.address)
        answer = store.answer(key)
        metrics.cache_answers.labels("miss" if answer is None else "hit").inc()
        if answer is not None:
            return Submitted(answer, filed.address, key)
        judging.check(inline)
        job = NewJob(
            request_hash=filed.address,
            profile_hash=filed.profile,
            cache_key=key,
            limit_ms=self._limit_ms(request),
            planner=request.planner,
            priority=options.priority,
            tag=options.tag,
            parent_id=options.parent_id,
            key_id=principal.key_id,
            max_queued=principal.max_queued,
            note=options.note,
            keep=partial(store.keep_in, filed),
        )
        job_id, is_new = self._queue.enqueue(principal.tenant, job)
        return Submitted(None, filed.address, key, job_id, is_new)

    def _limit_ms(self, request: PlanRequest) -> int:
        limit_ns = request.termination.time_limit_ns
        return self._max_solve_ms if limit_ns is None else min(-(-limit_ns // 10**6), self._max_solve_ms)


class TenantPlanning:
    """One tenant's requests, their jobs and plans."""

    def __init__(self, store: Store, queue: JobQueue) -> None:
        self._store, self._queue = store, queue

    def checked(self, request: PlanRequest) -> tuple[str, bool]:
        """Return the request's hash and whether its answer is known; raises like ``submit`` but queues nothing."""
        inline = self._store.resolve(request)
        address = inline.content_hash()
        has_answer = self._store.answer(cache_key(address)) is not None
        if not has_answer:
            judging.check(inline)
        return address, has_answer

    def is_open(self, plan_or_job: str) -> bool:
        """Return whether an id belongs to a job that has not ended. Raises NotFound."""
        if plan_or_job.startswith("sha256:"):
            return False
        return self._queue.job(self._store.tenant, plan_or_job, with_result=False).state in ACTIVE

    def plan_hash(self, plan_or_job: str) -> str:
        """Return the hash of the plan that an id names. Raises NotFound, and Conflict when the job has no plan."""
        if plan_or_job.startswith("sha256:"):
            return plan_or_job
        job = self._queue.job(self._store.tenant, plan_or_job)
        if job.result is not None and job.result.plan_hash is not None:
            return job.result.plan_hash
        if job.result is not None:
            raise Conflict(f"job {job.id!r} ended without a plan ({job.result.status}): {job.result.sentence}")
        if job.error is not None:
            raise Conflict(f"job {job.id!r} failed and has no plan: {job.error.detail}")
        raise Conflict(
            f"job {job.id!r} is {job.state} and has no final plan",
            remedy=f"wait for it, or GET /v1/jobs/{job.id}/incumbent for the best plan so far",
        )

    def incumbent(self, job_id: str) -> Plan:
        """Return the best plan of a job so far. Raises NotFound, and Conflict while no plan exists."""
        plan = self._queue.incumbent(self._store.tenant, job_id)
        if plan is None:
            raise Conflict(f"job {job_id!r} has no plan yet", remedy=f"watch /v1/jobs/{job_id}/events")
        return plan

    def plan_file(self, plan: PlanFile | str) -> PlanFile:
        """Return a plan file given inline, or by the hash of a stored plan. Raises NotFound."""
        return self._store.plan_file(plan) if isinstance(plan, str) else plan

    def keep(self, file: PlanFile) -> str:
        """Store a plan file; return the plan's hash. Raises InvalidDocument for a plan of another request."""
        filed = Filed.of(file.request)
        if file.plan.request_hash != filed.address:
            raise InvalidDocument(
                f"the plan was made for request {file.plan.request_hash}, but comes with request {filed.address}"
            )
        self._store.keep(filed)
        return self._store.put(file.plan)
