"""The fewest devices with which pipelines of stages apart may keep to a time, by the time passed before each stage.

A stage's *head* is a micro-batch's round trip through all stages before it, its *rest* the round trip through all
stages after it. Within less than T a stage can do its work only if head + work < T; and what it holds at most, which
no stage before it may fall short of, lets it idle in the first and the last round trip and spaces its micro-batches
(BOUNDS section 12). Ways are rounded down to a grid, so that head + way + rest of all stages is one number, the
*whole*; wholes are searched in ranges, in which the rest is at least the range's start minus head and way. If every
whole needs more devices than there are, no plan takes less than T.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock.solvers.bounds.device_count.count_kernel import MANY, Counts, Question, Rest, fewest_devices, rests
from penstock.solvers.bounds.device_count.stage_runs import runs_within
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem

GRID = 2**13
"""The number of parts of T to which ways are rounded."""
RATIO, FINEST = 1.12, 1.01
"""The ratio of the two ends of a range of wholes, and that from which a range is not halved any more."""
CLASSES = 1.25
"""The ratio of the limits in flight that a class of states has."""


class Count:
    """The count for one number of micro-batches and a time ``time_ns``."""

    def __init__(self, problem: Problem, batch: Batch, time_ns: int) -> None:
        self._batches, self._devices, self._time_ns = batch.num_micro_batches, problem.num_devices, time_ns
        self._unit_ns = max(1, time_ns // GRID)
        self._runs = runs_within(problem, batch, time_ns)
        self._rest = Rest(*np.full((2, problem.num_layers + 1), MANY, dtype=np.int64))
        rests(self._runs, self._unit_ns, self._rest)

    def refuted(self) -> bool:
        """Return True if every plan takes at least ``time_ns``."""
        shortest, most = int(self._rest.way[0]), self._time_ns // self._unit_ns + 1
        if self._rest.devices[0] > self._devices:
            return True
        if 8 * self._batches * self._time_ns >= 2**63:
            return False  # nothing is concluded from products that leave 64 bits
        ends = [shortest]
        while ends[-1] < most:
            ends.append(max(ends[-1] + 1, int(ends[-1] * RATIO)))
        alone, joined = self._room(ends[-1], self._batches), self._room(ends[-1], 1)
        left = [*pairwise(ends)][::-1]
        while left:
            low, high = left.pop()
            if self._needed(low, high, alone) <= self._devices:
                if high > max(low + 1, low * FINEST):
                    middle = (low + high) // 2
                    left += [(middle, high), (low, middle)]
                elif self._needed(low, high, joined) <= self._devices:
                    return False
        return True

    def _needed(self, low: int, high: int, counts: Counts) -> int:
        """Return the devices of the smallest plan whose whole is in [low, high), in units of the grid."""
        asked = Question(self._time_ns, self._batches, self._devices, self._unit_ns, low, high)
        return int(fewest_devices(self._runs, asked, counts, self._rest))

    def _room(self, heads: int, least: int) -> Counts:
        """Return room for that many heads and for classes of limits from M down to ``least``."""
        limits = [self._batches]
        while limits[-1] > least:
            limits.append(max(least, min(limits[-1] - 1, int(limits[-1] / CLASSES))))
        falling = np.asarray(limits)
        class_of = np.searchsorted(-falling, -np.arange(self._batches + 1), side="right") - 1
        longest = int(self._runs.layers.max(initial=1))
        return Counts(
            np.empty((longest + 1, len(limits), heads), dtype=np.int32),
            falling,
            np.maximum(0, class_of),
            np.empty((len(limits), 2), dtype=np.int64),
            np.empty(heads, dtype=np.int64),
        )
