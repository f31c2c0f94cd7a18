"""``/v1/layouts:import``: another trainer's layout as a plan, judged and compared with the best plans."""

from __future__ import annotations

from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request, Response

from penstock.examples.tiny import tiny_layout
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest
from penstock.service.http.requests.access import Access, Solver
from penstock.service.http.requests.bodies import reader, takes
from penstock.service.http.requests.children import answered
from penstock.service.problems import problems
from penstock.service.services import Service

router = APIRouter(prefix="/v1", tags=["questions"])


@router.post(
    "/layouts:import",
    responses={200: {"model": LayoutImported}, **problems(404, 413, 415, 422, 503, 504)},
    openapi_extra=takes(LayoutRequest, tiny_layout()),
)
async def import_layout(
    request: Request,
    caller: Solver,
    asked: Annotated[LayoutRequest, Depends(reader(LayoutRequest))],
    service: Access,
) -> Response:
    """Convert a layout of Megatron, torchtitan or DeepSpeed to a plan with simulated times; nothing is stored.

    `rivals` has the best plan that the same trainer can express, and the best of all; `compare: false` leaves them
    out. Limits of the request hold for each of their solves. A layout that does not fit memory is an answer; 422 names
    what cannot be read, by line and column, and what does not go with model, cluster and batch.
    """
    given = await run_sync(_inline, service, caller.tenant, asked)
    task = {
        "task": "layout",
        "entry": "penstock.questions.layouts:import_layout",
        "request": given.model_dump(mode="json"),
    }
    return await answered(request, service, caller.tenant, task, plans=given.compare)


def _inline(service: Service, tenant: str, asked: LayoutRequest) -> LayoutRequest:
    """Return the request with its documents inline, within this service's limits."""
    request = service.stores.of(tenant).resolve(asked.request)
    service.sizes.check(request)
    return asked.model_copy(update={"request": request})
