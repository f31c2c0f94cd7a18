"""The expected time of a plan: the longest of its stages and channels with the round trip of a micro-batch.

The first micro-batch has to pass the stages before, and the last micro-batch's gradient has to go back through them,
while the stage's all-reduce runs (SPP section III-B2: it overlaps all that the stages before still do). The estimate
only decides which plans are simulated, and in which order.
"""

from __future__ import annotations

from penstock.solvers.costs.buckets import stage_all_reduce_ns
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem


def estimate_ns(problem: Problem, allocation: Allocation) -> int:
    """Return the longest time of any stage or channel.

    For stage n: the way to n, its work, and the longer of the way back and its all-reduce.
    """
    rows = most_rows(problem, allocation)
    number_of = allocation.num_micro_batches
    there, back, longest = 0, 0, 0
    for number, stage in enumerate(allocation.stages):
        costs = stage_costs(problem, stage, rows)
        backward = costs.backward_ns + costs.recompute_ns
        work = number_of * (costs.forward_ns + backward)
        reduced = stage_all_reduce_ns(problem, stage)
        if problem.rules.overlap_all_reduce:
            reduced -= min(reduced, costs.backward_ns)
        longest = max(longest, there + work + max(back, reduced))
        there, back = there + costs.forward_ns, back + backward
        moved = channel_ns(problem, allocation, number, rows)
        longest = max(longest, there + number_of * moved + back)
        there, back = there + moved // 2, back + moved // 2
    return longest


def channel_ns(problem: Problem, allocation: Allocation, number: int, rows: int) -> int:
    """Return c^f + c^b of the channel after a stage, for a micro-batch of ``rows``; 0 after the last stage."""
    after = allocation.next(number)
    if after is None:
        return 0
    both = (transfer(problem, allocation, number, rows, 0), transfer(problem, allocation, after, rows, 1))
    return sum(sent.duration_ns for sent in both if sent is not None)
