"""``/v1/plans:…``, ``/v1/profiles:calibrate…``, ``/v1/fits``: questions about documents; nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Request, Response

from penstock.examples.tiny import tiny_calibration, tiny_fits, tiny_plan_file, tiny_request, tiny_throughput
from penstock.schemas.api.calibration import CalibrationOut, CalibrationRequest
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.api.fits import FitsAnswer, FitsRequest
from penstock.schemas.api.jobs import PlanComparison, RequestChecked, Simulation, Verdict
from penstock.schemas.api.throughput import ThroughputOut, ThroughputRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.schemas.request import PlanRequest
from penstock.service.http.requests.access import Access, Reader, Solver
from penstock.service.http.requests.bodies import STREAM, json_response, reader, takes
from penstock.service.http.requests.children import answered, messages_of, streamed, wants_events
from penstock.service.http.routes.plans import Asked, Hash
from penstock.service.jobs import judging
from penstock.service.jobs.direct_tasks import json_of, unless_gone
from penstock.service.problems import problems
from penstock.service.services import Service

router = APIRouter(prefix="/v1", tags=["questions"])

File = Annotated[PlanFile, Depends(reader(PlanFile))]
Texts = Annotated[list[str], Query(max_length=1024)]


@router.post(
    "/plans:validate",
    response_model=RequestChecked,
    responses=problems(404, 413, 415, 422),
    openapi_extra=takes(PlanRequest, tiny_request()),
)
async def validate(caller: Solver, asked: Asked, service: Access) -> RequestChecked:
    """Check a request as far as that is possible without solving it; 422 names all of its faults at once."""
    address, known = await run_sync(service.planning.of(caller.tenant).checked, asked)
    return RequestChecked(request_hash=address, cached=known)


@router.post(
    "/plans:verify",
    response_model=Verdict,
    responses=problems(413, 415, 422),
    openapi_extra=takes(PlanFile, tiny_plan_file()),
)
async def verify(caller: Solver, file: File, service: Access) -> Verdict:
    """Judge a plan of one's own: `valid`, or a sentence per fault. A plan with faults is an answer, not an error."""
    return await run_sync(judging.verdict, file, limiter=service.heavy)


@router.post(
    "/plans:simulate",
    response_model=Simulation,
    responses=problems(413, 415, 422),
    openapi_extra=takes(PlanFile, tiny_plan_file()),
)
async def simulate(caller: Solver, file: File, service: Access) -> Response:
    """Return a plan of one's own with its simulated prediction; 422 when it cannot be simulated (deadlock, shape)."""
    return json_response(await run_sync(judging.simulation, file, limiter=service.heavy))


@router.post(
    "/plans:compare",
    responses={
        200: {"model": list[PlanComparison], "content": STREAM},
        **problems(404, 413, 415, 422, 503, 504),
    },
    openapi_extra=takes(PlanRequest, tiny_request()),
)
async def compare(
    request: Request,
    caller: Solver,
    asked: Asked,
    service: Access,
    planner: Annotated[list[str], Query(max_length=64)] = [],  # noqa: B006  (FastAPI reads it, nothing writes it)
    schedule: Annotated[list[str], Query(max_length=64)] = [],  # noqa: B006
    layout: Annotated[list[str], Query(max_length=64)] = [],  # noqa: B006
) -> Response:
    """Run each planner with each of its schedules on the same request; `planner` and `schedule` restrict them.

    Each `layout` of one's own (`tensor=8,pipeline=4,micro-batch=1`) has a row of planner `yours`. A planner that cannot
    take the request has a row with status `unsupported`, whose `why` says what it can take.
    With `Accept: text/event-stream` each row is an event `row` as soon as it is found, and the last one is `end` or
    `problem`.
    """
    task, limit_s = await run_sync(_comparison, service, caller.tenant, asked, planner, schedule, layout)
    if wants_events(request):
        return streamed(service, caller.tenant, task, limit_s, "row")
    rows = await unless_gone(request.receive, lambda: messages_of(service, caller.tenant, task, limit_s, "row"))
    return json_response(json_of(rows))


class How:
    """How a plan is to be explained: query parameters."""

    def __init__(
        self,
        what_if: Annotated[list[str], Query(max_length=64)] = [],  # noqa: B006
        planner: str | None = None,
        max_plans: Annotated[int, Query(ge=1, le=10_000)] = 20,
        cut: Texts = [],  # noqa: B006
        replicas: Annotated[list[int], Query(max_length=1024)] = [],  # noqa: B006
        devices: Texts = [],  # noqa: B006
        schedule: str | None = None,
        micro_batches: Annotated[int | None, Query(ge=1, le=MAX_WIRE_INTEGER)] = None,
        why_not: Annotated[list[str], Query(max_length=16)] = [],  # noqa: B006
    ) -> None:
        layout = {
            "cuts": cut,
            "replicas": replicas,
            "devices": [[name for name in names.split(",") if name] for names in devices],
            "schedule": schedule,
            "num_micro_batches": micro_batches,
        }
        self.arguments: dict[str, Any] = {
            "what_if": what_if,
            "planner": planner,
            "max_plans": max_plans,
            "layout": layout if cut else None,
            "why_not": why_not,
        }
        self.plans = bool(what_if or why_not)


