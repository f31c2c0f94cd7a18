"""The least times of layers over ranges of slice sizes, on any kind of device.

A time is piecewise linear in the rows of a slice and rounded up (``problem._at_rows``): constant or proportional below
the smallest measurement, proportional above the largest; under linear scaling it jumps after a measured size. So it is
least at an end of the range, at a measured size, or one row above one; so is the time per row, up to the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.solvers.model.problem import Problem

ROUNDED_NS = 2
"""An upper limit of the time that rounding up adds: once for rows, once for the speed of a kind."""


class LeastTimes(NamedTuple):
    """Arrays (L,) in ns, each the least over a range of sizes and over all kinds.

    ``forward``, ``backward`` (whole) and ``gradient`` (without the weights' part) of one slice; ``work`` (forward and
    backward), ``backward_work``, and ``before_weights`` (forward and input gradient) of all rows of a step.
    """

    forward: np.ndarray
    backward: np.ndarray
    gradient: np.ndarray
    work: np.ndarray
    backward_work: np.ndarray
    before_weights: np.ndarray


def least_of(times: Sequence[LeastTimes]) -> LeastTimes:
    """Return the least times, component by component."""
    return LeastTimes(*(np.min(column, axis=0) for column in zip(*times, strict=True)))


class Slices:
    """Times of a problem's layers, cached by range."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._cache: dict[tuple[int, int, int], LeastTimes] = {}
        self._exact: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds whose costs differ, one name for each."""
        first: dict[tuple[str, float], str] = {}
        for device in self.problem.devices:
            first.setdefault(self.problem.kind_source[device.kind], device.kind)
        return tuple(first.values())

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        """The sizes at which a linear piece of a time begins or ends."""
        sizes = {p.rows for source, _ in self._sources for p in self.problem.measured[source]}
        return tuple(sorted({*sizes, *(size + 1 for size in sizes)}))

    @cached_property
    def _sources(self) -> set[tuple[str, float]]:
        return {self.problem.kind_source[kind] for kind in self.kinds}

    def times(self, least: int, most: int, rows: int) -> LeastTimes:
        """Return times for slices of ``least`` to ``most`` rows; ``rows``: how many are computed in a step."""
        key = (least, most, rows)
        if key not in self._cache:
            self._cache[key] = self._times(*key)
        return self._cache[key]

    def _times(self, least: int, most: int, rows: int) -> LeastTimes:
        sizes = sorted({least, most, *(size for size in self._steps if least < size < most)})
        slack = 0 if least == most else ROUNDED_NS
        least_of_kinds = []
        for size in sizes:
            for forward, backward, weight in self._at(size):
                work = np.maximum(0, forward + backward - 2 * slack) * rows // size
                back = np.maximum(0, backward - slack) * rows // size
                gradient = np.maximum(0, backward - weight - 2 * slack)
                # The rounding of the weights' part of a slice counts at the smallest size.
                before = np.maximum(0, forward + backward - weight - 2 * slack) * rows // size - slack * rows // least
                least_of_kinds.append((forward, backward, gradient, work, back, np.maximum(0, before)))
        return least_of([LeastTimes(*each) for each in least_of_kinds])

    def _at(self, size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return forward, backward and weight-gradient times of every layer, for each kind."""
        if size not in self._exact:
            costs = [self.problem.costs(kind, size) for kind in self.kinds]
            self._exact[size] = [(np.diff(c.forward_ns), np.diff(c.backward_ns), np.diff(c.weight_ns)) for c in costs]
        return self._exact[size]
