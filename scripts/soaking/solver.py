"""The planner of the service's soak: an odd seed takes its time, and its answer names the process that made it.

So an answer that was made twice is seen to have been. An even seed is answered by the real planners.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest


def solve(request: PlanRequest, send_plan: Callable[[Plan], None], on_progress: Any, workers: int) -> ResultOut:
    """Answer a request as ``penstock.planning.solve.solve_here`` does."""
    from penstock.questions.solve import solve

    result = solve(request, send_plan, on_progress, workers)
    if request.seed % 2 == 0:
        return result
    for _ in range(1 + request.seed % 5):
        time.sleep(0.1)
        if result.plan is not None:
            send_plan(result.plan)
    return result.model_copy(update={"why": (f"made by process {os.getpid()} at {time.time_ns()}",)})
