"""``/v1/profiles``, ``/v1/topologies``: documents by their hash; and lists of planners, schemas and examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import BaseModel

from penstock.examples import catalogue
from penstock.examples.tiny import tiny_profile, tiny_request, tiny_topology
from penstock.questions.json_schemas import schema_text
from penstock.schemas.api.jobs import DocumentPage, DocumentStored, ExampleOut, PlannerOut
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology
from penstock.service.http.requests.access import Access, Reader, Solver
from penstock.service.http.requests.bodies import UNCHANGED, Cursor, Limit, immutable, reader, tagged, takes
from penstock.service.http.requests.once import OnceRoute
from penstock.service.jobs import judging
from penstock.service.problems import problems
from penstock.service.runs.live_topology import living_topology

EXAMPLES = (("gpt2-small", "2x4xV100", 64), ("bert-large", "4x8xA100", 256), ("llama-3-70b", "8x8xH100", 1024))

router = APIRouter(prefix="/v1", tags=["documents"], route_class=OnceRoute)

Hash = Annotated[str, Path(description="`sha256:` and 64 hexadecimal digits", max_length=128)]


@router.post(
    "/profiles",
    status_code=201,
    response_model=DocumentStored,
    responses=problems(413, 415, 422),
    openapi_extra=takes(ModelProfile, tiny_profile()),
)
async def post_profile(
    caller: Solver, profile: Annotated[ModelProfile, Depends(reader(ModelProfile))], response: Response, service: Access
) -> DocumentStored:
    """Store a profile; requests may then refer to it by its hash."""
    address = await run_sync(service.stores.of(caller.tenant).put, profile)
    response.headers["Location"] = f"/v1/profiles/{address}"
    return DocumentStored(hash=address, href=f"/v1/profiles/{address}")


@router.post(
    "/topologies",
    status_code=201,
    response_model=DocumentStored,
    responses=problems(413, 415, 422),
    openapi_extra=takes(ClusterTopology, tiny_topology()),
)
async def post_topology(
    caller: Solver,
    topology: Annotated[ClusterTopology, Depends(reader(ClusterTopology))],
    response: Response,
    service: Access,
) -> DocumentStored:
    """Store a topology; requests may then refer to it by its hash."""
    address = await run_sync(service.stores.of(caller.tenant).put, topology)
    response.headers["Location"] = f"/v1/topologies/{address}"
    return DocumentStored(hash=address, href=f"/v1/topologies/{address}")


@router.get("/profiles", response_model=DocumentPage, responses={304: UNCHANGED, **problems(422)})
def list_profiles(
    request: Request, service: Access, caller: Reader, cursor: Cursor = None, limit: Limit = 50
) -> Response:
    """List the stored profiles, the newest first, without their layers."""
    page = service.stores.of(caller.tenant).listed("profile", cursor, limit)
    return tagged(request, page.model_dump_json().encode())


@router.get("/topologies", response_model=DocumentPage, responses={304: UNCHANGED, **problems(422)})
def list_topologies(
    request: Request, service: Access, caller: Reader, cursor: Cursor = None, limit: Limit = 50
) -> Response:
    """List the stored topologies, the newest first, without their devices."""
    page = service.stores.of(caller.tenant).listed("topology", cursor, limit)
    return tagged(request, page.model_dump_json().encode())


@router.get("/profiles/{hash}", responses={200: {"model": ModelProfile}, 304: UNCHANGED, **problems(404)})
def get_profile(request: Request, hash: Hash, service: Access, caller: Reader) -> Response:
    """Return a stored profile."""
    return immutable(request, service.stores.of(caller.tenant).body("profile", hash), hash)


@router.get("/topologies/agents", response_model_exclude_none=True, responses=problems(404, 409))
def get_agents_topology(service: Access, caller: Reader) -> ClusterTopology:
    """Return the devices of the living agents, with links where a stored topology has measured ones."""
    agents, store = service.agents.everybody(caller.tenant), service.stores.of(caller.tenant)
    return living_topology(agents, store.newest_topologies())


@router.get("/topologies/{hash}", responses={200: {"model": ClusterTopology}, 304: UNCHANGED, **problems(404)})
def get_topology(request: Request, hash: Hash, service: Access, caller: Reader) -> Response:
    """Return a stored topology."""
    return immutable(request, service.stores.of(caller.tenant).body("topology", hash), hash)


@router.get("/planners", response_model=list[PlannerOut], responses={304: UNCHANGED})
def get_planners(request: Request, caller: Reader) -> Response:
    """List the planners that a request may name, with their schedules and options."""
    return tagged(request, _json_list(judging.planners()))


@router.get("/schemas/{name}", responses={304: UNCHANGED, **problems(404)})
def get_schema(request: Request, name: str, caller: Reader) -> Response:
    """Return the JSON Schema of a document, such as `plan-request`."""
    return tagged(request, schema_text(name).encode())


@router.get("/examples", response_model=list[ExampleOut], responses={304: UNCHANGED})
def get_examples(request: Request, caller: Reader) -> Response:
    """List example requests that can be POSTed to /v1/plans unchanged."""
    tiny = ExampleOut(name="tiny", summary="four layers on two devices", request=tiny_request())
    profiles = set(catalogue.profile_names())
    return tagged(request, _json_list([tiny, *(_example(*each) for each in EXAMPLES if each[0] in profiles)]))


def _example(model: str, cluster: str, batch: int) -> ExampleOut:
    request = {
        "schema_version": 1,
        "profile": catalogue.profile(model).model_dump(mode="json", exclude_none=True),
        "topology": catalogue.cluster(cluster).model_dump(mode="json", exclude_none=True),
        "global_batch_size": batch,
    }
    return ExampleOut(name=f"{model} on {cluster}", summary=f"{batch} samples per step", request=request)


def _json_list(items: Sequence[BaseModel]) -> bytes:
    return b"[" + b",".join(item.model_dump_json().encode() for item in items) + b"]"
