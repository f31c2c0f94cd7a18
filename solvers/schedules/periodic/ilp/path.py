"""The operations of one micro-batch in order, and the smallest period once it is decided which run before which.

Symbols: s_o, the start of operation o of micro-batch 0; n_ij = floor((s_j - s_i) / T) for two operations of one
resource: n_ij operations i start between one i and the j of its micro-batch. With n given, T is the largest ratio
of durations to periods of a cycle of constraints, computed in integers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from itertools import combinations, pairwise
from typing import NamedTuple

from penstock.solvers.schedules.support.stage_line import StageLine

Counts = Mapping[tuple[int, int], int]


class PathOperation(NamedTuple):
    """An operation of the path; ``move``: a transfer, on the link between its stage and the next one."""

    forward: bool
    move: bool
    stage: int
    duration_ns: int
    resource: Hashable


class _Edge(NamedTuple):
    """A constraint: s_after >= s_before + duration + periods T."""

    before: int
    after: int
    duration_ns: int
    periods: int


def path_of(line: StageLine) -> tuple[PathOperation, ...]:
    """Return the path: F_1, its transfer, F_2, …, F_S, B_S, …, B_1.

    Stages on one processor and empty tensors have no transfer.
    """
    forward, backward = [], []
    for s in range(line.size):
        resource = ("processor", line.processor[s])
        forward.append(PathOperation(True, False, s, line.forward_ns[s], resource))
        backward.append(PathOperation(False, False, s, line.backward_ns[s], resource))
        if s + 1 < line.size and line.processor[s] != line.processor[s + 1]:
            link = frozenset(line.processor[s : s + 2])
            if line.hop_forward_ns[s]:
                forward.append(PathOperation(True, True, s, line.hop_forward_ns[s], link))
            if line.hop_backward_ns[s]:
                backward.append(PathOperation(False, True, s, line.hop_backward_ns[s], link))
    ordered = sorted(backward, key=lambda step: (step.stage, step.move), reverse=True)
    return (*forward, *ordered)


def rivals(path: tuple[PathOperation, ...]) -> list[tuple[int, ...]]:
    """Return the positions of the operations of each resource, in path order."""
    users: dict[Hashable, list[int]] = defaultdict(list)
    for i, step in enumerate(path):
        users[step.resource].append(i)
    return [tuple(positions) for positions in users.values()]


def timed(path: tuple[PathOperation, ...], counts: Counts, least_ns: int) -> tuple[int, list[int]] | None:
    """Return the least period from ``least_ns`` on with these counts, and all starts; None if they are inconsistent."""
    edges = [_Edge(i, j, path[i].duration_ns, 0) for i, j in pairwise(range(len(path)))]
    for positions in rivals(path):
        for i, j in combinations(positions, 2):
            edges.append(_Edge(i, j, path[i].duration_ns, counts[i, j]))
            edges.append(_Edge(j, i, path[j].duration_ns, -counts[i, j] - 1))
    period = least_ns
    while True:
        starts, cycle = _longest(len(path), edges, period)
        if not cycle:
            return period, starts
        periods = sum(edge.periods for edge in cycle)
        if periods >= 0:
            return None
        period = -(sum(edge.duration_ns for edge in cycle) // periods)


def _longest(size: int, edges: list[_Edge], period_ns: int) -> tuple[list[int], list[_Edge]]:
    """Return the earliest starts, none negative, or a cycle of constraints that this period breaks.

    The method is Bellman and Ford's.
    """
    starts = [0] * size
    came: list[_Edge | None] = [None] * size
    moved = 0
    for _ in range(size + 1):
        moved = -1
        for edge in edges:
            start = starts[edge.before] + edge.duration_ns + edge.periods * period_ns
            if start > starts[edge.after]:
                starts[edge.after], came[edge.after], moved = start, edge, edge.after
        if moved < 0:
            return starts, []
    return starts, _cycle(came, moved, size)


def _cycle(came: list[_Edge | None], at: int, size: int) -> list[_Edge]:
    """Return the cycle that leads to an operation that still moves after ``size`` passes."""
    for _ in range(size):
        at = _before(came, at)
    cycle: list[_Edge] = []
    first = at
    while not cycle or at != first:
        edge = came[at]
        assert edge is not None
        cycle.append(edge)
        at = edge.before
    return cycle


def _before(came: list[_Edge | None], at: int) -> int:
    edge = came[at]
    assert edge is not None
    return edge.before