@router.post(
    "/plans:explain",
    responses={200: {"model": Explanation}, **problems(413, 415, 422, 503, 504)},
    openapi_extra=takes(PlanFile, tiny_plan_file()),
)
async def explain(
    request: Request, caller: Solver, file: File, service: Access, how: Annotated[How, Depends()]
) -> Response:
    """Explain what a plan's time is made of, what limits it, and what would help; 422 when it cannot be simulated.

    `what_if` names changes to try (`bandwidth=2`, `devices=+8`, …; `default` the usual ones, if the plan has at most
    50,000 operations and 2,048 GPUs, `all` those of any plan), `planner` which one plans again for them. With `cut`
    (layers or their names, where stages begin) the answer compares a layout of one's own, whose `replicas` or `devices`
    (one entry a stage, names separated by commas), `schedule` and `micro_batches` may be given. `why_not` names other
    degrees and sharding to compare (`tensor=4`, `sharding=none`, both with a comma, `next` for the next best degrees,
    `default` for these where there are any, on up to 2,048 GPUs).
    """
    return await _explained(request, service, caller.tenant, file, how)


@router.get("/plans/{hash}:explain", responses={200: {"model": Explanation}, **problems(404, 422, 503, 504)})
async def explain_stored(
    request: Request, hash: Hash, service: Access, caller: Reader, how: Annotated[How, Depends()]
) -> Response:
    """Explain a stored plan."""
    file = await run_sync(service.stores.of(caller.tenant).plan_file, hash)
    return await _explained(request, service, caller.tenant, file, how)


@router.post(
    "/profiles:calibrate",
    responses={200: {"model": CalibrationOut}, **problems(413, 415, 422, 503, 504)},
    openapi_extra=takes(CalibrationRequest, tiny_calibration()),
)
async def calibrate(
    request: Request,
    caller: Solver,
    asked: Annotated[CalibrationRequest, Depends(reader(CalibrationRequest))],
    service: Access,
) -> Response:
    """Correct a profile and a topology by the traces of runs (`GET /v1/runs/{id}/trace`); nothing is stored."""
    task = {
        "task": "calibrate",
        "entry": "penstock.calibration.calibrate:answer",
        "request": asked.model_dump(mode="json"),
    }
    return await answered(request, service, caller.tenant, task)


@router.post(
    "/profiles:calibrate-throughput",
    responses={200: {"model": ThroughputOut}, **problems(413, 415, 422, 503, 504)},
    openapi_extra=takes(ThroughputRequest, tiny_throughput()),
)
async def calibrate_throughput(
    request: Request,
    caller: Solver,
    asked: Annotated[ThroughputRequest, Depends(reader(ThroughputRequest))],
    service: Access,
) -> Response:
    """Fold the pace of one run into a kind of device, and predict other plans before and after; nothing is stored."""
    task = {
        "task": "calibrate-throughput",
        "entry": "penstock.calibration.throughput:answer",
        "request": asked.model_dump(mode="json"),
    }
    return await answered(request, service, caller.tenant, task)


@router.post(
    "/fits",
    responses={200: {"model": FitsAnswer}, **problems(404, 413, 415, 422)},
    openapi_extra=takes(FitsRequest, tiny_fits()),
)
async def fits(
    caller: Solver, asked: Annotated[FitsRequest, Depends(reader(FitsRequest))], service: Access
) -> Response:
    """Which degrees of parallelism are legal for a transformer on a cluster, and which fit into its memory.

    Closed forms, no search. That nothing fits is an answer; 422 names a degree that no layout can have, with the rule
    and the nearest legal values.
    """
    return json_response(await run_sync(_fitting, service, caller.tenant, asked, limiter=service.heavy))


def _fitting(service: Service, tenant: str, asked: FitsRequest) -> FitsAnswer:
    from penstock.planning.fits import answer

    topology = asked.topology
    if isinstance(topology, str):
        topology = service.stores.of(tenant).topology(topology)
        service.sizes.check(topology)
    return answer(asked.model_copy(update={"topology": topology}))


async def _explained(request: Request, service: Service, tenant: str, file: PlanFile, how: How) -> Response:
    task = {
        "task": "explain",
        "entry": "penstock.planning.explain:explain",
        "file": file.model_dump(mode="json"),
        "how": how.arguments,
    }
    return await answered(request, service, tenant, task, plans=how.plans)


def _comparison(
    service: Service, tenant: str, asked: PlanRequest, planners: list[str], schedules: list[str], layouts: list[str]
) -> tuple[dict[str, Any], float]:
    """The task for a child, and its limit in seconds."""
    inline = service.stores.of(tenant).resolve(asked)
    judging.check_comparison(inline, planners, schedules)
    task = {
        "task": "compare",
        "entry": service.settings.compare_entry,
        "request": inline.model_dump(mode="json"),
        "planners": planners,
        "schedules": schedules,
        "layouts": layouts,
    }
    limit_ns, longest_s = inline.termination.time_limit_ns, service.settings.max_solve_s
    return task, longest_s if limit_ns is None else min(limit_ns / 1e9 + service.settings.solve_grace_s, longest_s)
