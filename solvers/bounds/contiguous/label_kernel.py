"""The least bound of any plan of one contiguous pipeline: labels from the last layer to the first (BOUNDS section 3).

A label stands for the stages from a layer on, in so many devices; ``q`` of its state are the devices of the first
stage's *node run*, neighbouring stages placed in one node (0: the stage spans nodes). It holds, for each point j of a
grid of bounds on the stages and channels before it (``grid_kernel``),

* P[j], the end of the backward work, counted from when the first micro-batch can come in;
* Q[j], the same with only forward rates from before (what counts before an all-reduce);
* V[j], the end with all-reduces and updates;

and R, the round trip of one micro-batch, and E, one micro-batch's time to the latest end of an all-reduce. Each is a
lower bound for the stages that the label stands for. So a label replaces another if none of its numbers is larger, and
two labels may be merged into their minima: every value of the search bounds every plan.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.contiguous.grid_kernel import Grid, Reach, fill_after
from penstock.solvers.bounds.contiguous.label_pool import ALONE, JOINED, PLACED, SPANNING, Pool, add, clear
from penstock.solvers.bounds.contiguous.label_steps import (
    AMONG_SPANNING,
    FROM_SPANNING,
    SAME_RUN,
    TO_OTHER_NODE,
    TO_SPANNING,
    Pieces,
    hop,
    may_be_below,
    most_near,
    near_matters,
    put,
    times_of_hop,
)
from penstock.solvers.bounds.windows_kernel import FREE
from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.fields import Fields

VALUE, PARENT, STOP, REPLICAS, PLACE, VARIANT = range(6)
"""Columns of the best plans.

The value or the limit, 1 + the label after the first stage (-1 without a plan), the first stage's columns (4).
"""
LIMIT, CUT = range(2)
"""Columns of a search's state: the limit that its plans are below; whether that has left anything out."""


@Fields.register
class Work(NamedTuple):
    """Arrays that a search writes: labels of stages by first layer, labels after the channels to one layer, the best
    plans.

    ``best`` (plans, 6): by rising value; ``state`` (2,): LIMIT and CUT. ``fresh`` is room for a label.
    """

    stages: Pool
    hops: Pool
    best: np.ndarray
    state: np.ndarray
    reach: Reach
    fresh: np.ndarray


@loop
def advance(pieces: Pieces, grid: Grid, work: Work, cap: int, at: int, most_steps: int) -> tuple[int, int]:
    """Continue from layer ``at`` backwards, layer by layer, for ``most_steps`` steps or a little more.

    Return the layer to continue from, 0 at the end, and the number of steps, -1 where labels have no room. ``cap``:
    labels of a state; more are merged. A step is a point of a label.
    """
    layers, steps = pieces.sent.shape[1] - 1, 0
    while at > 0 and steps < most_steps:
        clear(work.hops)
        done = _begin(pieces, work, cap) if at == layers else _send(pieces, grid, work, cap, at)
        if done < 0:
            return at, -1
        steps += done
        done = _stage(pieces, grid, work, cap, at)
        if done < 0:
            return at, -1
        steps += done
        at -= 1
    return at, steps


@inner
def _state(pieces: Pieces, used: int, replicas: int, run: int) -> int:
    return used * pieces.shapes + pieces.shape[replicas, run]


@loop
def _begin(pieces: Pieces, work: Work, cap: int) -> int:
    """Begin with an empty label behind the last stage."""
    work.fresh[:] = 0
    for r in range(1, pieces.limit.shape[1]):
        if r <= pieces.node_size:
            add(work.hops, _state(pieces, r, r, r), work.fresh, cap, -1, 0, 0, ALONE, 0)
        if r > pieces.node_size or (pieces.spans and r > 1):
            add(work.hops, _state(pieces, r, r, 0), work.fresh, cap, -1, 0, 0, SPANNING, 0)
    return 1


@inner
def _way(pieces: Pieces, placed: int, source: int, in_node: bool) -> int:
    """Return how a stage of ``placed`` lies to the stage after it; -1 if it cannot be placed so."""
    if placed == SPANNING:
        if source <= pieces.node_size and (not pieces.spans or source == 1):
            return -1
        return FROM_SPANNING if in_node else AMONG_SPANNING
    if source > pieces.node_size:
        return -1
    if placed == ALONE:
        return TO_OTHER_NODE if in_node else TO_SPANNING
    return SAME_RUN if in_node else -1


@loop
def _send(pieces: Pieces, grid: Grid, work: Work, cap: int, at: int) -> int:
    """Send labels from the stages that begin at a layer to all stages that may end there; -1 without room."""
    most, steps = pieces.limit.shape[1] - 1, 0
    for r in range(1, most + 1):
        for source in range(1, min(most, pieces.devices - r) + 1):
            for placed in (JOINED, ALONE, SPANNING):
                for in_node in range(2):
                    way = _way(pieces, placed, source, in_node == 1)
                    if way < 0 or (in_node == 1 and r > pieces.node_size) or pieces.rate[way, source, r] == np.inf:
                        continue
                    done = _send_one_way(pieces, grid, work, cap, at, r, source, placed, in_node, way)
                    if done < 0:
                        return -1
                    steps += done
    return steps


