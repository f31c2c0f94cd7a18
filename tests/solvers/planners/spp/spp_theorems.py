"""SPP's Lemma 1, Lemma 2 and Theorem 1 as formulas (docs/theory/algorithms.md, section 3.4).

They hold in SPP's model: one kind of device, and a slice takes its share of a micro-batch's time (rounded up). Each
channel carries one transfer at a time over private links (``network: private``, ``half``, ``transfer: spp``). A flat
ring all-reduces after the last backward. Latencies are zero, no measured times replace formulas, and the number of
micro-batches is fixed. All times are times of a step.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np

from penstock.solvers.costs.buckets import stage_all_reduce_ns
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch, most_rows, row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.spp.estimate import channel_ns
from penstock.solvers.planners.spp.ordering import dense_bandwidths


def lemma_1_ns(problem: Problem, allocation: Allocation) -> int:
    """Return Lemma 1's limit: (M + 4 S - 4) C and the longest all-reduce; C is the slowest stage's or channel's time.

    C is for the largest micro-batch.
    """
    rows = most_rows(problem, allocation)
    cycle, reduced = 0, 0
    for number, stage in enumerate(allocation.stages):
        costs = stage_costs(problem, stage, rows)
        cycle = max(cycle, costs.forward_ns + costs.backward_ns + costs.recompute_ns)
        cycle = max(cycle, channel_ns(problem, allocation, number, rows))
        reduced = max(reduced, stage_all_reduce_ns(problem, stage))
    return (allocation.num_micro_batches + 4 * len(allocation.stages) - 4) * cycle + reduced


def slowest_ns(problem: Problem, allocation: Allocation) -> int:
    """Return W(S): the time of the slowest stage, with its all-reduce, or channel in a step."""
    worst = 0
    classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)
    for number, stage in enumerate(allocation.stages):
        costs = [(stage_costs(problem, stage, rows), count) for rows, count in classes]
        work = sum(count * (c.forward_ns + c.backward_ns + c.recompute_ns) for c, count in costs)
        moved = sum(count * channel_ns(problem, allocation, number, rows) for rows, count in classes)
        worst = max(worst, moved, work + stage_all_reduce_ns(problem, stage))
    return worst


def spread(problem: Problem, batch: Batch) -> Fraction | None:
    """Return Phi of Lemma 2: W of the best plan on the recursive order is at most (1 + Phi) times the least W.

    None: there is no limit.
    Phi = max(p_max b_max, d_max) / Gamma (1 / b_min - 1 / b_max). Layers that no cut separates count as one.
    """
    if problem.num_devices == 1:
        return Fraction(0)
    bandwidth = dense_bandwidths(problem)
    links = bandwidth[~np.eye(len(bandwidth), dtype=bool)]
    narrowest, widest = int(links.min()), int(links.max())
    costs = problem.costs(problem.devices[0].kind, batch.most_rows)
    work = costs.forward_ns + costs.backward_ns
    if narrowest == 0 or work[-1] == 0:
        return None
    cuts = np.flatnonzero(problem.cuttable)
    longest = max(int(work[j] - work[i]) for i, j in pairwise([0, *(cuts + 1).tolist(), problem.num_layers]))
    sent = (problem.forward_bytes + problem.backward_bytes)[cuts].max(initial=0)
    most = max(Fraction(longest * widest, 10**9), Fraction(int(sent) * batch.most_rows))
    gamma = Fraction(int(work[-1]), problem.num_devices)
    return most / gamma * 10**9 * (Fraction(1, narrowest) - Fraction(1, widest))


def theorem_1(problem: Problem, batch: Batch) -> Fraction | None:
    """Return how many times the least that is possible SPP's plan may take by Theorem 1, or None for no limit."""
    phi = spread(problem, batch)
    if phi is None:
        return None
    return (2 + Fraction(4 * problem.num_devices - 4, batch.num_micro_batches)) * (1 + phi)
