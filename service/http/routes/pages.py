"""Pages for people. Each is rendered here and readable without a script; scripts add live updates and drawings."""

from __future__ import annotations

from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from penstock.schemas.api.jobs import JobState, ProblemDetails
from penstock.schemas.errors import PenstockError
from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.service.http.requests.access import Access, Reader, Runner, Solver
from penstock.service.http.requests.bodies import json_response
from penstock.service.http.routes import questions
from penstock.service.pages import acting, assets, comparison, fits_page, overview, question_page, timelines
from penstock.service.pages.sources import Sources
from penstock.service.pages.templating import PageRoute, found_page, page
from penstock.service.problems import TaskFailed

router = APIRouter(tags=["pages"], include_in_schema=False, route_class=PageRoute, default_response_class=HTMLResponse)

Cursor = Annotated[str | None, Query(max_length=64)]
Ids = Annotated[list[str], Query(max_length=200)]
Time = Annotated[int, Query(ge=0, le=MAX_WIRE_INTEGER)]
FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}


@router.get("/")
def home(request: Request, service: Access, who: Reader) -> Response:
    """Show the latest jobs, plans and runs, and where to begin."""
    return page(request, "home.html", **overview.home(Sources.of(service, who)))


@router.get("/plan")
def plan_form(request: Request, service: Access, who: Reader) -> Response:
    """Show the form of a plan request."""
    fields = {name: request.query_params.getlist(name) for name in request.query_params}
    return page(request, "plan_form.html", **acting.form(Sources.of(service, who), fields))


@router.post("/plan")
async def submit(request: Request, service: Access, who: Solver) -> Response:
    """Request a plan: continue to its job or plan, or return to the form with errors at its fields."""
    return await _act(request, acting.submit, Sources.of(service, who), await acting.posted(request))


@router.post("/compare")
async def submit_sweep(request: Request, service: Access, who: Solver) -> Response:
    """Submit a comparison of every planner, or of the values that the form lists, and continue to its table."""
    return await _act(request, acting.submit_sweep, Sources.of(service, who), await acting.posted(request))


@router.get("/fits")
async def fits(request: Request, service: Access, who: Reader) -> Response:
    """Show which degrees of parallelism are legal and fit, by the fields of the address."""
    shown = await run_sync(fits_page.fits, service.sizes, dict(request.query_params), limiter=service.heavy)
    return page(request, "fits.html", **shown)


@router.get("/questions")
def question_form(request: Request, who: Solver, name: str | None = None) -> Response:
    """List the questions with an immediate answer, or show the form of one."""
    return page(request, "questions.html", **question_page.form(name))


@router.post("/questions")
async def ask(request: Request, service: Access, who: Solver, name: str) -> Response:
    """Answer the question of the form, or say what is wrong with it."""
    text = (await acting.posted(request)).get("request", [""])[0]
    result: Any = None
    error: ProblemDetails | None = None
    try:
        store = service.stores.of(who.tenant)
        document = await run_sync(question_page.read, store, service.sizes, name, text)
        result = await questions.answer(request, service, who.tenant, name, document)
    except PenstockError as refused:
        error = ProblemDetails.of(refused)
    except TaskFailed as failed:
        error = failed.problem
    shown = question_page.form(name, text, result, error)
    return page(request, "questions.html", 200 if error is None else error.status, **shown)


@router.get("/jobs")
def jobs(
    request: Request, service: Access, who: Reader, cursor: Cursor = None, state: JobState | None = None
) -> Response:
    """List jobs, the newest first."""
    return page(request, "jobs.html", **overview.jobs(Sources.of(service, who), cursor, state))


@router.get("/jobs/{id}")
def job(request: Request, id: str, service: Access, who: Reader) -> Response:
    """Show a job and its progress."""
    return page(request, "job.html", **overview.job(Sources.of(service, who), id))


@router.post("/jobs/{id}/{verb}")
async def act_on_job(request: Request, id: str, verb: acting.JobVerb, service: Access, who: Solver) -> Response:
    """Cancel, finish or retry a job, and show it again."""
    await acting.posted(request)
    await run_sync(acting.on_job, Sources.of(service, who), id, verb)
    return RedirectResponse(f"/jobs/{id}", 303)


@router.get("/plans")
def plan_file_form(request: Request, who: Solver) -> Response:
    """Show the form that opens a plan file."""
    return page(request, "open_plan.html", error=None, text="")


@router.post("/plans")
async def open_plan(request: Request, service: Access, who: Solver) -> Response:
    """Keep a plan file and show it, or say what is wrong with it."""
    sources, values = Sources.of(service, who), await acting.posted(request)
    outcome = await run_sync(acting.open_plan, sources, values, limiter=service.heavy)
    if outcome.goes_to is not None:
        return RedirectResponse(outcome.goes_to, 303)
    return page(request, "open_plan.html", outcome.shown["error"].status, **outcome.shown)


@router.get("/plans/{id}")
async def plan(request: Request, id: str, service: Access, who: Reader) -> Response:
    """Show a plan, by its hash or by its job: figures, bounds, timeline, memory, explanation, downloads."""
    shown = await run_sync(acting.plan, Sources.of(service, who), id, limiter=service.heavy)
    return found_page(request, "plan.html", shown, f"/jobs/{id}")


@router.get("/plans/{id}/timeline")
async def plan_timeline(
    id: str,
    service: Access,
    who: Reader,
    start: Annotated[int, Query(alias="from", ge=0, le=MAX_WIRE_INTEGER)] = 0,
    to: Time = 0,
    columns: Annotated[int, Query(ge=0, le=20_000)] = 0,
) -> Response:
    """Return the timeline as data; with `from`, `to` and `columns` a part of it in more detail."""
    part = timelines.Part(start, to, columns) if columns else None
    sources = Sources.of(service, who)
    timeline = await run_sync(acting.plan_timeline, sources, id, part, limiter=service.heavy)
    return json_response(timeline, headers={"Cache-Control": "private, max-age=3600"})


