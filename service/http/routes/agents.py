"""``/v1/agents``: the nodes' end of runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from penstock.schemas.api.agents import AgentOut, SyncReply, SyncRequest
from penstock.schemas.quantities import AgentName
from penstock.service.http.requests.access import Access, NodeAgent, Reader
from penstock.service.http.requests.bodies import json_response, reader, takes
from penstock.service.problems import problems
from penstock.service.security.authenticator import require_node

router = APIRouter(prefix="/v1", tags=["agents"])

SYNC_EXAMPLE = {
    "incarnation": "5f1c",
    "state_version": 0,
    "devices": [{"id": "node0/0", "kind": "cpu", "memory_bytes": 4_000_000_000}],
    "models": ["gpt"],
    "address": "127.0.0.1",
    "hold": False,
}


@router.post(
    "/agents/{id}:sync",
    response_model=SyncReply,
    responses=problems(409, 413, 415, 422),
    openapi_extra=takes(SyncRequest, SYNC_EXAMPLE),
)
async def sync(
    request: Request,
    caller: NodeAgent,
    id: Annotated[AgentName, Path()],
    sent: Annotated[SyncRequest, Depends(reader(SyncRequest))],
    service: Access,
) -> Response:
    """Store an agent's events and return its assignments; held until those change (`schemas/api/agents.py`)."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    require_node(caller, id)
    return json_response(await service.agents.sync(caller.tenant, id, sent, hung_up))


@router.get("/agents", response_model=list[AgentOut])
def list_agents(service: Access, caller: Reader) -> list[AgentOut]:
    """List all agents that have ever reported to this service."""
    return service.agents.everybody(caller.tenant)
