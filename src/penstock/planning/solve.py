"""Answer a plan request: read the document, run planners, return a document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.convert import to_plan, to_problem, to_result
from penstock.layouts.limits import faults as faults_beyond
from penstock.layouts.limits import refuse_beyond
from penstock.planning.judge import refuse_unsound
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan, Progress, Result
from penstock.solvers.planners.catalogue import PLANNERS, resolve
from penstock.solvers.solve import choices, driver
from penstock.solvers.solve.searched import kinds_apart


def solve_here(
    request: PlanRequest,
    on_incumbent: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> ResultOut:
    """Answer a request in this process, which may be in the compiler when a limit of time passes.

    Raises InvalidDocument or UnsupportedRequest; having no plan is an answer, not an error.
    ``on_incumbent`` is called with every better plan, ``on_progress`` also with bounds and the planners at work.
    ``workers``: processes for a large request, by default one per processor; the plan does not depend on it.
    """
    problem = to_problem(request)
    return to_result(problem, request, solve_problem(problem, request, on_incumbent, on_progress, workers))


def solve_verified(
    request: PlanRequest,
    on_incumbent: Callable[[Plan], None] | None = None,
    _on_progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> ResultOut:
    """Answer a request as ``solve_here``; ``on_incumbent`` is called with plans that were verified.

    Progress is not reported: its bounds would come before the first plan, and interpreted they take longer than plans.
    Raises InvalidPlan where one does not verify (our bug).
    """

    def verified(plan: Plan) -> None:
        refuse_unsound(PlanFile(plan=plan, request=request))
        if on_incumbent is not None:
            on_incumbent(plan)

    return solve_here(request, verified, None, workers)


def solve_problem(
    problem: Problem,
    request: PlanRequest,
    on_incumbent: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> Result:
    """Answer a request that is a problem already, as ``solve_here``."""
    refuse_unsupported(request)

    def announce(at: Problem, plan: JudgedPlan) -> None:
        if on_incumbent is not None:
            on_incumbent(to_plan(at, request, plan, ()))

    limits = request.termination
    settings: dict[str, Any] = {
        "planner": request.planner,
        "schedule": request.schedule,
        "time_limit_ns": limits.time_limit_ns,
        "max_plans": limits.max_plans,
        "effort": limits.planned_effort,
        "gap": limits.gap,
        "options": request.options,
        "on_progress": on_progress,
        "workers": workers,
    }
    if problem.choices or (resolve(request.planner).asks_others and kinds_apart(problem)):
        result = choices.solve(problem, on_incumbent=lambda incumbent: announce(*incumbent), **settings)
    else:
        result = driver.solve(problem, on_incumbent=lambda plan: announce(problem, plan), **settings)
    if problem.within is not None and result.best is not None:
        at = choices.problem_of(problem, result)
        beyond = faults_beyond(at, result.best.allocation, result.best.schedule, problem.within)
        if beyond:
            raise InvalidPlan(
                f"planner {request.planner!r} made a plan that {request.target} cannot express: {beyond[0]}"
            )
    return result


def refuse_unsupported(request: PlanRequest) -> None:
    """Raise UnsupportedRequest for what documents can express but no planner supports; nothing is ignored."""
    refuse_beyond(request)
    if request.target is not None and not resolve(request.planner).target:
        able = " or ".join(repr(name) for name, entry in PLANNERS.items() if entry.target)
        raise UnsupportedRequest(
            f"planner {request.planner!r} cannot plan for the target {request.target}; {able} can",
            remedy=f"planner {able}, or leave the target out",
        )
