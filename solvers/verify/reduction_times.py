"""Times of all-reduces for ``verify``, read independently from the measurements, or else computed for a ring."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import ceil

from penstock.solvers.costs.collectives import group_of
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.model.degrees import Operation
from penstock.solvers.model.problem import Problem


def reduction_ns(problem: Problem, size_bytes: int, devices: Sequence[int]) -> int:
    """Return the time in which devices sum the gradients of ``size_bytes`` of parameters, and gather sharded states.

    Half of an all-reduce sums gradients, in the gradients' width; the other half gathers the gradients, or the
    parameters in the parameters' width.
    """
    if len(devices) == 1 or size_bytes == 0:
        return 0
    summed = size_bytes * problem.memory.gradient_factor
    size_bytes = ceil(Fraction(summed + (size_bytes if problem.memory.shard_states else summed), 2))
    if problem.collectives and (per_node := _devices_per_node(problem, tuple(devices))):
        options: tuple[tuple[Operation, ...], ...] = (("all_reduce",), ("reduce_scatter", "all_gather"))
        for operations in options:
            measured = [_measured(problem, operation, per_node, len(devices)) for operation in operations]
            if all(measured):
                return sum(_read(points, size_bytes) for points in measured)
    return group_of(problem, tuple(devices)).computed_ns("all_reduce", size_bytes)


@lru_cache(maxsize=2**10)
def _devices_per_node(problem: Problem, devices: tuple[int, ...]) -> int:
    """Return the number of devices in every node; 0 where it differs, or where several groups share links."""
    network = problem.network
    nodes = [network.node_of[device] for device in devices]
    counts = {nodes.count(node) for node in nodes}
    width = network.ring_bandwidth(devices)
    if problem.real is not None:
        alone = [tuple(problem.cells[cell][lane] for cell in devices) for lane in range(len(problem.cells[devices[0]]))]
        if width < min(problem.real.network.ring_bandwidth(gpus) for gpus in alone):
            return 0
    return counts.pop() if len(counts) == 1 and width else 0


@lru_cache(maxsize=2**10)
def _measured(problem: Problem, operation: Operation, per_node: int, devices: int) -> tuple[tuple[int, int], ...]:
    """Return bytes and ns measured in groups of that span, by bytes; more bytes never take less time."""
    rows = [
        row
        for row in problem.collectives
        if row.operation == operation and row.devices_per_node == per_node and row.nodes * per_node == devices
    ]
    sizes = sorted(row.size_bytes for row in rows)
    return tuple((size, max(row.time_ns for row in rows if row.size_bytes <= size)) for size in sizes)


def _read(points: Sequence[tuple[int, int]], size_bytes: int) -> int:
    """Return the time on the straight line between two measurements, or beyond them on the last line."""
    (first, least_ns), (last, most_ns) = points[0], points[-1]
    if size_bytes <= first:
        return least_ns
    for (a, a_ns), (b, b_ns) in pairwise(points):
        if a < size_bytes <= b:
            return ceil(a_ns + Fraction((b_ns - a_ns) * (size_bytes - a), b - a))
    slopes = [Fraction(y - x, b - a) for (a, x), (b, y) in pairwise(points) if y > x]
    slope = slopes[-1] if slopes else Fraction(most_ns, last)
    return min(NEVER_NS, ceil(most_ns + slope * (size_bytes - last)))
