"""Several parts of the model on each device, in a loop: interleaved 1F1B and breadth first.

Megatron-LM (Narayanan et al., SC 2021), section 2.2.2, ALGORITHMS 7.5: p ranks, v chunks, micro-batches in groups of
p. Breadth first (Lamy-Poirier, MLSys 2023; WPipe A.4, ALGORITHMS 5.7): all micro-batches through each chunk in turn.
For equal times, both take M (F + B) + (p - 1) (F + B) / v, where F and B are of all of a rank's chunks together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.chunks import Ranks, looped


def interleaved(problem: Problem, allocation: Allocation, group: int | None = None) -> Orders:
    """Return interleaved 1F1B orders.

    Rank r runs 2 (p - r - 1) + (v - 1) g forwards of its chunks, then a forward and a backward in turn. Micro-batches
    go in groups of g, p by default, through all chunks of a rank, backwards from the last chunk on; the last group may
    be smaller. Raises ``UnsupportedRequest`` for stages that are not in a loop, two or more on each rank, and for
    groups of less than p while there are p micro-batches.
    """
    ranks = looped(allocation, "interleaved", least=2)
    p, v, number = len(ranks.stages), len(ranks.stages[0]), allocation.num_micro_batches
    together = p if group is None else group
    if not groups_go(p, number, together):
        raise UnsupportedRequest(
            f"schedule 'interleaved' runs micro-batches in groups of {together} through the plan's {p} ranks, but "
            f"{number} is not a multiple of {p}: {number % together} would be left",
            remedy=f"{-(-number // p) * p} micro-batches, or schedule 'looped-bfs'",
        )
    rows = []
    for r, chunks in enumerate(ranks.stages):
        warmup = min(number * v, 2 * (p - r - 1) + (v - 1) * together)
        forward = [(FORWARD, s, m) for s, m in _in_groups(chunks, number, together)]
        backward = [(BACKWARD, s, m) for s, m in _in_groups(chunks[::-1], number, together)]
        turns = [each for pair in zip(forward[warmup:], backward, strict=False) for each in pair]
        rows.append(forward[:warmup] + turns + backward[len(forward) - warmup :])
    return ranks.orders("interleaved", rows)


def groups_go(ranks: int, number: int, group: int) -> bool:
    """Return whether each group keeps all ranks busy, or holds all micro-batches."""
    left = number % group
    return group == number or (ranks <= group <= number and (left == 0 or left >= ranks))


def group_of(allocation: Allocation, orders: Orders) -> int:
    """Return the group size g of interleaved rows: the last rank runs (v - 1) g forwards in advance."""
    ranks = len({stage.devices for stage in allocation.stages})
    last = next(row for row in orders.rows if row.devices == allocation.stages[ranks - 1].devices)
    before = int(np.argmax(last.operations[:, 0] == BACKWARD)) - 1
    return min(allocation.num_micro_batches, before // max(1, len(allocation.stages) // ranks - 1))


def _in_groups(chunks: Sequence[int], number: int, group: int) -> list[tuple[int, int]]:
    """Return stage and micro-batch of each pass, in order."""
    starts = range(0, number, group)
    return [(s, m) for start in starts for s in chunks for m in range(start, min(start + group, number))]


def looped_bfs(problem: Problem, allocation: Allocation) -> Orders:
    """Return orders in which every rank runs all forwards chunk by chunk, then all backwards from its last chunk on.

    Raises ``UnsupportedRequest`` for stages that are not in a loop.
    """
    ranks = looped(allocation, "looped-bfs")
    return ranks.orders("looped-bfs", _breadth_first(ranks, range(allocation.num_micro_batches)))


def looped_bfs_lifo(problem: Problem, allocation: Allocation) -> Orders:
    """Return ``looped_bfs`` with each chunk's backwards from the last micro-batch on, as in PyTorch.

    Raises ``UnsupportedRequest`` for stages that are not in a loop.
    """
    ranks = looped(allocation, "looped-bfs-lifo")
    return ranks.orders("looped-bfs-lifo", _breadth_first(ranks, range(allocation.num_micro_batches)[::-1]))


def _breadth_first(ranks: Ranks, backwards: range) -> Iterator[list[tuple[int, int, int]]]:
    for chunks in ranks.stages:
        forwards = [(FORWARD, s, m) for s in chunks for m in sorted(backwards)]
        yield forwards + [(BACKWARD, s, m) for s in reversed(chunks) for m in backwards]
