"""The least time of every plan of a choice from its load alone, without the problem of the choice.

All samples go through all layers on one GPU of a mesh, at the least time per sample that was measured; collectives
and updates come on top. Times between measured sizes are interpolated, so that no size takes less per sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.solvers.degrees.cells import Cells
from penstock.solvers.degrees.times import variant_at
from penstock.solvers.model.degrees import CellMeasured, Choice, Degrees
from penstock.solvers.model.problem import Measured, Problem

LESS = 1 - 1e-9
"""A factor that covers the rounding errors of the sums."""


class Loads:
    """The loads of a request's choices; choices of the same degrees have the same."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._samples: dict[Degrees, float] = {}

    def least_ns(self, choice: Choice, cells: Cells) -> int:
        """Return a bound on all plans of a choice, at most its problem's bound; 0 where operations may share GPUs.

        ``cells``: the cells of the choice.
        """
        if "elastic_averaging" in self._problem.update_rules:
            return 0
        if choice.degrees not in self._samples:
            self._samples[choice.degrees] = self._per_sample_ns(choice.degrees)
        meshes = sum(map(len, cells)) / choice.degrees.mesh
        return int(LESS * self._problem.global_batch_size * self._samples[choice.degrees] / meshes)

    def _per_sample_ns(self, degrees: Degrees) -> float:
        """Return the time of one sample through all layers, each at its best size on its best kind."""
        problem = self._problem
        variant = None if degrees == Degrees() else variant_at(problem, degrees)
        measured: dict[str, Sequence[Measured | CellMeasured]] = {}
        measured |= problem.measured if variant is None else variant.measured
        each = [
            (point.forward_ns + point.backward_ns) / (point.rows * speed)
            for source, speed in set(problem.kind_source.values())
            for point in measured[source]
        ]
        return float(np.min(each, axis=0).sum())
