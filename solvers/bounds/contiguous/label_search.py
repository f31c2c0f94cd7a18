"""Search for the bound of one number of micro-batches, step by step (BOUNDS section 3: adaptive grid, deepening).

A step looks for a plan whose bound is below a limit. If there is no such plan, the limit is a bound of every plan.
Otherwise the plan's value is the bound; the plan's rates are then added to the grid, until the value is its exact
bound.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.solvers.bounds.contiguous.border_bound import carried_bound_ns
from penstock.solvers.bounds.contiguous.grid_kernel import Point, make_grid, make_reach
from penstock.solvers.bounds.contiguous.label_kernel import CUT, PARENT, STOP, VALUE, Work, advance
from penstock.solvers.bounds.contiguous.label_pool import JOINED, SPANNING, make_pool
from penstock.solvers.bounds.contiguous.label_steps import (
    AMONG_SPANNING,
    FROM_SPANNING,
    GOOD_PART,
    SAME_RUN,
    TO_OTHER_NODE,
    TO_SPANNING,
    Pieces,
)
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.bounds.contiguous.stage_costs import make_pieces
from penstock.solvers.bounds.windows_kernel import FREE, Chains, window_bounds
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem

MOST_OF_A_STATE, LEAST_OF_A_STATE = 64, 4
"""Most and fewest labels per state; when a search exceeds its effort, the next search keeps a quarter of them."""
MOST_LABELS = 1 << 18
"""The most labels on up to ``PLAIN`` devices; proportionally more on more devices."""
EFFORT = 20_000_000
"""Points of labels in one search on ``PLAIN`` devices; it grows with the number of devices to the power 3/2."""
PLAIN = 16
PIECE = 2_000_000
"""Points of labels between two moments at which a search can be left."""
MOST_POINTS = 24
"""The most points of the grid, in addition to the point that represents an unknown rate."""


@dataclass(frozen=True)
class LabelledStage:
    """A stage of a plan that was found: layers [first, stop) on ``replicas`` devices.

    ``placed``: JOINED with the next stage in one node, ALONE in a node, or SPANNING nodes; ``variant``: of the tables.
    """

    first: int
    stop: int
    replicas: int
    placed: int
    variant: int

    @property
    def in_node(self) -> bool:
        """True if one node holds the stage."""
        return self.placed != SPANNING


Path = tuple[LabelledStage, ...]


@dataclass
class BatchSearch:
    """The search over plans of one number of micro-batches. No plan takes less than ``bound_ns``, or ``carried_ns``.

    ``carried_ns``: with the load of all stages on the same cables, -1 until ``carry`` was called. ``split``: backwards
    may be split into input and weight gradients, so that work may wait for its turn. ``closed``: the bound will not
    rise any more. ``empty``: there is no plan at all. ``cap``: labels of a state before they are merged.
    ``own_bound_ns``: the exact bound of the last plan.
    """

    problem: Problem
    batch: Batch
    links: Links
    split: bool = False
    bound_ns: int = 0
    carried_ns: int = -1
    prepared: bool = False
    closed: bool = False
    empty: bool = False
    steps: int = 0
    cap: int = MOST_OF_A_STATE
    own_bound_ns: int = 0
    _points: list[Point] = field(default_factory=list)

    @property
    def proven_ns(self) -> int:
        """The largest proven time: no plan takes less."""
        return max(self.bound_ns, self.carried_ns)

    def carry(self, below_ns: int) -> None:
        """Raise the proven time, at most to ``below_ns``, by the load of cables around nodes and groups of nodes."""
        bound_ns = self.bound_ns
        self.carried_ns = carried_bound_ns(self.problem, self.batch, self.links, self.pieces, bound_ns, below_ns)

    @cached_property
    def pieces(self) -> Pieces:
        """The tables of all stages."""
        return make_pieces(self.problem, self.batch, self.links, split=self.split)

    def step(self, below_ns: int) -> Generator[None, None, Path | None]:
        """Raise the bound, at most to ``below_ns``; return the plan that it belongs to, if it is below.

        Yields after each counted unit of work, so that the caller can stop. The first step makes the tables: the first
        bound is the work of all layers, shared by all devices.
        """
        if not self.prepared:
            self.prepared = True
            self.bound_ns = -(-int(self.pieces.least_work[-1]) // self.problem.num_devices)
            return None
        search = yield from self._search(below_ns)
        if search.at > 0:
            self.closed = self.cap <= LEAST_OF_A_STATE and not self._points
            self.cap, self._points = max(LEAST_OF_A_STATE, self.cap // 4), []
            return None
        path = next(search.paths(), None)
        if path is None:
            self.bound_ns = max(self.bound_ns, below_ns)
            self.closed = self.empty = not search.work.state[CUT]
            return None
        value = int(search.work.best[0, VALUE])
        self.bound_ns = max(self.bound_ns, value)
        chains = chains_of(self.pieces, path, below_ns)
        points = list(self._points)
        self.own_bound_ns = plan_bound_ns(chains, self.pieces.batches)
        if self.own_bound_ns > value:
            self._points = _refined(points, _rates(chains, self.pieces.batches))
        self.closed = self._points == points
        return path

    def paths(self, below_ns: int, most: int) -> Generator[None, None, list[Path]]:
        """Return plans whose labels are below, at most so many, the least first; yields as ``step`` does."""
        search = yield from self._search(below_ns, most)
        return list(search.paths()) if search.at == 0 else []

    def _search(self, below_ns: int, most: int = 1) -> Generator[None, None, _LabelSearch]:
        search = _LabelSearch(self.pieces, self._points, below_ns, self.cap, most)
        while search.at > 0 and search.steps < search.effort:
            yield
            search.go_on()
        self.steps += search.steps
        return search


class _LabelSearch:
    """One search for the best plans below a limit, from the last layer (``at``) to the first."""

    def __init__(self, pieces: Pieces, points: list[Point], below_ns: int, cap: int, plans: int) -> None:
        self.pieces, self.cap = pieces, cap
        self.grid = make_grid(points, pieces.batches)
        whole, early = self.grid.forward.size, self.grid.early_forward.size
        width, layers = whole + 2 * early + 2, pieces.sent.shape[1] - 1
        states = (pieces.devices + 1) * pieces.shapes
        scale = max(1, pieces.devices // PLAIN)
        most = MOST_LABELS * scale
        self.work = Work(
            stages=make_pool(most, width, (layers + 1) * states, whole + early),
            hops=make_pool(most, width, states, whole + early),
            best=np.tile(np.array([below_ns, -1, 0, 0, 0, 0]), (plans, 1)),
            state=np.array([below_ns, 0]),
            reach=make_reach(self.grid),
            fresh=np.zeros(width, np.int64),
        )
        self.at, self.steps = layers, 0
        self.effort = EFFORT * math.isqrt(scale**3)

    def go_on(self) -> None:
        """Run one unit of the search; if memory for labels runs out, all its effort counts as spent."""
        self.at, steps = advance(self.pieces, self.grid, self.work, self.cap, self.at, PIECE)
        self.steps = self.effort if steps < 0 else self.steps + steps

    def paths(self) -> Iterator[Path]:
        """Yield the plans below the limit, the best first, each from the first stage on."""
        stages = self.work.stages
        for best in self.work.best[self.work.best[:, PARENT] >= 0].tolist():
            stages_of_plan, at = [best[STOP:]], best[PARENT] - 1
            while at >= 0:
                stages_of_plan.append(stages.origin[at].tolist())
                at = int(stages.parent[at])
            yield _path(stages_of_plan)


def _path(stages: list[list[int]]) -> Path:
    """Return the stages from the first one on."""
    parts, first = [], 0
    for stop, replicas, placed, variant in stages:
        parts.append(LabelledStage(first, stop, replicas, placed, variant))
        first = stop
    return tuple(parts)


def chains_of(pieces: Pieces, path: Path, limit_ns: int = 0) -> Chains:
    """Return the plan as the arrays that the bound of a single plan takes (``kernels.windows``).

    ``limit_ns``: of the search that it is from, which decides how exactly transfers are computed.
    """
    columns: list[list[int]] = [[] for _ in Chains._fields]
    for part, following, run in [
        *((*pair, run) for pair, run in zip(pairwise(path), _runs_of(path), strict=True)),
        (path[-1], None, 0),
    ]:
        at = (part.variant, part.replicas, part.first, part.stop)
        after = int(pieces.after[0 if part.in_node else 1, part.replicas, part.first, part.stop])
        after += int(pieces.weight[at])
        out, back, channel = (0, 0, FREE) if following is None else hop(pieces, part, following, run, limit_ns)
        row = [pieces.forward[at], pieces.backward[at], out, back, channel, after, 0, pieces.limit[at], pieces.work[at]]
        for column, value in zip(columns, row, strict=True):
            column.append(int(value))
    columns[3] = [0, *columns[3][:-1]]
    return Chains(*(np.asarray([column], dtype=np.int64) for column in columns))


def _runs_of(path: Path) -> list[int]:
    """Return, for each pair of neighbours, the devices of the node run of the stage in a node; 0 without one."""
    runs: list[int] = []
    for number in range(len(path)):
        joined = number > 0 and path[number - 1].placed == JOINED
        runs.append(runs[-1] if joined else sum(part.replicas for part in _run(path[number:])))
    return [runs[number if part.in_node else number + 1] for number, part in enumerate(path[:-1])]


def _run(path: Path) -> Iterator[LabelledStage]:
    """Yield the first stage and those after it that are in the same node."""
    for part in path:
        yield part
        if part.placed != JOINED:
            return


def hop(
    pieces: Pieces, source: LabelledStage, target: LabelledStage, run: int = 0, limit_ns: int = 0
) -> tuple[int, int, int]:
    """Return the transfer times out and back between two stages, and how they exclude each other.

    ``run``: the devices of the node run of the stage that is in a node, at least the stage's; ``limit_ns``: as in
    ``chains_of``.
    """
    r, to = source.replicas, target.replicas
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
    rates = pieces.rate[way, r, to], pieces.rate[home, to, r]
    if way != home:
        inside, spread = (r, to) if way == TO_SPANNING else (to, r)
        apart = pieces.spread_rate[0, inside, spread]
        slowest = sum(math.ceil(sent * apart) for sent in pieces.sent[:, source.stop].tolist())
        slowest += int(pieces.latency_ns[TO_SPANNING]) * int(np.count_nonzero(pieces.sent[:, source.stop]))
        if way == TO_SPANNING and GOOD_PART * pieces.batches * slowest < limit_ns:
            run = inside
        near = max(0, min(spread - 1, pieces.node_size - max(run, inside), len(pieces.spread_rate) - 1))
        rates = (pieces.spread_rate[near, inside, spread],) * 2
    times = []
    for sent, rate, there in zip(pieces.sent[:, source.stop], rates, (way, home), strict=True):
        times.append(math.ceil(sent * rate) + int(pieces.latency_ns[there]) if sent > 0 else 0)
    return times[0], times[1], int(pieces.channel[way]) if min(times) > 0 else FREE


def plan_bound_ns(chains: Chains, batches: int) -> int:
    """Return the bound of one plan, from the kernel that bounds any plan."""
    bounds = np.zeros(1, dtype=np.int64)
    scratch = np.zeros((2, chains.forward.shape[1]), dtype=np.int64)
    window_bounds(chains, batches, bounds, scratch[0], scratch[1])
    return int(bounds[0])


def _rates(chains: Chains, batches: int) -> list[Point]:
    """Return the longest step and the smallest limit up to and including each stage and channel of a plan."""
    rates, forward, backward, limit = [], 0, 0, batches
    out, back = chains.out[0], np.append(chains.back[0][1:], 0)
    for s in range(chains.forward.shape[1]):
        forward, backward = max(forward, int(chains.forward[0, s])), max(backward, int(chains.backward[0, s]))
        limit = min(limit, int(chains.limit[0, s]))
        rates.append((forward, backward, limit))
        if chains.channel[0, s] != FREE:
            forward, backward = max(forward, int(out[s])), max(backward, int(back[s]))
            rates.append((forward, backward, limit))
    return rates


def _refined(points: list[Point], rates: list[Point]) -> list[Point]:
    """Return the plan's rates and the earlier points, the newest first, at most ``MOST_POINTS``."""
    return list(dict.fromkeys([*rates, *points]))[:MOST_POINTS]
