"""A planner's proposal to the simulator: an allocation, and the schedules and settings to try it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import micro_batches_that_fit
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import most_rows, row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, JudgedPlan
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.catalogue import schedule_row
from penstock.solvers.schedules.early_backward import depths as depths_of


class Proposal(NamedTuple):
    """An allocation with the schedules and the all-reduce settings to simulate it under.

    No schedule at all: nothing is simulated, but the search for one took as long as a plan, and counts as one in
    ``max_plans``. ``fixed``: simulate this schedule and no other, with the allocation's recomputation; ``schedules``
    then holds its name. Rules other than ``synchronous`` always come with a fixed schedule. ``judged``: the plan as the
    planner has timed it; one with a timeline fits. ``proven``: a bound that the planner has proven by now. ``note``: a
    remark on its search, for ``why``.
    """

    allocation: Allocation
    schedules: tuple[str, ...]
    policy: str = "best"
    overlaps: tuple[bool, ...] = (True,)
    update_rule: UpdateRule = "synchronous"
    fixed: Schedule | None = None
    judged: JudgedPlan | None = None
    proven: Bound | None = None
    note: str = ""


def under(problem: Problem, allocation: Allocation, schedules: tuple[str, ...], policy: str = "best") -> Proposal:
    """Return an allocation to simulate under some schedules, with the request's setting of the all-reduce."""
    return Proposal(allocation, schedules, policy, (problem.rules.overlap_all_reduce,))


def in_order(
    problem: Problem, allocation: Allocation, schedule: Schedule, rule: UpdateRule = "synchronous", note: str = ""
) -> Proposal:
    """Return an allocation to simulate under one schedule alone, with the request's setting of the all-reduce."""
    overlaps = (problem.rules.overlap_all_reduce,)
    return Proposal(allocation, (schedule.name,), "best", overlaps, rule, schedule, note=note)


def proposed(plan: JudgedPlan, proven: Bound | None = None) -> Proposal:
    """Return a plan as a proposal that is not timed again; a plan with a timeline fits."""
    return Proposal(
        plan.allocation,
        (plan.schedule.name,),
        overlaps=(plan.overlap_all_reduce,),
        update_rule=plan.update_rule,
        fixed=plan.schedule,
        judged=plan,
        proven=proven,
    )


def proposed_again(plan: JudgedPlan, devices: Mapping[int, int]) -> Proposal:
    """Return a plan as a proposal with ``devices[d]`` in the place of its device d."""
    schedule = plan.schedule
    if isinstance(schedule, Orders):
        rows = (replace(row, devices=tuple(devices[d] for d in row.devices)) for row in schedule.rows)
        schedule = replace(schedule, rows=tuple(rows))
    return proposed(plan)._replace(allocation=plan.allocation.on(devices), fixed=schedule, judged=None)


def recompute_variants(problem: Problem, allocation: Allocation, schedules: tuple[str, ...]) -> list[Allocation]:
    """Return the allocation with recomputation if the request requires it, or where memory runs short.

    ``auto``: on the stages that hold no micro-batch without it; then also on stages that hold fewer than the schedules
    keep in flight.
    """
    if problem.recompute == "never":
        return [allocation]
    stages = allocation.stages
    if problem.recompute == "always":
        return [allocation.recomputing(range(len(stages)))]
    rows = most_rows(problem, allocation)
    fits = [micro_batches_that_fit(problem, stage, rows) for stage in stages]
    depths = depths_of(allocation)
    whole = allocation.num_micro_batches
    floor = whole if any(schedule_row(each).whole for each in schedules) else 0
    flying = [max(min(2 * d - 1, whole), floor) for d in depths]
    levels = ([1] * len(stages), [min(d, whole) for d in depths], flying)
    variants = [allocation.recomputing({s for s, fit in enumerate(fits) if fit < level[s]}) for level in levels]
    return list(dict.fromkeys(variants))


def whole_backwards_bound_ns(problem: Problem, allocation: Allocation) -> int:
    """Return a bound on every order with unsplit backwards, quick to compute; 0 for several pipelines.

    A stage begins when the first forward has reached it, and its last gradient has to go back to the first stage. Of
    replicas that take turns, one computes at least its share.
    """
    classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)
    head, bound = 0, 0
    for stage in allocation.stages:
        costs = [(stage_costs(problem, stage, rows), count) for rows, count in classes]
        each = [(c.passes_ns, count) for c, count in costs]
        busy = sum(takes * count for takes, count in each)
        if stage.dispatch == "round_robin":
            busy = -(-allocation.num_micro_batches // stage.replicas) * min(takes for takes, _count in each)
        bound = max(bound, head + busy)
        head += min(c.forward_ns + c.backward_ns for c, _ in costs)
    return bound if len(allocation.pipelines) == 1 else 0


def unreachable(problem: Problem, allocation: Allocation) -> str | None:
    """Return a sentence that names the stages that cannot reach each other, or None when all can."""
    rows = most_rows(problem, allocation)
    for number, stage in enumerate(allocation.stages):
        for direction in (0, 1):
            sent = transfer(problem, allocation, number, rows, direction)
            if sent is not None and sent.duration_ns >= NEVER_NS:
                return f"nothing connects the devices of layers {stage.first}–{stage.last} to the next stage's"
        if stage.replicas > 1 and all_reduce_ns(problem, 1, stage.devices) >= NEVER_NS:
            return f"nothing connects the replicas of layers {stage.first}–{stage.last}"
    return None
