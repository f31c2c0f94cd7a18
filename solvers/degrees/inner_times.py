"""The time that collectives inside a pass add to it: what computation does not hide.

They take the time of their operation and no resource of the network: a context or expert group that leaves its node
does not compete with transfers between stages. That is an assumption of every plan with degrees.
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
    """How many times as long as stated computation takes, and collectives do, by the groups that they are over.

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
        """Return (L,) ns in which GPUs with copies of ``trained`` bytes, ``experts`` of them experts', sum these.

        Each layer's gradients are reduce-scattered in their width, and gathered, or the parameters where optimizer
        states are sharded.
        """
        width = 1 if memory.shard_states else memory.gradient_factor
        scattered = self.half_ns("reduce_scatter", trained, experts, memory.gradient_factor)
        return np.asarray(scattered + self.half_ns("all_gather", trained, experts, width))

    def half_ns(self, half: Operation, sizes: Sequence[int], experts: Sequence[int], width: int) -> np.ndarray:
        """Return (L,) ns of half an all-reduce over GPUs with copies of ``sizes`` bytes, times ``width``.

        Of all but ``experts`` bytes it is among every t-th GPU of a cell, of these among every GPU that has the same.
        """
        x = self._degrees.expert_group
        known: dict[tuple[int, int], int] = {}
        for own in zip(sizes, experts, strict=True):
            if own not in known:
                parts = (self._degrees.tensor, own[0] - own[1]), (x, own[1])
                known[own] = sum(self._slowest_ns(self._apart(stride), (half,), size * width) for stride, size in parts)
        return np.asarray([known[own] for own in zip(sizes, experts, strict=True)], dtype=np.int64)

    def _apart(self, stride: int) -> tuple[Group, ...]:
        """Return the groups of every ``stride``-th GPU of a cell, those that differ."""
        return self._distinct([cell[lane::stride] for cell in self._cells for lane in range(stride)])

    def _distinct(self, groups: Sequence[Sequence[int]]) -> tuple[Group, ...]:
        return tuple(dict.fromkeys(group_of(self._problem, tuple(group)) for group in groups if len(group) > 1))

    @staticmethod
    def _slowest_ns(groups: Sequence[Group], operations: Sequence[Operation], size: int, count: int = 1) -> int:
        """Return what the slowest of several groups takes for these operations, one after the other."""
        return sum(max((group.time_ns(each, size, count) for group in groups), default=0) for each in operations)

    @cached_property
    def _groups(self) -> dict[Over, tuple[Group, ...]]:
        """Each kind of group, those that differ: tensor groups are neighbours, context groups have stride t."""
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

        On a kind that is ``speed`` times as fast as the measured one, computation hides the less.
        """
        taken: dict[tuple[Collective, ...], int] = {}
        for own in measured.collectives:
            if own not in taken:
                taken[own] = sum(self._exposed_ns(each, speed) for each in own if each.phase == phase)
        return np.asarray([taken[own] for own in measured.collectives], dtype=np.int64)

    def _exposed_ns(self, collective: Collective, speed: float) -> int:
        groups = self._groups[collective.over]
        stated = self._slowest_ns(groups, (collective.operation,), collective.bytes, collective.count)
        taken = int(scaled(stated, getattr(self._times, collective.over)))
        return max(0, taken - int(collective.hidden_ns / speed))


def scaled(times_ns: Any, factor: Fraction) -> Any:
    """Return a time, or an array of them, ``factor`` times as long, rounded up."""
    return times_ns if factor == 1 else -(-times_ns * factor.numerator // factor.denominator)
