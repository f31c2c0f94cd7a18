"""``/v1/topologies:import``: what schedulers, drivers and fabric tools print, as a topology."""

from __future__ import annotations

from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request, Response

from penstock.examples.tiny import tiny_import
from penstock.schemas.api.topology_import import ImportSource, TopologyImport, TopologyImported
from penstock.schemas.topology import ClusterTopology
from penstock.service.http.requests.access import Access, Solver
from penstock.service.http.requests.bodies import json_response, reader, takes
from penstock.service.http.requests.children import result_of
from penstock.service.http.requests.once import OnceRoute
from penstock.service.jobs.direct_tasks import json_of
from penstock.service.problems import problems
from penstock.service.runs.live_topology import living_topology
from penstock.service.services import Service

router = APIRouter(prefix="/v1", tags=["documents"], route_class=OnceRoute)


@router.post(
    "/topologies:import",
    responses={200: {"model": TopologyImported}, **problems(404, 409, 413, 415, 422, 503, 504)},
    openapi_extra=takes(TopologyImport, tiny_import()),
)
async def import_topology(
    request: Request,
    caller: Solver,
    asked: Annotated[TopologyImport, Depends(reader(TopologyImport))],
    service: Access,
) -> Response:
    """Make one topology from the output of Slurm, Kubernetes, drivers and fabric tools. No named file is opened.

    The answer says what was assumed and which nodes were left out; 422 names what cannot be read, by line and column,
    contradictions, and whatever neither sources nor options say. The topology is kept under its hash, unless `store`
    is false. With `agents` the service's living agents are a source as well.
    """
    if asked.agents:
        asked = await run_sync(_with_agents, service, caller.tenant, asked)
    task = {
        "task": "import",
        "entry": "penstock.importers.cluster.formats:answer",
        "request": asked.model_dump(mode="json"),
        "most_devices": service.settings.max_devices,
        "memory_bytes": service.settings.solve_memory_bytes,
    }
    found = await result_of(request, service, caller.tenant, task)
    if not asked.store:
        return json_response(json_of(found))
    address = await run_sync(_kept, service, caller.tenant, found["topology"], limiter=service.heavy)
    return json_response(json_of({**found, "hash": address}))


def _with_agents(service: Service, tenant: str, asked: TopologyImport) -> TopologyImport:
    living = living_topology(service.agents.everybody(tenant), service.stores.of(tenant).newest_topologies())
    source = ImportSource(text=living.text(), format="agents", name="the living agents")
    return asked.model_copy(update={"sources": (*asked.sources, source)})


def _kept(service: Service, tenant: str, topology: dict[str, Any]) -> str:
    return service.stores.of(tenant).put(ClusterTopology.parse(topology))
