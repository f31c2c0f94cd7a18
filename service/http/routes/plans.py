"""``/v1/plans``: a request for a plan becomes a job; the resulting plans are stored under their hashes."""

from __future__ import annotations

import time
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Path, Query, Request, Response

from penstock.examples.tiny import tiny_request
from penstock.schemas.api.jobs import JobOut
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest
from penstock.service.db.tables import ACTIVE
from penstock.service.http.requests.access import Access, Principal, Reader, Solver
from penstock.service.http.requests.bodies import (
    UNCHANGED,
    body_of,
    immutable,
    json_response,
    parsed,
    prefer_wait_s,
    reader,
    takes,
)
from penstock.service.http.requests.once import OnceRoute, answers_again, note_of
from penstock.service.http.routes.jobs import Tag, settled
from penstock.service.jobs.submit import JobOptions
from penstock.service.problems import problems
from penstock.service.services import Service

CACHE_STATUS = {
    "Cache-Status": {"description": "`penstock; hit` where the answer was known before", "schema": {"type": "string"}}
}
router = APIRouter(prefix="/v1", tags=["plans"], route_class=OnceRoute)

PlanRequestBody = Annotated[PlanRequest, Depends(reader(PlanRequest))]
STORED = {"Cache-Status": "penstock; hit"}
"""The header of a stored answer (RFC 9211)."""
Hash = Annotated[str, Path(description="a plan's hash: `sha256:` and 64 hexadecimal digits", max_length=128)]


@router.post(
    "/plans",
    status_code=202,
    responses={
        200: {"model": JobOut, "description": "known, or done in time", "headers": CACHE_STATUS},
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
    """Request a plan: 202 with a job, or 200 with its result when it is stored or found within `Prefer: wait=N`."""
    began = time.monotonic()
    body = await body_of(request)
    options = JobOptions(priority=priority, tag=tag, note=note_of(request))
    submitted = await parsed(request, service.submissions.submit, caller, body, options)
    if submitted.answer is not None:
        return json_response(submitted.answer, headers=STORED)
    return await _answered(request, service, caller, submitted.job_id, began)


@answers_again("/v1/plans")
async def _answered(
    request: Request, service: Service, caller: Principal, job_id: str, began: float | None = None
) -> Response:
    """Return the job once it has ended, or as it is when the wait, counted from ``began``, is over."""
    wait_s = prefer_wait_s(request, service.settings.max_wait_s)
    state, body = await settled(service, caller, job_id, (time.monotonic() if began is None else began) + wait_s)
    headers = {"Location": f"/v1/jobs/{job_id}"} | ({"Preference-Applied": f"wait={wait_s:.0f}"} if wait_s else {})
    return json_response(body, 202 if state in ACTIVE else 200, headers)


@router.get("/plans/{hash}", responses={200: {"model": Plan}, 304: UNCHANGED, **problems(404)})
async def get(request: Request, hash: Hash, service: Access, caller: Reader) -> Response:
    """Return a plan, which never changes."""
    return immutable(request, await run_sync(service.stores.of(caller.tenant).body, "plan", hash), hash)


@router.get("/plans/{hash}/plan-file", responses={200: {"model": PlanFile}, 304: UNCHANGED, **problems(404)})
def plan_file(request: Request, hash: Hash, service: Access, caller: Reader) -> Response:
    """Return a plan with its request: it can be judged, run and explained by itself."""
    return immutable(request, service.stores.of(caller.tenant).plan_file_body(hash), hash)
