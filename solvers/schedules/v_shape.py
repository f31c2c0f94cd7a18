"""Two parts of the model on each device, in a V, backwards split: ZB-V, V-half and V-min.

ZB-V: Qi et al., ICLR 2024 (ALGORITHMS 7.6). V-half and V-min: Qi et al., "Pipeline parallelism with controllable
memory", NeurIPS 2024: a *building block*, the operations of one micro-batch at unit times, is repeated every 6 units,
and what fills and drains the pipeline moves together (``reordering``). Its *offsets* say how many units later each
operation runs on the next rank that the micro-batch reaches. A chunk keeps its activations from F to W of the block, so
small offsets keep little and large ones hide the transfers. For equal times the offsets 1 keep about 1/3 of what 1F1B
keeps, V-half's offsets about 1/2, and ZB-V's the same as 1F1B.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import FORWARD, INPUT, WEIGHT
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.chunks import Ranks, v_shaped
from penstock.solvers.schedules.support.reordering import PERIOD, reordered, weight_units


class Offsets(NamedTuple):
    """The units from rank to rank: forwards down and up, gradients down and up."""

    forward_down: int
    forward_up: int
    gradient_down: int
    gradient_up: int


V_MIN = Offsets(1, 1, 1, 1)
V_HALF = Offsets(2, 1, 2, 1)
V_ZERO = Offsets(4, 2, 4, 2)


def zb_v(problem: Problem, allocation: Allocation) -> Orders:
    """Return ZB-V's orders: no bubble within a rank for equal times; p micro-batches' stages are kept.

    Raises ``UnsupportedRequest`` for stages that are not in a V, and for fewer than 2 p micro-batches.
    """
    ranks, number = v_shaped(allocation, "zb-v"), allocation.num_micro_batches
    p = len(ranks.stages)
    if number < 2 * p:
        raise UnsupportedRequest(
            f"schedule 'zb-v' needs {2 * p} micro-batches, twice as many as ranks; there are {number}",
            remedy=f"{2 * p} micro-batches, or schedule 'v-half'",
        )
    return ranks.orders("zb-v", [_zero_bubble(r, p, number, chunks) for r, chunks in enumerate(ranks.stages)])


def zb_v_cut(problem: Problem, allocation: Allocation) -> Orders:
    """Return ``zb_v``; for fewer than 2 p - 1 micro-batches its order for 2 p - 1, without the missing ones.

    Raises ``UnsupportedRequest`` for stages that are not in a V.
    """
    ranks, number = v_shaped(allocation, "zb-v"), allocation.num_micro_batches
    p = len(ranks.stages)
    rows = [_zero_bubble(r, p, max(number, 2 * p - 1), chunks) for r, chunks in enumerate(ranks.stages)]
    return ranks.orders("zb-v", [[each for each in row if each[2] < number] for row in rows])


def _zero_bubble(rank: int, p: int, number: int, chunks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    row: list[tuple[int, int, int]] = []
    done = {(kind, chunk): 0 for kind in (FORWARD, INPUT, WEIGHT) for chunk in (0, 1)}

    def run(times: int, *operations: tuple[int, int]) -> None:
        for kind, chunk in operations * times:
            row.append((kind, chunks[chunk], done[kind, chunk]))
            done[kind, chunk] += 1

    down, up = (FORWARD, 0), (FORWARD, 1)
    first, second = ((INPUT, 0), (WEIGHT, 0)), ((INPUT, 1), (WEIGHT, 1))
    run(2 * (p - rank) - 1, down)
    run(rank, up, down)
    run(p - rank, up, *second)
    while done[up] < done[down] or done[down] < number:
        run(1 if done[down] < number else 0, down)
        run(1, *first, up, *second)
    run(rank, first[0], second[0])
    run(p - rank, *first)
    run(number - done[WEIGHT, 1], second[1])
    run(number - done[WEIGHT, 0], first[1])
    return row


def v_half(problem: Problem, allocation: Allocation) -> Orders:
    """Return orders that keep about half of 1F1B. Raises ``UnsupportedRequest`` for stages that are not in a V."""
    return repeated(v_shaped(allocation, "v-half"), "v-half", V_HALF, allocation.num_micro_batches)


def v_min(problem: Problem, allocation: Allocation) -> Orders:
    """Return orders that keep about a third of 1F1B. Raises ``UnsupportedRequest`` for stages that are not in a V."""
    return repeated(v_shaped(allocation, "v-min"), "v-min", V_MIN, allocation.num_micro_batches)


def repeated(ranks: Ranks, name: str, offsets: Offsets, number: int) -> Orders:
    """Return the building block repeated for each micro-batch, reordered at both ends of the step."""
    rows = []
    for operations, chunks in zip(_repeated(len(ranks.stages), offsets, number), ranks.stages, strict=True):
        row = operations.copy()
        row[:, 1] = np.asarray(chunks, dtype=np.int32)[operations[:, 1]]
        rows.append(row)
    return ranks.orders(name, rows)


@lru_cache(maxsize=64)
def _repeated(p: int, offsets: Offsets, number: int) -> tuple[np.ndarray, ...]:
    """Return each rank's operations: (kind, 0 for the chunk on the way down or 1, micro-batch)."""
    operations = ((FORWARD, 0), (FORWARD, 1), (INPUT, 1), (INPUT, 0), (WEIGHT, 1), (WEIGHT, 0))
    rows = []
    for of_rank in reordered(building_block(p, offsets), number):
        timed = sorted(
            (unit, kind, chunk, m)
            for units, (kind, chunk) in zip((*of_rank, *weight_units(of_rank)), operations, strict=True)
            for m, unit in enumerate(units)
        )
        rows.append(np.asarray(timed, dtype=np.int32).reshape(-1, 4)[:, 1:])
    return tuple(rows)


