"""Solve one plan request in a process that can be killed, wherever an executor runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from penstock.schemas.api.jobs import ProblemDetails, ResultOut
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.workers.cut_off import best_so_far
from penstock.workers.place import here
from penstock.workers.protocol import Message, run_task, solve_task


@dataclass(frozen=True)
class SolveLimits:
    """The limits of a solve: seconds where its request has no limit, bytes beyond what is loaded (0: no limit)."""

    solve_s: float = 3600.0
    grace_s: float = 1.5
    memory_bytes: int = 0
    processes: int = 1
    entry: str = "penstock.planning.solve:solve_here"


def solve_case(request: PlanRequest, limits: SolveLimits) -> ResultOut | ProblemDetails:
    """Solve a plan request in a separate process; return its result or its error.

    A solver past its limit is ended, and its best plan is the answer. A solver whose answer is not needed is ended.
    """
    place, started = here(), time.monotonic()
    limit_ns = request.termination.time_limit_ns
    limit_s = limits.solve_s if limit_ns is None else min(limit_ns / 1e9, limits.solve_s)
    task = solve_task(limits.entry, request.model_dump_json().encode(), limits.processes, limits.memory_bytes)
    newest: dict[str, bytes] = {}

    def take(message: Message) -> None:
        newest[message.kind] = message.body

    problem = run_task(place, task, limit_s + limits.grace_s, take, wanted=place.wanted)
    if "result" in newest:
        return ResultOut.model_validate_json(newest["result"])
    seconds = time.monotonic() - started
    if problem is not None and seconds < limit_s + limits.grace_s:
        return problem
    best = Plan.model_validate_json(newest["incumbent"]) if "incumbent" in newest else None
    return best_so_far(request, best, f"its limit of {limit_s:g} s was over", seconds)
