"""Raising the bound of one number of micro-batches, step by step (BOUNDS section 3: adaptive grid, deepening).

A step looks for a plan whose bound is below a limit. When there is none, the limit is a bound of every plan. When
there is one, its value is; the plan's own rates are then added to the grid, until the value is its exact bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from penstock.solvers.batches import Batch
from penstock.solvers.kernels.request_labels import EMPTY, FOUND, NONE, TOO_MUCH, search
from penstock.solvers.kernels.request_pool import JOINED, SPANNING
from penstock.solvers.kernels.request_steps import (
    AMONG_SPANNING,
    FROM_SPANNING,
    SAME_RUN,
    TO_OTHER_NODE,
    TO_SPANNING,
    Pieces,
)
from penstock.solvers.kernels.windows import FREE, Chains, window_bounds
from penstock.solvers.problem import Problem
from penstock.solvers.request_bound.links import Links
from penstock.solvers.request_bound.pieces import make_pieces

MOST_OF_A_STATE, LEAST_OF_A_STATE = 64, 4
"""Where a search is too long, the next one keeps a quarter of the labels of a state."""
MOST_LABELS = 1 << 18
EFFORT = 10_000_000
"""Labels times grid points of one search."""
MOST_POINTS = 16
"""Of the grid, beside the one that stands for knowing nothing."""


@dataclass(frozen=True)
class Part:
    """A stage of a plan that was found: layers [first, stop) on so many devices.

    ``placed``: JOINED with the next stage in one node, ALONE in a node, or SPANNING; ``variant``: of the tables.
    """

    first: int
    stop: int
    replicas: int
    placed: int
    variant: int

    @property
    def in_node(self) -> bool:
        """Whether one node holds it."""
        return self.placed != SPANNING


Path = tuple[Part, ...]


@dataclass
class BatchSearch:
    """The plans of one number of micro-batches. No plan takes less than ``bound_ns``.

    ``closed``: the bound will not rise any more. ``empty``: there is no plan at all.
    ``cap``: labels of a state before they are merged.
    """

    problem: Problem
    batch: Batch
    links: Links
    closed: bool = False
    empty: bool = False
    steps: int = 0
    cap: int = MOST_OF_A_STATE
    _grid: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The first bound is the work of all layers, shared by all devices."""
        self.pieces = make_pieces(self.problem, self.batch, self.links)
        self.bound_ns = -(-int(self.pieces.least_work[-1]) // self.problem.num_devices)

    def step(self, below_ns: int) -> Path | None:
        """Raise the bound, at most to ``below_ns``; the plan that it belongs to, if it is below."""
        pieces = self.pieces
        grid = np.asarray([(0, 0), *self._grid], dtype=np.int64)
        status, value, stages, steps = search(
            pieces,
            np.ascontiguousarray(grid[:, 0]),
            np.ascontiguousarray(grid[:, 1]),
            below_ns,
            self.cap,
            MOST_LABELS,
            EFFORT // len(grid),
        )
        self.steps += int(steps) * len(grid)
        if status == TOO_MUCH:
            self.closed = self.cap <= LEAST_OF_A_STATE and not self._grid
            self.cap, self._grid = max(LEAST_OF_A_STATE, self.cap // 4), []
            return None
        if status in (NONE, EMPTY):
            self.bound_ns = max(self.bound_ns, below_ns)
            self.closed = self.empty = status == EMPTY
            return None
        assert status == FOUND
        self.bound_ns = max(self.bound_ns, int(value))
        path = _path(stages.tolist())
        chains = chains_of(pieces, path)
        known = list(self._grid)
        if plan_bound_ns(chains, pieces.batches) > value:
            self._grid = _refined(known, _rates(chains))
        self.closed = self._grid == known
        return path


def _path(stages: list[list[int]]) -> Path:
    """The stages from the first one on."""
    parts, first = [], 0
    for stop, replicas, placed, variant in stages:
        parts.append(Part(first, stop, replicas, placed, variant))
        first = stop
    return tuple(parts)


def chains_of(pieces: Pieces, path: Path) -> Chains:
    """The plan as the arrays of the plan's own bound (``kernels.windows``)."""
    columns: list[list[int]] = [[] for _ in Chains._fields]
    for part, behind in [*pairwise(path), (path[-1], None)]:
        at = (part.variant, part.replicas, part.first, part.stop)
        after = int(pieces.after[0 if part.in_node else 1, part.replicas, part.first, part.stop])
        out, back, channel = (0, 0, FREE) if behind is None else hop(pieces, part, behind)
        row = [pieces.forward[at], pieces.backward[at], out, back, channel, after, 0, pieces.limit[at], pieces.work[at]]
        for column, value in zip(columns, row, strict=True):
            column.append(int(value))
    columns[3] = [0, *columns[3][:-1]]
    return Chains(*(np.asarray([column], dtype=np.int64) for column in columns))


def hop(pieces: Pieces, source: Part, target: Part) -> tuple[int, int, int]:
    """Transfer times out and back between two stages, and how they exclude each other."""
    if source.placed == JOINED:
        way = home = SAME_RUN
    elif source.in_node and target.in_node:
        way = home = TO_OTHER_NODE
    elif source.in_node:
        way, home = TO_SPANNING, FROM_SPANNING
    elif target.in_node:
        way, home = FROM_SPANNING, TO_SPANNING
    else:
        way = home = AMONG_SPANNING
    times = []
    for sent, there, (r, to) in zip(
        pieces.sent[:, source.stop],
        (way, home),
        ((source.replicas, target.replicas), (target.replicas, source.replicas)),
        strict=True,
    ):
        duration = math.ceil(sent * pieces.rate[there, r, to]) + int(pieces.latency_ns[there])
        times.append(duration if sent > 0 else 0)
    return times[0], times[1], int(pieces.channel[way]) if min(times) > 0 else FREE


def plan_bound_ns(chains: Chains, batches: int) -> int:
    """The bound of one plan, by the kernel that bounds any plan."""
    bounds = np.zeros(1, dtype=np.int64)
    scratch = np.zeros((2, chains.forward.shape[1]), dtype=np.int64)
    window_bounds(chains, batches, bounds, scratch[0], scratch[1])
    return int(bounds[0])


def _rates(chains: Chains) -> list[tuple[int, int]]:
    """The longest forward and backward step so far, after each stage and channel of a plan."""
    found, forward, backward = [], 0, 0
    out, back = chains.out[0], np.append(chains.back[0][1:], 0)
    for s in range(chains.forward.shape[1]):
        forward, backward = max(forward, int(chains.forward[0, s])), max(backward, int(chains.backward[0, s]))
        found.append((forward, backward))
        if chains.channel[0, s] != FREE:
            forward, backward = max(forward, int(out[s])), max(backward, int(back[s]))
            found.append((forward, backward))
    return found


def _refined(known: list[tuple[int, int]], rates: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The plan's rates and those known points that make a rising chain with them, the newest kept first."""
    fresh = sorted(set(rates) - {(0, 0)})
    for point in known:
        rising = all((point[0] <= f and point[1] <= b) or (point[0] >= f and point[1] >= b) for f, b in fresh)
        if rising and point not in fresh and len(fresh) < MOST_POINTS:
            fresh.append(point)
    return sorted(fresh[:MOST_POINTS])
