"""Rounds of a measurement: in each, every micro-batch size has its block, so that what drifts hits all sizes alike.

Enough has been seen after ``MIN_ROUNDS``, once the times of all shares together agree within ``STEADY`` over the last
``STEADY_ROUNDS``, at every size. The later half of the rounds counts: what a processor does in its first moments (full
caches of the other processes, a higher clock) is not what it does in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

MIN_ROUNDS = 8
STEADY_ROUNDS = 3
STEADY = 0.03


class Block(NamedTuple):
    """Passes of one process at one size: medians per layer, and what all of them took together."""

    forward_ns: Sequence[int]
    backward_ns: Sequence[int]
    passes: int
    wall_ns: int
    busy_ns: int

    @property
    def total_ns(self) -> int:
        """A forward and a backward through all its layers."""
        return sum(self.forward_ns) + sum(self.backward_ns)


class Rounds:
    """The blocks of all rounds: by round, size and process."""

    def __init__(self) -> None:
        self._rounds: list[Sequence[Sequence[Block]]] = []

    def add(self, blocks: Sequence[Sequence[Block]]) -> None:
        """Take a round: for each size a block of each process."""
        self._rounds.append(blocks)

    @property
    def count(self) -> int:
        """Rounds so far."""
        return len(self._rounds)

    @property
    def spread(self) -> float:
        """Relative distance between the last ``STEADY_ROUNDS``, of the size with the largest; 1 for fewer rounds."""
        if self.count < STEADY_ROUNDS:
            return 1.0
        last = [
            [sum(one.total_ns for one in of_size) for of_size in blocks] for blocks in self._rounds[-STEADY_ROUNDS:]
        ]
        by_size: list[tuple[int, ...]] = list(zip(*last, strict=True))
        return min(1.0, max((max(times) - min(times)) / max(1, min(times)) for times in by_size))

    @property
    def steady(self) -> bool:
        """Whether enough has been seen."""
        return self.count >= MIN_ROUNDS and self.spread <= STEADY

    @property
    def slowdown(self) -> float:
        """Wall-clock time of all processes over their processor time, in the rounds that count; one for all sizes."""
        kept = [one for blocks in self._kept for of_size in blocks for one in of_size]
        return max(1.0, sum(one.wall_ns for one in kept) / max(1, sum(one.busy_ns for one in kept)))

    def passes(self, size: int) -> int:
        """Passes that count at size number ``size``, of the process with the fewest."""
        return min(sum(one.passes for one in of_process) for of_process in self._of(size))

    def forward_ns(self, size: int, process: int) -> list[int]:
        """Of each layer of a process, the median over the rounds that count."""
        return _medians([one.forward_ns for one in self._of(size)[process]])

    def backward_ns(self, size: int, process: int) -> list[int]:
        """As ``forward_ns``."""
        return _medians([one.backward_ns for one in self._of(size)[process]])

    @property
    def _kept(self) -> list[Sequence[Sequence[Block]]]:
        return self._rounds[self.count // 2 :]

    def _of(self, size: int) -> list[tuple[Block, ...]]:
        """By process, the blocks that count."""
        return list(zip(*(blocks[size] for blocks in self._kept), strict=True))


def _medians(rows: Sequence[Sequence[int]]) -> list[int]:
    return [round(median(column)) for column in zip(*rows, strict=True)]
