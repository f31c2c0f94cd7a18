"""Collectives that were measured: their time by bytes, for groups of devices of the measured span (ALGORITHMS 1.6)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.infinity import FAR_NS, NEVER_NS
from penstock.solvers.model.degrees import Operation
from penstock.solvers.model.problem import Problem, per_problem

_LESS = 1 - 1e-12
"""For floats that have to be at most an exact number."""


class Span(NamedTuple):
    """How many devices of each node take part, and of how many nodes."""

    devices_per_node: int
    nodes: int


class Curve(NamedTuple):
    """The time of one collective by its bytes: measured sizes, ascending, and times that never fall.

    Between two sizes it is linear, below the smallest it is that of the smallest, and above the largest it goes on at
    the bandwidth of the last segment in which it grows; where none does, in proportion to the largest.
    """

    sizes: tuple[int, ...]
    times_ns: tuple[int, ...]

    def time_ns(self, size_bytes: int) -> int:
        """Return the time of one collective, rounded up, at most ``NEVER_NS``."""
        at = bisect_left(self.sizes, size_bytes)
        if at == 0:
            return self.times_ns[0]
        if at == len(self.sizes):
            beyond, (more_ns, more_bytes) = size_bytes - self.sizes[-1], self._last_slope
            return min(NEVER_NS, self.times_ns[-1] - (-beyond * more_ns // more_bytes))
        low_ns, high_ns = self.times_ns[at - 1], self.times_ns[at]
        low, high = self.sizes[at - 1], self.sizes[at]
        return low_ns - (-(size_bytes - low) * (high_ns - low_ns) // (high - low))

    def least_ns(self, sizes: np.ndarray) -> np.ndarray:
        """Return, for sizes of any shape, whole ns that are at most the times of collectives."""
        (more_ns, more_bytes), last = self._last_slope, self.sizes[-1]
        known = np.interp(sizes, self.sizes, self.times_ns)
        known = known + np.maximum(0, sizes - last) * (more_ns / more_bytes)
        return np.asarray(np.floor(np.minimum(FAR_NS, known * _LESS)), dtype=np.int64)

    @property
    def _last_slope(self) -> tuple[int, int]:
        """Return the slope above the largest size: ns, and the bytes that they are for."""
        for at in range(len(self.sizes) - 1, 0, -1):
            if self.times_ns[at] > self.times_ns[at - 1]:
                return self.times_ns[at] - self.times_ns[at - 1], self.sizes[at] - self.sizes[at - 1]
        return self.times_ns[-1], self.sizes[-1]


Measured = tuple[tuple[Operation, tuple[Curve, ...]], ...]
"""By operation the curves whose times add up to its own: one, or those of an all-reduce's two halves."""


def measured_of(problem: Problem, devices: Sequence[int]) -> Measured:
    """Return what was measured of groups of the devices' span.

    Nothing is known of devices that are not spread evenly over their nodes, or that nothing connects. Of the cells of
    a problem with degrees, each GPU has its own group, and all of these work at the same time: what was measured of one
    group alone holds for them where they share no link, so that each has the bandwidth that it has alone.
    """
    if not problem.collectives:
        return ()
    held = Counter(problem.network.node_of[device] for device in devices)
    if len(set(held.values())) > 1:
        return ()
    found = measured_by_span(problem).get(Span(len(devices) // len(held), len(held)), ())
    return found if found and _are_alone(problem, devices) else ()


def _are_alone(problem: Problem, devices: Sequence[int]) -> bool:
    width = problem.network.ring_bandwidth(devices)
    if problem.real is None:
        return width > 0
    lanes = zip(*(problem.cells[cell] for cell in devices), strict=True)
    return width > 0 and width >= min(problem.real.network.ring_bandwidth(lane) for lane in lanes)


@per_problem
def measured_by_span(problem: Problem) -> dict[Span, Measured]:
    """Return what was measured, by span; an all-reduce that was not is a reduce-scatter and an all-gather."""
    points: dict[Span, dict[Operation, list[tuple[int, int]]]] = {}
    for row in problem.collectives:
        own = points.setdefault(Span(row.devices_per_node, row.nodes), {})
        own.setdefault(row.operation, []).append((row.size_bytes, row.time_ns))
    found: dict[Span, Measured] = {}
    for span, by_operation in points.items():
        curves: dict[Operation, tuple[Curve, ...]] = {name: (_curve(known),) for name, known in by_operation.items()}
        if "all_reduce" not in curves and curves.keys() >= {"reduce_scatter", "all_gather"}:
            curves["all_reduce"] = curves["reduce_scatter"] + curves["all_gather"]
        found[span] = tuple(curves.items())
    return found


def _curve(points: Sequence[tuple[int, int]]) -> Curve:
    sizes, times = zip(*sorted(points), strict=True)
    return Curve(sizes, tuple(accumulate(times, max)))
