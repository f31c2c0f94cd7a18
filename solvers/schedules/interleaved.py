"""Several parts of the model on each device, in a loop: interleaved 1F1B and breadth first.

Megatron-LM (Narayanan et al., SC 2021), section 2.2.2, ALGORITHMS 7.5: p ranks, v chunks, micro-batches in groups of
p. Breadth first (Lamy-Poirier, MLSys 2023; WPipe A.4, ALGORITHMS 5.7): all micro-batches through each chunk in turn.
For equal times, F and B those of all of a rank's chunks together, both take M (F + B) + (p - 1) (F + B) / v.
"""

from __future__ import annotations

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.allocation import Allocation
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders
from penstock.solvers.schedules.chunks import looped


def interleaved(problem: Problem, allocation: Allocation) -> Orders:
    """Rank r runs 2 (p - r - 1) + (v - 1) p forwards of its chunks, then a forward and a backward in turn.

    The n-th forward is of chunk (n mod p v) div p and micro-batch (n div p v) p + n mod p, backwards take the chunks
    from the last on. Raises ``UnsupportedRequest`` for stages that are not in a loop, two or more on each rank, and
    where the micro-batches are no multiple of p.
    """
    ranks = looped(allocation, "interleaved", least=2)
    p, v, number = len(ranks.stages), len(ranks.stages[0]), allocation.num_micro_batches
    if number % p:
        raise UnsupportedRequest(
            f"schedule 'interleaved' takes micro-batches in groups of {p}, the ranks of the plan; {number} are no "
            f"multiple of {p}",
            remedy=f"{-(-number // p) * p} micro-batches, or schedule 'looped-bfs'",
        )
    rows = []
    for r, chunks in enumerate(ranks.stages):
        warmup = min(number * v, 2 * (p - r - 1) + (v - 1) * p)
        numbers = range(number * v)
        forward = [(FORWARD, chunks[n % (p * v) // p], n // (p * v) * p + n % p) for n in numbers]
        backward = [(BACKWARD, chunks[v - 1 - n % (p * v) // p], n // (p * v) * p + n % p) for n in numbers]
        turns = [each for pair in zip(forward[warmup:], backward, strict=False) for each in pair]
        rows.append(forward[:warmup] + turns + backward[len(numbers) - warmup :])
    return ranks.orders("interleaved", rows)


def looped_bfs(problem: Problem, allocation: Allocation) -> Orders:
    """Every rank runs all forwards chunk by chunk, then all backwards from its last chunk on.

    Raises ``UnsupportedRequest`` for stages that are not in a loop.
    """
    ranks = looped(allocation, "looped-bfs")
    numbers, rows = range(allocation.num_micro_batches), []
    for chunks in ranks.stages:
        forwards = [(FORWARD, s, m) for s in chunks for m in numbers]
        rows.append(forwards + [(BACKWARD, s, m) for s in reversed(chunks) for m in numbers])
    return ranks.orders("looped-bfs", rows)
