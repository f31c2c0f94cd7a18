"""Building blocks for any times: one micro-batch's operations in a period that repeats (Qi et al., NeurIPS 2024).

The paper's blocks (``v_shape``) are for equal times. Here the operations of one micro-batch are placed one after the
other, each as early as its input and its device allow modulo the period, as modulo scheduling does (Rau, MICRO 1994):
forwards, then gradients of inputs, at last gradients of weights in the rest of each device's period. Waits between
stages (``hop``) and at the ends of a V (``turns``) make a block longer, which keeps more and hides more. Times are the
real ones with transfers, in a period from the busiest device's work on, or all equal, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import FORWARD, INPUT, WEIGHT
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.blocks_kernel import NOWHERE, OperationList, place
from penstock.solvers.schedules.support.chained import Chained

UNIT_NS = 60
"""A unit of equal times; waits are parts of it."""
HOPS = ((0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 1, 1), (3, 1, 3, 1), (2, 1, 2, 1), (1, 3, 1, 3))
"""The units added to a transfer between stages: forwards down and up, gradients down and up."""
TURNS = tuple(product(range(4), repeat=3))
"""The units added at each of the three turns of a V."""
PERIODS = (100, 105, 110, 120)
"""The periods, in percent of the busiest device's work."""
EVEN_KEPT, REAL_KEPT = 4, 2
"""The numbers of the shortest blocks of each hop (and period) that are tried."""


class Block(NamedTuple):
    """The starts of F, I and W of each stage, (3, S), and the period; ``length_ns``: until the last one ends."""

    length_ns: int
    period_ns: int
    start: np.ndarray


def v_blocks(chained: Chained, room: Sequence[int]) -> Iterator[Orders]:
    """Yield orders of blocks for stages in a V that stay within each rank's memory budget."""
    real, lags = chained.times()
    even = np.full_like(real, UNIT_NS)
    busiest = int(np.bincount(np.asarray(_lanes(chained)), weights=real.sum(axis=0)).max())
    kinds = [(even, np.zeros_like(lags), 6 * UNIT_NS, EVEN_KEPT)]
    kinds += [(real, lags, busiest * percent // 100, REAL_KEPT) for percent in PERIODS]
    for times, ways, period_ns, most in kinds:
        for hop in HOPS:
            distinct: dict[bytes, Block] = {}
            plain = [_chain(chained, times, ways, period_ns, hop, reverse) for reverse in (False, True)]
            for turns, reverse in product(TURNS, (False, True)):
                block = _block(plain[reverse], times, period_ns, turns, reverse)
                if block is not None:
                    distinct.setdefault(block.start.tobytes(), block)
            ranked = sorted(distinct.values(), key=lambda each: each.length_ns)
            fitting = (block for block in ranked if _fits(chained, block, times, room))
            yield from (_repeated(chained, block) for block in islice(fitting, most))


def _lanes(chained: Chained) -> list[int]:
    """Return the rank of each stage."""
    rank_of = {s: r for r, chunks in enumerate(chained.ranks.stages) for s in chunks}
    return [rank_of[s] for s in range(len(rank_of))]


def _chain(
    chained: Chained, times: np.ndarray, lags: np.ndarray, period_ns: int, hop: tuple[int, ...], reverse: bool
) -> OperationList:
    """Return one micro-batch's operations without any wait at the turns; ``times`` (3, S) of F, I, W.

    ``lags`` (2, S): on the way to each stage's forward and gradient. ``reverse``: weight gradients go down.
    """
    lanes, count, p = _lanes(chained), times.shape[1], len(chained.ranks.stages)
    down, up = np.arange(count), np.arange(count)[::-1]
    way = np.arange(1, 2 * count)
    weights = down if reverse else up
    chain = OperationList(
        after=np.concatenate((np.arange(-1, 2 * count - 1), 2 * count - 1 - weights)),
        lag_ns=np.concatenate((lags[0, down], lags[1, up], np.zeros(count, dtype=np.int64))),
        lane=np.asarray([lanes[s] for s in (*down, *up, *weights)]),
        duration_ns=np.concatenate((times[0, down], times[1, up], times[2, weights])),
    )
    chain.lag_ns[1 : 2 * count] += np.where(way % p == 0, 0, np.asarray(hop)[way // p]) * (period_ns // 6)
    return chain


def _block(
    plain: OperationList, times: np.ndarray, period_ns: int, turns: tuple[int, ...], reverse: bool
) -> Block | None:
    """Return the chain with ``turns`` units of waiting at its three turns, without conflicts between its operations."""
    count = times.shape[1]
    p = count // 2
    lag_ns = plain.lag_ns.copy()
    lag_ns[p : 4 * p : p] += np.asarray(turns) * (period_ns // 6)
    start = place(plain._replace(lag_ns=lag_ns), period_ns, p)
    if (start == NOWHERE).any():
        return None
    starts = np.empty((3, count), dtype=np.int64)
    starts[0], starts[1] = start[:count], start[2 * count - 1 : count - 1 : -1]
    starts[2] = start[2 * count :] if reverse else start[: 2 * count - 1 : -1]
    return Block(int((starts + times).max()), period_ns, starts)


def _fits(chained: Chained, block: Block, times: np.ndarray, room: Sequence[int]) -> bool:
    """Return whether what a rank keeps at the start of a forward, of all earlier micro-batches, is within ``room``."""
    for chunks, free in zip(chained.ranks.stages, room, strict=True):
        for s in chunks:
            kept = 0
            for other in chunks:
                begun = (block.start[0, s] - block.start[0, other]) // block.period_ns
                ended = (block.start[0, s] - block.start[2, other] - times[2, other]) // block.period_ns
                kept += int(begun - ended) * chained.taken_bytes(other)
            if kept > free:
                return False
    return True


def _repeated(chained: Chained, block: Block) -> Orders:
    """Return the block once for each micro-batch, operations in the order of their starts.

    Among operations that start at once and take no time, forwards go down the stages and gradients up, as they need
    each other.
    """
    number = chained.allocation.num_micro_batches
    rows = []
    for chunks in chained.ranks.stages:
        timed = [
            (int(block.start[k, s]) + m * block.period_ns, kind, s if kind == FORWARD else -s, m)
            for k, kind in enumerate((FORWARD, INPUT, WEIGHT))
            for s in chunks
            for m in range(number)
        ]
        rows.append([(kind, abs(s), m) for _start, kind, s, m in sorted(timed)])
    return chained.ranks.orders("blocks", rows)
