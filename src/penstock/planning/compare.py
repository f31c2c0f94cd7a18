"""Compare planners and schedules on one request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from penstock.convert import to_problem
from penstock.convert.requested_degrees import to_degrees
from penstock.layouts.plain import Written, written_layout
from penstock.planning.solve import solve_problem
from penstock.schemas.amounts import duration, exact
from penstock.schemas.api.jobs import CompareRequest, PlanComparison
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.request import PlanRequest
from penstock.solvers.model.micro_batches import measured_rows, row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, Result
from penstock.solvers.planners.catalogue import PLANNERS, resolve
from penstock.solvers.schedules.catalogue import SCHEDULES, schedule_row

YOURS = "yours"
"""The planner of a row whose layout was given."""


def answer(question: CompareRequest, terms: Terms = NO_TERMS) -> tuple[PlanComparison, ...]:
    """Compare as a document asks; notify of each row at once. Raises as ``comparisons``."""
    rows = []
    for row in comparisons(question.request, question.planners, question.schedules, terms.workers, question.layouts):
        terms.notify(row)
        rows.append(row)
    return tuple(rows)


def comparisons(
    request: PlanRequest,
    planners: Sequence[str] = (),
    schedules: Sequence[str] = (),
    workers: int | None = None,
    layouts: Sequence[str] = (),
) -> Iterator[PlanComparison]:
    """Solve with each planner and each compatible schedule; yield one row at a time as they finish.

    The user's ``layouts`` come first, in words such as ``tensor=8,pipeline=4,micro-batch=1``
    (``layouts.plain.written_layout``). ``auto`` comes last, with all schedules at once, and so does ``exact``, which
    makes its own. A planner that rejects the request has one row, which states why.
    Raises UnsupportedRequest for an unknown name, and where no planner supports any of the schedules; and the errors of
    ``written_layout``.
    """
    problem = to_problem(request)
    alone = one_device_ns(problem)
    for text in layouts:
        yield _row_of_layout(written_layout(request, text), alone)
    rules = frozenset(request.update_rules)
    for planner, planner_schedules in pairs(planners, schedules).items():
        fitting = [
            schedule for schedule in planner_schedules if schedule == "auto" or SCHEDULES[schedule].supports & rules
        ]
        for schedule in fitting or planner_schedules[:1]:
            row_request = request.model_copy(update={"planner": planner, "schedule": schedule, "options": {}})
            started = time.monotonic()
            try:
                result = solve_problem(problem, row_request, workers=workers)
            except UnsupportedRequest as error:
                yield _refused(planner, error)
                break
            yield _row(problem, planner, schedule, result, alone, time.monotonic() - started)


def pairs(planners: Sequence[str], schedules: Sequence[str]) -> dict[str, list[str]]:
    """Return the schedules that ``comparisons`` runs each planner with; raises as it does."""
    for schedule in schedules:
        schedule_row(schedule)
    schedules_of = {}
    for name in planners or (*(name for name in PLANNERS if name != "auto"), "auto"):
        entry = resolve(name)
        every = ["auto"] if not schedules and (name == "auto" or not entry.accepts) else list(entry.accepts)
        allowed = [schedule for schedule in every if not schedules or schedule in schedules]
        if allowed:
            schedules_of[name] = allowed
    if not schedules_of:
        raise UnsupportedRequest(
            f"none of the planners {', '.join(planners)} supports the schedule {' or '.join(schedules)}",
            remedy="; ".join(f"{name}: {', '.join(resolve(name).accepts)}" for name in planners),
        )
    return schedules_of


def _refused(planner: str, error: UnsupportedRequest) -> PlanComparison:
    return PlanComparison(
        planner=planner,
        schedule=None,
        update_rule=None,
        status="unsupported",
        iteration_ns=None,
        peak_memory_bytes=None,
        bound_ns=None,
        gap=None,
        speedup_vs_one_device=None,
        seconds=0.0,
        why=f"{error.detail}; {error.remedy}" if error.remedy else error.detail,
    )


def _row_of_layout(written: Written, alone_ns: int | None) -> PlanComparison:
    """Return the row of a layout that was given; one that does not fit has a time only in words."""
    plan, fits = written.layout.file.plan, written.layout.fits
    assert plan.prediction is not None
    time_ns = plan.prediction.time_per_global_batch_ns
    lacks = f"a GPU lacks {exact(written.layout.missing_bytes)}; with enough memory it would take {duration(time_ns)}"
    return PlanComparison(
        planner=YOURS,
        schedule=plan.schedule.name,
        update_rule=plan.update_rule,
        status="feasible" if fits else "infeasible",
        iteration_ns=time_ns if fits else None,
        peak_memory_bytes=plan.prediction.peak_memory_bytes,
        bound_ns=None,
        gap=None,
        speedup_vs_one_device=alone_ns / time_ns if fits and alone_ns else None,
        seconds=0.0,
        why="" if fits else lacks,
        layout=written.words,
        degrees=plan.degrees,
        sharding=plan.sharding,
        chosen=plan.chosen,
        stages=len({stage.devices for stage in plan.pipelines[0].stages}),
    )


def _row(
    problem: Problem, planner: str, schedule: str, result: Result, alone_ns: int | None, seconds: float
) -> PlanComparison:
    best = result.best
    bound = max((b.bound_ns for b in result.bounds if b.scope == REQUEST_SCOPE), default=None)
    return PlanComparison(
        planner=planner,
        schedule=best.schedule.name if best and schedule == "auto" else schedule,
        update_rule=best.update_rule if best else None,
        status=result.status.value,
        iteration_ns=best.value_ns if best else None,
        peak_memory_bytes=best.timeline.peak_memory_bytes if best else None,
        bound_ns=bound,
        gap=best.value_ns / bound - 1 if best and bound else None,
        speedup_vs_one_device=alone_ns / best.value_ns if best and alone_ns else None,
        seconds=round(seconds, 6),
        why=result.sentence,
        degrees=to_degrees(result.choice.degrees) if best and result.choice else None,
        sharding=result.choice.sharding if best and result.choice else None,
        chosen=dict(result.choice.values) or None if best and result.choice else None,
        stages=len({stage.devices for stage in best.allocation.stages}) if best else None,
    )


def one_device_ns(problem: Problem) -> int | None:
    """Return the time of the global batch on the fastest single device, ignoring memory: the base of speed-ups."""
    best = None
    sizes = problem.micro_batch_sizes or measured_rows(problem)
    for kind in sorted({device.kind for device in problem.devices}):
        for size in sizes:
            count = -(-problem.global_batch_size // size)
            total = int(problem.update_ns[-1])
            for rows, number in row_classes(problem.global_batch_size, count):
                costs = problem.costs(kind, rows)
                total += number * int(costs.forward_ns[-1] + costs.backward_ns[-1])
            best = total if best is None else min(best, total)
    return best
