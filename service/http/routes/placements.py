"""``/v1/placements``: which free nodes jobs should get. Nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request, Response

from penstock.examples.tiny import tiny_placement
from penstock.schemas.api.placement import PlacementAnswer, PlacementJob, PlacementRequest
from penstock.service.http.requests.access import Access, Solver
from penstock.service.http.requests.bodies import STREAM, reader, takes
from penstock.service.http.requests.children import answered, streamed, wants_events
from penstock.service.problems import problems
from penstock.service.services import Service

router = APIRouter(prefix="/v1", tags=["questions"])


@router.post(
    "/placements",
    responses={200: {"model": PlacementAnswer, "content": STREAM}, **problems(404, 409, 413, 415, 422, 503, 504)},
    openapi_extra=takes(PlacementRequest, tiny_placement()),
)
async def place(
    request: Request,
    caller: Solver,
    asked: Annotated[PlacementRequest, Depends(reader(PlacementRequest))],
    service: Access,
) -> Response:
    """Choose the nodes of each job, with its plan, the results for other numbers of nodes, and the reasons.

    A job that fits nowhere is an answer, with the bytes that are missing. 409: no device is free; 422 names nodes that
    the topology lacks. Without `time_limit_ns` large sets of nodes get regular layouts only, which takes seconds.
    With `Accept: text/event-stream` each set of nodes that is settled is an event `progress`, the answer is the event
    `result`, and the last one is `end` or `problem`.
    """
    inline = await run_sync(_inline, service, caller.tenant, asked)
    task = {"task": "place", "entry": "penstock.placing:answer", "request": inline.model_dump(mode="json")}
    if wants_events(request):
        return streamed(service, caller.tenant, task, service.settings.max_solve_s, "progress", "result")
    return await answered(request, service, caller.tenant, task, plans=True)


def _inline(service: Service, tenant: str, asked: PlacementRequest) -> PlacementRequest:
    """Return the request with its documents inline, within this service's time limit."""
    store, sizes = service.stores.of(tenant), service.sizes
    topology = store.topology(asked.topology) if isinstance(asked.topology, str) else asked.topology
    sizes.check(topology)
    jobs = []
    for job in asked.jobs:
        fields: dict[str, Any] = {name: getattr(job, name) for name in PlacementJob.model_fields}
        fields["profile"] = store.profile(job.profile) if isinstance(job.profile, str) else job.profile
        jobs.append(PlacementJob(**fields))
        sizes.check(jobs[-1])
    most_ns = round((service.settings.max_solve_s - service.settings.solve_grace_s) * 1e9)
    limit_ns = None if asked.time_limit_ns is None else max(1, min(asked.time_limit_ns, most_ns))
    return asked.model_copy(update={"topology": topology, "jobs": tuple(jobs), "time_limit_ns": limit_ns})
