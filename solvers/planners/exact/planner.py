"""``exact``: the best plan of a small request over partition, replication, placement and schedule, with its proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from penstock.schemas.coverage import Covers
from penstock.solvers.bounds.coverage import class_bound, contiguous
from penstock.solvers.grid.block_partition import thinnest
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.model.options import Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Reason, Refusal
from penstock.solvers.planners.exact.joint import BestFirstSearch, Improvement
from penstock.solvers.planners.proposal import Proposal, proposed, under
from penstock.solvers.planners.setting import Setting

MOST_PLANS = 30_000
"""Limit on partitions × placements × numbers of micro-batches: some seconds of bounds, a queue that fits in memory."""
EFFORT = Option("effort", 5.0, "for optimising orders by CP-SAT, over all plans; about seconds, but counted", low=0)
OPTIONS = (EFFORT,)


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield ever better plans, each with the bound proven by then; repeat the last one between pieces of work.

    Where nothing fits, yield the plan with the most stages and the smallest micro-batches, so that the simulator
    reports what is lacking. Raises ``UnsupportedRequest`` if the plans are too many to list.
    """
    problem = setting.problem
    space = Space.of(problem, MOST_PLANS)
    count = space.count()
    if count > MOST_PLANS:
        kind = (
            "planner 'exact' enumerates all plans: {} layers on {} devices in {} numbers of micro-batches make {} "
            "partitions and placements; at most {}"
        )
        raise Refusal(
            Reason(kind, (problem.num_layers, problem.num_devices, len(space.batches), count, MOST_PLANS)),
            remedy="planner auto, or fewer micro_batch_sizes",
        )
    search = BestFirstSearch(space, EFFORT.of(options))
    numbers = [batch.num_micro_batches for batch in space.batches]
    covers = replace(contiguous(problem, numbers), replica_order=frozenset({"cluster"})) if space.is_complete else None
    latest: Proposal | None = None
    for improvement in search.run():
        if setting.deadline.passed:
            return
        latest = latest if improvement is None else _proposal(problem, improvement, covers)
        if latest is not None:
            yield latest
    if search.best is None:
        yield from (under(problem, each, ("early-backward",), "A") for each in thinnest(problem)[:1])


def _proposal(problem: Problem, improvement: Improvement, covers: Covers | None) -> Proposal:
    """Return an improvement with its proof, where the space has every plan of a class."""
    if covers is None:
        return proposed(improvement.plan)
    bound = class_bound(problem, covers, improvement.bound_ns, "every plan's bound, and job shops by CP-SAT")
    return proposed(improvement.plan, bound)
