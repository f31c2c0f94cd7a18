"""One micro-batch's operations in a period that repeats: the place of each on its lane (``schedules.blocks``)."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled

NOWHERE = -1
"""The start of an operation for which the period has no free time."""


class OperationList(NamedTuple):
    """Operations in the order in which they are placed, N of them, L lanes.

    ``after`` (N,): the operation that each follows (-1: none); ``lag_ns``: the least time after its end. ``lane``,
    ``duration_ns`` (N,).
    """

    after: np.ndarray
    lag_ns: np.ndarray
    lane: np.ndarray
    duration_ns: np.ndarray


@compiled
def place(chain: OperationList, period_ns: int, lanes: int) -> np.ndarray:
    """Return the earliest start of each operation, no two of a lane at once modulo the period; (N,) int64.

    O(N × operations of a lane, squared). From the first operation without a free time on, nothing is placed.
    """
    after, lag, lane, duration = chain
    count = len(lane)
    start = np.full(count, NOWHERE, dtype=np.int64)
    operations_of = np.zeros((lanes, count), dtype=np.int64)
    size = np.zeros(lanes, dtype=np.int64)
    for op in range(count):
        t = lag[op]
        if after[op] >= 0:
            t += start[after[op]] + duration[after[op]]
        last, row, k = t + period_ns, lane[op], 0
        while k < size[row] and t < last:
            other = operations_of[row, k]
            apart = (t - start[other]) % period_ns
            if apart < duration[other]:
                t += duration[other] - apart
                k = 0
            elif period_ns - apart < duration[op]:
                t += period_ns - apart + duration[other]
                k = 0
            else:
                k += 1
        if t >= last or duration[op] > period_ns:
            break
        start[op] = t
        operations_of[row, size[row]] = op
        size[row] += 1
    return start
