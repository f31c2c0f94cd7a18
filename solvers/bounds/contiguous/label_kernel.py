"""The least bound of any plan of one contiguous pipeline: labels from the last layer to the first (BOUNDS section 3).

A label stands for the stages from a layer on, in so many devices; ``q`` of its state are the devices of the first
stage's *node run*, neighbouring stages placed in one node (0: the stage spans nodes). It holds, for each point j of a
grid of what is known of the stages and channels before it (``request_grid``),

* P[j], the end of the backward work, counted from when the first micro-batch can come in;
* Q[j], the same with only forward rates from before (what counts before an all-reduce);
* V[j], the end with all-reduces and updates;

and R, the way round of one micro-batch, and E, one micro-batch's way to the latest end of an all-reduce. Each is a
lower bound for the stages that the label stands for, so a label none of whose numbers is larger than another's
replaces it, and two labels may be merged into their minima: what is found bounds every plan.
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
"""Columns of the best plans: the value or the limit, 1 + the label after the first stage (-1 without a plan), and what
made that stage (4)."""
LIMIT, CUT = range(2)
"""Of a search: what its plans are below; whether that has left anything out."""


@Fields.register
class Work(NamedTuple):
    """What a search writes: labels of stages by their first layer, labels after the channels to one layer, the best.

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
    """Go on from layer ``at`` backwards, layer by layer, for so many steps or a little more.

    (The layer to go on from, 0 at the end; the steps made, -1 where labels have no room.) ``cap``: labels of a state;
    more are merged. A step is a point of a label.
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
    """Behind the last stage there is nothing."""
    work.fresh[:] = 0
    for r in range(1, pieces.limit.shape[1]):
        if r <= pieces.node_size:
            add(work.hops, _state(pieces, r, r, r), work.fresh, cap, -1, 0, 0, ALONE, 0)
        if r > pieces.node_size or (pieces.spans and r > 1):
            add(work.hops, _state(pieces, r, r, 0), work.fresh, cap, -1, 0, 0, SPANNING, 0)
    return 1


@inner
def _way(pieces: Pieces, placed: int, source: int, in_node: bool) -> int:
    """How a stage of so many replicas, placed so, lies to the one after; -1 where it cannot be placed so."""
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
    """From the stages that begin at a layer to all stages that may end there; -1 where labels have no room."""
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
    """From the stages of ``r`` replicas to those of ``source``; -1 where labels have no room.

    Devices of a stage across nodes, if they are in the other one's node, count with its run: how many decides what the
    node's link carries.
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
def _is_quicker(pieces: Pieces, held: int, spread: int, near: int) -> bool:
    """Whether one more device in the other's node spares time."""
    return pieces.spread_rate[near, held, spread] < pieces.spread_rate[near - 1, held, spread]


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
    """From stages whose node run has ``q`` devices to those whose run has ``run``; -1 where labels have no room."""
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
    """All stages that end before a layer, put before the labels after it; -1 where labels have no room."""
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
    """One stage, put before every label that it may stand before; -1 where labels have no room."""
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
                    parent, placed = work.hops.parent[label], work.hops.made[label, PLACED]
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
