"""Codecs for the incumbent's tensors, where the simulation finds that they save time (WPipe, appendix A.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.solvers.costs.codecs import best_codecs, with_codecs
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan


def encoded(problem: Problem, best: JudgedPlan, stopped: Callable[[], bool]) -> tuple[JudgedPlan, str] | None:
    """Return the plan with the codecs that save most, and a note for ``why``; None where none saves time."""
    if best.update_rule == "elastic_averaging":
        return None
    how: dict[str, Any] = {"overlap": best.overlap_all_reduce, "update_rule": best.update_rule}

    def judge(allocation: Allocation) -> int | None:
        if stopped():
            return None
        timeline = simulate(problem, allocation, best.schedule, **how)
        short = largest_shortage(problem, allocation, timeline)
        return timeline.time_per_global_batch_ns if short is None else None

    edges = best_codecs(problem, best.allocation, best.value_ns, judge)
    if not edges:
        return None
    allocation = with_codecs(best.allocation, edges)
    timeline = simulate(problem, allocation, best.schedule, **how)
    saved = 100 * (1 - timeline.time_per_global_batch_ns / best.value_ns)
    note = f"fp16s after stages {sorted(edges)} takes {saved:.2f} % off"
    value_ns = timeline.time_per_global_batch_ns
    return replace(best, allocation=allocation, value_ns=value_ns, simulated=timeline), note
