"""The effect of a change of the request on the time: the plan re-timed, reordered, or the request planned again.

*Re-timed*: the plan's order, simulated in the changed request. *Re-drafted*: its stages on its devices, with the best
candidate schedule there. *Re-planned*: a planner's answer to the changed request, of a bounded number of plans. The
fastest result that fits in memory counts; ties go to the first of these. All times are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Literal, NamedTuple

from penstock.schemas.amounts import shortage
from penstock.schemas.errors import InvalidPlan
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.costs.memory import largest_shortage, spare_bytes
from penstock.solvers.explanation.changes import Change
from penstock.solvers.explanation.reordering import best_order, can_be_reordered, schedules_of
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.plan_shape import layers_need
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan, Shortage

How = Literal["as it is", "re-timed", "re-drafted", "re-planned", "none"]
Replan = Callable[[Problem], JudgedPlan | None]
"""A planner's best plan for a problem; None where it finds no plan."""


class Row(NamedTuple):
    """One change and its result. ``plan`` is None where no attempt fits; ``why`` has the reason.

    ``headroom_bytes``: the free memory of the fullest device. ``bound_ns``: the bound on every plan of the changed
    request.
    """

    name: str
    sentence: str
    how: How
    plan: JudgedPlan | None
    headroom_bytes: int | None
    bound_ns: int
    why: str = ""


def what_if(
    problem: Problem, plan: JudgedPlan, changes: Iterable[Change], replan: Replan | None, replan_all: bool = False
) -> Iterator[Row]:
    """Yield a row for each change, as soon as it is computed; first the unchanged plan.

    Without ``replan_all`` the problem is planned again only with other devices, and where the plan can be neither
    re-timed nor re-drafted.
    """
    short = largest_shortage(problem, plan.allocation, plan.timeline)
    bound = request_bound(problem, fits=short is None).bound_ns
    room = headroom(problem, plan)
    yield Row("", "as it is", "as it is", plan, room, bound, lacks(problem, short))
    if replan is not None and replan_all and (again := replan(problem)) is not None:
        yield Row("", "as it is, planned again", "re-planned", again, headroom(problem, again), bound)
    for changed in changes:
        yield tried(changed, plan, replan, replan_all or changed.name.startswith("devices"))


def tried(changed: Change, plan: JudgedPlan, replan: Replan | None, replans: bool) -> Row:
    """Return the best result of re-timing, re-drafting and re-planning in a changed problem."""
    problem = changed.problem
    results: list[tuple[How, JudgedPlan]] = []
    why = ""
    if changed.retimes:
        with suppress(InvalidPlan):  # devices that no link connects any more
            retimed = retime(problem, plan, changed.allocation)
            short = largest_shortage(problem, retimed.allocation, retimed.timeline)
            why = lacks(problem, short)
            results += [("re-timed", retimed)] if short is None else []
    if can_be_reordered(plan) and (changed.retimes or changed.allocation is not None):
        allocation = changed.allocation or plan.allocation
        fixed = changed.name.startswith("recompute")
        reordered = best_order(
            problem, allocation, schedules_of(plan), overlap=plan.overlap_all_reduce, recompute=not fixed
        )
        why = why or reordered.why or lacks(problem, reordered.shortage)
        results += [("re-drafted", reordered.plan)] if reordered.fits and reordered.plan is not None else []
    if replan is not None and (replans or not results) and (planned := replan(problem)) is not None:
        results.append(("re-planned", planned))
    bound = request_bound(problem).bound_ns
    if not results:
        return Row(changed.name, changed.sentence, "none", None, None, bound, why or _nothing(replan))
    how, best = min(results, key=lambda each: each[1].value_ns)
    return Row(changed.name, changed.sentence, how, best, headroom(problem, best), bound)


def _nothing(replan: Replan | None) -> str:
    if replan is None:
        return "its order cannot be kept, and no planner was named to plan it again"
    return "the planner found no plan"


def retime(problem: Problem, plan: JudgedPlan, recomputing: Allocation | None = None) -> JudgedPlan:
    """Return the plan's order, timed in another problem or with other stages ``recomputing``.

    Raises as ``simulate``.
    """
    allocation = recomputing or plan.allocation
    timeline = simulate(
        problem, allocation, plan.schedule, overlap=plan.overlap_all_reduce, update_rule=plan.update_rule
    )
    return JudgedPlan.of(plan.planner, allocation, plan.schedule, timeline, plan.overlap_all_reduce, plan.update_rule)


def headroom(problem: Problem, plan: JudgedPlan) -> int:
    """Return the free memory of the fullest device, in bytes; negative where it overflows."""
    return min(spare_bytes(problem, plan.timeline).values())


def lacks(problem: Problem, short: Shortage | None) -> str:
    """Return which stage lacks how much on which device, as a sentence; empty without a shortage."""
    if short is None:
        return ""
    return (
        f"{layers_need(short.first_layer, short.last_layer)} "
        f"{shortage(short.needed_bytes, short.available_bytes, problem.devices[short.device].name)}"
    )
