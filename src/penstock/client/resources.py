# Made from async_resources.py by scripts/make-client: change that one.
"""The service's resources, a class for each kind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import httpx

from penstock.client.connection import Connection
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


class Plans:
    """Plans: request, fetch by hash, judge, explain and export them.

    Where a method takes a stored ``plan``, that is its hash; the id of a job means its resulting plan.
    """

    def __init__(self, connection: Connection, jobs: Jobs) -> None:
        self._connection, self._jobs = connection, jobs

    def create(
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
        job = self._connection.document(JobOut, send)
        if not wait:
            return job
        if on_event is not None and job.state not in ENDED:
            with closing(self._jobs.events(job.id)) as events:
                for event in events:
                    on_event(event)
        while job.state not in ENDED:
            job = self._jobs.get(job.id, wait_s=WAIT_S)
        if job.error is not None:
            raise error_of(job.error)
        return job

    def get(self, hash: str) -> Plan:
        """Return the plan of a hash."""
        return self._connection.document(Plan, Send("GET", f"/v1/plans/{hash}"))

    def file(self, plan: str) -> PlanFile:
        """Return a stored plan with its request inline."""
        path = f"/v1/plans/{self._jobs.hash_of(plan)}/plan-file"
        return self._connection.document(PlanFile, Send("GET", path))

    def programs(self, plan: str) -> list[dict[str, Any]]:
        """Return the programs of all ranks, as ``schemas.program.Program.from_json`` reads them."""
        path = f"/v1/plans/{self._jobs.hash_of(plan)}/programs"
        return self._connection.document(list[dict[str, Any]], Send("GET", path))

    def export(
        self, plan: str, to: str, settings: LaunchSettings | None = None, *, against: str | None = None
    ) -> bytes:
        """Return a stored plan in another form, as the bytes of a file, or of a zip archive for several files.

        ``to``: ``report``, ``svg``, …, or a scheduler (``sbatch``, ``jobset``, …), which ``settings`` are for.
        ``against``: the hash of a topology; Conflict names nodes of the plan that it does not have.
        """
        params: dict[str, Any] = {"to": to, "against": against}
        if settings is not None:
            params |= settings.model_dump(mode="json", exclude_unset=True)
        path = f"/v1/plans/{self._jobs.hash_of(plan)}:export"
        return (self._connection.answer(Send("GET", path, params=params, patient=True))).content

    def validate(self, request: PlanRequest | Named) -> RequestChecked:
        """Check a request without solving it."""
        return self._connection.document(RequestChecked, Send("POST", "/v1/plans:validate", request))


class Jobs:
    """Jobs: the progress of plan requests."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, id: str, *, wait_s: int = 0) -> JobOut:
        """Return a job as it is, or once it has ended within ``wait_s``."""
        return self._connection.document(JobOut, Send("GET", f"/v1/jobs/{id}", wait_s=wait_s))

    def list(
        self,
        *,
        state: JobState | None = None,
        tag: str | None = None,
        profile: str | None = None,
        planner: str | None = None,
    ) -> Iterator[JobOut]:
        """List all jobs, the newest first; optionally of one state, tag, profile (its hash) or planner."""
        params = {"state": state, "tag": tag, "profile": profile, "planner": planner}
        return self._connection.pages(JobPage, "/v1/jobs", params)

    def page(
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
        return self._connection.document(JobPage, send)

    def events(self, id: str, after: int = 0) -> Generator[JobEvent, None, None]:
        """Iterate over a job's events from number ``after`` on, until it has ended; survives a broken connection."""
        return self._connection.events(JobEvent, f"/v1/jobs/{id}/events", after)

    def cancel(self, id: str) -> JobOut:
        """Stop a job and drop its plans."""
        return self._connection.document(JobOut, Send("POST", f"/v1/jobs/{id}:cancel", is_safe=True))

    def finish(self, id: str) -> JobOut:
        """Stop a job; its best plan so far becomes its result."""
        return self._connection.document(JobOut, Send("POST", f"/v1/jobs/{id}:finish", is_safe=True))

    def retry(self, id: str) -> JobOut:
        """Restart a job that has failed or was cancelled."""
        return self._connection.document(JobOut, Send("POST", f"/v1/jobs/{id}:retry", again=False))

    def delete(self, id: str) -> None:
        """Delete a job that has ended, with its events and its answer; a stored plan stays under its hash."""
        self._connection.answer(Send("DELETE", f"/v1/jobs/{id}", again=False))

    def incumbent(self, id: str) -> Plan:
        """Return the best plan of a job so far."""
        return self._connection.document(Plan, Send("GET", f"/v1/jobs/{id}/incumbent"))

    def plan_file(self, id: str, *, best: bool = False) -> PlanFile:
        """Return the plan of a job, with its request inline; with ``best`` the best so far of a running one."""
        send = Send("GET", f"/v1/jobs/{id}/plan-file", params={"best": best})
        return self._connection.document(PlanFile, send)

    def hash_of(self, plan_or_job: str) -> str:
        """Return a plan's hash unchanged, and for a job's id the hash of its plan.

        Raises Conflict for a job without a final plan.
        """
        if plan_or_job.startswith("sha256:"):
            return plan_or_job
        job = self.get(plan_or_job)
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


class Runs:
    """Training runs on the service's agents."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create(
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
        run = self._connection.document(RunOut, Send("POST", "/v1/runs", request, headers=once()))
        if not wait:
            return run
        with closing(self.watch(run.id)) as changes:
            for run in changes:
                if on_change is not None:
                    on_change(run)
        if run.error is not None:
            raise error_of(run.error)
        return run

    def get(self, id: str) -> RunOut:
        """Return a run as it is."""
        return self._connection.document(RunOut, Send("GET", f"/v1/runs/{id}"))

    def list(self) -> Iterator[RunOut]:
        """List all runs, the newest first."""
        return self._connection.pages(RunPage, "/v1/runs", {})

    def page(self, *, limit: int = 50, cursor: str | None = None) -> RunPage:
        """Return one page of what ``list`` iterates over."""
        send = Send("GET", "/v1/runs", params={"limit": limit, "cursor": cursor})
        return self._connection.document(RunPage, send)

    def watch(self, id: str) -> Generator[RunOut, None, None]:
        """Yield a run each time that it has changed, until it has ended."""
        tag: str | None = None
        for count in itertools.count():
            headers = {} if tag is None else {"If-None-Match": tag}
            send = Send("GET", f"/v1/runs/{id}", headers=headers, wait_s=WAIT_S if count else 0)
            response = self._connection.answer(send)
            if response.status_code == httpx.codes.NOT_MODIFIED:
                continue
            tag = response.headers["etag"]
            run = RunOut.model_validate_json(response.content)
            yield run
            if run.state in ENDED:
                return

    def events(self, id: str, after: int = 0) -> Generator[RunEvent, None, None]:
        """Iterate over a run's events from number ``after`` on, until it has ended; survives a broken connection."""
        return self._connection.events(RunEvent, f"/v1/runs/{id}/events", after)

    def event_page(self, id: str, after: int = 0) -> RunEventPage:
        """Return the events of a run after number ``after`` so far."""
        send = Send("GET", f"/v1/runs/{id}/events", params={"poll": 1, "after": after})
        return self._connection.document(RunEventPage, send)

    def log(self, id: str, rank: int, *, generation: int | None = None) -> RankLog:
        """Return the end of a rank's log."""
        send = Send("GET", f"/v1/runs/{id}/logs", params={"rank": rank, "generation": generation})
        return self._connection.document(RankLog, send)

    def cancel(self, id: str) -> RunOut:
        """Stop a run on all its agents."""
        return self._connection.document(RunOut, Send("POST", f"/v1/runs/{id}:cancel", is_safe=True))

    def trace(self, id: str) -> Trace:
        """Return the measurements of a run's ranks."""
        return self._connection.document(Trace, Send("GET", f"/v1/runs/{id}/trace"))


class Sweeps:
    """One request along many axes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create(
        self, request: SweepRequest | Named, *, wait: bool = True, on_change: Callable[[SweepOut], None] | None = None
    ) -> SweepOut:
        """Solve a request along many axes. With ``wait``, return the sweep with its table once all cases have ended."""
        sweep = self._connection.document(SweepOut, Send("POST", "/v1/sweeps", request, headers=once()))
        while wait and sweep.state == "running":
            ended = sweep.ended
            sweep = self.get(sweep.id)
            if on_change is not None and sweep.ended != ended:
                on_change(sweep)
            if sweep.state == "running":
                time.sleep(FIRST_PAUSE_S)
        return sweep

    def get(self, id: str) -> SweepOut:
        """Return a sweep with its table so far."""
        return self._connection.document(SweepOut, Send("GET", f"/v1/sweeps/{id}"))

    def list(self) -> Iterator[SweepOut]:
        """List all sweeps, the newest first, without their tables."""
        return self._connection.pages(SweepPage, "/v1/sweeps", {})

    def page(self, *, limit: int = 50, cursor: str | None = None) -> SweepPage:
        """Return one page of what ``list`` iterates over."""
        send = Send("GET", "/v1/sweeps", params={"limit": limit, "cursor": cursor})
        return self._connection.document(SweepPage, send)

    def cancel(self, id: str) -> SweepOut:
        """Stop all cases of a sweep and drop their plans."""
        return self._connection.document(SweepOut, Send("POST", f"/v1/sweeps/{id}:cancel", is_safe=True))

    def finish(self, id: str) -> SweepOut:
        """Stop all cases of a sweep; each keeps its best plan so far."""
        return self._connection.document(SweepOut, Send("POST", f"/v1/sweeps/{id}:finish", is_safe=True))

    def delete(self, id: str) -> None:
        """Delete a sweep that has ended, with its cases."""
        self._connection.answer(Send("DELETE", f"/v1/sweeps/{id}", again=False))


class Profiles:
    """Profiles of models, stored under their hashes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create(self, profile: ModelProfile) -> DocumentStored:
        """Store a profile; requests may then refer to it by its hash."""
        return self._connection.document(DocumentStored, Send("POST", "/v1/profiles", profile, is_safe=True))

    def get(self, hash: str) -> ModelProfile:
        """Return the profile of a hash."""
        return self._connection.document(ModelProfile, Send("GET", f"/v1/profiles/{hash}"))

    def list(self) -> Iterator[DocumentOut]:
        """List all stored profiles by name and hash, the newest first."""
        return self._connection.pages(DocumentPage, "/v1/profiles", {})

    def page(self, *, limit: int = 50, cursor: str | None = None) -> DocumentPage:
        """Return one page of what ``list`` iterates over."""
        send = Send("GET", "/v1/profiles", params={"limit": limit, "cursor": cursor})
        return self._connection.document(DocumentPage, send)


class Topologies:
    """Clusters, stored under their hashes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create(self, topology: ClusterTopology) -> DocumentStored:
        """Store a topology; requests may then refer to it by its hash."""
        return self._connection.document(DocumentStored, Send("POST", "/v1/topologies", topology, is_safe=True))

    def get(self, hash: str) -> ClusterTopology:
        """Return the topology of a hash."""
        return self._connection.document(ClusterTopology, Send("GET", f"/v1/topologies/{hash}"))

    def list(self) -> Iterator[DocumentOut]:
        """List all stored topologies by name and hash, the newest first."""
        return self._connection.pages(DocumentPage, "/v1/topologies", {})

    def page(self, *, limit: int = 50, cursor: str | None = None) -> DocumentPage:
        """Return one page of what ``list`` iterates over."""
        send = Send("GET", "/v1/topologies", params={"limit": limit, "cursor": cursor})
        return self._connection.document(DocumentPage, send)

    def of_agents(self) -> ClusterTopology:
        """Return the devices of living agents, with measured links if any. Raises NotFound without any agent."""
        return self._connection.document(ClusterTopology, Send("GET", "/v1/topologies/agents"))
