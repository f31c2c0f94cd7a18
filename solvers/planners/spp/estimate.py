"""The expected time of a plan: the longest of its stages and channels with the round trip of a micro-batch.

The first micro-batch has to come through the stages before, and the last one's gradient to go back through them, while
the stage's own all-reduce runs (SPP section III-B2: it overlaps all that the stages before still do). Decides only
which plans are judged, and in which order.
"""

from __future__ import annotations

from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.spp.guarantees import channel_ns, reduction_ns


def estimate_ns(problem: Problem, allocation: Allocation) -> int:
    """max over n of the way to stage n, its work in the step, and the longer of the way back and its all-reduce."""
    rows = most_rows(problem, allocation)
    number_of = allocation.num_micro_batches
    there, back, longest = 0, 0, 0
    for number, stage in enumerate(allocation.stages):
        costs = stage_costs(problem, stage, rows)
        backward = costs.backward_ns + costs.recompute_ns
        work = number_of * (costs.forward_ns + backward)
        reduced = reduction_ns(problem, allocation, number)
        if problem.rules.overlap_all_reduce:
            reduced -= min(reduced, costs.backward_ns)
        longest = max(longest, there + work + max(back, reduced))
        there, back = there + costs.forward_ns, back + backward
        moved = channel_ns(problem, allocation, number, rows)
        longest = max(longest, there + number_of * moved + back)
        there, back = there + moved // 2, back + moved // 2
    return longest
