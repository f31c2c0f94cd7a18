"""``/v1/plans/{id}/…``: a plan with its request, its programs, and its other forms."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal
from urllib.parse import quote

from anyio.to_thread import run_sync
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from penstock.manifests.against import of_topology, refuse_absent
from penstock.schemas.launch import LaunchSettings
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.quantities import MAX_WIRE_INTEGER, ContentHash
from penstock.service.http.exports import EXPORTS, FORMS, MEDIA_TYPES, one_file, written
from penstock.service.http.problems import problems
from penstock.service.http.routes.access import Access, Reader
from penstock.service.http.routes.bodies import UNCHANGED, immutable, tagged
from penstock.service.http.routes.plans import Id

router = APIRouter(prefix="/v1", tags=["plans"])

To = StrEnum("To", {name.replace("-", "_"): name for name in EXPORTS})  # type: ignore[misc]
TYPES = (
    {form.media_type for form in FORMS.values()} | set(MEDIA_TYPES.values()) | {"application/toml", "application/zip"}
)


class ExportAsked(LaunchSettings):
    """What a plan is exported to, and how its ranks are launched where it is a scheduler."""

    to: To
    against: ContentHash | None = Field(
        default=None, description="hash of a topology: a plan for nodes that it does not have is refused"
    )


Rank = Annotated[int, Path(ge=0, le=MAX_WIRE_INTEGER)]


@router.get("/plans/{id}/plan", responses={200: {"model": PlanFile}, 304: UNCHANGED, **problems(404, 409, 422)})
def plan_file(request: Request, id: Id, service: Access, caller: Reader, best: Literal["0", "1"] = "0") -> Response:
    """The final plan with its request inline: it can be judged, run and explained alone.

    With `best=1` a job that still runs gives its best plan so far.
    """
    planning, store = service.planning.of(caller.tenant), service.stores.of(caller.tenant)
    if best == "1" and planning.is_open(id):
        return tagged(request, store.file_of(planning.incumbent(id)).canonical_json())
    address = planning.plan_hash(id)
    return immutable(request, store.plan_file_body(address), address)


@router.get("/plans/{id}/incumbent", responses={200: {"model": Plan}, 304: UNCHANGED, **problems(404, 409)})
def incumbent(request: Request, id: Id, service: Access, caller: Reader) -> Response:
    """The best plan of a job so far."""
    return tagged(request, service.planning.of(caller.tenant).incumbent(id).canonical_json())


@router.get("/plans/{id}/programs", responses={304: UNCHANGED, **problems(404, 409, 422)})
async def programs(request: Request, id: Id, service: Access, caller: Reader) -> Response:
    """The programs of all ranks, lowered from the plan."""
    address = await run_sync(service.planning.of(caller.tenant).plan_hash, id)
    found = await run_sync(service.programs.all, caller.tenant, address, limiter=service.heavy)
    return immutable(request, b"[" + b",".join(found) + b"]", address)


@router.get("/plans/{id}/programs/{rank}", responses={304: UNCHANGED, **problems(404, 409, 422)})
async def program(request: Request, id: Id, rank: Rank, service: Access, caller: Reader) -> Response:
    """The program of one rank."""
    address = await run_sync(service.planning.of(caller.tenant).plan_hash, id)
    found = await run_sync(service.programs.one, caller.tenant, address, rank, limiter=service.heavy)
    return immutable(request, found, address)


@router.get(
    "/plans/{id}/export",
    responses={
        200: {"content": {media_type: {} for media_type in sorted(TYPES)}, "description": "a file"},
        **problems(404, 409, 422),
    },
    response_class=Response,
)
async def export(id: Id, asked: Annotated[ExportAsked, Query()], service: Access, caller: Reader) -> Response:
    """The plan in another form, as a file: `chrome-trace` for Perfetto, `csv` for PyTorch, `svg`, `report`, …

    For schedulers (`sbatch`, `trainjob`, `jobset`, …) the other parameters say how its ranks are launched; a form of
    several files comes as a zip archive. With `against` a plan for nodes that are gone is a 409 that names them. The
    header `Penstock-Notes` (percent-encoded UTF-8) says what of the plan a file has no place for.
    """
    address = await run_sync(service.planning.of(caller.tenant).plan_hash, id)
    store = service.stores.of(caller.tenant)
    file = await run_sync(store.plan_file, address)
    if asked.against is not None:
        now = await run_sync(store.topology, asked.against)
        await run_sync(refuse_absent, file, of_topology(now, f"the topology {asked.against}"))
    settings = LaunchSettings.parse(asked.model_dump(include=asked.model_fields_set - {"to", "against"}))
    files = await run_sync(written, file, asked.to.value, settings, limiter=service.heavy)
    made = await run_sync(one_file, file, asked.to.value, files)
    headers = {"Content-Disposition": f'attachment; filename="{made.name}"', "Cache-Control": "private, max-age=3600"}
    if made.notes:
        headers["Penstock-Notes"] = quote("; ".join(made.notes)[:2000], safe=" ;:,.()/'")
    return Response(made.body, media_type=made.media_type, headers=headers)
