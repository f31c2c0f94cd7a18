"""Routes that say whether the service lives and works, what it counts, and what it is."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Response

from penstock.planning.code_digest import code_digest
from penstock.service import metrics
from penstock.service.db.gauges import CONTENT_TYPE, exposition
from penstock.service.http.requests.access import Access, Scraper
from penstock.service.problems import problems
from penstock.service.readiness import readiness

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Return 200 while the process responds."""
    return {"status": "ok"}


@router.get("/readyz", responses=problems(503))
def readyz(service: Access) -> dict[str, str | int]:
    """Return 200 if the database is at this version, a worker is alive and nothing is shutting down; else 503."""
    return readiness(service)


@router.get("/metrics", response_class=Response, responses={**problems(503), 200: {"content": {"text/plain": {}}}})
def get_metrics(service: Access, caller: Scraper) -> Response:
    """Return metrics for Prometheus: of this process, and of all that share the database."""
    metrics.waiters.set(service.notifier.waiting())
    return Response(exposition(service.collector), media_type=CONTENT_TYPE)


@router.get("/version")
async def get_version(response: Response) -> dict[str, str]:
    """Return the service's name and version, and the digest of the code that its answers depend on."""
    response.headers["Cache-Control"] = "no-cache"
    return {"name": "penstock", "version": version("penstock"), "code": code_digest()}
