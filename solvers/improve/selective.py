"""Selective recomputation: modules instead of whole layers, chosen stage by stage for a plan whose order stays.

Every group of stages on the same devices begins with the way to recompute that takes the least time: nothing at first.
As long as devices lack memory, each of their groups takes its next way, which takes more time and keeps less; the last
way is the plan's. Orders name no layers, and recomputation only where it is a separate operation; without these
operations they remain valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.schemas.program import RECOMPUTE
from penstock.solvers.costs.memory import shortages
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row

Stages = tuple[Stage, ...]


def lighter(
    problem: Problem, allocation: Allocation, orders: Orders, overlap: bool, stopped: Callable[[], bool]
) -> tuple[Allocation, Orders] | None:
    """Return the first plan with less recomputation that fits; None if no such plan fits."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for s, stage in enumerate(allocation.stages):
        groups.setdefault(tuple(sorted(stage.devices)), []).append(s)
    rows = most_rows(problem, allocation)
    ways = {key: _ways(problem, [allocation.stages[s] for s in group], rows) for key, group in groups.items()}
    at = dict.fromkeys(groups, 0)
    while not stopped() and any(at[key] < len(ways[key]) - 1 for key in groups):
        chosen = {s: stage for key, group in groups.items() for s, stage in zip(group, ways[key][at[key]], strict=True)}
        plan = _with(allocation, chosen)
        order = _without_idle(plan, orders)
        short = {each.device for each in shortages(problem, plan, simulate(problem, plan, order, overlap=overlap))}
        if not short:
            return plan, order
        lacking = [key for key in groups if short & set(key) and at[key] < len(ways[key]) - 1]
        if not lacking:
            return None
        for key in lacking:
            at[key] += 1
    return None


def _ways(problem: Problem, stages: Sequence[Stage], rows: int) -> list[Stages]:
    """Return the ways to recompute the stages that are quicker than the plan's, quickest first, each keeping less.

    The plan's way is the last.
    """
    planned = tuple(stages)
    plain = tuple(stage.plain for stage in stages)
    others = [plain, *(tuple(replace(stage, modules=each) for stage in plain) for each in problem.module_sets)]
    costs = {way: _time_and_kept(problem, way, rows) for way in (*others, planned)}
    quicker: list[Stages] = []
    for way in sorted(dict.fromkeys(others), key=lambda way: costs[way]):
        if costs[way][0] < costs[planned][0] and (not quicker or costs[way][1] < costs[quicker[-1]][1]):
            quicker.append(way)
    return [*quicker, planned]


def _time_and_kept(problem: Problem, stages: Stages, rows: int) -> tuple[int, int]:
    costs = [stage_costs(problem, stage, rows) for stage in stages]
    return sum(cost.recompute_ns for cost in costs), sum(cost.kept_bytes for cost in costs)


def _with(allocation: Allocation, chosen: dict[int, Stage]) -> Allocation:
    """Return the allocation with these stages, by their numbers."""
    return allocation.having(chosen[s] for s in sorted(chosen))


def _without_idle(plan: Allocation, orders: Orders) -> Orders:
    """Return the orders without the separate recomputations of stages that recompute no whole layers."""
    whole = np.asarray([bool(stage.recompute) for stage in plan.stages])

    def kept(row: Row) -> Row:
        operations = row.operations
        return Row(row.devices, operations[(operations[:, 0] != RECOMPUTE) | whole[operations[:, 1]]])

    return replace(orders, rows=tuple(map(kept, orders.rows)))
