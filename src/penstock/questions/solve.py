"""Answer a plan request on this machine, within its limit of time."""

from __future__ import annotations

from collections.abc import Callable

from penstock.convert import to_problem
from penstock.planning.solve import refuse_unsupported, solve_here
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.solvers.compiled.kept import all_kept
from penstock.solvers.model.result import Progress
from penstock.workers.apart import solve_apart


def solve(
    request: PlanRequest,
    on_incumbent: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> ResultOut:
    """Answer a request as ``planning.solve.solve_here``; a limit of time holds also while kernels are compiled.

    A child process then solves, and another one interprets the kernels until they are compiled.
    """
    if request.termination.time_limit_ns is None or all_kept():
        return solve_here(request, on_incumbent, on_progress, workers)
    refuse_unsupported(request)
    return solve_apart(request, to_problem(request), on_incumbent, on_progress, workers)
