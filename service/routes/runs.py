"""``/v1/runs``: plans on agents."""

from __future__ import annotations

import time
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Request, Response

from penstock.schemas.jobs import RunOut, RunPage, RunRequest
from penstock.schemas.trace import Trace
from penstock.service import judging
from penstock.service.problems import problems
from penstock.service.routes.access import Access
from penstock.service.routes.bodies import json_response, prefer_wait_s, reader, tagged, takes
from penstock.service.runs import LIVE
from penstock.service.samples import tiny_plan_file
from penstock.service.services import Service

router = APIRouter(prefix="/v1", tags=["runs"])

RUN_EXAMPLE = {"schema_version": 1, "plan": tiny_plan_file(), "model": "gpt", "steps": 3, "check": True}


@router.post(
    "/runs",
    status_code=201,
    response_model=RunOut,
    responses=problems(404, 409, 413, 415, 422),
    openapi_extra=takes(RunRequest, RUN_EXAMPLE),
)
async def start(wanted: Annotated[RunRequest, Depends(reader(RunRequest))], service: Access) -> Response:
    """Train with a plan on the agents whose devices it names; `model` is a key of their configuration."""
    run = await run_sync(_start, service, wanted, limiter=service.heavy)
    return json_response(run, 201, {"Location": f"/v1/runs/{run.id}"})


@router.get("/runs", response_model=RunPage, responses=problems(422))
def list_runs(
    service: Access,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> RunPage:
    """Runs, the newest first."""
    items = service.runs.recent(cursor, limit)
    return RunPage(items=tuple(items), next_cursor=items[-1].id if len(items) == limit else None)


@router.get("/runs/{id}", response_model=RunOut, responses=problems(404))
async def get(request: Request, id: str, service: Access) -> Response:
    """A run as it stands; with `Prefer: wait=N`, once it differs from `If-None-Match`, or has ended."""
    until = time.monotonic() + prefer_wait_s(request, service.settings.max_wait_s)
    any_change = "if-none-match" in request.headers
    with service.notifier.listen(f"run:{id}") as listener:
        while True:
            run = await run_sync(service.runs.run, id)
            answer = tagged(request, run.model_dump_json().encode())
            settled = answer.status_code == 200 if any_change else run.state not in LIVE
            if settled or service.notifier.closed or not await listener.wait(until - time.monotonic()):
                return answer


@router.post("/runs/{id}/cancel", response_model=RunOut, responses=problems(404, 409))
def cancel(id: str, service: Access) -> Response:
    """Stop a run on all its agents."""
    return json_response(service.runs.cancel(id))


@router.get("/runs/{id}/trace", response_model=Trace, responses=problems(404))
def trace(request: Request, id: str, service: Access) -> Response:
    """What the ranks measured in the traced steps."""
    return tagged(request, service.runs.trace(id).model_dump_json().encode())


def _start(service: Service, wanted: RunRequest) -> RunOut:
    lowered = judging.lowered(service.planning.plan_file(wanted.plan))
    service.planning.keep(lowered.file)
    return service.runs.create(wanted, lowered, service.agents.everybody())
