"""A thin client of the service: ``Client("http://127.0.0.1:8642").plan(request, on_event=print)``.

It needs no extra. Every refusal of the service is raised as the error that it was there (``schemas.errors``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.schemas.agents import AgentOut
from penstock.schemas.document import Document
from penstock.schemas.errors import Fault, PenstockError, Unreachable
from penstock.schemas.explanation import Explanation
from penstock.schemas.jobs import (
    DocumentStored,
    EventPage,
    ExampleOut,
    JobEvent,
    JobOut,
    JobPage,
    PlanComparison,
    PlannerOut,
    ProblemDetails,
    RankLog,
    Recover,
    RequestChecked,
    RunEventPage,
    RunOut,
    RunPage,
    RunRequest,
    Simulation,
    Verdict,
)
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.run_options import RunOptions
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace

WAIT_S = 20
ENDED = ("succeeded", "failed", "cancelled")

M = TypeVar("M", bound=BaseModel)


class Client:
    """One connection to a service. Raises Unreachable when it does not answer, and PenstockError for its refusals."""

    def __init__(self, server: str = "http://127.0.0.1:8642", *, timeout_s: float = 60.0) -> None:
        self._http = httpx.Client(base_url=server, timeout=httpx.Timeout(timeout_s, read=timeout_s + WAIT_S))
        self._server = server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    # ---- plans ---------------------------------------------------------------------------------------------------

    def plan(
        self, request: PlanRequest, *, wait: bool = True, on_event: Callable[[JobEvent], None] | None = None
    ) -> JobOut:
        """Ask for a plan. With ``wait``, return the job once it has ended; ``on_event`` hears of its progress.

        An ended job that has no result is raised as the error that it met.
        """
        job = self._get(JobOut, "POST", "/v1/plans", request)
        if not wait:
            return job
        if on_event is not None and not job.cached:
            for event in self.events(job.id):
                on_event(event)
        while job.state not in ENDED:
            job = self.job(job.id, wait_s=WAIT_S)
        if job.error is not None:
            raise error_of(job.error)
        return job

    def events(self, job_id: str, after: int = 0) -> Iterator[JobEvent]:
        """A job's events from number ``after`` on, until it has ended; survives a broken connection."""
        while True:
            page = self._get(EventPage, "GET", f"/v1/plans/{job_id}/events?poll=1&after={after}", wait_s=WAIT_S)
            yield from page.items
            after = page.last
            if page.done and not page.items:
                return

    def job(self, job_id: str, *, wait_s: int = 0) -> JobOut:
        """A job as it stands, or once it has ended within ``wait_s``."""
        return self._get(JobOut, "GET", f"/v1/plans/{job_id}", wait_s=wait_s)

    def jobs(self, *, limit: int = 50, cursor: str | None = None) -> JobPage:
        """Jobs, the newest first."""
        more = {} if cursor is None else {"cursor": cursor}
        return self._get(JobPage, "GET", "/v1/plans", params={"limit": limit, **more})

    def cancel(self, job_id: str) -> JobOut:
        """Stop a job and drop what it has found."""
        return self._get(JobOut, "POST", f"/v1/plans/{job_id}/cancel")

    def finish(self, job_id: str) -> JobOut:
        """Stop a job; its best plan so far becomes its result."""
        return self._get(JobOut, "POST", f"/v1/plans/{job_id}/finish")

    def plan_file(self, plan_or_job: str) -> PlanFile:
        """The plan of a hash or of a job, with its request inline."""
        return self._get(PlanFile, "GET", f"/v1/plans/{plan_or_job}/plan")

    def incumbent(self, job_id: str) -> Plan:
        """The best plan of a job so far."""
        return self._get(Plan, "GET", f"/v1/plans/{job_id}/incumbent")

    def programs(self, plan_or_job: str) -> list[dict[str, Any]]:
        """The programs of all ranks, as ``schemas.program.Program.from_json`` reads them."""
        programs: list[dict[str, Any]] = self._answer("GET", f"/v1/plans/{plan_or_job}/programs").json()
        return programs

    def validate(self, request: PlanRequest) -> RequestChecked:
        """Check a request without solving it."""
        return self._get(RequestChecked, "POST", "/v1/plans:validate", request)

    def verify(self, file: PlanFile) -> Verdict:
        """Whether a plan keeps the rules."""
        return self._get(Verdict, "POST", "/v1/plans:verify", file)

    def simulate(self, file: PlanFile) -> Simulation:
        """A plan with the judge's prediction."""
        return self._get(Simulation, "POST", "/v1/plans:simulate", file)

    def compare(
        self, request: PlanRequest, planners: Sequence[str] = (), schedules: Sequence[str] = ()
    ) -> list[PlanComparison]:
        """Each planner with each of its schedules."""
        params = {"planner": list(planners), "schedule": list(schedules)}
        answer = self._answer("POST", "/v1/plans:compare", request, params=params, patient=True)
        return TypeAdapter(list[PlanComparison]).validate_json(answer.content)

    def explain(
        self,
        file: PlanFile,
        *,
        what_if: Sequence[str] = (),
        planner: str | None = None,
        max_plans: int = 20,
        cuts: Sequence[str] = (),
        replicas: Sequence[int] = (),
        devices: Sequence[Sequence[str]] = (),
        schedule: str | None = None,
        micro_batches: int | None = None,
    ) -> Explanation:
        """What a plan's time is made of and what would help; with ``cuts``, why not that layout."""
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
        given = {name: value for name, value in params.items() if value is not None}
        answer = self._answer("POST", "/v1/plans:explain", file, params=given, patient=True)
        return Explanation.model_validate_json(answer.content)

    # ---- documents -----------------------------------------------------------------------------------------------

    def post(self, document: ModelProfile | ClusterTopology) -> DocumentStored:
        """Keep a profile or a topology on the service; requests may then name it by its hash."""
        path = "/v1/profiles" if isinstance(document, ModelProfile) else "/v1/topologies"
        return self._get(DocumentStored, "POST", path, document)

    def agents_topology(self) -> ClusterTopology:
        """The devices of living agents, with links where they were measured. Raises NotFound without any agent."""
        return self._get(ClusterTopology, "GET", "/v1/topologies/agents")

    def planners(self) -> list[PlannerOut]:
        """The planners that a request may name."""
        return TypeAdapter(list[PlannerOut]).validate_json(self._answer("GET", "/v1/planners").content)

    def examples(self) -> list[ExampleOut]:
        """Requests that can be sent as they are."""
        return TypeAdapter(list[ExampleOut]).validate_json(self._answer("GET", "/v1/examples").content)

    # ---- agents and runs -----------------------------------------------------------------------------------------

    def agents(self) -> list[AgentOut]:
        """All agents that were ever there."""
        return TypeAdapter(list[AgentOut]).validate_json(self._answer("GET", "/v1/agents").content)

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
        run = self._get(RunOut, "POST", "/v1/runs", request)
        if not wait:
            return run
        for state in self.watch_run(run.id):
            run = state
            if on_change is not None:
                on_change(run)
        if run.error is not None:
            raise error_of(run.error)
        return run

    def watch_run(self, run_id: str) -> Iterator[RunOut]:
        """A run each time that it has changed, until it has ended."""
        tag: str | None = None
        while True:
            known = {} if tag is None else {"If-None-Match": tag}
            answer = self._answer("GET", f"/v1/runs/{run_id}", headers=known, wait_s=0 if tag is None else WAIT_S)
            if answer.status_code == httpx.codes.NOT_MODIFIED:
                continue
            tag = answer.headers["etag"]
            run = RunOut.model_validate_json(answer.content)
            yield run
            if run.state in ENDED:
                return

    def run_state(self, run_id: str) -> RunOut:
        """A run as it stands."""
        return self._get(RunOut, "GET", f"/v1/runs/{run_id}")

    def runs(self, *, limit: int = 50) -> RunPage:
        """Runs, the newest first."""
        return self._get(RunPage, "GET", "/v1/runs", params={"limit": limit})

    def run_events(self, run_id: str, after: int = 0) -> RunEventPage:
        """The story of a run after event ``after``, as far as it goes."""
        return self._get(RunEventPage, "GET", f"/v1/runs/{run_id}/events", params={"poll": 1, "after": after})

    def rank_log(self, run_id: str, rank: int, *, generation: int | None = None) -> RankLog:
        """The end of what a rank has written."""
        wanted = {"rank": rank} | ({} if generation is None else {"generation": generation})
        return self._get(RankLog, "GET", f"/v1/runs/{run_id}/logs", params=wanted)

    def cancel_run(self, run_id: str) -> RunOut:
        """Stop a run on all its agents."""
        return self._get(RunOut, "POST", f"/v1/runs/{run_id}/cancel")

    def trace(self, run_id: str) -> Trace:
        """What the ranks of a run measured."""
        return self._get(Trace, "GET", f"/v1/runs/{run_id}/trace")

    # ---- the service itself --------------------------------------------------------------------------------------

    def wait_until_ready(self, timeout_s: float = 30.0) -> None:
        """Return once the service is ready. Raises Unreachable when it is not in time."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                self._answer("GET", "/readyz")
                return
            except Unreachable:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def _get(self, model: type[M], method: str, path: str, body: BaseModel | None = None, **more: Any) -> M:
        answer = self._answer(method, path, body, **more)
        try:
            return model.model_validate_json(answer.content)
        except ValidationError as error:
            raise Unreachable(
                f"{self._server} answered {method} {path} with something else than a {model.__name__}: "
                f"{error.errors()[0]['msg']}",
                remedy="is it a Penstock service of the same version?",
            ) from None

    def _answer(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        wait_s: int = 0,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        patient: bool = False,
    ) -> httpx.Response:
        sent = dict(headers or {})
        if wait_s:
            sent["Prefer"] = f"wait={wait_s}"
        content = None
        if body is not None:
            sent["Content-Type"] = "application/json"
            content = body.canonical_json() if isinstance(body, Document) else body.model_dump_json().encode()
        timeout = httpx.Timeout(10.0, read=None) if patient else httpx.USE_CLIENT_DEFAULT
        try:
            answer = self._http.request(method, path, content=content, headers=sent, params=params, timeout=timeout)
        except httpx.TransportError as error:
            raise Unreachable(
                f"{self._server} does not answer {method} {path}: {str(error) or type(error).__name__}",
                remedy="start it with `penstock serve`, or name another server",
            ) from None
        if answer.is_error:
            raise _refusal(answer)
        return answer


def error_of(problem: ProblemDetails) -> PenstockError:
    """Problem details as the error that they were."""
    kind = next((kind for kind in PenstockError.__subclasses__() if kind.code == problem.code), PenstockError)
    faults = tuple(Fault(fault.pointer, fault.detail, fault.code) for fault in problem.errors)
    return kind(problem.detail, faults=faults, remedy=problem.remedy)


def _refusal(answer: httpx.Response) -> PenstockError:
    try:
        return error_of(ProblemDetails.model_validate_json(answer.content))
    except ValidationError:
        return Unreachable(
            f"{answer.request.url} answered {answer.status_code} {answer.reason_phrase}",
            remedy="is it a Penstock service?",
        )


__all__ = ["Client", "error_of"]
