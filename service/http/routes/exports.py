"""``/v1/plans/{hash}/…``: the programs of a stored plan, and its other forms."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated
from urllib.parse import quote

from anyio.to_thread import run_sync
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from penstock.exporting.forms import EXPORTS, FORMS, MEDIA_TYPES, one_file, written
from penstock.manifests.against import of_topology, refuse_absent
from penstock.schemas.quantities import MAX_WIRE_INTEGER, ContentHash
from penstock.schemas.ranks.launch import LaunchSettings
from penstock.service.http.requests.access import Access, Reader
from penstock.service.http.requests.bodies import UNCHANGED, immutable
from penstock.service.http.routes.plans import Hash
from penstock.service.problems import problems

router = APIRouter(prefix="/v1", tags=["plans"])

To = StrEnum("To", {name.replace("-", "_"): name for name in EXPORTS})  # type: ignore[misc]
TYPES = (
    {form.media_type for form in FORMS.values()} | set(MEDIA_TYPES.values()) | {"application/toml", "application/zip"}
)


class ExportQuery(LaunchSettings):
    """The form that a plan is exported to and, where that is a scheduler's, how its ranks are launched."""

    to: To
    against: ContentHash | None = Field(
        default=None, description="hash of a topology: a plan for nodes that it does not have is refused"
    )


Rank = Annotated[int, Path(ge=0, le=MAX_WIRE_INTEGER)]


@router.get("/plans/{hash}/programs", responses={304: UNCHANGED, **problems(404, 422)})
async def programs(request: Request, hash: Hash, service: Access, caller: Reader) -> Response:
    """Return the programs of all ranks, lowered from the plan."""
    texts = await run_sync(service.programs.all, caller.tenant, hash, limiter=service.heavy)
    return immutable(request, b"[" + b",".join(texts) + b"]", hash)


@router.get("/plans/{hash}/programs/{rank}", responses={304: UNCHANGED, **problems(404, 422)})
async def program(request: Request, hash: Hash, rank: Rank, service: Access, caller: Reader) -> Response:
    """Return the program of one rank."""
    text = await run_sync(service.programs.one, caller.tenant, hash, rank, limiter=service.heavy)
    return immutable(request, text, hash)


@router.get(
    "/plans/{hash}:export",
    responses={
        200: {"content": {media_type: {} for media_type in sorted(TYPES)}, "description": "a file"},
        **problems(404, 409, 422),
    },
    response_class=Response,
)
async def export(hash: Hash, query: Annotated[ExportQuery, Query()], service: Access, caller: Reader) -> Response:
    """Return the plan in another form, as a file: `chrome-trace` for Perfetto, `csv` for PyTorch, `svg`, `report`, …

    For schedulers (`sbatch`, `trainjob`, `jobset`, …) the other parameters say how its ranks are launched; a form of
    several files comes as a zip archive. With `against` a plan for nodes that are gone is a 409 that names them. The
    header `Penstock-Notes` (percent-encoded UTF-8) names the parts of the plan that the file cannot hold.
    """
    store = service.stores.of(caller.tenant)
    file = await run_sync(store.plan_file, hash)
    if query.against is not None:
        now = await run_sync(store.topology, query.against)
        await run_sync(refuse_absent, file, of_topology(now, f"the topology {query.against}"))
    settings = LaunchSettings.parse(query.model_dump(include=query.model_fields_set - {"to", "against"}))
    files = await run_sync(written, file, query.to.value, settings, limiter=service.heavy)
    download = await run_sync(one_file, file, query.to.value, files)
    headers = {
        "Content-Disposition": f'attachment; filename="{download.name}"',
        "Cache-Control": "private, max-age=3600",
    }
    if download.notes:
        headers["Penstock-Notes"] = quote("; ".join(download.notes)[:2000], safe=" ;:,.()/'")
    return Response(download.body, media_type=download.media_type, headers=headers)
