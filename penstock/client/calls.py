"""Every call that the service takes, described once."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import httpx

from penstock.client.flows import (
    FIRST_PAUSE_S,
    Flow,
    Item,
    Listing,
    Pause,
    Send,
    answer,
    call,
    document,
    heard,
    listing,
    story,
    told,
    unreachable,
)
from penstock.client.refusals import error_of, refusal
from penstock.schemas.api.agents import AgentOut
from penstock.schemas.api.calibration import CalibrationOut, CalibrationRequest
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.api.jobs import (
    DocumentPage,
    DocumentStored,
    ExampleOut,
    JobEvent,
    JobOut,
    JobPage,
    JobState,
    PlanComparison,
    PlannerOut,
    RankLog,
    Recover,
    RequestChecked,
    RunEvent,
    RunEventPage,
    RunOut,
    RunPage,
    RunRequest,
    Simulation,
    Verdict,
    VersionOut,
)
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest
from penstock.schemas.api.placement import PlacementAnswer, PlacementProgress, PlacementRequest
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.api.sweep import SweepOut, SweepPage, SweepRequest
from penstock.schemas.api.topology_import import ImportOptions, ImportSource, TopologyImport, TopologyImported
from penstock.schemas.launch import LaunchSettings
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace

WAIT_S = 20
ENDED = ("succeeded", "failed", "cancelled")

T = TypeVar("T")


class Calls:
    """What both clients can do."""

    def __init__(self, server: str, patience_s: float) -> None:
        self._server, self._patience_s = server, patience_s

    # ---- plans ---------------------------------------------------------------------------------------------------

    @call
    def plan(
        self,
        request: PlanRequest,
        *,
        wait: bool = True,
        on_event: Callable[[JobEvent], None] | None = None,
        priority: int = 0,
        tag: str | None = None,
    ) -> Flow[JobOut]:
        """Ask for a plan. With ``wait``, return the job once it has ended; ``on_event`` hears of its progress.

        ``priority`` (−100…100) and ``tag`` are the job's, not the request's. A job that ended without a result is
        raised as the error that it met.
        """
        params = {"priority": priority, "tag": tag}
        job = yield from self._get(JobOut, Send("POST", "/v1/plans", request, _given(params)))
        if not wait:
            return job
        if on_event is not None and not job.cached:
            events = story(self._server, JobEvent, f"/v1/plans/{job.id}/events", 0, self._patience_s)
            yield from heard(events, on_event)
        while job.state not in ENDED:
            job = yield from self._get(JobOut, Send("GET", f"/v1/plans/{job.id}", wait_s=WAIT_S))
        if job.error is not None:
            raise error_of(job.error)
        return job

    @listing
    def events(self, job_id: str, after: int = 0) -> Listing[JobEvent]:
        """A job's events from number ``after`` on, until it has ended; survives a broken connection."""
        return story(self._server, JobEvent, f"/v1/plans/{job_id}/events", after, self._patience_s)

    @call
    def job(self, job_id: str, *, wait_s: int = 0) -> Flow[JobOut]:
        """A job as it stands, or once it has ended within ``wait_s``."""
        return self._get(JobOut, Send("GET", f"/v1/plans/{job_id}", wait_s=wait_s))

    @call
    def jobs(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        state: JobState | None = None,
        tag: str | None = None,
        profile: str | None = None,
        planner: str | None = None,
    ) -> Flow[JobPage]:
        """Jobs, the newest first; of one state, tag, profile (its hash) or planner."""
        params = {"limit": limit, "cursor": cursor, "state": state, "tag": tag, "profile": profile, "planner": planner}
        return self._get(JobPage, Send("GET", "/v1/plans", params=_given(params)))

    @call
    def cancel(self, job_id: str) -> Flow[JobOut]:
        """Stop a job and drop what it has found."""
        return self._get(JobOut, Send("POST", f"/v1/plans/{job_id}/cancel"))

    @call
    def finish(self, job_id: str) -> Flow[JobOut]:
        """Stop a job; its best plan so far becomes its result."""
        return self._get(JobOut, Send("POST", f"/v1/plans/{job_id}/finish"))

    @call
    def retry(self, job_id: str) -> Flow[JobOut]:
        """Start a job again that has failed or was cancelled."""
        return self._get(JobOut, Send("POST", f"/v1/plans/{job_id}/retry", again=False))

    @call
    def delete(self, job_id: str) -> Flow[None]:
        """Delete a job that has ended, with its events and its answer; a stored plan stays under its hash."""
        return self._done(Send("DELETE", f"/v1/plans/{job_id}", again=False))

    @call
    def plan_file(self, plan_or_job: str, *, best: bool = False) -> Flow[PlanFile]:
        """The plan of a hash or of a job, with its request inline; with ``best`` the best so far of a running one."""
        params = {"best": 1} if best else {}
        return self._get(PlanFile, Send("GET", f"/v1/plans/{plan_or_job}/plan", params=params))

    @call
    def incumbent(self, job_id: str) -> Flow[Plan]:
        """The best plan of a job so far."""
        return self._get(Plan, Send("GET", f"/v1/plans/{job_id}/incumbent"))

    @call
    def programs(self, plan_or_job: str) -> Flow[list[dict[str, Any]]]:
        """The programs of all ranks, as ``schemas.program.Program.from_json`` reads them."""
        return self._get(list[dict[str, Any]], Send("GET", f"/v1/plans/{plan_or_job}/programs"))

    @call
    def export(
        self, plan_or_job: str, to: str, settings: LaunchSettings | None = None, *, against: str | None = None
    ) -> Flow[bytes]:
        """A plan in another form, as the bytes of a file; several files as those of a zip archive.

        ``to``: ``report``, ``svg``, …, or a scheduler (``sbatch``, ``jobset``, …), which ``settings`` are for.
        ``against``: the hash of a topology; Conflict names nodes of the plan that it does not have.
        """
        params = _given({"to": to, "against": against}) | (
            {} if settings is None else settings.model_dump(mode="json", exclude_unset=True)
        )
        found = yield from self._answer(
            Send("GET", f"/v1/plans/{plan_or_job}/export", params=params, headers={"Accept": "*/*"}, patient=True)
        )
        return found.content

    @call
    def validate(self, request: PlanRequest) -> Flow[RequestChecked]:
        """Check a request without solving it."""
        return self._get(RequestChecked, Send("POST", "/v1/plans:validate", request))

    @call
    def verify(self, file: PlanFile) -> Flow[Verdict]:
        """Whether a plan keeps the rules."""
        return self._get(Verdict, Send("POST", "/v1/plans:verify", file))

    @call
    def simulate(self, file: PlanFile) -> Flow[Simulation]:
        """A plan with the judge's prediction."""
        return self._get(Simulation, Send("POST", "/v1/plans:simulate", file))

    @call
    def compare(
        self, request: PlanRequest, planners: Sequence[str] = (), schedules: Sequence[str] = ()
    ) -> Flow[list[PlanComparison]]:
        """Each planner with each of its schedules."""
        params = {"planner": list(planners), "schedule": list(schedules)}
        return self._get(list[PlanComparison], Send("POST", "/v1/plans:compare", request, params, patient=True))

    @call
    def explain(
        self,
        plan: PlanFile | str,
        *,
        what_if: Sequence[str] = (),
        planner: str | None = None,
        max_plans: int = 20,
        cuts: Sequence[str] = (),
        replicas: Sequence[int] = (),
        devices: Sequence[Sequence[str]] = (),
        schedule: str | None = None,
        micro_batches: int | None = None,
    ) -> Flow[Explanation]:
        """What a plan's time is made of and what would help; with ``cuts``, why not that layout.

        ``plan``: a plan file, or the hash or job of a stored one.
        """
        params = {
            "what_if": list(what_if),
            "planner": planner,
            "max_plans": max_plans,
            "cut": list(cuts),
            "replicas": list(replicas),
            "devices": [",".join(names) for names in devices],
            "schedule": schedule,
            "micro_batches": micro_batches,
        }
        if isinstance(plan, str):
            return self._get(Explanation, Send("GET", f"/v1/plans/{plan}/explain", params=_given(params), patient=True))
        return self._get(Explanation, Send("POST", "/v1/plans:explain", plan, _given(params), patient=True))

    @call
    def import_layout(self, asked: LayoutRequest) -> Flow[LayoutImported]:
        """Another trainer's layout as a plan, judged, beside the best within the trainer's limits and without."""
        return self._get(LayoutImported, Send("POST", "/v1/layouts:import", asked, patient=True))

    @call
    def calibrate(self, profile: ModelProfile, traces: Sequence[Trace], *, links: bool = True) -> Flow[CalibrationOut]:
        """Fold traces, which hold their plans, into a profile, and into their topology."""
        request = CalibrationRequest(profile=profile, traces=tuple(traces), links=links)
        return self._get(CalibrationOut, Send("POST", "/v1/profiles:calibrate", request, patient=True))

    @call
    def place(
        self, request: PlacementRequest, *, on_progress: Callable[[PlacementProgress], None] | None = None
    ) -> Flow[PlacementAnswer]:
        """Choose nodes, and how many, for each job of a request, with plans and reasons.

        ``on_progress`` hears of each set of nodes that is settled.
        """
        send = Send("POST", "/v1/placements", request, patient=True)
        if on_progress is None:
            return self._get(PlacementAnswer, send)
        return self._placed(send, on_progress)

    def _placed(self, send: Send, on_progress: Callable[[PlacementProgress], None]) -> Flow[PlacementAnswer]:
        found: list[PlacementAnswer] = []

        def hear(event: tuple[str, str]) -> None:
            name, data = event
            if name == "result":
                found.append(PlacementAnswer.model_validate_json(data))
            else:
                on_progress(PlacementProgress.model_validate_json(data))

        yield from heard(told(self._server, send, self._patience_s), hear)
        return found[0]

    # ---- sweeps --------------------------------------------------------------------------------------------------

    @call
    def sweep(
        self, request: SweepRequest, *, wait: bool = True, on_change: Callable[[SweepOut], None] | None = None
    ) -> Flow[SweepOut]:
        """Ask one request along many axes. With ``wait``, return the sweep with its table once all cases have ended."""
        send = Send("POST", "/v1/sweeps", request, headers=_once())
        sweep = yield from self._get(SweepOut, send)
        while wait and sweep.state == "running":
            ended = sweep.ended
            sweep = yield from self._get(SweepOut, Send("GET", f"/v1/sweeps/{sweep.id}"))
            if on_change is not None and sweep.ended != ended:
                on_change(sweep)
            if sweep.state == "running":
                yield Pause(FIRST_PAUSE_S)
        return sweep

    @call
    def sweep_state(self, sweep_id: str) -> Flow[SweepOut]:
        """A sweep as it stands, with its table so far."""
        return self._get(SweepOut, Send("GET", f"/v1/sweeps/{sweep_id}"))

    @call
    def sweeps(self, *, limit: int = 50, cursor: str | None = None) -> Flow[SweepPage]:
        """Sweeps, the newest first."""
        return self._get(SweepPage, Send("GET", "/v1/sweeps", params=_given({"limit": limit, "cursor": cursor})))

    @call
    def stop_sweep(self, sweep_id: str, how: Literal["cancel", "finish"] = "cancel") -> Flow[SweepOut]:
        """Stop all cases of a sweep; with ``finish`` each keeps its best plan so far."""
        return self._get(SweepOut, Send("POST", f"/v1/sweeps/{sweep_id}/{how}"))

    @call
    def delete_sweep(self, sweep_id: str) -> Flow[None]:
        """Delete a sweep that has ended, with its cases."""
        return self._done(Send("DELETE", f"/v1/sweeps/{sweep_id}", again=False))

    # ---- documents -----------------------------------------------------------------------------------------------

    @call
    def post(self, document: ModelProfile | ClusterTopology) -> Flow[DocumentStored]:
        """Keep a profile or a topology on the service; requests may then name it by its hash."""
        path = "/v1/profiles" if isinstance(document, ModelProfile) else "/v1/topologies"
        return self._get(DocumentStored, Send("POST", path, document))

    @call
    def profiles(self, *, limit: int = 50, cursor: str | None = None) -> Flow[DocumentPage]:
        """Stored profiles by name and hash, the newest first."""
        return self._get(DocumentPage, Send("GET", "/v1/profiles", params=_given({"limit": limit, "cursor": cursor})))

    @call
    def topologies(self, *, limit: int = 50, cursor: str | None = None) -> Flow[DocumentPage]:
        """Stored topologies by name and hash, the newest first."""
        return self._get(DocumentPage, Send("GET", "/v1/topologies", params=_given({"limit": limit, "cursor": cursor})))

    @call
    def profile(self, address: str) -> Flow[ModelProfile]:
        """The profile of a hash."""
        return self._get(ModelProfile, Send("GET", f"/v1/profiles/{address}"))

    @call
    def topology(self, address: str) -> Flow[ClusterTopology]:
        """The topology of a hash."""
        return self._get(ClusterTopology, Send("GET", f"/v1/topologies/{address}"))

    @call
    def agents_topology(self) -> Flow[ClusterTopology]:
        """The devices of living agents, with links where they were measured. Raises NotFound without any agent."""
        return self._get(ClusterTopology, Send("GET", "/v1/topologies/agents"))

    @call
    def import_topology(
        self,
        sources: Sequence[ImportSource],
        options: ImportOptions | None = None,
        *,
        agents: bool = False,
        store: bool = True,
    ) -> Flow[TopologyImported]:
        """One topology of what tools print; ``agents``: of the living ones, too. Kept on the service with ``store``."""
        request = TopologyImport(sources=tuple(sources), options=options or ImportOptions(), agents=agents, store=store)
        return self._get(TopologyImported, Send("POST", "/v1/topologies:import", request, patient=True))

    @call
    def planners(self) -> Flow[list[PlannerOut]]:
        """The planners that a request may name."""
        return self._get(list[PlannerOut], Send("GET", "/v1/planners"))

    @call
    def examples(self) -> Flow[list[ExampleOut]]:
        """Requests that can be sent as they are."""
        return self._get(list[ExampleOut], Send("GET", "/v1/examples"))

    # ---- agents and runs -----------------------------------------------------------------------------------------

    @call
    def agents(self) -> Flow[list[AgentOut]]:
        """All agents that were ever there."""
        return self._get(list[AgentOut], Send("GET", "/v1/agents"))

    @call
    def run(
        self,
        plan: PlanFile | str,
        model: str,
        *,
        steps: int = 3,
        seed: int = 0,
        check: bool = False,
        trace_steps: int = 1,
        options: RunOptions | None = None,
        max_restarts: int = 0,
        wait: bool = True,
        on_change: Callable[[RunOut], None] | None = None,
    ) -> Flow[RunOut]:
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
        run = yield from self._get(RunOut, Send("POST", "/v1/runs", request, headers=_once()))
        if not wait:
            return run

        def hear(state: RunOut) -> None:
            nonlocal run
            run = state
            if on_change is not None:
                on_change(state)

        yield from heard(self._changes(run.id), hear)
        if run.error is not None:
            raise error_of(run.error)
        return run

    @listing
    def watch_run(self, run_id: str) -> Listing[RunOut]:
        """A run each time that it has changed, until it has ended."""
        return self._changes(run_id)

    @call
    def run_state(self, run_id: str) -> Flow[RunOut]:
        """A run as it stands."""
        return self._get(RunOut, Send("GET", f"/v1/runs/{run_id}"))

    @call
    def runs(self, *, limit: int = 50, cursor: str | None = None) -> Flow[RunPage]:
        """Runs, the newest first."""
        return self._get(RunPage, Send("GET", "/v1/runs", params=_given({"limit": limit, "cursor": cursor})))

    @call
    def run_events(self, run_id: str, after: int = 0) -> Flow[RunEventPage]:
        """The story of a run after event ``after``, as far as it goes."""
        return self._get(RunEventPage, Send("GET", f"/v1/runs/{run_id}/events", params={"poll": 1, "after": after}))

    @listing
    def run_story(self, run_id: str, after: int = 0) -> Listing[RunEvent]:
        """The events of a run from number ``after`` on, until it has ended; survives a broken connection."""
        return story(self._server, RunEvent, f"/v1/runs/{run_id}/events", after, self._patience_s)

    @call
    def rank_log(self, run_id: str, rank: int, *, generation: int | None = None) -> Flow[RankLog]:
        """The end of what a rank has written."""
        params = _given({"rank": rank, "generation": generation})
        return self._get(RankLog, Send("GET", f"/v1/runs/{run_id}/logs", params=params))

    @call
    def cancel_run(self, run_id: str) -> Flow[RunOut]:
        """Stop a run on all its agents."""
        return self._get(RunOut, Send("POST", f"/v1/runs/{run_id}/cancel"))

    @call
    def trace(self, run_id: str) -> Flow[Trace]:
        """What the ranks of a run measured."""
        return self._get(Trace, Send("GET", f"/v1/runs/{run_id}/trace"))

    # ---- the service itself --------------------------------------------------------------------------------------

    @call
    def version(self) -> Flow[VersionOut]:
        """What answers there."""
        return self._get(VersionOut, Send("GET", "/version"))

    @call
    def wait_until_ready(self, timeout_s: float = 30.0) -> Flow[None]:
        """Return once the service is ready. Raises Unreachable, or the service's reason, when it is not in time."""
        until, send = time.monotonic() + timeout_s, Send("GET", "/readyz", again=False)
        while True:
            try:
                found: httpx.Response = yield send
                if found.is_success:
                    return
                error = refusal(found)
            except httpx.TransportError as no_answer:
                error = unreachable(self._server, send, no_answer)
            if time.monotonic() > until:
                raise error
            yield Pause(0.1)

    def _changes(self, run_id: str) -> Listing[RunOut]:
        tag: str | None = None
        for asked in itertools.count():
            known = {} if tag is None else {"If-None-Match": tag}
            send = Send("GET", f"/v1/runs/{run_id}", headers=known, wait_s=WAIT_S if asked else 0)
            found = yield from answer(self._server, send, self._patience_s)
            if found.status_code == httpx.codes.NOT_MODIFIED:
                continue
            tag = found.headers["etag"]
            run = RunOut.model_validate_json(found.content)
            yield Item(run)
            if run.state in ENDED:
                return

    def _get(self, model: type[T], send: Send) -> Flow[T]:
        return document(self._server, model, send, self._patience_s)

    def _answer(self, send: Send) -> Flow[httpx.Response]:
        return answer(self._server, send, self._patience_s)

    def _done(self, send: Send) -> Flow[None]:
        yield from self._answer(send)


def _given(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def _once() -> dict[str, str]:
    """A key that makes the service do a thing once, however often it is sent."""
    return {"Idempotency-Key": str(uuid.uuid4())}
