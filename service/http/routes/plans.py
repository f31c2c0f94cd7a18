"""``/v1/plans``: requests, their jobs and events, and the immutable plans that come of them."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from penstock.schemas.api.jobs import EventPage, JobOut, JobPage, JobState
from penstock.schemas.plan import Plan
from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.schemas.request import PlanRequest
from penstock.service.db.tables import ACTIVE
from penstock.service.http.problems import problems
from penstock.service.http.routes.access import Access, Principal, Reader, Solver
from penstock.service.http.routes.bodies import (
    STREAM,
    UNCHANGED,
    Cursor,
    Limit,
    body_of,
    immutable,
    json_response,
    prefer_wait_s,
    reader,
    tagged,
    takes,
)
from penstock.service.http.routes.once import OnceRoute, answers_again, note_of
from penstock.service.http.routes.stories import After, tell_story
from penstock.service.http.samples import tiny_request
from penstock.service.jobs.submit import Wishes
from penstock.service.services import Service

router = APIRouter(prefix="/v1", tags=["plans"], route_class=OnceRoute)

Asked = Annotated[PlanRequest, Depends(reader(PlanRequest))]
Id = Annotated[str, Path(description="a job's id, or a plan's hash", max_length=128)]
Tag = Annotated[str | None, Query(max_length=128, description="a word of yours, to find the job by")]


@router.post(
    "/plans",
    status_code=202,
    responses={
        200: {"model": JobOut, "description": "known, or done in time"},
        202: {"model": JobOut},
        **problems(404, 409, 413, 415, 422, 429),
    },
    openapi_extra=takes(PlanRequest, tiny_request()),
)
async def submit(
    request: Request,
    service: Access,
    caller: Solver,
    priority: Annotated[int, Query(ge=-100, le=100, description="higher ones first")] = 0,
    tag: Tag = None,
) -> Response:
    """Ask for a plan: 202 with a job, or 200 with its result when it is known or done within `Prefer: wait=N`."""
    began = time.monotonic()
    body = await body_of(request)
    wishes = Wishes(priority=priority, tag=tag, note=note_of(request))
    submitted = await run_sync(service.submissions.submit, caller, body, wishes)
    if submitted.answer is not None:
        return json_response(submitted.answer)
    return await _answered(request, service, caller, submitted.job_id, began)


@answers_again("/v1/plans")
async def _answered(
    request: Request, service: Service, caller: Principal, job_id: str, began: float | None = None
) -> Response:
    """The job once it has ended, or as it stands when the wait is over; that counts from when the request ``began``."""
    wait_s = prefer_wait_s(request, service.settings.max_wait_s)
    job = await _settled(service, caller, job_id, (time.monotonic() if began is None else began) + wait_s)
    headers = {"Location": f"/v1/plans/{job.id}"} | ({"Preference-Applied": f"wait={wait_s:.0f}"} if wait_s else {})
    return json_response(job, 202 if job.state in ACTIVE else 200, headers)


@router.get("/plans", response_model=JobPage, responses=problems(422))
def list_jobs(
    service: Access,
    caller: Reader,
    cursor: Cursor = None,
    limit: Limit = 50,
    state: JobState | None = None,
    tag: Tag = None,
    profile: Annotated[str | None, Query(max_length=128, description="the hash of its profile")] = None,
    planner: Annotated[str | None, Query(max_length=128)] = None,
    parent: Annotated[str | None, Query(max_length=64, description="the sweep that asked for it")] = None,
) -> JobPage:
    """Jobs, the newest first; of one state, tag, profile, planner or sweep."""
    wanted = {"tag": tag, "profile": profile, "planner": planner, "parent_id": parent}
    items = service.queue.recent(caller.tenant, cursor, limit, state, **wanted)
    return JobPage(items=tuple(items), next_cursor=items[-1].id if len(items) == limit else None)


@router.get("/plans/{id}", responses={200: {"model": JobOut | Plan}, 304: UNCHANGED, **problems(404)})
async def get(request: Request, id: Id, service: Access, caller: Reader) -> Response:
    """A job as it stands (with `Prefer: wait=N`, once it has ended), or the immutable plan of a hash."""
    if id.startswith("sha256:"):
        return immutable(request, await run_sync(service.stores.of(caller.tenant).body, "plan", id), id)
    until = time.monotonic() + prefer_wait_s(request, service.settings.max_wait_s)
    job = await _settled(service, caller, id, until)
    return tagged(request, job.model_dump_json().encode())


@router.delete("/plans/{id}", status_code=204, responses=problems(404, 409))
async def delete(id: Id, service: Access, caller: Solver) -> None:
    """Delete a job that has ended, with its events and its answer. Plans stay under their hashes."""
    await run_sync(service.queue.delete, caller.tenant, id)


@router.get(
    "/plans/{id}/events",
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
    poll: Literal["0", "1"] = "0",
    after: After = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_WIRE_INTEGER)] = None,
) -> Response:
    """A job's story as server-sent events, resumed after `Last-Event-ID`; with `poll=1` as JSON, held by `Prefer`."""

    def page(after: int) -> EventPage:
        done = service.queue.job(caller.tenant, id, with_result=False).state not in ACTIVE
        items = service.queue.events(caller.tenant, id, after)
        return EventPage(items=tuple(items), last=items[-1].sequence if items else after, done=done)

    start = after if last_event_id is None else last_event_id
    return await tell_story(request, service, f"job:{id}", page, start, poll=poll == "1")


@router.post("/plans/{id}/cancel", response_model=JobOut, responses=problems(404, 409))
async def cancel(id: Id, service: Access, caller: Solver) -> Response:
    """Stop a job and drop what it has found."""
    return json_response(await run_sync(service.queue.stop, caller.tenant, id, "cancel"))


@router.post("/plans/{id}/finish", response_model=JobOut, responses=problems(404, 409))
async def finish(id: Id, service: Access, caller: Solver) -> Response:
    """Stop a job and keep the best plan so far as its result."""
    return json_response(await run_sync(service.queue.stop, caller.tenant, id, "finish"))


@router.post("/plans/{id}/retry", status_code=202, response_model=JobOut, responses=problems(404, 409, 429))
async def retry(id: Id, service: Access, caller: Solver) -> Response:
    """Start a job again that has failed or was cancelled."""
    return json_response(await run_sync(service.queue.retry, caller.tenant, id), 202)


async def _settled(service: Service, caller: Principal, job_id: str, until: float) -> JobOut:
    """The job once it has ended, or as it stands at ``until``, of ``time.monotonic``."""
    with service.notifier.listen(f"job:{job_id}") as listener:
        while True:
            job = await run_sync(service.queue.job, caller.tenant, job_id)
            if job.state not in ACTIVE or service.notifier.closed:
                return job
            if not await listener.wait(until - time.monotonic()):
                return job
