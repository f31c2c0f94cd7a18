"""``/v1/sweeps``: one request along many axes."""

from __future__ import annotations

from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Path, Request, Response

from penstock.examples.tiny import tiny_sweep
from penstock.schemas.api.sweep import SweepOut, SweepPage, SweepRequest
from penstock.service.http.requests.access import Access, Principal, Reader, Solver
from penstock.service.http.requests.bodies import UNCHANGED, Cursor, Limit, json_response, reader, tagged, takes
from penstock.service.http.requests.once import OnceRoute, answers_again, note_of
from penstock.service.problems import problems
from penstock.service.services import Service

router = APIRouter(prefix="/v1", tags=["sweeps"], route_class=OnceRoute)

Id = Annotated[str, Path(description="a sweep's id", max_length=64)]


@router.post(
    "/sweeps",
    status_code=201,
    response_model=SweepOut,
    responses=problems(404, 409, 413, 415, 422, 429),
    openapi_extra=takes(SweepRequest, tiny_sweep()),
)
async def start(
    request: Request,
    caller: Solver,
    sweep_request: Annotated[SweepRequest, Depends(reader(SweepRequest))],
    service: Access,
) -> Response:
    """Solve a request for each combination of topologies, batch sizes, planners, schedules and update rules."""
    sweep = await run_sync(service.sweeps.submit, caller, sweep_request, note_of(request), limiter=service.heavy)
    return _created(sweep)


@answers_again("/v1/sweeps")
async def _answered(request: Request, service: Service, caller: Principal, sweep_id: str) -> Response:
    return _created(await run_sync(service.sweeps.sweep, caller.tenant, sweep_id))


def _created(sweep: SweepOut) -> Response:
    return json_response(sweep, 201, {"Location": f"/v1/sweeps/{sweep.id}"})


@router.get("/sweeps", response_model=SweepPage, responses=problems(422))
def list_sweeps(service: Access, caller: Reader, cursor: Cursor = None, limit: Limit = 50) -> SweepPage:
    """List sweeps, the newest first, without their tables."""
    items = service.sweeps.recent(caller.tenant, cursor, limit)
    return SweepPage(items=tuple(items), next_cursor=items[-1].id if len(items) == limit else None)


@router.get("/sweeps/{id}", response_model=SweepOut, responses={304: UNCHANGED, **problems(404)})
def get(request: Request, id: Id, service: Access, caller: Reader) -> Response:
    """Return a sweep with its table: throughput, memory, devices, cost and gap of each case, and the Pareto front."""
    return tagged(request, service.sweeps.sweep(caller.tenant, id).model_dump_json().encode())


@router.post("/sweeps/{id}:cancel", response_model=SweepOut, responses=problems(404, 409))
def cancel(id: Id, service: Access, caller: Solver) -> Response:
    """Stop all cases of a sweep and drop their plans."""
    return json_response(service.sweeps.stop(caller.tenant, id, "cancel"))


@router.post("/sweeps/{id}:finish", response_model=SweepOut, responses=problems(404, 409))
def finish(id: Id, service: Access, caller: Solver) -> Response:
    """Stop all cases of a sweep; each keeps its best plan so far."""
    return json_response(service.sweeps.stop(caller.tenant, id, "finish"))


@router.delete("/sweeps/{id}", status_code=204, responses=problems(404, 409))
def delete(id: Id, service: Access, caller: Solver) -> None:
    """Delete a sweep that has ended, and the jobs that it made."""
    service.sweeps.delete(caller.tenant, id)
