"""Rounds of a measurement: each round has a block of every micro-batch size, so that drift affects all sizes alike.

A processor does not keep its speed: other load on its caches, its cores or its host makes the same pass a tenth slower
for a second or two. A run of many steps sees the mean, so the mean over rounds counts, without the first
``WARM_UP_ROUNDS``. The measurement ends when its standard error is at most ``PRECISION`` at every size. Successive
rounds are correlated, so the error is computed from means of ``GROUP_ROUNDS`` rounds, of which there are at least
``MIN_GROUPS``. Three rounds that agree by chance therefore do not end it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

WARM_UP_ROUNDS = 4
GROUP_ROUNDS = 4
MIN_GROUPS = 4
MIN_ROUNDS = WARM_UP_ROUNDS + MIN_GROUPS * GROUP_ROUNDS
PRECISION = 0.02


class Block(NamedTuple):
    """Passes of one process at one size: medians per layer, and the wall-clock time of all passes together."""

    forward_ns: Sequence[int]
    backward_ns: Sequence[int]
    passes: int
    wall_ns: int

    @property
    def total_ns(self) -> int:
        """The time of a forward and a backward through all layers."""
        return sum(self.forward_ns) + sum(self.backward_ns)


class Rounds:
    """The blocks of all rounds: by round, size and process."""

    def __init__(self) -> None:
        self._rounds: list[Sequence[Sequence[Block]]] = []

    def add(self, blocks: Sequence[Sequence[Block]]) -> None:
        """Add a round: for each size a block of each process."""
        self._rounds.append(blocks)

    @property
    def count(self) -> int:
        """The number of rounds so far."""
        return len(self._rounds)

    @property
    def error(self) -> float:
        """The relative standard error of a pass's mean time, for the size where it is largest; 1 for too few rounds."""
        starts = range(0, self.count - WARM_UP_ROUNDS - GROUP_ROUNDS + 1, GROUP_ROUNDS)
        if len(starts) < MIN_GROUPS:
            return 1.0
        errors = []
        for size in range(len(self._kept[0])):
            times = [sum(one.wall_ns / one.passes for one in blocks[size]) for blocks in self._kept]
            groups = [fmean(times[start : start + GROUP_ROUNDS]) for start in starts]
            errors.append(stdev(groups) / fmean(groups) / sqrt(len(groups)))
        return min(1.0, max(errors))

    @property
    def precise(self) -> bool:
        """True if the error is small enough."""
        return self.error <= PRECISION

    @property
    def slowdown(self) -> float:
        """The wall-clock time of all passes over the time of their layers, in the rounds that count; one for all sizes.

        Besides waiting for the processor it includes the time of a pass outside its layers, and passes that took longer
        than the median. A step of a run includes both.
        """
        kept = [one for blocks in self._kept for of_size in blocks for one in of_size]
        return max(1.0, sum(one.wall_ns for one in kept) / max(1, sum(one.passes * one.total_ns for one in kept)))

    def passes(self, size: int) -> int:
        """Return the number of passes that count at size number ``size``, for the process with the fewest."""
        return min(sum(one.passes for one in of_process) for of_process in self._of(size))

    def forward_ns(self, size: int, process: int) -> list[float]:
        """Return each layer's forward time in a process: the mean over the rounds that count, in ns."""
        return _means([one.forward_ns for one in self._of(size)[process]])

    def backward_ns(self, size: int, process: int) -> list[float]:
        """Return each layer's backward time in a process: the mean over the rounds that count, in ns."""
        return _means([one.backward_ns for one in self._of(size)[process]])

    @property
    def _kept(self) -> list[Sequence[Sequence[Block]]]:
        """The rounds after the first ones; the later half where rounds are few."""
        return self._rounds[min(WARM_UP_ROUNDS, self.count // 2) :]

    def _of(self, size: int) -> list[tuple[Block, ...]]:
        """Return the blocks that count, by process."""
        return list(zip(*(blocks[size] for blocks in self._kept), strict=True))


def _means(rows: Sequence[Sequence[int]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]
