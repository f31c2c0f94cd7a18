"""The fewest devices with which pipelines of stages apart may keep to a time, by the time passed before each stage.

A stage's *head* is a micro-batch's round trip through all stages before it, its *rest* the round trip through all
stages after it. Within less than T a stage can do its work only if head + work < T. If it holds at most D of M
micro-batches in flight, each from its first operation there to its last for way + rest, then also head + M (way +
rest) / D < T, as at most D of these M intervals overlap at any time. Ways are rounded down to a grid, so that head +
way + rest of all stages is one number, the *whole*; wholes are searched in ranges, in which the rest is at least the
range's start minus head and way. If every whole needs more devices than there are, no plan takes less than T.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from penstock.solvers.bounds.device_count.stage_runs import Runs, replica_numbers, runs_within
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem

GRID = 2**13
"""The number of parts of T to which ways are rounded."""
RATIO = 1.12
"""The ratio of the two ends of a range of wholes."""
MANY = 2**30
"""The number of devices that marks an impossible entry."""


class Count:
    """The count for one number of micro-batches and a time ``time_ns``."""

    def __init__(self, problem: Problem, batch: Batch, time_ns: int) -> None:
        self._batches = batch.num_micro_batches
        self._layers, self._devices, self._time_ns = problem.num_layers, problem.num_devices, time_ns
        self._unit_ns = max(1, time_ns // GRID)
        numbers = replica_numbers(problem, batch)
        most = [*(number - 1 for number in numbers[1:]), problem.num_devices]
        found = [runs_within(problem, batch, *each, time_ns) for each in zip(numbers, most, strict=True)]
        self._runs = [runs for runs in found if self._possible(runs).any()]
        self._shortest = self._after(lambda runs: runs.way_ns // self._unit_ns)
        self._fewest = self._after(lambda runs: np.full_like(runs.way_ns, runs.replicas))

    def refuted(self) -> bool:
        """Return True if every plan takes at least ``time_ns``."""
        if self._shortest[0] >= MANY or self._fewest[0] > self._devices:
            return True
        most = self._time_ns // self._unit_ns + 1
        ends = [int(self._shortest[0])]
        while ends[-1] < most:
            ends.append(max(ends[-1] + 1, int(ends[-1] * RATIO)))
        return all(self._needed(low, high) > self._devices for low, high in pairwise(ends))

    def _possible(self, runs: Runs) -> np.ndarray:
        return np.asarray((runs.work_ns < self._time_ns) & ((runs.flying > 0) | (runs.flying_again > 0)))

    def _after(self, of: Callable[[Runs], np.ndarray]) -> np.ndarray:
        """Return (L + 1,) the least sum of a value over runs that cover the layers from i on; ``MANY`` if none do."""
        width = max((runs.way_ns.shape[1] for runs in self._runs), default=1)
        least = np.full((self._layers, width), MANY, dtype=np.int64)
        for runs in self._runs:
            part = least[:, : runs.way_ns.shape[1]]
            np.minimum(part, np.where(self._possible(runs), of(runs), MANY), out=part)
        total = np.full(self._layers + 1, MANY, dtype=np.int64)
        total[self._layers] = 0
        for first in range(self._layers - 1, -1, -1):
            stop = min(self._layers, first + width)
            total[first] = min(MANY, int((least[first, : stop - first] + total[first + 1 : stop + 1]).min()))
        return total

    def _needed(self, low: int, high: int) -> int:
        """Return the devices of the smallest plan whose whole is in [low, high), in units of the grid."""
        count = np.full((self._layers + 1, high), MANY, dtype=np.int64)
        count[0, 0] = 0
        windows = [self._windows(runs, low) for runs in self._runs]
        for first in range(self._layers):
            heads = self._open(count[first], first, high)
            if heads is None:
                continue
            for runs, window in zip(self._runs, windows, strict=True):
                _extend(count, first, heads, runs, window, high)
        return int(count[self._layers, low:].min())

    def _open(self, count: np.ndarray, first: int, high: int) -> tuple[int, int] | None:
        """Return the range of heads from which the last layer can still be reached with the available devices."""
        count[count + self._fewest[first] > self._devices] = MANY
        count[max(0, high - int(self._shortest[first])) :] = MANY
        left = np.flatnonzero(count < MANY)
        return (int(left[0]), int(left[-1]) + 1) if left.size else None

    def _windows(self, runs: Runs, low: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (L, W) each: the run's way in units; the least head, and the largest possible head plus one."""
        begins, ends = [], []
        for flying, work in ((runs.flying, runs.work_ns), (runs.flying_again, runs.work_ns + runs.again_ns)):
            begin, end = self._heads(flying, work, low)
            begins.append(begin)
            ends.append(end)
        # Recomputing takes longer and holds more in flight: either variant may be possible, so all between them counts.
        empty = [begin >= end for begin, end in zip(begins, ends, strict=True)]
        begin = np.minimum(*(np.where(no, MANY, each) for no, each in zip(empty, begins, strict=True)))
        end = np.maximum(*(np.where(no, 0, each) for no, each in zip(empty, ends, strict=True)))
        return runs.way_ns // self._unit_ns, begin, end

    def _heads(self, flying: np.ndarray, work_ns: np.ndarray, low: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the head from which memory lets a stage end in time, and the head up to which its work does."""
        end = -(-(self._time_ns - work_ns) // self._unit_ns)
        most = np.maximum(1, np.minimum(flying, self._batches))
        # head + M (whole - head) / D < T  <=>  head (M - D) > M whole - D T
        lacking = self._batches * low * self._unit_ns - most * self._time_ns
        over = np.maximum(1, (self._batches - most) * self._unit_ns)
        begin = np.where(lacking >= 0, lacking // over + 1, 0)
        begin = np.where((most == self._batches), 0, begin)
        return np.where(flying > 0, begin, MANY), np.where(flying > 0, end, 0)


def _extend(
    count: np.ndarray,
    first: int,
    heads: tuple[int, int],
    runs: Runs,
    window: tuple[np.ndarray, np.ndarray, np.ndarray],
    high: int,
) -> None:
    """Extend the counts by all runs from a layer on, on one number of replicas."""
    way, begin, end = (each[first].tolist() for each in window)
    for n, (step, low, stop) in enumerate(zip(way, begin, end, strict=True)):
        low, stop = max(low, heads[0]), min(stop, heads[1], high - step)
        if low < stop:
            after = count[first + n + 1, low + step : stop + step]
            np.minimum(after, count[first, low:stop] + runs.replicas, out=after)