def building_block(p: int, offsets: Offsets) -> list[tuple[int, int, int, int, int, int]]:
    """Return when each rank runs F down, F up, I of the upper chunk, I of the lower, W of the upper, W of the lower.

    The waits at the three turns ensure that no rank runs two operations in one of the 6 units of a period. Among such
    waits, waits that keep least win, then the shortest. These are the authors': for V-half (0, 0, 1), and
    (0, 3, 1) for even p; for V-min (0, 0, 0), and (0, 2, 0) where 3 divides p.
    """
    down, up, back, home = offsets
    reach = p - 1
    blocks = []
    for wait in product(range(PERIOD), repeat=3):
        second = down * reach + 1 + wait[0]
        third = second + up * reach + 1 + wait[1]
        fourth = third + back * reach + 1 + wait[2]
        starts = [
            (down * r, second + up * (reach - r), third + back * r, fourth + home * (reach - r)) for r in range(p)
        ]
        if all(len({t % PERIOD for t in each}) == 4 for each in starts):
            block = [(*each, *_weights(each)) for each in starts]
            blocks.append((max(_most_kept(each) for each in block), sum(wait), block))
    if not blocks:
        raise AssertionError(f"offsets {offsets} leave no room in a period")
    return min(blocks)[2]


def _most_kept(block: tuple[int, int, int, int, int, int]) -> int:
    """Return the most chunks that a rank keeps, from F to W, when the block is repeated indefinitely."""
    chunks = ((block[0], block[5]), (block[1], block[4]))
    return max(
        sum((now - begun) // PERIOD - (now - ended) // PERIOD for begun, ended in chunks) for now, _ended in chunks
    )


def _weights(starts: tuple[int, int, int, int]) -> tuple[int, int]:
    """Return when the weight gradients run: each in a free unit, together as soon as possible."""
    _down, _up, upper, lower = starts
    left = sorted(set(range(PERIOD)) - {t % PERIOD for t in starts})
    pairs = [(left[0], left[1]), (left[1], left[0])]
    waits = [((a - upper - 1) % PERIOD, (b - lower - 1) % PERIOD) for a, b in pairs]
    first, second = min(waits, key=lambda each: (sum(each), each))
    return upper + 1 + first, lower + 1 + second
