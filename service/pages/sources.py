"""The data of pages: one tenant's jobs, plans, runs and agents."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from penstock.examples import catalogue
from penstock.questions.in_child import task_of
from penstock.schemas.api.agents import AgentOut
from penstock.schemas.api.explanation import ExplainRequest, Explanation
from penstock.schemas.api.jobs import JobEvent, JobOut, JobState, ResultOut, RunEvent, RunOut
from penstock.schemas.api.sweep import SweepOut, SweepRequest
from penstock.schemas.errors import Conflict, InvalidDocument, NotFound
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace
from penstock.service.db.document_store import Store, cache_key
from penstock.service.db.tables import ACTIVE, is_alive, iso, jobs, workers
from penstock.service.runs.live_topology import living_topology
from penstock.service.security.principals import Principal
from penstock.service.services import Service
from penstock.workers.protocol import Message, run_task


class NotTried(InvalidDocument):
    """Changes that could not be tried."""

    title = "That could not be tried"


@dataclass(frozen=True)
class RequestSummary:
    """A request in a few words."""

    model: str
    cluster: str
    global_batch_size: int
    planner: str
    schedule: str
    update_rules: tuple[str, ...]
    limit_ns: int | None


class WorkerSeen(NamedTuple):
    """A process that solves jobs, as the database knows it."""

    id: str
    host: str
    pid: int
    slots: int
    started_at: str
    seen_at: str
    version: str


@dataclass(frozen=True)
class Sources:
    """The documents and rows of the service that ``who`` may see."""

    service: Service
    who: Principal

    @classmethod
    def of(cls, service: Service, who: Principal) -> Sources:
        """Return the sources of a request's principal."""
        return cls(service, who)

    @property
    def tenant(self) -> str:
        """The tenant that owns everything here."""
        return self.who.tenant

    @property
    def store(self) -> Store:
        """The tenant's documents."""
        return self.service.stores.of(self.tenant)

    def jobs(self, before: str | None, limit: int, state: JobState | None = None) -> list[JobOut]:
        """List jobs, the newest first."""
        return self.service.queue.recent(self.tenant, before, limit, state)

    def job(self, job_id: str) -> JobOut:
        """Return a job with its result. Raises NotFound."""
        return self.service.queue.job(self.tenant, job_id)

    def stop(self, job_id: str, how: str) -> None:
        """Cancel or finish a job. Raises NotFound and Conflict."""
        self.service.queue.stop(self.tenant, job_id, how)

    def retry(self, job_id: str) -> None:
        """Try a job again that failed or was cancelled. Raises NotFound and Conflict."""
        self.service.queue.retry(self.tenant, job_id)

    def submit_sweep(self, request: SweepRequest) -> SweepOut:
        """Submit every case of a sweep. Raises as ``submit``."""
        return self.service.sweeps.submit(self.who, request)

    def sweep(self, sweep_id: str) -> SweepOut:
        """Return a sweep with its rows. Raises NotFound."""
        return self.service.sweeps.sweep(self.tenant, sweep_id)

    def sweeps(self, before: str | None, limit: int) -> list[SweepOut]:
        """List sweeps, the newest first, without their rows."""
        return self.service.sweeps.recent(self.tenant, before, limit)

    def swept_model(self, sweep_id: str) -> str:
        """Return the model of a sweep; a dash before its first case is submitted."""
        return _swept_model(self, sweep_id)

    def cancel_sweep(self, sweep_id: str) -> None:
        """Cancel the cases of a sweep that have not ended. Raises NotFound and Conflict."""
        self.service.sweeps.stop(self.tenant, sweep_id, "cancel")

    def explanation(self, file: PlanFile, what_ifs: Sequence[str], why_not: Sequence[str]) -> Explanation:
        """Explain a plan, with the results of other requests and degrees, in a separate process.

        Raises InvalidDocument and UnsupportedRequest for changes that make no sense.
        """
        request = ExplainRequest.parse({"plan": file, "what_if": what_ifs, "why_not": why_not})
        settings = self.service.settings
        task = task_of("explain", request, **settings.limits_of_tasks)
        messages: list[Message] = []
        problem = run_task(self.service.forkserver, task, settings.max_solve_s, messages.append)
        if problem is not None:
            raise NotTried(problem.detail, remedy=problem.remedy)
        return Explanation.model_validate_json(next(each.body for each in messages if each.kind == "result"))

    def events(self, job_id: str) -> list[JobEvent]:
        """Return the first events of a job."""
        return self.service.queue.events(self.tenant, job_id, 0)

    def summary(self, request_hash: str) -> RequestSummary:
        """Return a stored request in a few words. Raises NotFound."""
        return _summary(self, request_hash)

    def submit(self, request: PlanRequest) -> JobOut:
        """Submit a request; return a finished job for a stored answer, otherwise the running one."""
        submitted = self.service.planning.submit(self.who, request)
        if submitted.answer is not None:
            return JobOut.model_validate_json(submitted.answer)
        return self.job(submitted.job_id)

    def plan_hash(self, plan_or_job: str) -> str:
        """Return the plan's hash of an id. Raises NotFound, and Conflict for a job without one."""
        return self.service.planning.of(self.tenant).plan_hash(plan_or_job)

    def keep(self, file: PlanFile) -> str:
        """Store a plan file; return its plan's hash. Raises InvalidDocument and UnsupportedRequest."""
        if self.who.scopes:
            self.service.sizes.check(file.request)
        return self.service.planning.of(self.tenant).keep(file)

    def answer_with(self, plan_or_job: str, plan_hash: str, request_hash: str) -> ResultOut | None:
        """Return the answer with a plan: the job's, or the stored one of its request; None without either."""
        if not plan_or_job.startswith("sha256:"):
            return self.job(plan_or_job).result
        answer = self.store.answer(cache_key(request_hash))
        kept = None if answer is None else json.loads(answer).get("result")
        return ResultOut.model_validate(kept) if kept and kept.get("plan_hash") == plan_hash else None

    def plan_file(self, plan_or_job: str) -> PlanFile:
        """Return a plan with its request. Raises NotFound and Conflict."""
        return self.store.plan_file(self.plan_hash(plan_or_job))

    def request_of(self, plan_or_job: str) -> PlanRequest:
        """Return the request of a job or of a plan, with profile and topology as hashes. Raises NotFound."""
        if plan_or_job.startswith("sha256:"):
            address = self.store.plan(plan_or_job).request_hash
        else:
            address = self.job(plan_or_job).request_hash
        return PlanRequest.model_validate_json(self.store.body("plan request", address))

    def runs(self, before: str | None, limit: int) -> list[RunOut]:
        """List runs, the newest first."""
        return self.service.runs.recent(self.tenant, before, limit)

    def run(self, run_id: str) -> RunOut:
        """Return a run. Raises NotFound."""
        return self.service.runs.run(self.tenant, run_id)

    def run_events(self, run_id: str) -> list[RunEvent]:
        """Return the first events of a run."""
        return self.service.runs.events(self.tenant, run_id, 0)[0]

    def cancel_run(self, run_id: str) -> None:
        """Stop a run. Raises NotFound and Conflict."""
        self.service.runs.cancel(self.tenant, run_id)

    def trace(self, run_id: str) -> Trace | None:
        """Return the trace of a run, or None."""
        try:
            return self.service.runs.trace(self.tenant, run_id)
        except (NotFound, Conflict):
            return None

    def agents(self) -> list[AgentOut]:
        """List all agents that ever connected."""
        return self.service.agents.everybody(self.tenant)

    def living(self) -> ClusterTopology | None:
        """Return the topology of living agents with their links; None without a living agent."""
        try:
            return living_topology(self.agents(), self.store.newest_topologies())
        except NotFound:
            return None

    def workers(self) -> list[WorkerSeen]:
        """Return the workers that are alive, for any tenant."""
        alive = is_alive(int(self.service.settings.lease_s * 1000))
        with self.service.database.read() as connection:
            rows = connection.execute(sa.select(workers).where(alive).order_by(workers.c.id)).mappings().all()
        return [
            WorkerSeen(
                **{name: row[name] for name in ("id", "host", "pid", "slots", "version")},
                started_at=iso(row["started_ms"]),
                seen_at=iso(row["seen_ms"]),
            )
            for row in rows
        ]

    def job_counts(self) -> dict[str, int]:
        """Count the waiting and the running jobs."""
        query = (
            sa.select(jobs.c.state, sa.func.count().label("number"))
            .where(jobs.c.tenant == self.tenant, jobs.c.state.in_(ACTIVE))
            .group_by(jobs.c.state)
        )
        with self.service.database.read() as connection:
            return {row.state: row.number for row in connection.execute(query)}

    def up_s(self) -> float:
        """Return the time since this process began to serve, in seconds."""
        return time.monotonic() - self.service.started

    def profile(self, name: str) -> ModelProfile:
        """Find a shipped profile by its name, or a stored one by its hash. Raises NotFound."""
        return self.store.profile(name) if name.startswith("sha256:") else catalogue.profile(name)

    def topology(self, name: str) -> ClusterTopology:
        """Find a shipped cluster by name or form, or a stored one by hash. Raises NotFound and InvalidDocument."""
        return self.store.topology(name) if name.startswith("sha256:") else catalogue.cluster(name)

    def words(self, jobs: Iterable[JobOut]) -> dict[str, RequestSummary]:
        """Return the requests of jobs in words, by hash."""
        return {job.request_hash: self.summary(job.request_hash) for job in jobs}


@lru_cache(maxsize=1024)
def _swept_model(sources: Sources, sweep_id: str) -> str:
    job_ids = (row.job_id for row in sources.sweep(sweep_id).rows if row.job_id is not None)
    for job_id in job_ids:
        with suppress(NotFound):
            return sources.summary(sources.job(job_id).request_hash).model
    return "–"


@lru_cache(maxsize=2048)
def _summary(sources: Sources, request_hash: str) -> RequestSummary:
    store = sources.store
    request: dict[str, Any] = json.loads(store.body("plan request", request_hash))
    return RequestSummary(
        model=json.loads(store.body("profile", request["profile"]))["name"],
        cluster=json.loads(store.body("topology", request["topology"]))["name"],
        global_batch_size=request["global_batch_size"],
        planner=request.get("planner", "auto"),
        schedule=request.get("schedule", "auto"),
        update_rules=tuple(request.get("update_rules", ("synchronous",))),
        limit_ns=request.get("termination", {}).get("time_limit_ns"),
    )
