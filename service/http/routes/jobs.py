"""``/v1/jobs``: the states and events of plan requests, and the operations on them."""

from __future__ import annotations

import time
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Path, Query, Request, Response

from penstock.schemas.api.jobs import EventPage, JobOut, JobPage, JobState
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.service.db.tables import ACTIVE
from penstock.service.http.requests.access import Access, Principal, Reader, Solver
from penstock.service.http.requests.bodies import (
    STREAM,
    UNCHANGED,
    Cursor,
    Limit,
    immutable,
    json_response,
    prefer_wait_s,
    tagged,
)
from penstock.service.http.requests.events import After, answer_events
from penstock.service.http.requests.once import OnceRoute
from penstock.service.problems import problems
from penstock.service.services import Service

router = APIRouter(prefix="/v1", tags=["jobs"], route_class=OnceRoute)

Id = Annotated[str, Path(description="a job's id", max_length=128)]
Tag = Annotated[str | None, Query(max_length=128, description="a tag of your choice, to find the job by")]


@router.get("/jobs", response_model=JobPage, responses=problems(422))
def list_jobs(
    service: Access,
    caller: Reader,
    cursor: Cursor = None,
    limit: Limit = 50,
    state: JobState | None = None,
    tag: Tag = None,
    profile: Annotated[str | None, Query(max_length=128, description="the hash of its profile")] = None,
    planner: Annotated[str | None, Query(max_length=128)] = None,
    parent: Annotated[str | None, Query(max_length=64, description="the sweep that submitted it")] = None,
) -> JobPage:
    """List jobs, the newest first; optionally of one state, tag, profile, planner or sweep."""
    wanted = {"tag": tag, "profile": profile, "planner": planner, "parent_id": parent}
    items = service.queue.recent(caller.tenant, cursor, limit, state, **wanted)
    return JobPage(items=tuple(items), next_cursor=items[-1].id if len(items) == limit else None)


@router.post("/jobs/{id}:cancel", response_model=JobOut, responses=problems(404, 409))
async def cancel(id: Id, service: Access, caller: Solver) -> Response:
    """Stop a job and drop its plans."""
    return json_response(await run_sync(service.queue.stop, caller.tenant, id, "cancel"))


@router.post("/jobs/{id}:finish", response_model=JobOut, responses=problems(404, 409))
async def finish(id: Id, service: Access, caller: Solver) -> Response:
    """Stop a job and keep the best plan so far as its result."""
    return json_response(await run_sync(service.queue.stop, caller.tenant, id, "finish"))


@router.post("/jobs/{id}:retry", status_code=202, response_model=JobOut, responses=problems(404, 409, 429))
async def retry(id: Id, service: Access, caller: Solver) -> Response:
    """Restart a job that has failed or was cancelled."""
    return json_response(await run_sync(service.queue.retry, caller.tenant, id), 202)


@router.get("/jobs/{id}", responses={200: {"model": JobOut}, 304: UNCHANGED, **problems(404)})
async def get(request: Request, id: Id, service: Access, caller: Reader) -> Response:
    """Return a job; with `Prefer: wait=N`, once it has ended or after N seconds."""
    until = time.monotonic() + prefer_wait_s(request, service.settings.max_wait_s)
    _state, body = await settled(service, caller, id, until)
    return tagged(request, body)


@router.delete("/jobs/{id}", status_code=204, responses=problems(404, 409))
async def delete(id: Id, service: Access, caller: Solver) -> None:
    """Delete a job that has ended, with its events and its answer. Plans stay under their hashes."""
    await run_sync(service.queue.delete, caller.tenant, id)


@router.get(
    "/jobs/{id}/events",
    responses={
        200: {"model": EventPage, "content": STREAM},
        204: {"description": "the job has ended, and there is nothing after that number"},
        **problems(404, 422),
    },
)
async def events(
    request: Request,
    id: Id,
    service: Access,
    caller: Reader,
    poll: bool = False,
    after: After = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_WIRE_INTEGER)] = None,
) -> Response:
    """Stream a job's events (SSE), resumed after `Last-Event-ID`; with `poll` as JSON, held by `Prefer`."""

    def page(after: int) -> EventPage:
        done = service.queue.job(caller.tenant, id, with_result=False).state not in ACTIVE
        items = service.queue.events(caller.tenant, id, after)
        return EventPage(items=tuple(items), last=items[-1].sequence if items else after, done=done)

    start = after if last_event_id is None else last_event_id
    return await answer_events(request, service, f"job:{id}", page, start, poll=poll)


@router.get("/jobs/{id}/incumbent", responses={200: {"model": Plan}, 304: UNCHANGED, **problems(404, 409)})
def incumbent(request: Request, id: Id, service: Access, caller: Reader) -> Response:
    """Return the best plan of a job so far."""
    return tagged(request, service.planning.of(caller.tenant).incumbent(id).canonical_json())


@router.get("/jobs/{id}/plan-file", responses={200: {"model": PlanFile}, 304: UNCHANGED, **problems(404, 409)})
def plan_file(request: Request, id: Id, service: Access, caller: Reader, best: bool = False) -> Response:
    """Return the final plan of a job with its request; with `best`, the best plan of a running job so far."""
    planning, store = service.planning.of(caller.tenant), service.stores.of(caller.tenant)
    if best and planning.is_open(id):
        return tagged(request, store.file_of(planning.incumbent(id)).canonical_json())
    address = planning.plan_hash(id)
    return immutable(request, store.plan_file_body(address), address)


async def settled(service: Service, caller: Principal, job_id: str, until: float) -> tuple[JobState, bytes]:
    """Return state and JSON of the job once it has ended, or as it is at ``until``, of ``time.monotonic``."""
    with service.notifier.listen(f"job:{job_id}") as listener:
        while True:
            state, body = await run_sync(service.queue.answer, caller.tenant, job_id)
            if state not in ACTIVE or service.notifier.closed:
                return state, body
            if not await listener.wait(until - time.monotonic()):
                return state, body
