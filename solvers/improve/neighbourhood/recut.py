"""Other cuts under a plan's order: for several stages on a device, split backwards, several pipelines.

An order names stages, not layers, so it stays valid when the cuts between stages move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from penstock.solvers.costs.memory import fits
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders

STEPS = (1, -1, 2, -2, 4, -4)
"""Numbers of cuttable positions that a cut moves at a time."""
MOST_OPERATIONS = 3_000_000
"""The most operations that are simulated."""


def recuts(
    problem: Problem,
    allocation: Allocation,
    orders: Orders,
    overlap: bool,
    value_ns: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[JudgedPlan]:
    """Yield ever better plans; the first move of a cut that helps is taken, cut after cut."""
    size = sum(len(row.operations) for row in orders.rows)
    left = MOST_OPERATIONS // max(1, size)
    edges = [s for s in range(len(allocation.stages)) if allocation.next(s) is not None]
    since = 0
    while edges and since < len(edges):
        for plan in list(_moved(problem, allocation, edges[0])):
            if left <= 0 or stopped():
                return
            left -= 1
            value = makespan_ns(problem, plan, orders, overlap=overlap)
            if value >= value_ns:
                continue
            timeline = simulate(problem, plan, orders, overlap=overlap)
            if fits(problem, timeline):
                allocation, value_ns, since = plan, value, 0
                yield JudgedPlan.of("", plan, orders, timeline, overlap)
                break
        else:
            since += 1
            edges = edges[1:] + edges[:1]


def _moved(problem: Problem, plan: Allocation, s: int) -> Iterator[Allocation]:
    """Yield the plan with the cut after a stage moved."""
    cuts = np.flatnonzero(problem.cuttable).tolist()
    one, two = plan.stages[s], plan.stages[s + 1]
    at = cuts.index(one.last)
    for step in STEPS:
        if 0 <= at + step < len(cuts) and one.first <= cuts[at + step] < two.last:
            last = cuts[at + step]
            changed = {s: one.of_layers(one.first, last), s + 1: two.of_layers(last + 1, two.last)}
            moved = _with(plan, changed)
            if not problem.pins or broken_pin(problem, moved) is None:
                yield moved


def _with(plan: Allocation, changed: dict[int, Stage]) -> Allocation:
    return plan.having(changed.get(s, stage) for s, stage in enumerate(plan.stages))
