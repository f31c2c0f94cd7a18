"""Whether the service lives and works, what it counts, and what it is."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Response

from penstock.service import metrics
from penstock.service.http.problems import problems
from penstock.service.http.readiness import readiness
from penstock.service.http.requests.access import Access, Scraper

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses=problems(503))
def readyz(service: Access) -> dict[str, str | int]:
    """The database answers and is of this version, a worker lives, nothing is ending; 503 says what fails."""
    return readiness(service)


@router.get("/metrics", response_class=Response, responses={**problems(503), 200: {"content": {"text/plain": {}}}})
def get_metrics(service: Access, caller: Scraper) -> Response:
    """Metrics for Prometheus: of this process, and of all that share the database."""
    metrics.waiters.set(service.notifier.waiting())
    return Response(metrics.exposition(service.collector), media_type=metrics.CONTENT_TYPE)


@router.get("/version")
async def get_version(response: Response) -> dict[str, str]:
    """What answers here."""
    response.headers["Cache-Control"] = "no-cache"
    return {"name": "penstock", "version": version("penstock")}
