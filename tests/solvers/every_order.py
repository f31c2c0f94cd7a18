"""All orders of straight pipelines that the limits in flight allow, with micro-batches in index order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations, product

import numpy as np
from problems import as_operations, gpipe

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import effective_limits
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row


def times_of_every_order(problem: Problem, plan: Allocation) -> Iterator[int]:
    """Yield the simulated time of every order that can run within the limits in flight."""
    limits = effective_limits(StageTimes(problem, plan, gpipe(plan)))
    each = [list(_interleavings(s, plan.num_micro_batches, limits[s])) for s in range(len(plan.stages))]
    for rows in product(*each):
        orders = Orders("any", tuple(Row(plan.stages[s].devices, row) for s, row in enumerate(rows)))
        with suppress(InvalidPlan):  # rows that wait for each other in a circle
            yield makespan_ns(problem, plan, orders)


def _interleavings(s: int, batches: int, limit: int) -> Iterator[np.ndarray]:
    for places in combinations(range(2 * batches), batches):
        row, forwards = [], 0
        for i in range(2 * batches):
            if i in places:
                row.append((FORWARD, s, forwards))
                forwards += 1
            else:
                row.append((BACKWARD, s, i - forwards))
            if not 0 <= 2 * forwards - i - 1 <= limit:
                break
        else:
            yield as_operations(row)