@loop
def _send_one_way(
    pieces: Pieces,
    grid: Grid,
    work: Work,
    cap: int,
    at: int,
    r: int,
    source: int,
    placed: int,
    in_node: int,
    way: int,
) -> int:
    """Send labels from the stages of ``r`` replicas to the stages of ``source``; -1 where labels have no room.

    If devices of a stage across nodes are in the other stage's node, they count with its run: their number decides the
    load of the node's link.
    """
    low, high = (r, pieces.node_size) if in_node == 1 else (0, 0)
    steps = 0
    for q in range(low, high + 1):
        run = 0 if placed == SPANNING else source if placed == ALONE else q + source
        if run > pieces.node_size or pieces.shape[r, q] < 0:
            continue
        least, most = 0, 0
        if way == FROM_SPANNING:
            least = most = most_near(pieces, source, q)
        elif way == TO_SPANNING:
            most = most_near(pieces, r, run)
            least = 0 if near_matters(pieces, at, source, r, work.state[LIMIT]) else most
        for some in range(least, most + 1):
            if some > least and not _is_quicker(pieces, source, r, some):
                continue
            grown = run + some - least if way == TO_SPANNING else run
            done = _send_one_run(pieces, grid, work, cap, at, r, source, placed, q, grown, way, some)
            if done < 0:
                return -1
            steps += done
    return steps


@inner
def _is_quicker(pieces: Pieces, replicas: int, spread: int, near: int) -> bool:
    """Return whether one more device in the other's node saves time."""
    return pieces.spread_rate[near, replicas, spread] < pieces.spread_rate[near - 1, replicas, spread]


@loop
def _send_one_run(
    pieces: Pieces,
    grid: Grid,
    work: Work,
    cap: int,
    at: int,
    r: int,
    source: int,
    placed: int,
    q: int,
    run: int,
    way: int,
    near: int,
) -> int:
    """Send labels from stages whose node run has ``q`` devices to stages whose run has ``run``; -1 without room."""
    out, back, channel = times_of_hop(pieces, at, way, source, r, near)
    if channel == FREE:
        fill_after(grid, 0, 0, pieces.batches, work.reach)
    else:
        fill_after(grid, out, back, pieces.batches, work.reach)
    layer = at * (pieces.devices + 1) * pieces.shapes
    points, steps = work.fresh.size, 0
    for used in range(r, pieces.devices - source + 1):
        label = work.stages.head[layer + _state(pieces, used, r, q)]
        while label >= 0:
            steps += 1
            left = pieces.devices - used
            if may_be_below(pieces, grid, work.stages.label[label], at, left, work.best[-1, VALUE]):
                steps += points
                hop(pieces, grid, work.reach, work.stages.label[label], out, back, channel, work.fresh)
                if may_be_below(pieces, grid, work.fresh, at, left, work.best[-1, VALUE]):
                    state = _state(pieces, used + source, source, run)
                    if not add(work.hops, state, work.fresh, cap, label, 0, 0, placed, 0):
                        return -1
                else:
                    work.state[CUT] = 1
            else:
                work.state[CUT] = 1
            label = work.stages.next[label]
    return steps


@loop
def _stage(pieces: Pieces, grid: Grid, work: Work, cap: int, at: int) -> int:
    """Put all stages that end before a layer before the labels after it; -1 where labels have no room."""
    steps = 0
    for r in range(1, pieces.limit.shape[1]):
        for first in range(at - 1, -1, -1):
            if pieces.whole_work[0, r, first, at] >= work.best[-1, VALUE]:
                work.state[CUT] = 1
                break
            for variant in range(pieces.limit.shape[0]):
                if pieces.limit[variant, r, first, at] == 0:
                    continue
                done = _stage_of(pieces, grid, work, cap, at, r, first, variant)
                if done < 0:
                    return -1
                steps += done
    return steps


@loop
def _stage_of(pieces: Pieces, grid: Grid, work: Work, cap: int, at: int, r: int, first: int, variant: int) -> int:
    """Put one stage before every label that it may precede; -1 where labels have no room."""
    total, best, points = pieces.devices, work.best, work.fresh.size
    layer = first * (total + 1) * pieces.shapes
    of = (variant, r, first, at)
    fill_after(grid, pieces.forward[of], pieces.backward[of], pieces.limit[of], work.reach)
    steps = 0
    for used in range(r, total + 1 if first == 0 else total):
        if first > 0 and pieces.least_work[first] >= best[-1, VALUE] * (total - used):
            work.state[CUT] = 1
            break
        for q in range(pieces.node_size + 1):
            if pieces.shape[r, q] < 0:
                continue
            state = _state(pieces, used, r, q)
            label = work.hops.head[state]
            where = 0 if q > 0 else 1
            while label >= 0:
                steps += 1
                after, left, below = work.hops.label[label], total - used, best[-1, VALUE]
                if put(pieces, grid, work.reach, after, first, at, r, variant, where, left, below, work.fresh):
                    steps += points
                    parent, placed = work.hops.parent[label], work.hops.origin[label, PLACED]
                    if first == 0:
                        value = work.fresh[grid.forward.size + grid.early_forward.size]
                        row = _place_for(best, value)
                        best[row, VALUE], best[row, PARENT], best[row, STOP] = value, parent + 1, at
                        best[row, REPLICAS], best[row, PLACE], best[row, VARIANT] = r, placed, variant
                    elif not add(work.stages, layer + state, work.fresh, cap, parent, at, r, placed, variant):
                        return -1
                else:
                    work.state[CUT] = 1
                label = work.hops.next[label]
    return steps


@inner
def _place_for(best: np.ndarray, value: int) -> int:
    """Make room for a plan among the best ones, of which the last is lost."""
    row = best.shape[0] - 1
    while row > 0 and best[row - 1, VALUE] > value:
        for k in range(best.shape[1]):
            best[row, k] = best[row - 1, k]
        row -= 1
    return row
