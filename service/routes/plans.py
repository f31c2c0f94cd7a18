"""``/v1/plans``: requests, their jobs and events, and the immutable plans that come of them."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from penstock.schemas.explanation import Explanation
from penstock.schemas.jobs import (
    EventPage,
    JobOut,
    JobPage,
    JobState,
    PlanComparison,
    RequestChecked,
    Simulation,
    Verdict,
)
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.schemas.request import PlanRequest
from penstock.service import judging
from penstock.service.database import ACTIVE
from penstock.service.problems import problem_response, problems
from penstock.service.routes.access import Access
from penstock.service.routes.bodies import immutable, json_response, prefer_wait_s, reader, tagged, takes
from penstock.service.routes.stories import After, tell_story
from penstock.service.samples import tiny_plan_file, tiny_request
from penstock.service.services import Service
from penstock.service.tasks import run_task

router = APIRouter(prefix="/v1", tags=["plans"])

Asked = Annotated[PlanRequest, Depends(reader(PlanRequest))]
File = Annotated[PlanFile, Depends(reader(PlanFile))]
Id = Annotated[str, Path(description="a job's id, or a plan's hash")]


@router.post(
    "/plans",
    status_code=202,
    responses={
        200: {"model": JobOut, "description": "known, or done in time"},
        202: {"model": JobOut},
        **problems(404, 413, 415, 422),
    },
    openapi_extra=takes(PlanRequest, tiny_request()),
)
async def submit(request: Request, asked: Asked, service: Access) -> Response:
    """Ask for a plan: 202 with a job, or 200 with its result when it is known or done within `Prefer: wait=N`."""
    submitted = await run_sync(service.planning.submit, asked)
    if submitted.answer is not None:
        return json_response(submitted.answer)
    wait_s = prefer_wait_s(request, service.settings.max_wait_s)
    job = await _settled(service, submitted.job_id, wait_s)
    headers = {"Location": f"/v1/plans/{job.id}"}
    if wait_s:
        headers["Preference-Applied"] = f"wait={wait_s:.0f}"
    return json_response(job, 202 if job.state in ACTIVE else 200, headers)


@router.get("/plans", response_model=JobPage, responses=problems(422))
def list_jobs(
    service: Access,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    state: JobState | None = None,
) -> JobPage:
    """Jobs, the newest first."""
    items = service.queue.recent(cursor, limit, state)
    return JobPage(items=tuple(items), next_cursor=items[-1].id if len(items) == limit else None)


@router.get("/plans/{id}", responses={200: {"model": JobOut | Plan}, **problems(404)})
async def get(request: Request, id: Id, service: Access) -> Response:
    """A job as it stands (with `Prefer: wait=N`, once it has ended), or the immutable plan of a hash."""
    if id.startswith("sha256:"):
        return immutable(request, await run_sync(service.store.body, "plan", id), id)
    job = await _settled(service, id, prefer_wait_s(request, service.settings.max_wait_s))
    return tagged(request, job.model_dump_json().encode())


@router.get("/plans/{id}/plan", responses={200: {"model": PlanFile}, **problems(404, 409)})
def plan_file(request: Request, id: Id, service: Access) -> Response:
    """The final plan with its request inline: it can be judged, run and explained alone."""
    address = service.planning.plan_hash(id)
    return immutable(request, service.store.plan_file_body(address), address)


@router.get("/plans/{id}/incumbent", responses={200: {"model": Plan}, **problems(404, 409)})
def incumbent(request: Request, id: Id, service: Access) -> Response:
    """The best plan of a job so far."""
    return tagged(request, service.planning.incumbent(id).canonical_json())


@router.get("/plans/{id}/programs", responses=problems(404, 409, 422))
async def programs(request: Request, id: Id, service: Access) -> Response:
    """The programs of all ranks, lowered from the plan."""
    address = await run_sync(service.planning.plan_hash, id)
    found = await run_sync(service.programs.all, address, limiter=service.heavy)
    return immutable(request, b"[" + b",".join(found) + b"]", address)


@router.get("/plans/{id}/programs/{rank}", responses=problems(404, 409, 422))
async def program(
    request: Request, id: Id, rank: Annotated[int, Path(ge=0, le=MAX_WIRE_INTEGER)], service: Access
) -> Response:
    """The program of one rank."""
    address = await run_sync(service.planning.plan_hash, id)
    return immutable(request, await run_sync(service.programs.one, address, rank, limiter=service.heavy), address)


@router.get("/plans/{id}/events", responses={200: {"model": EventPage}, **problems(404, 422)})
async def events(
    request: Request,
    id: Id,
    service: Access,
    poll: Literal["0", "1"] = "0",
    after: After = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_WIRE_INTEGER)] = None,
) -> Response:
    """A job's story as server-sent events, resumed after `Last-Event-ID`; with `poll=1` as JSON, held by `Prefer`."""

    def page(after: int) -> EventPage:
        done = service.queue.job(id, with_result=False).state not in ACTIVE
        items = service.queue.events(id, after)
        return EventPage(items=tuple(items), last=items[-1].sequence if items else after, done=done)

    start = after if last_event_id is None else last_event_id
    return await tell_story(request, service, f"job:{id}", page, start, poll=poll == "1")


@router.post("/plans/{id}/cancel", response_model=JobOut, responses=problems(404, 409))
async def cancel(id: Id, service: Access) -> Response:
    """Stop a job and drop what it has found."""
    return json_response(await run_sync(service.queue.stop, id, "cancel"))


@router.post("/plans/{id}/finish", response_model=JobOut, responses=problems(404, 409))
async def finish(id: Id, service: Access) -> Response:
    """Stop a job and keep the best plan so far as its result."""
    return json_response(await run_sync(service.queue.stop, id, "finish"))


