"""Whether the service lives and works, and what it is."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Response

from penstock.schemas.errors import Unreachable
from penstock.service.problems import problems
from penstock.service.routes.access import Access

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses=problems(503))
def readyz(service: Access) -> dict[str, str | int]:
    """Database and worker do their part; 503 says which does not."""
    revision = service.database.revision()
    if not service.worker.alive():
        raise Unreachable("a thread of the worker has ended", remedy="start the service again")
    return {"status": "ready", "revision": revision, "slots": service.settings.slots}


@router.get("/version")
async def get_version(response: Response) -> dict[str, str]:
    """What answers here."""
    response.headers["Cache-Control"] = "no-cache"
    return {"name": "penstock", "version": version("penstock")}
