"""Proven bounds of all plans of a small space: every stage and every edge is costed once, then looked up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from penstock.solvers.bounds.chain_costs import ChainCosts, Rows
from penstock.solvers.grid.enumeration import Placement, Space
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.schedule import Orders

WHOLE_BACKWARDS = Orders("any order", ())
"""The placeholder for every order of unsplit backwards, where only the kinds of operations count."""


class ChainTables:
    """Bounds of all plans of one number of micro-batches in a space.

    A stage's times depend on its layers and, up to symmetry, its devices. An edge's time depends on the cut and on both
    stages' devices. In mode ``nic`` slices of unequal size make even symmetric pairs differ, so there each pair is
    counted separately. Where a stage may recompute or not, it takes the time without recomputation and the larger free
    memory of the two: the input that a recomputing stage keeps may be larger than its stash.
    """

    def __init__(self, space: Space, batch: Batch) -> None:
        self.space = space
        self.costs = ChainCosts(space.problem, batch.num_micro_batches)
        self._stages: dict[object, np.ndarray] = {}
        self._edges: dict[object, np.ndarray] = {}

    def bounds(self, partitions: np.ndarray, placements: Sequence[Placement]) -> np.ndarray:
        """Return a proven bound of each plan in ns, (len(placements), len(partitions))."""
        rows = [self._bounds(partitions, each) for each in placements]
        return np.asarray(rows, dtype=np.int64).reshape(len(placements), len(partitions))

    def _bounds(self, partitions: np.ndarray, placement: Placement) -> np.ndarray:
        count, length = len(partitions), len(placement)
        quick, roomy = np.zeros((2, count, length), dtype=np.int64)
        edges = np.zeros((count, length), dtype=np.int64)
        for s, devices in enumerate(placement):
            quick[:, s], roomy[:, s] = self._stage_numbers(devices)[:, partitions[:, s], partitions[:, s + 1]]
            if s + 1 < length:
                edges[:, s] = self._edge_numbers(devices, placement[s + 1])[partitions[:, s + 1]]
        rows = Rows(np.full(count, length), quick, edges)
        limits = self.costs.limits(rows)
        if (quick != roomy).any():
            limits = np.maximum(limits, self.costs.limits(rows._replace(stages=roomy)))
        return self.costs.bounds_ns(rows, limits)

    def _stage_numbers(self, devices: tuple[int, ...]) -> np.ndarray:
        """Return the numbers of the stages from one layer up to another on these devices, (2, L, L + 1).

        The first gives the times, the second may have more free memory.
        """
        key = self.space.orbit((devices,))
        if key not in self._stages:
            self._stages[key] = self._number_stages(devices)
        return self._stages[key]

    def _number_stages(self, devices: tuple[int, ...]) -> np.ndarray:
        layers = self.space.problem.num_layers
        table = np.zeros((2, layers, layers + 1), dtype=np.int64)
        for i, first in enumerate(self._starts):
            for stop in (*self._starts[i + 1 :], layers):
                table[:, first, stop] = self._number_stage(Stage(first, stop - 1, devices))
        return table

    def _number_stage(self, stage: Stage) -> tuple[int, int]:
        recompute = self.space.problem.recompute
        quick = self.costs.stage(stage.whole if recompute == "always" else stage)
        if recompute == "auto" and self.costs.least_limit(quick) < self.costs.num_micro_batches:
            return quick, self.costs.stage(stage.whole)
        return quick, quick

    def _edge_numbers(self, source: tuple[int, ...], target: tuple[int, ...]) -> np.ndarray:
        """Return the numbers of the edges between two stages by the second stage's first layer, (L,)."""
        rules = self.space.problem.rules
        slices = rules.shared or rules.transfer == "nic"
        key = (source, target) if slices else self.space.orbit((source, target))
        if key not in self._edges:
            table = np.zeros(self.space.problem.num_layers, dtype=np.int64)
            for first in self._starts[1:]:
                table[first] = self.costs.edge(Stage(first - 1, first - 1, source), Stage(first, first, target))
            self._edges[key] = table
        return self._edges[key]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The layers that a stage may begin with."""
        return (0, *(cut + 1 for cut in self.space.cuts))
