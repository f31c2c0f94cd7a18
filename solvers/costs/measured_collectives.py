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
"""Factor for floats that must not exceed an exact number."""


class Span(NamedTuple):
    """The number of devices of each node that take part, and the number of nodes."""

    devices_per_node: int
    nodes: int


class Curve(NamedTuple):
    """The time of one collective by its bytes: measured sizes, ascending, and times that never fall.

    Between two sizes it is linear, below the smallest it is the smallest size's time. Above the largest it continues at
    the bandwidth of the last segment in which it grows; if none grows, in proportion to the largest.
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
        times_ns = np.interp(sizes, self.sizes, self.times_ns)
        times_ns = times_ns + np.maximum(0, sizes - last) * (more_ns / more_bytes)
        return np.asarray(np.floor(np.minimum(FAR_NS, times_ns * _LESS)), dtype=np.int64)

    @property
    def _last_slope(self) -> tuple[int, int]:
        """Return the slope above the largest size: ns, and the bytes that take them."""
        for at in range(len(self.sizes) - 1, 0, -1):
            if self.times_ns[at] > self.times_ns[at - 1]:
                return self.times_ns[at] - self.times_ns[at - 1], self.sizes[at] - self.sizes[at - 1]
        return self.times_ns[-1], self.sizes[-1]


Measured = tuple[tuple[Operation, tuple[Curve, ...]], ...]
"""Curves by operation, whose times add up to its time: one curve, or two for the halves of an all-reduce."""


def measured_of(problem: Problem, devices: Sequence[int]) -> Measured:
    """Return the measurements of groups of the devices' span.

    There are none of devices that are not spread evenly over their nodes, or that nothing connects. Each GPU of the
    cells of a problem with degrees is in a different group, and all of these work at the same time. A measurement of
    one group alone holds for them where they share no link, so that each has the bandwidth that it has alone.
    """
    if not problem.collectives:
        return ()
    devices_in = Counter(problem.network.node_of[device] for device in devices)
    if len(set(devices_in.values())) > 1:
        return ()
    measured = measured_by_span(problem).get(Span(len(devices) // len(devices_in), len(devices_in)), ())
    return measured if measured and _are_alone(problem, devices) else ()


def _are_alone(problem: Problem, devices: Sequence[int]) -> bool:
    width = problem.network.ring_bandwidth(devices)
    if problem.real is None:
        return width > 0
    lanes = zip(*(problem.cells[cell] for cell in devices), strict=True)
    return width > 0 and width >= min(problem.real.network.ring_bandwidth(lane) for lane in lanes)


@per_problem
def measured_by_span(problem: Problem) -> dict[Span, Measured]:
    """Return the measurements by span; an all-reduce that was not measured is a reduce-scatter and an all-gather."""
    points: dict[Span, dict[Operation, list[tuple[int, int]]]] = {}
    for row in problem.collectives:
        points_of = points.setdefault(Span(row.devices_per_node, row.nodes), {})
        points_of.setdefault(row.operation, []).append((row.size_bytes, row.time_ns))
    curves_of: dict[Span, Measured] = {}
    for span, by_operation in points.items():
        curves: dict[Operation, tuple[Curve, ...]] = {
            name: (_curve(sizes_and_times),) for name, sizes_and_times in by_operation.items()
        }
        if "all_reduce" not in curves and curves.keys() >= {"reduce_scatter", "all_gather"}:
            curves["all_reduce"] = curves["reduce_scatter"] + curves["all_gather"]
        curves_of[span] = tuple(curves.items())
    return curves_of


def _curve(points: Sequence[tuple[int, int]]) -> Curve:
    sizes, times = zip(*sorted(points), strict=True)
    return Curve(sizes, tuple(accumulate(times, max)))
