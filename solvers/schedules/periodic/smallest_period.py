"""The pattern of the smallest period of any allocation, by the periodic ILP (MadPipe section 4.3; ALGORITHMS 4.4)."""

from __future__ import annotations

from penstock.schemas.errors import InvalidPlan
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.schedules.periodic.ilp import NODES, solve
from penstock.solvers.schedules.support.stage_line import StageLine


def periodic_ilp(problem: Problem, allocation: Allocation, *, nodes: int = NODES) -> Pattern:
    """Return the best pattern within ``nodes`` of the search tree.

    Raises ``InvalidPlan`` if none exists, or the search ends without one.
    """
    answer = solve(StageLine.of(problem, allocation), nodes=nodes, seed=problem.seed)
    if answer.pattern is not None:
        return answer.pattern
    if answer.proven:
        raise InvalidPlan(
            "no period lets every processor keep its micro-batches in addition to two versions of its weights",
            remedy="recomputation, smaller micro-batches, or another allocation",
        )
    raise InvalidPlan(f"no pattern was found within {nodes} nodes", remedy="more nodes, or schedule inside-out")
