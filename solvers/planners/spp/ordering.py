"""Recursive device ordering: neighbours in the order share the fastest links (SPP section IV-B1, Algorithm 2).

Cut the graph of bandwidths where it is weakest, order both sides, put them side by side. The paper leaves two things
open (R-12). Which of the minimum cuts: the cut of ``stoer_wagner_kernel``, ties by fewer devices, then by
lexicographic numbers; for a disconnected graph the smallest component. Which side comes first: ``id``, the side with
the smallest device number, or ``bandwidth``, where each side is reversed if that widens the joint.

Interchangeable devices are one vertex: the weight of a cut is concave in their number on one side, so a minimum cut
has them all on one side or takes away a single one. O(T^4 / 12) steps for T sets.
"""

from __future__ import annotations

from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.spp.stoer_wagner_kernel import minimum_cut

Orientation = Literal["id", "bandwidth"]
ORIENTATIONS: tuple[Orientation, ...] = ("id", "bandwidth")
SUM_BITS = 60
"""Bandwidths are divided by their greatest common divisor, and then halved until all of them add up to fewer bits."""


class DeviceSet(NamedTuple):
    """Devices with equal connections, ascending, and their row in the graph."""

    row: int
    devices: tuple[int, ...]


class Graph(NamedTuple):
    """Bandwidths between sets of interchangeable devices, (T, T) int64, within a set on the diagonal.

    Sets are ordered by their smallest device.
    """

    between: np.ndarray
    sets: tuple[DeviceSet, ...]


class Cut(NamedTuple):
    """A cut's weight and the side with fewer devices: their number, and whole sets or one device of a set."""

    weight: int
    size: int
    devices: list[int]


def device_order(graph: Graph, orientation: Orientation = "id") -> tuple[int, ...]:
    """Return all devices in one line, by recursive minimum cuts (Algorithm 2).

    An explicit stack replaces the recursion.
    """
    row_of = {device: each.row for each in graph.sets for device in each.devices}
    waiting: list[tuple[DeviceSet, ...] | None] = [graph.sets]
    ready: list[tuple[int, ...]] = []
    while waiting:
        part = waiting.pop()
        if part is None:
            right, left = ready.pop(), ready.pop()
            ready.append(_joined(graph, row_of, left, right, orientation))
        elif len(part) == 1:
            ready.append(part[0].devices)
        else:
            waiting += [None, *reversed(halves(graph, part))]
    return ready[0]


def _joined(
    graph: Graph, row_of: dict[int, int], left: tuple[int, ...], right: tuple[int, ...], orientation: Orientation
) -> tuple[int, ...]:
    """Join two lines as they are or reversed (R-12).

    With ``bandwidth``, the two devices at the joint have the most bandwidth.
    """
    if orientation == "id":
        return left + right
    ways = product((left, left[::-1]), (right, right[::-1]))
    first, second = max(ways, key=lambda way: int(graph.between[row_of[way[0][-1]], row_of[way[1][0]]]))
    return first + second


def halves(graph: Graph, part: tuple[DeviceSet, ...]) -> tuple[tuple[DeviceSet, ...], tuple[DeviceSet, ...]]:
    """Return the two sides of a minimum cut of at least two sets, the side with the smallest device first."""
    best = min([_between_sets(graph, part), *_single_devices(graph, part)])
    chosen = set(best.devices)
    sides = []
    for inside in (True, False):
        kept = (DeviceSet(t.row, tuple(d for d in t.devices if (d in chosen) is inside)) for t in part)
        sides.append(tuple(sorted((t for t in kept if t.devices), key=lambda t: t.devices[0])))
    first, second = sorted(sides, key=lambda side: side[0].devices[0])
    return first, second


def _between_sets(graph: Graph, part: tuple[DeviceSet, ...]) -> Cut:
    """Return the minimum cut that splits no set."""
    rows = np.asarray([each.row for each in part])
    count = np.asarray([len(each.devices) for each in part], dtype=np.int64)
    weight = graph.between[np.ix_(rows, rows)] * np.outer(count, count)
    np.fill_diagonal(weight, 0)
    side = _smallest_component(weight, count)
    value = 0
    if side is None:
        value, side = minimum_cut(weight, count)
    devices = sorted(d for each, inside in zip(part, side, strict=True) if inside for d in each.devices)
    return Cut(value, len(devices), devices)


