"""Pages for people: what there is, and the report of a plan or of a run. Rendered here, nothing is fetched."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.resources import files

from anyio.to_thread import run_sync
from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from penstock.report.words import duration, percent
from penstock.service import judging
from penstock.service.problems import problems
from penstock.service.routes.access import Access

SHOWN = 50

router = APIRouter(tags=["pages"], include_in_schema=False)


@router.get("/", response_class=HTMLResponse)
def index(service: Access) -> HTMLResponse:
    """The newest jobs and runs, and all agents."""
    page = _template().render(
        style=(files("penstock.report") / "style.css").read_text(encoding="utf-8"),
        version=version("penstock"),
        jobs=service.queue.recent(None, SHOWN),
        runs=service.runs.recent(None, SHOWN),
        agents=service.agents.everybody(),
    )
    return _page(page, scripts=False)


@router.get("/plans/{id}", response_class=HTMLResponse, responses=problems(404, 409))
async def plan(id: str, service: Access) -> HTMLResponse:
    """The report of a plan, by its hash or by its job."""

    def render() -> str:
        return judging.report(service.store.plan_file(service.planning.plan_hash(id)))

    return _page(await run_sync(render, limiter=service.heavy))


@router.get("/runs/{id}", response_class=HTMLResponse, responses=problems(404))
async def run(id: str, service: Access) -> HTMLResponse:
    """The report of a run's plan, with the measured timeline beside the predicted one."""

    def render() -> str:
        trace = service.runs.trace(id)
        return judging.report(service.store.plan_file(trace.plan_hash), trace)

    return _page(await run_sync(render, limiter=service.heavy))


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("penstock.service"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals |= {"duration": duration, "percent": percent}
    return environment.get_template("index.html")


def _page(text: str, *, scripts: bool = True) -> HTMLResponse:
    policy = "default-src 'none'; style-src 'unsafe-inline'" + ("; script-src 'unsafe-inline'" if scripts else "")
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})
