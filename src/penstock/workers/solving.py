"""Solve one plan request in a process that can be killed, wherever an executor runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.workers.cut_off import best_so_far
from penstock.workers.place import here
from penstock.workers.protocol import run_task


@dataclass(frozen=True)
class SolveLimits:
    """The limits of a solve: seconds where its request has no limit, bytes beyond what is loaded (0: no limit)."""

    solve_s: float = 3600.0
    grace_s: float = 1.5
    memory_bytes: int = 0
    processes: int = 1
    entry: str = "penstock.planning.solve:solve_here"


def solve_case(document: dict[str, Any], limits: SolveLimits) -> dict[str, Any]:
    """Solve a plan request in a process of its own: ``{"result": …}``, or ``{"problem": …}`` as sent on the wire.

    A solver past its limit is ended, and its best plan is the answer; one whose answer is not needed is ended.
    """
    place, started = here(), time.monotonic()
    limit_ns = (document.get("termination") or {}).get("time_limit_ns")
    limit_s = limits.solve_s if limit_ns is None else min(limit_ns / 1e9, limits.solve_s)
    task = {
        "task": "solve",
        "entry": limits.entry,
        "request": document,
        "workers": limits.processes,
        "memory_bytes": limits.memory_bytes,
    }
    said: dict[str, Any] = {}

    def take(message: dict[str, Any]) -> None:
        said[message["kind"]] = message

    problem = run_task(place, task, limit_s + limits.grace_s, take, wanted=place.wanted)
    if "result" in said:
        return {"result": said["result"]["result"]}
    seconds = time.monotonic() - started
    if problem is not None and seconds < limit_s + limits.grace_s:
        return {"problem": problem.model_dump(exclude_none=True)}
    best = Plan.model_validate(said["incumbent"]["plan"]) if "incumbent" in said else None
    request = PlanRequest.model_validate(document)
    answer = best_so_far(request, best, f"its limit of {limit_s:g} s was over", seconds)
    return {"result": answer.model_dump(mode="json")}