def _smallest_component(weight: np.ndarray, count: np.ndarray) -> np.ndarray | None:
    """Return the component with the fewest devices, as a mask; None when the graph is connected.

    Ties go to the first.
    """
    left = np.ones(len(count), dtype=bool)
    components: list[np.ndarray] = []
    while left.any():
        reached = np.zeros_like(left)
        front = np.zeros_like(left)
        front[int(np.argmax(left))] = True
        while front.any():
            reached |= front
            front = (weight[front] > 0).any(axis=0) & ~reached
        components.append(reached)
        left &= ~reached
    return None if len(components) == 1 else min(components, key=lambda mask: int(count[mask].sum()))


def _single_devices(graph: Graph, part: tuple[DeviceSet, ...]) -> list[Cut]:
    """Return the cuts that take away one device of a set of several."""
    several = [each for each in part if len(each.devices) > 1]
    if not several:
        return []
    rows, others = ([each.row for each in sets] for sets in (several, part))
    count = np.asarray([len(each.devices) for each in part], dtype=np.int64)
    pulls = graph.between[np.ix_(rows, others)] @ count - graph.between[rows, rows]
    return [Cut(pull, 1, [each.devices[0]]) for pull, each in zip(pulls.tolist(), several, strict=True)]


def graph_of(problem: Problem) -> Graph:
    """Return the problem's devices as a graph; of the two directions between devices the slower one counts."""
    groups, between = _groups(problem)
    return merged(_scaled(between, problem.num_devices), groups)


def dense_bandwidths(problem: Problem) -> np.ndarray:
    """Return the bytes per second between any two devices in the slower direction, (V, V) int64.

    0 where nothing connects them.
    """
    groups, between = _groups(problem)
    row = np.empty(problem.num_devices, dtype=np.int64)
    for number, group in enumerate(groups):
        row[list(group)] = number
    return np.asarray(between[np.ix_(row, row)])


def _groups(problem: Problem) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return groups of devices, and the bandwidths between and inside them.

    A group is a node where its devices share one network card, otherwise a single device.
    """
    network = problem.network
    if network.matrix_bytes_per_s is None and not any(network.has_own_nic):
        groups = sorted(group for group in problem.nodes() if group)
        between = np.asarray([[_bandwidth(problem, a, b) for b in groups] for a in groups], dtype=np.int64)
    else:
        groups = [(d,) for d in range(problem.num_devices)]
        between = network.dense_bandwidth()
    return groups, np.minimum(between, between.T)


def merged(between: np.ndarray, groups: list[tuple[int, ...]]) -> Graph:
    """Join groups of interchangeable devices: equal rows elsewhere, and the same bandwidth among themselves."""
    away = between.sum(axis=1) - between.diagonal()
    heads: list[int] = []
    members: dict[int, list[int]] = {}
    heads_by_sum: dict[int, list[int]] = {}
    inside: dict[int, int] = {}
    for g, group in enumerate(groups):
        alike = (
            h for h in heads_by_sum.get(int(away[g]), []) if _are_interchangeable(between, inside, h, g, len(group))
        )
        head = next(alike, None)
        if head is None:
            heads.append(g)
            heads_by_sum.setdefault(int(away[g]), []).append(g)
            members[g] = list(group)
            inside[g] = int(between[g, g]) if len(group) > 1 else -1
        else:
            members[head] += group
            inside[head] = int(between[head, g])
    table = between[np.ix_(heads, heads)]
    np.fill_diagonal(table, [max(0, inside[h]) for h in heads])
    return Graph(table, tuple(DeviceSet(row, tuple(sorted(members[h]))) for row, h in enumerate(heads)))


def _are_interchangeable(between: np.ndarray, inside: dict[int, int], head: int, other: int, size: int) -> bool:
    joint = int(between[head, other])
    if inside[head] not in (-1, joint) or (size > 1 and between[other, other] != joint):
        return False
    same = between[head] == between[other]
    same[[head, other]] = True
    return bool(same.all())


def _bandwidth(problem: Problem, group: tuple[int, ...], other: tuple[int, ...]) -> int:
    if group == other and len(group) == 1:
        return 0
    return problem.network.bandwidth(group[0], other[1] if group == other else other[0])


def _scaled(between: np.ndarray, num_devices: int) -> np.ndarray:
    scaled = between // max(1, int(np.gcd.reduce(between, axis=None)))
    most = int(scaled.max(initial=0)) * num_devices**2
    return np.asarray(scaled >> max(0, most.bit_length() - SUM_BITS))
