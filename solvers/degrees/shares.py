"""The share of a plan's time that is communication among the GPUs that hold a replica together."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Literal, get_args

from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.degrees.contract import with_times
from penstock.solvers.degrees.inner_times import STATED
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.degrees import Over
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem

COLLECTIVES: tuple[Over | Literal["data"], ...] = (*get_args(Over), "data")
"""The groups that collectives inside cells are over; ``data``: all GPUs with the same part of a sharded model."""


def exposed_share(problem: Problem, allocation: Allocation) -> Fraction:
    """Return the share of collectives in the time of all passes, recomputation included; 0 at degrees of 1."""
    passes_ns = _passes_ns(problem, allocation)
    return Fraction(passes_ns - _passes_ns(without_collectives(problem, COLLECTIVES), allocation), max(1, passes_ns))


def without_collectives(problem: Problem, over: Iterable[str]) -> Problem:
    """Return the problem with collectives over these groups that take no time."""
    if problem.real is None:
        return problem
    return with_times(problem, STATED._replace(**dict.fromkeys(over, Fraction(0))))


def _passes_ns(problem: Problem, allocation: Allocation) -> int:
    """Return the time of one micro-batch's passes through all stages of a pipeline, recomputation included."""
    rows = most_rows(problem, allocation)
    return sum(stage_costs(problem, stage, rows).passes_ns for stage in allocation.pipelines[0].stages)
