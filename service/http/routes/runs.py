"""``/v1/runs``: plans on agents."""

from __future__ import annotations

import time
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from penstock.examples.tiny import tiny_plan_file
from penstock.planning.programs.lowered import lower
from penstock.schemas.api.jobs import RankLog, RunEventPage, RunOut, RunPage, RunRequest
from penstock.schemas.errors import NotFound
from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.schemas.trace import Trace
from penstock.service.db.database import Note
from penstock.service.http.requests.access import Access, Principal, Reader, Runner
from penstock.service.http.requests.bodies import json_response, prefer_wait_s, reader, tagged, takes
from penstock.service.http.requests.events import After, answer_events
from penstock.service.http.requests.once import OnceRoute, answers_again, note_of
from penstock.service.problems import problems
from penstock.service.runs.run_rows import LIVE
from penstock.service.services import Service

router = APIRouter(prefix="/v1", tags=["runs"], route_class=OnceRoute)

RUN_EXAMPLE = {"schema_version": 1, "plan": tiny_plan_file(), "model": "gpt", "steps": 3, "check": True}


@router.post(
    "/runs",
    status_code=201,
    response_model=RunOut,
    responses=problems(404, 409, 413, 415, 422),
    openapi_extra=takes(RunRequest, RUN_EXAMPLE),
)
async def start(
    request: Request, caller: Runner, wanted: Annotated[RunRequest, Depends(reader(RunRequest))], service: Access
) -> Response:
    """Train with a plan on the agents whose devices it names; `model` is a key of their configuration."""
    return _created(await run_sync(_start, service, caller.tenant, wanted, note_of(request), limiter=service.heavy))


@answers_again("/v1/runs")
async def _answered(request: Request, service: Service, caller: Principal, run_id: str) -> Response:
    return _created(await run_sync(service.runs.run, caller.tenant, run_id))


def _created(run: RunOut) -> Response:
    return json_response(run, 201, {"Location": f"/v1/runs/{run.id}"})


@router.get("/runs", response_model=RunPage, responses=problems(422))
def list_runs(
    service: Access,
    caller: Reader,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> RunPage:
    """List runs, the newest first."""
    items = service.runs.recent(caller.tenant, cursor, limit)
    return RunPage(items=tuple(items), next_cursor=items[-1].id if len(items) == limit else None)


@router.get("/runs/{id}", response_model=RunOut, responses=problems(404))
async def get(request: Request, id: str, service: Access, caller: Reader) -> Response:
    """Return a run; with `Prefer: wait=N`, once it differs from `If-None-Match`, or has ended."""
    until = time.monotonic() + prefer_wait_s(request, service.settings.max_wait_s)
    any_change = "if-none-match" in request.headers
    with service.notifier.listen(f"run:{id}") as listener:
        while True:
            run = await run_sync(service.runs.run, caller.tenant, id)
            answer = tagged(request, run.model_dump_json().encode())
            settled = answer.status_code == 200 if any_change else run.state not in LIVE
            if settled or service.notifier.closed or not await listener.wait(until - time.monotonic()):
                return answer


@router.post("/runs/{id}:cancel", response_model=RunOut, responses=problems(404, 409))
def cancel(id: str, service: Access, caller: Runner) -> Response:
    """Stop a run on all its agents."""
    return json_response(service.runs.cancel(caller.tenant, id))


@router.get("/runs/{id}/trace", response_model=Trace, responses=problems(404))
def trace(request: Request, id: str, service: Access, caller: Reader) -> Response:
    """Return the ranks' measurements of the traced steps, with the plan that they ran."""
    measurements = service.runs.trace(caller.tenant, id)
    whole = measurements.model_copy(
        update={"plan_file": service.stores.of(caller.tenant).plan_file(measurements.plan_hash)}
    )
    return tagged(request, whole.model_dump_json().encode())


@router.get("/runs/{id}/events", responses={200: {"model": RunEventPage}, **problems(404, 422)})
async def events(
    request: Request,
    id: str,
    service: Access,
    caller: Reader,
    poll: bool = False,
    after: After = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_WIRE_INTEGER)] = None,
) -> Response:
    """Stream a run's events (SSE), resumed after `Last-Event-ID`; with `poll` as JSON, held by `Prefer`."""

    def page(after: int) -> RunEventPage:
        items, done = service.runs.events(caller.tenant, id, after)
        return RunEventPage(items=tuple(items), last=items[-1].sequence if items else after, done=done)

    start = after if last_event_id is None else last_event_id
    return await answer_events(request, service, f"run:{id}", page, start, poll=poll)


@router.get("/runs/{id}/logs", response_model=RankLog, responses=problems(404, 409, 422, 503))
async def logs(
    id: str,
    service: Access,
    caller: Reader,
    rank: Annotated[int, Query(ge=0, le=MAX_WIRE_INTEGER)] = 0,
    generation: Annotated[int | None, Query(ge=1, le=MAX_WIRE_INTEGER)] = None,
    max_bytes: Annotated[int, Query(ge=1, le=2**20)] = 2**16,
) -> Response:
    """Return the end of a rank's log, from its agent, which has to be connected."""
    agent, number = await run_sync(service.runs.agent_of, caller.tenant, id, rank, generation)
    tail = await service.agents.log_tail(caller.tenant, agent, id, number, rank, max_bytes)
    if tail.path is None:
        raise NotFound(f"agent {agent!r} has no log of rank {rank} in generation {number} of run {id!r}")
    return json_response(RankLog(agent=agent, rank=rank, generation=number, path=tail.path, text=tail.text))


def _start(service: Service, tenant: str, wanted: RunRequest, note: Note | None) -> RunOut:
    present = service.agents.everybody(tenant)  # the judge may have to be loaded first, which takes its time
    planning = service.planning.of(tenant)
    lowered = lower(planning.plan_file(wanted.plan), wanted.options, wanted.steps)
    planning.keep(lowered.file)
    return service.runs.create(tenant, wanted, lowered, present, note)