@router.post(
    "/plans:validate",
    response_model=RequestChecked,
    responses=problems(404, 413, 415, 422),
    openapi_extra=takes(PlanRequest, tiny_request()),
)
async def validate(asked: Asked, service: Access) -> RequestChecked:
    """Check a request as far as that is possible without solving it."""
    address, known = await run_sync(service.planning.checked, asked)
    return RequestChecked(request_hash=address, cached=known)


@router.post(
    "/plans:verify",
    response_model=Verdict,
    responses=problems(413, 415, 422),
    openapi_extra=takes(PlanFile, tiny_plan_file()),
)
async def verify(file: File, service: Access) -> Verdict:
    """Judge a plan of one's own: `valid`, or a sentence per fault. A plan with faults is an answer, not an error."""
    return await run_sync(judging.verdict, file, limiter=service.heavy)


@router.post(
    "/plans:simulate",
    response_model=Simulation,
    responses=problems(413, 415, 422),
    openapi_extra=takes(PlanFile, tiny_plan_file()),
)
async def simulate(file: File, service: Access) -> Response:
    """A plan of one's own with the judge's prediction; 422 when it cannot be simulated (deadlock, shape)."""
    return json_response(await run_sync(judging.simulation, file, limiter=service.heavy))


@router.post(
    "/plans:compare",
    response_model=list[PlanComparison],
    responses=problems(404, 413, 415, 422),
    openapi_extra=takes(PlanRequest, tiny_request()),
)
async def compare(
    asked: Asked,
    service: Access,
    planner: Annotated[list[str], Query()] = [],  # noqa: B006  (FastAPI reads it, nobody writes it)
    schedule: Annotated[list[str], Query()] = [],  # noqa: B006
) -> Response:
    """Each planner with each of its schedules, judged alike; `planner` and `schedule` narrow it down.

    A planner that cannot take the request has a row with status `unsupported`, whose `why` says what it can take.
    """
    return await run_sync(_compare, service, asked, planner, schedule, limiter=service.heavy)


def _compare(service: Service, asked: PlanRequest, planners: list[str], schedules: list[str]) -> Response:
    inline = service.store.resolve(asked)
    judging.check_comparison(inline, planners, schedules)
    task = {
        "task": "compare",
        "entry": service.settings.compare_entry,
        "request": inline.model_dump(mode="json"),
        "planners": planners,
        "schedules": schedules,
    }
    rows: list[dict[str, Any]] = []
    limit_ns = inline.termination.time_limit_ns
    limit_s = service.settings.max_solve_s if limit_ns is None else limit_ns / 1e9 + service.settings.solve_grace_s
    problem = run_task(service.forkserver, task, limit_s, lambda told: rows.append(told) if "row" in told else None)
    if problem is not None:
        return problem_response(problem)
    return json_response(json.dumps([told["row"] for told in rows]).encode())


@router.post(
    "/plans:explain",
    response_model=Explanation,
    responses=problems(413, 415, 422),
    openapi_extra=takes(PlanFile, tiny_plan_file()),
)
async def explain(
    file: File,
    service: Access,
    what_if: Annotated[list[str], Query(max_length=64)] = [],  # noqa: B006
    planner: str | None = None,
    max_plans: Annotated[int, Query(ge=1, le=10_000)] = 20,
    cut: Annotated[list[str], Query(max_length=1024)] = [],  # noqa: B006
    replicas: Annotated[list[int], Query(max_length=1024)] = [],  # noqa: B006
    devices: Annotated[list[str], Query(max_length=1024)] = [],  # noqa: B006
    schedule: str | None = None,
    micro_batches: Annotated[int | None, Query(ge=1, le=MAX_WIRE_INTEGER)] = None,
) -> Response:
    """What a plan's time is made of, what binds it, and what would help; 422 when it cannot be simulated.

    `what_if` names changes to try (`bandwidth=2`, `devices=+8`, …; `default` the usual ones), `planner` who plans anew
    for them. With `cut` (layers or their names, where stages begin) the answer compares a layout of one's own, whose
    `replicas` or `devices` (one entry a stage, names separated by commas), `schedule` and `micro_batches` may be given.
    """
    layout = None
    if cut:
        layout = {
            "cuts": cut,
            "replicas": replicas,
            "devices": [[name for name in names.split(",") if name] for names in devices],
            "schedule": schedule,
            "num_micro_batches": micro_batches,
        }
    how = {"what_if": what_if, "planner": planner, "max_plans": max_plans, "layout": layout}
    return await run_sync(_explain, service, file, how, limiter=service.heavy)


def _explain(service: Service, file: PlanFile, how: dict[str, Any]) -> Response:
    task = {
        "task": "explain",
        "entry": "penstock.explaining:explain",
        "file": file.model_dump(mode="json"),
        "how": how,
    }
    told: list[dict[str, Any]] = []
    problem = run_task(
        service.forkserver, task, service.settings.max_solve_s, lambda m: told.append(m) if "result" in m else None
    )
    if problem is not None:
        return problem_response(problem)
    return json_response(json.dumps(told[-1]["result"]).encode())


async def _settled(service: Service, job_id: str, wait_s: float) -> JobOut:
    """The job once it has ended, or as it stands after ``wait_s``."""
    until = time.monotonic() + wait_s
    with service.notifier.listen(f"job:{job_id}") as listener:
        while True:
            job = await run_sync(service.queue.job, job_id)
            if job.state not in ACTIVE or service.notifier.closed:
                return job
            if not await listener.wait(until - time.monotonic()):
                return job
