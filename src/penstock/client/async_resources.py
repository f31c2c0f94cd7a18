"""The service's resources, a class for each kind."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import anyio
import httpx

from penstock.client.async_connection import AsyncConnection
from penstock.client.messages import ENDED, FIRST_PAUSE_S, WAIT_S, Named, Send, once
from penstock.client.refusals import error_of
from penstock.schemas.api.jobs import (
    DocumentOut,
    DocumentPage,
    DocumentStored,
    JobEvent,
    JobOut,
    JobPage,
    JobState,
    RankLog,
    Recover,
    RequestChecked,
    RunEvent,
    RunEventPage,
    RunOut,
    RunPage,
    RunRequest,
)
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.api.sweep import SweepOut, SweepPage, SweepRequest
from penstock.schemas.errors import Conflict
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.ranks.launch import LaunchSettings
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace


class AsyncPlans:
    """Plans: request, fetch by hash, judge, explain and export them.

    Where a method takes a stored ``plan``, that is its hash; the id of a job means its resulting plan.
    """

    def __init__(self, connection: AsyncConnection, jobs: AsyncJobs) -> None:
        self._connection, self._jobs = connection, jobs

    async def create(
        self,
        request: PlanRequest | Named,
        *,
        wait: bool = True,
        on_event: Callable[[JobEvent], None] | None = None,
        priority: int = 0,
        tag: str | None = None,
    ) -> JobOut:
        """Request a plan. With ``wait``, return the job once it has ended; ``on_event`` is called with its events.

        ``priority`` (−100…100) and ``tag`` are the job's, not the request's. A job that ended without a result is
        raised as the error that it met.
        """
        params = {"priority": priority, "tag": tag}
        send = Send("POST", "/v1/plans", request, params, is_safe=True)  # equal requests share a job
        job = await self._connection.document(JobOut, send)
        if not wait:
            return job
        if on_event is not None and job.state not in ENDED:
            async with aclosing(self._jobs.events(job.id)) as events:
                async for event in events:
                    on_event(event)
        while job.state not in ENDED:
            job = await self._jobs.get(job.id, wait_s=WAIT_S)
        if job.error is not None:
            raise error_of(job.error)
        return job

    async def get(self, hash: str) -> Plan:
        """Return the plan of a hash."""
        return await self._connection.document(Plan, Send("GET", f"/v1/plans/{hash}"))

    async def file(self, plan: str) -> PlanFile:
        """Return a stored plan with its request inline."""
        path = f"/v1/plans/{await self._jobs.hash_of(plan)}/plan-file"
        return await self._connection.document(PlanFile, Send("GET", path))

    async def programs(self, plan: str) -> list[dict[str, Any]]:
        """Return the programs of all ranks, as ``schemas.program.Program.from_json`` reads them."""
        path = f"/v1/plans/{await self._jobs.hash_of(plan)}/programs"
        return await self._connection.document(list[dict[str, Any]], Send("GET", path))

    async def export(
        self, plan: str, to: str, settings: LaunchSettings | None = None, *, against: str | None = None
    ) -> bytes:
        """Return a stored plan in another form, as the bytes of a file, or of a zip archive for several files.

        ``to``: ``report``, ``svg``, …, or a scheduler (``sbatch``, ``jobset``, …), which ``settings`` are for.
        ``against``: the hash of a topology; Conflict names nodes of the plan that it does not have.
        """
        params: dict[str, Any] = {"to": to, "against": against}
        if settings is not None:
            params |= settings.model_dump(mode="json", exclude_unset=True)
        path = f"/v1/plans/{await self._jobs.hash_of(plan)}:export"
        return (await self._connection.answer(Send("GET", path, params=params, patient=True))).content

    async def validate(self, request: PlanRequest | Named) -> RequestChecked:
        """Check a request without solving it."""
        return await self._connection.document(RequestChecked, Send("POST", "/v1/plans:validate", request))


class AsyncJobs:
    """Jobs: the progress of plan requests."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def get(self, id: str, *, wait_s: int = 0) -> JobOut:
        """Return a job as it is, or once it has ended within ``wait_s``."""
        return await self._connection.document(JobOut, Send("GET", f"/v1/jobs/{id}", wait_s=wait_s))

    def list(
        self,
        *,
        state: JobState | None = None,
        tag: str | None = None,
        profile: str | None = None,
        planner: str | None = None,
    ) -> AsyncIterator[JobOut]:
        """List all jobs, the newest first; optionally of one state, tag, profile (its hash) or planner."""
        params = {"state": state, "tag": tag, "profile": profile, "planner": planner}
        return self._connection.pages(JobPage, "/v1/jobs", params)

    async def page(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        state: JobState | None = None,
        tag: str | None = None,
        profile: str | None = None,
        planner: str | None = None,
    ) -> JobPage:
        """Return one page of what ``list`` iterates over."""
        only = {"state": state, "tag": tag, "profile": profile, "planner": planner}
        send = Send("GET", "/v1/jobs", params={"limit": limit, "cursor": cursor, **only})
        return await self._connection.document(JobPage, send)

    def events(self, id: str, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Iterate over a job's events from number ``after`` on, until it has ended; survives a broken connection."""
        return self._connection.events(JobEvent, f"/v1/jobs/{id}/events", after)

    async def cancel(self, id: str) -> JobOut:
        """Stop a job and drop its plans."""
        return await self._connection.document(JobOut, Send("POST", f"/v1/jobs/{id}:cancel", is_safe=True))

    async def finish(self, id: str) -> JobOut:
        """Stop a job; its best plan so far becomes its result."""
        return await self._connection.document(JobOut, Send("POST", f"/v1/jobs/{id}:finish", is_safe=True))

    async def retry(self, id: str) -> JobOut:
        """Restart a job that has failed or was cancelled."""
        return await self._connection.document(JobOut, Send("POST", f"/v1/jobs/{id}:retry", again=False))

    async def delete(self, id: str) -> None:
        """Delete a job that has ended, with its events and its answer; a stored plan stays under its hash."""
        await self._connection.answer(Send("DELETE", f"/v1/jobs/{id}", again=False))

    async def incumbent(self, id: str) -> Plan:
        """Return the best plan of a job so far."""
        return await self._connection.document(Plan, Send("GET", f"/v1/jobs/{id}/incumbent"))

    async def plan_file(self, id: str, *, best: bool = False) -> PlanFile:
        """Return the plan of a job, with its request inline; with ``best`` the best so far of a running one."""
        send = Send("GET", f"/v1/jobs/{id}/plan-file", params={"best": best})
        return await self._connection.document(PlanFile, send)

    async def hash_of(self, plan_or_job: str) -> str:
        """Return a plan's hash unchanged, and for a job's id the hash of its plan.

        Raises Conflict for a job without a final plan.
        """
        if plan_or_job.startswith("sha256:"):
            return plan_or_job
        job = await self.get(plan_or_job)
        if job.result is None or job.result.plan_hash is None:
            why = job.error.detail if job.error is not None else job.result.sentence if job.result is not None else ""
            how = job.state if job.result is None else job.result.status
            raise Conflict(
                f"job {job.id!r} ended without a plan ({how}): {why}"
                if job.state in ENDED
                else f"job {job.id!r} is {job.state} and has no final plan",
                remedy=None if job.state in ENDED else "wait for it, or take its best plan so far",
            )
        return job.result.plan_hash


class AsyncRuns:
    """Training runs on the service's agents."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(
        self,
        plan: PlanFile | str,
        model: str,
        *,
        steps: int = 5,
        seed: int = 0,
        check: bool = False,
        trace_steps: int = 1,
        options: RunOptions | None = None,
        max_restarts: int = 0,
        wait: bool = True,
        on_change: Callable[[RunOut], None] | None = None,
    ) -> RunOut:
        """Train with a plan (inline, or the hash of a stored one) on the agents whose devices it names.

        ``max_restarts``: how often it goes on from its newest checkpoint after a death; ``options`` say where that is.
        With ``wait``, return the run once it has ended; a run that failed is raised as its error.
        """
        request = RunRequest(
            plan=plan,
            model=model,
            steps=steps,
            seed=seed,
            check=check,
            trace_steps=trace_steps,
            options=options or RunOptions(),
            recover=Recover(max_restarts=max_restarts) if max_restarts else None,
        )
        run = await self._connection.document(RunOut, Send("POST", "/v1/runs", request, headers=once()))
        if not wait:
            return run
        async with aclosing(self.watch(run.id)) as changes:
            async for run in changes:
                if on_change is not None:
                    on_change(run)
        if run.error is not None:
            raise error_of(run.error)
        return run

    async def get(self, id: str) -> RunOut:
        """Return a run as it is."""
        return await self._connection.document(RunOut, Send("GET", f"/v1/runs/{id}"))

    def list(self) -> AsyncIterator[RunOut]:
        """List all runs, the newest first."""
        return self._connection.pages(RunPage, "/v1/runs", {})

    async def page(self, *, limit: int = 50, cursor: str | None = None) -> RunPage:
        """Return one page of what ``list`` iterates over."""
        send = Send("GET", "/v1/runs", params={"limit": limit, "cursor": cursor})
        return await self._connection.document(RunPage, send)

    async def watch(self, id: str) -> AsyncGenerator[RunOut, None]:
        """Yield a run each time that it has changed, until it has ended."""
        tag: str | None = None
        for count in itertools.count():
            headers = {} if tag is None else {"If-None-Match": tag}
            send = Send("GET", f"/v1/runs/{id}", headers=headers, wait_s=WAIT_S if count else 0)
            response = await self._connection.answer(send)
            if response.status_code == httpx.codes.NOT_MODIFIED:
                continue
            tag = response.headers["etag"]
            run = RunOut.model_validate_json(response.content)
            yield run
            if run.state in ENDED:
                return

    def events(self, id: str, after: int = 0) -> AsyncGenerator[RunEvent, None]:
        """Iterate over a run's events from number ``after`` on, until it has ended; survives a broken connection."""
        return self._connection.events(RunEvent, f"/v1/runs/{id}/events", after)

    async def event_page(self, id: str, after: int = 0) -> RunEventPage:
        """Return the events of a run after number ``after`` so far."""
        send = Send("GET", f"/v1/runs/{id}/events", params={"poll": 1, "after": after})
        return await self._connection.document(RunEventPage, send)

    async def log(self, id: str, rank: int, *, generation: int | None = None) -> RankLog:
        """Return the end of a rank's log."""
        send = Send("GET", f"/v1/runs/{id}/logs", params={"rank": rank, "generation": generation})
        return await self._connection.document(RankLog, send)

    async def cancel(self, id: str) -> RunOut:
        """Stop a run on all its agents."""
        return await self._connection.document(RunOut, Send("POST", f"/v1/runs/{id}:cancel", is_safe=True))

    async def trace(self, id: str) -> Trace:
        """Return the measurements of a run's ranks."""
        return await self._connection.document(Trace, Send("GET", f"/v1/runs/{id}/trace"))


class AsyncSweeps:
    """One request along many axes."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(
        self, request: SweepRequest | Named, *, wait: bool = True, on_change: Callable[[SweepOut], None] | None = None
    ) -> SweepOut:
        """Solve a request along many axes. With ``wait``, return the sweep with its table once all cases have ended."""
        sweep = await self._connection.document(SweepOut, Send("POST", "/v1/sweeps", request, headers=once()))
        while wait and sweep.state == "running":
            ended = sweep.ended
            sweep = await self.get(sweep.id)
            if on_change is not None and sweep.ended != ended:
                on_change(sweep)
            if sweep.state == "running":
                await anyio.sleep(FIRST_PAUSE_S)
        return sweep

    async def get(self, id: str) -> SweepOut:
        """Return a sweep with its table so far."""
        return await self._connection.document(SweepOut, Send("GET", f"/v1/sweeps/{id}"))

    def list(self) -> AsyncIterator[SweepOut]:
        """List all sweeps, the newest first, without their tables."""
        return self._connection.pages(SweepPage, "/v1/sweeps", {})

    async def page(self, *, limit: int = 50, cursor: str | None = None) -> SweepPage:
        """Return one page of what ``list`` iterates over."""
        send = Send("GET", "/v1/sweeps", params={"limit": limit, "cursor": cursor})
        return await self._connection.document(SweepPage, send)

    async def cancel(self, id: str) -> SweepOut:
        """Stop all cases of a sweep and drop their plans."""
        return await self._connection.document(SweepOut, Send("POST", f"/v1/sweeps/{id}:cancel", is_safe=True))

    async def finish(self, id: str) -> SweepOut:
        """Stop all cases of a sweep; each keeps its best plan so far."""
        return await self._connection.document(SweepOut, Send("POST", f"/v1/sweeps/{id}:finish", is_safe=True))

    async def delete(self, id: str) -> None:
        """Delete a sweep that has ended, with its cases."""
        await self._connection.answer(Send("DELETE", f"/v1/sweeps/{id}", again=False))


class AsyncProfiles:
    """Profiles of models, stored under their hashes."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(self, profile: ModelProfile) -> DocumentStored:
        """Store a profile; requests may then refer to it by its hash."""
        return await self._connection.document(DocumentStored, Send("POST", "/v1/profiles", profile, is_safe=True))

    async def get(self, hash: str) -> ModelProfile:
        """Return the profile of a hash."""
        return await self._connection.document(ModelProfile, Send("GET", f"/v1/profiles/{hash}"))

    def list(self) -> AsyncIterator[DocumentOut]:
        """List all stored profiles by name and hash, the newest first."""
        return self._connection.pages(DocumentPage, "/v1/profiles", {})

    async def page(self, *, limit: int = 50, cursor: str | None = None) -> DocumentPage:
        """Return one page of what ``list`` iterates over."""
        send = Send("GET", "/v1/profiles", params={"limit": limit, "cursor": cursor})
        return await self._connection.document(DocumentPage, send)


class AsyncTopologies:
    """Clusters, stored under their hashes."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(self, topology: ClusterTopology) -> DocumentStored:
        """Store a topology; requests may then refer to it by its hash."""
        return await self._connection.document(DocumentStored, Send("POST", "/v1/topologies", topology, is_safe=True))

    async def get(self, hash: str) -> ClusterTopology:
        """Return the topology of a hash."""
        return await self._connection.document(ClusterTopology, Send("GET", f"/v1/topologies/{hash}"))

    def list(self) -> AsyncIterator[DocumentOut]:
        """List all stored topologies by name and hash, the newest first."""
        return self._connection.pages(DocumentPage, "/v1/topologies", {})

    async def page(self, *, limit: int = 50, cursor: str | None = None) -> DocumentPage:
        """Return one page of what ``list`` iterates over."""
        send = Send("GET", "/v1/topologies", params={"limit": limit, "cursor": cursor})
        return await self._connection.document(DocumentPage, send)

    async def of_agents(self) -> ClusterTopology:
        """Return the devices of living agents, with measured links if any. Raises NotFound without any agent."""
        return await self._connection.document(ClusterTopology, Send("GET", "/v1/topologies/agents"))
