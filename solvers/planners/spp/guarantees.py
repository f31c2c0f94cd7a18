"""What SPP's theorems promise of a plan, computed: Lemma 1, Lemma 2 and Theorem 1 (section IV; ALGORITHMS 3.4).

They hold in SPP's model: one kind of device, a slice takes its share of a micro-batch's time (rounded up), each channel
carries one transfer at a time over links of its own (``network: private``, ``half``, ``transfer: spp``), a flat ring
all-reduce after the last backward, no latencies, nothing measured instead, one number of micro-batches. All times are
of a step.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from penstock.schemas.coverage import every
from penstock.solvers.bounds.coverage import class_bound, contiguous, modules_known
from penstock.solvers.costs.buckets import stage_all_reduce_ns
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch, candidates, most_rows, row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound
from penstock.solvers.planners.spp.ordering import dense_bandwidths


def only_batch(problem: Problem) -> Batch | None:
    """The request's one number of micro-batches, when the request is in SPP's model; else None."""
    rules, network = problem.rules, problem.network
    paper = (rules.shared, rules.channel, rules.transfer, rules.all_reduce, rules.overlap_all_reduce)
    latencies = [cable.latency_ns for cable in network.cables]
    latencies += [inside.latency_ns for inside in network.insides if inside is not None]
    still = not any(latencies) and (network.matrix_latency_ns is None or not network.matrix_latency_ns.any())
    one_kind = len({problem.kind_source[device.kind] for device in problem.devices}) == 1
    batches = candidates(problem, (1,))
    fits = paper == (False, "half", "spp", "flat", False) and still and one_kind and problem.linear
    even = len(batches) == 1 and problem.global_batch_size % batches[0].num_micro_batches == 0
    alone = not (problem.update_ns[-1] or problem.shared_parameters or problem.collectives)
    return batches[0] if fits and even and alone else None


def lemma_1_ns(problem: Problem, allocation: Allocation) -> int:
    """Lemma 1: PE takes at most (M + 4 S - 4) C and the longest all-reduce; C is the slowest stage's or channel's time.

    C is of the largest micro-batch.
    """
    rows = most_rows(problem, allocation)
    cycle, reduced = 0, 0
    for number, stage in enumerate(allocation.stages):
        costs = stage_costs(problem, stage, rows)
        cycle = max(cycle, costs.forward_ns + costs.backward_ns + costs.recompute_ns)
        cycle = max(cycle, channel_ns(problem, allocation, number, rows))
        reduced = max(reduced, reduction_ns(problem, allocation, number))
    return (allocation.num_micro_batches + 4 * len(allocation.stages) - 4) * cycle + reduced


def channel_ns(problem: Problem, allocation: Allocation, number: int, rows: int) -> int:
    """c^f + c^b of the channel after a stage, for a micro-batch of ``rows``; 0 after the last."""
    after = allocation.next(number)
    if after is None:
        return 0
    both = (transfer(problem, allocation, number, rows, 0), transfer(problem, allocation, after, rows, 1))
    return sum(sent.duration_ns for sent in both if sent is not None)


def reduction_ns(problem: Problem, allocation: Allocation, number: int) -> int:
    """A_s: the stage's gradients in one all-reduce."""
    return stage_all_reduce_ns(problem, allocation.stages[number])


def slowest_ns(problem: Problem, allocation: Allocation) -> int:
    """W(S): what the slowest stage, its all-reduce included, or channel works in a step."""
    worst = 0
    classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)
    for number, stage in enumerate(allocation.stages):
        costs = [(stage_costs(problem, stage, rows), count) for rows, count in classes]
        work = sum(count * (c.forward_ns + c.backward_ns + c.recompute_ns) for c, count in costs)
        moved = sum(count * channel_ns(problem, allocation, number, rows) for rows, count in classes)
        worst = max(worst, moved, work + reduction_ns(problem, allocation, number))
    return worst


def spread(problem: Problem, batch: Batch) -> Fraction | None:
    """Phi of Lemma 2: W of the best plan on the recursive order is at most (1 + Phi) times that of any; None: no limit.

    Phi = max(p_max b_max, d_max) / Gamma (1 / b_min - 1 / b_max). Layers that no cut separates count as one.
    """
    if problem.num_devices == 1:
        return Fraction(0)
    bandwidth = dense_bandwidths(problem)
    links = bandwidth[~np.eye(len(bandwidth), dtype=bool)]
    narrowest, widest = int(links.min()), max(int(links.max()), _widest_ring(problem))
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
    """Theorem 1: SPP's plan takes less than this many times the least that is possible; None: no limit."""
    phi = spread(problem, batch)
    if phi is None:
        return None
    return (2 + Fraction(4 * problem.num_devices - 4, batch.num_micro_batches)) * (1 + phi)


def certified(problem: Problem, batch: Batch, value_ns: int) -> Bound | None:
    """Theorem 1 turned round: what every plan of SPP's model takes at least, from what SPP's best plan takes.

    A millionth is taken off, for what rounding up has added to the value. The theorem knows no memory and counts no
    recomputation, which only adds to a plan's time: plans that recompute inside their backwards are covered as well.
    """
    ratio = theorem_1(problem, batch)
    if ratio is None:
        return None
    bound_ns = int(value_ns / ratio * Fraction(999_999, 1_000_000))
    own = contiguous(problem, [batch.num_micro_batches])
    covers = replace(own, recompute=every("recompute")["recompute"], recompute_modules=modules_known(problem))
    method = f"SPP, theorem 1: its plan takes less than {float(ratio):.2f} times the least possible"
    return class_bound(problem, covers, bound_ns, method)


def promise(problem: Problem, batch: Batch, allocation: Allocation, smallest_ns: int) -> str:
    """Lemma 1, Lemma 2 and Theorem 1 for a plan, as a sentence; ``smallest_ns``: W of PRM."""
    cap = lemma_1_ns(problem, allocation) / 1e6
    said = f"SPP's lemma 1: its order takes at most {cap:.3f} ms on {len(allocation.stages)} stages"
    phi, ratio = spread(problem, batch), theorem_1(problem, batch)
    if phi is None or ratio is None:
        return f"{said}; devices that nothing connects leave lemma 2 and theorem 1 without a limit"
    return (
        f"{said}; lemma 2: the slowest stage or channel works {smallest_ns / 1e6:.3f} ms, at most {float(1 + phi):.2f} "
        f"times the least possible; theorem 1: the plan takes less than {float(ratio):.2f} times the least possible"
    )


def _widest_ring(problem: Problem) -> int:
    """Return the most bytes per second that the cards of a node carry together, 0 where all devices share its links."""
    network = problem.network
    if not network.has_cards:
        return 0
    return max(map(len, problem.nodes())) * max(cable.lane_bytes_per_s for cable in network.cables)
