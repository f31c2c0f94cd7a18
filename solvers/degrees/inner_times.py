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
from penstock.solvers.model.degrees import CellMeasured, Collective, Degrees, Over, Phase
from penstock.solvers.model.problem import Problem


class Times(NamedTuple):
    """How many times as long as stated computation takes, and collectives do, by the groups that they are over."""

    computation: Fraction = Fraction(1)
    tensor: Fraction = Fraction(1)
    context: Fraction = Fraction(1)
    expert: Fraction = Fraction(1)


STATED = Times()


class InnerTimes:
    """Collectives over the groups inside cells, ``times`` as long; where groups differ, the slowest counts."""

    def __init__(
        self, problem: Problem, degrees: Degrees, cells: Sequence[Sequence[int]], times: Times = STATED
    ) -> None:
        self._problem, self._degrees, self._cells, self._times = problem, degrees, cells, times

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
        x = self._degrees.expert * self._degrees.expert_tensor
        expert = [cell[at : at + x] for cell in self._cells for at in range(0, len(cell), x)]
        groups: dict[Over, list[Sequence[int]]] = {"tensor": tensor, "context": context, "expert": expert}
        return {
            over: tuple(dict.fromkeys(group_of(self._problem, tuple(group)) for group in each if len(group) > 1))
            for over, each in groups.items()
        }

    def exposed_ns(self, measured: CellMeasured, phase: Phase, speed: float = 1.0) -> np.ndarray:
        """Return (L,) ns that each layer's collectives add to one pass of the measurement's rows.

        On a kind that is ``speed`` times as fast as the measured one, computation hides the less.
        """
        taken: dict[tuple[Collective, ...], int] = {}
        for own in measured.collectives:
            if own not in taken:
                taken[own] = sum(self._exposed_ns(each, speed) for each in own if each.phase == phase)
        return np.asarray([taken[own] for own in measured.collectives], dtype=np.int64)

    def _exposed_ns(self, collective: Collective, speed: float) -> int:
        stated = max(
            (
                group.time_ns(collective.operation, collective.bytes, collective.count)
                for group in self._groups[collective.over]
            ),
            default=0,
        )
        taken = int(scaled(stated, getattr(self._times, collective.over)))
        return max(0, taken - int(collective.hidden_ns / speed))


def scaled(times_ns: Any, factor: Fraction) -> Any:
    """Return a time, or an array of them, ``factor`` times as long, rounded up."""
    return times_ns if factor == 1 else -(-times_ns * factor.numerator // factor.denominator)