@router.get("/plans/{id}/report")
async def plan_report(id: str, service: Access, who: Reader) -> Response:
    """Return the plan's report as one file."""
    text = await run_sync(timelines.report, Sources.of(service, who), id, limiter=service.heavy)
    return HTMLResponse(text, headers=acting.as_file("report.html"))


@router.get("/plans/{id}/request")
def plan_request(id: str, service: Access, who: Reader) -> Response:
    """Return the request of a plan or job, with its documents inline."""
    return json_response(acting.whole_request(Sources.of(service, who), id), headers=acting.as_file("request.json"))


@router.get("/plans/{id}/what-if")
async def what_if(
    request: Request,
    id: str,
    service: Access,
    who: Solver,
    change: Ids = [],  # noqa: B006
    why_not: Ids = [],  # noqa: B006
) -> Response:
    """Show the effect of changes of the request, and of other degrees: the named ones, or else the usual ones."""
    async with service.children.place(who.tenant):
        shown = await run_sync(acting.what_if, Sources.of(service, who), id, change, why_not)
    return page(request, "what_if.html", **shown)


@router.get("/compare")
def compare(request: Request, service: Access, who: Reader, job: Ids = [], plan: Ids = []) -> Response:  # noqa: B006
    """Show jobs and plans side by side."""
    return page(request, "compare.html", **comparison.chosen(Sources.of(service, who), job, plan))


@router.get("/sweeps")
def sweeps(request: Request, service: Access, who: Reader, cursor: Cursor = None) -> Response:
    """List sweeps, the newest first."""
    return page(request, "sweeps.html", **overview.sweeps(Sources.of(service, who), cursor))


@router.get("/sweeps/{id}")
def sweep(request: Request, id: str, service: Access, who: Reader) -> Response:
    """Show a sweep's table, which fills in, and its Pareto front."""
    return page(request, "compare.html", **comparison.of_sweep(Sources.of(service, who), id))


@router.post("/sweeps/{id}/cancel")
async def cancel_sweep(request: Request, id: str, service: Access, who: Solver) -> Response:
    """Cancel unfinished cases, and show the sweep again."""
    await acting.posted(request)
    await run_sync(Sources.of(service, who).cancel_sweep, id)
    return RedirectResponse(f"/sweeps/{id}", 303)


@router.get("/runs")
def runs(request: Request, service: Access, who: Reader, cursor: Cursor = None) -> Response:
    """List runs, the newest first."""
    return page(request, "runs.html", **overview.runs(Sources.of(service, who), cursor))


@router.get("/runs/{id}")
def run(request: Request, id: str, service: Access, who: Reader) -> Response:
    """Show a run and its progress."""
    return page(request, "run.html", **overview.run(Sources.of(service, who), id))


@router.get("/runs/{id}/timeline")
async def run_timeline(
    id: str,
    service: Access,
    who: Reader,
    start: Annotated[int, Query(alias="from", ge=0, le=MAX_WIRE_INTEGER)] = 0,
    to: Time = 0,
    columns: Annotated[int, Query(ge=0, le=20_000)] = 0,
) -> Response:
    """Return the predicted and the measured timeline as data."""
    part = timelines.Part(start, to, columns) if columns else None
    sources = Sources.of(service, who)
    return json_response(await run_sync(acting.run_timeline, sources, id, part, limiter=service.heavy))


@router.get("/runs/{id}/report")
async def run_report(id: str, service: Access, who: Reader) -> Response:
    """Return the run's report as one file."""
    text = await run_sync(timelines.run_report, Sources.of(service, who), id, limiter=service.heavy)
    return HTMLResponse(text, headers=acting.as_file("report.html"))


@router.post("/runs/{id}/cancel")
async def cancel_run(request: Request, id: str, service: Access, who: Runner) -> Response:
    """Stop a run on all its agents, and show it again."""
    await acting.posted(request)
    await run_sync(Sources.of(service, who).cancel_run, id)
    return RedirectResponse(f"/runs/{id}", 303)


@router.get("/agents")
def agents(request: Request, service: Access, who: Reader) -> Response:
    """List the agents with their devices and models."""
    return page(request, "agents.html", **overview.agents(Sources.of(service, who)))


@router.get("/cluster")
def cluster(request: Request, service: Access, who: Reader) -> Response:
    """Show the devices of living agents, and their links."""
    return page(request, "cluster.html", **overview.cluster(Sources.of(service, who)))


@router.get("/health")
def health(request: Request, service: Access, who: Reader) -> Response:
    """Show whether the service can take work, and its workers."""
    return page(request, "health.html", **overview.health(Sources.of(service, who)))


@router.get("/favicon.ico")
async def favicon() -> Response:
    """Return the icon, for clients that request it at its usual address."""
    icon = assets.find("icon.svg")
    return Response(icon.body, media_type=icon.media_type, headers={"Cache-Control": "public, max-age=86400"})


@router.get("/static/{edition}/{name}")
async def static(edition: str, name: str) -> Response:
    """Return a script, a style or a picture of the pages; a file of an older edition is not cached."""
    asset = assets.find(name)
    headers = FOR_EVER if edition == assets.edition() else {"Cache-Control": "no-store"}
    return Response(asset.body, media_type=asset.media_type, headers=headers)


async def _act(request: Request, act: Any, sources: Sources, values: dict[str, list[str]]) -> Response:
    outcome = await run_sync(act, sources, values)
    if outcome.goes_to is not None:
        return RedirectResponse(outcome.goes_to, 303)
    return page(request, "plan_form.html", 422, **outcome.shown)
