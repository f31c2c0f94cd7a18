"""The time that collectives inside a pass add to it: the part that computation does not hide.

Collectives take the time of their operation and no resource of the network: a context or expert group that leaves its
node does not compete with transfers between stages. Every plan with degrees assumes this.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.costs.collectives import Group, group_of
from penstock.solvers.model.degrees import CellMeasured, CellModule, Collective, Degrees, Operation, Over, Phase
from penstock.solvers.model.problem import MemoryRules, Problem


class TimeFactors(NamedTuple):
    """Factors on the stated times of computation, and of collectives, by the groups that they are over.

    ``data``: gathers of parameters and sums of gradients inside passes, over all GPUs with the same part.
    """

    computation: Fraction = Fraction(1)
    tensor: Fraction = Fraction(1)
    context: Fraction = Fraction(1)
    expert: Fraction = Fraction(1)
    data: Fraction = Fraction(1)


STATED = TimeFactors()


class InnerTimes:
    """Collectives over the groups inside cells, ``times`` as long; where groups differ, the slowest counts."""

    def __init__(
        self, problem: Problem, degrees: Degrees, cells: Sequence[Sequence[int]], times: TimeFactors = STATED
    ) -> None:
        self._problem, self._degrees, self._cells, self._times = problem, degrees, cells, times

    def reduce_ns(self, trained: Sequence[int], experts: Sequence[int], memory: MemoryRules) -> np.ndarray:
        """Return (L,) ns in which GPUs with copies of ``trained`` bytes, of which ``experts`` belong to experts, sum
        gradients.

        Each layer's gradients are reduce-scattered in their width. The gradients are then gathered, or the parameters
        if
        optimizer states are sharded.
        """
        width = 1 if memory.shard_states else memory.gradient_factor
        scattered = self.half_ns("reduce_scatter", trained, experts, memory.gradient_factor)
        return np.asarray(scattered + self.half_ns("all_gather", trained, experts, width))

    def half_ns(self, half: Operation, sizes: Sequence[int], experts: Sequence[int], width: int) -> np.ndarray:
        """Return (L,) ns of half an all-reduce over GPUs with copies of ``sizes`` bytes, times ``width``.

        The ``experts`` bytes move among the GPUs with the same experts, all other bytes among every t-th GPU of a cell.
        """
        x = self._degrees.expert_group
        times: dict[tuple[int, int], int] = {}
        for bytes_of_layer in zip(sizes, experts, strict=True):
            if bytes_of_layer not in times:
                parts = (self._degrees.tensor, bytes_of_layer[0] - bytes_of_layer[1]), (x, bytes_of_layer[1])
                times[bytes_of_layer] = sum(
                    self._slowest_ns(self._apart(stride), (half,), size * width) for stride, size in parts
                )
        return np.asarray(
            [times[bytes_of_layer] for bytes_of_layer in zip(sizes, experts, strict=True)], dtype=np.int64
        )

    def _apart(self, stride: int) -> tuple[Group, ...]:
        """Return the distinct groups of every ``stride``-th GPU of a cell."""
        return self._distinct([cell[lane::stride] for cell in self._cells for lane in range(stride)])

    def _distinct(self, groups: Sequence[Sequence[int]]) -> tuple[Group, ...]:
        return tuple(dict.fromkeys(group_of(self._problem, tuple(group)) for group in groups if len(group) > 1))

    @staticmethod
    def _slowest_ns(groups: Sequence[Group], operations: Sequence[Operation], size: int, count: int = 1) -> int:
        """Return the time of these operations, one after the other, each in the slowest of several groups."""
        return sum(max((group.time_ns(each, size, count) for group in groups), default=0) for each in operations)

    @cached_property
    def _groups(self) -> dict[Over, tuple[Group, ...]]:
        """The distinct groups of each kind: tensor groups are neighbours, context groups have stride t."""
        t, mesh = self._degrees.tensor, self._degrees.mesh
        tensor = [cell[at : at + t] for cell in self._cells for at in range(0, len(cell), t)]
        context = [
            cell[start + lane : start + mesh : t]
            for cell in self._cells
            for start in range(0, len(cell), mesh)
            for lane in range(t)
        ]
        x = self._degrees.expert_group
        expert = [cell[at : at + x] for cell in self._cells for at in range(0, len(cell), x)]
        groups: dict[Over, list[Sequence[int]]] = {"tensor": tensor, "context": context, "expert": expert}
        return {over: self._distinct(each) for over, each in groups.items()}

    def exposed_ns(self, measured: CellMeasured | CellModule, phase: Phase, speed: float = 1.0) -> np.ndarray:
        """Return (L,) ns that each layer's collectives add to one pass of the measurement's rows.

        On a kind that is ``speed`` times as fast as the measured kind, computation hides less.
        """
        times: dict[tuple[Collective, ...], int] = {}
        for collectives in measured.collectives:
            if collectives not in times:
                times[collectives] = sum(self._exposed_ns(each, speed) for each in collectives if each.phase == phase)
        return np.asarray([times[collectives] for collectives in measured.collectives], dtype=np.int64)

    def _exposed_ns(self, collective: Collective, speed: float) -> int:
        groups = self._groups[collective.over]
        stated = self._slowest_ns(groups, (collective.operation,), collective.bytes, collective.count)
        total = int(scaled(stated, getattr(self._times, collective.over)))
        return max(0, total - int(collective.hidden_ns / speed))


def scaled(times_ns: Any, factor: Fraction) -> Any:
    """Return a time, or an array of times, ``factor`` times as long, rounded up."""
    return times_ns if factor == 1 else -(-times_ns * factor.numerator // factor.denominator)
