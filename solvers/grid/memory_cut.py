"""The cut of a chain whose longest part is as short as memory allows, a part for each device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.grid.block_kernel import shorten_longest


class Demand(NamedTuple):
    """The time and the bytes of layers on device i, as prefix sums over the P places to cut.

    ``time_ns`` (N, P); ``bytes`` (C, N, P): at each of C moments at which memory is at its peak.
    """

    time_ns: np.ndarray
    bytes: np.ndarray


class Ends(NamedTuple):
    """The longest part of i devices (``largest_ns``, (N + 1, P) by their end), and the begin of the last part."""

    largest_ns: np.ndarray
    before: np.ndarray

    def bounds(self, end: int) -> list[int]:
        """Return the places where the parts of all devices begin, and where the last ends."""
        bounds = [end]
        for i in range(len(self.before) - 1, 0, -1):
            bounds.append(int(self.before[i, bounds[-1]]))
        return bounds[::-1]


def memory_cut(demand: Demand, room_bytes: np.ndarray) -> list[int] | None:
    """Return the places between the parts, and both ends, for the shortest longest part; None where no parts fit."""
    ends = longest_parts(demand, room_bytes)
    return ends.bounds(ends.largest_ns.shape[1] - 1) if ends.largest_ns[-1, -1] < NEVER_NS else None


def longest_parts(demand: Demand, room_bytes: np.ndarray) -> Ends:
    """Return the smallest longest part of the first i devices up to every place; ``NEVER_NS`` where no parts fit."""
    count, places = demand.time_ns.shape
    ends = Ends(np.empty((count + 1, places), dtype=np.int64), np.zeros((count + 1, places), dtype=np.int64))
    shorten_longest(*(np.ascontiguousarray(each) for each in (*demand, room_bytes)), *ends)
    return ends
