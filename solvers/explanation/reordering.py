"""The best candidate schedule of a given allocation, without a planner."""

from __future__ import annotations

from typing import NamedTuple

from penstock.schemas.errors import InvalidPlan
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan, Shortage
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.proposal import recompute_variants
from penstock.solvers.schedules.catalogue import SCHEDULES
from penstock.solvers.schedules.support.candidates import candidate_schedules

USUAL = ("early-backward", "gpipe")
"""Schedules that are tried where the plan's schedule does not order arbitrary stages."""


class BestOrder(NamedTuple):
    """The quickest order that fits, or else the order that lacks least memory; ``why``: the reason if no order runs."""

    plan: JudgedPlan | None
    shortage: Shortage | None = None
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether a plan exists and fits."""
        return self.plan is not None and self.shortage is None

    @property
    def rank(self) -> tuple[int, int]:
        """Return the sort key of orders: the missing memory, then the time."""
        if self.plan is None:
            return NEVER_NS, NEVER_NS
        return (self.shortage.missing_bytes if self.shortage else 0), self.plan.value_ns


def best_order(
    problem: Problem,
    allocation: Allocation,
    schedules: tuple[str, ...],
    *,
    overlap: bool = True,
    recompute: bool = True,
) -> BestOrder:
    """Return the best candidate of ``schedules``; with ``recompute``, also where the request lets stages recompute."""
    best: BestOrder | None = None
    why = ""
    for variant in _variants(problem, allocation, schedules, recompute):
        for name in schedules:
            for candidate in candidate_schedules(problem, variant, name, "best"):
                orders = candidate.orders(problem, variant)
                try:
                    timeline = simulate(problem, variant, orders, overlap=overlap)
                except InvalidPlan as error:
                    why = why or error.detail
                    continue
                plan = JudgedPlan.of("by-hand", variant, orders, timeline, overlap)
                judged = BestOrder(plan, largest_shortage(problem, variant, timeline))
                best = judged if best is None or judged.rank < best.rank else best
    return best or BestOrder(None, None, why)


def schedules_of(plan: JudgedPlan) -> tuple[str, ...]:
    """Return the plan's schedule where it orders arbitrary stages, else the usual schedules."""
    row = SCHEDULES.get(plan.schedule.name)
    return (row.name,) if row is not None and row.for_any_stages else USUAL


def can_be_reordered(plan: JudgedPlan) -> bool:
    """Return whether the plan is one flushed pipeline whose stages share no devices."""
    devices = [d for stage in plan.allocation.stages for d in stage.devices]
    apart = len(plan.allocation.pipelines) == 1 and len(set(devices)) == len(devices)
    return apart and isinstance(plan.schedule, Orders) and plan.update_rule == "synchronous"


def _variants(
    problem: Problem, allocation: Allocation, schedules: tuple[str, ...], recompute: bool
) -> list[Allocation]:
    if not recompute or problem.recompute == "never":
        return [allocation]
    plain = allocation.having(stage.plain for stage in allocation.stages)
    return list(dict.fromkeys((allocation, *recompute_variants(problem, plain, schedules))))
