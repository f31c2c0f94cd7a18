"""The least bound of any plan of one contiguous pipeline: labels from the last layer to the first (BOUNDS section 3).

A label stands for the stages from a layer on, in so many devices; ``q`` of its state are the devices of the first
stage's *node run*, neighbouring stages placed in one node (0: the stage spans nodes). It holds, for each point j of a
rising grid of rates (``grid_forward[j]``, ``grid_backward[j]``) that some stage or channel before it has at least,

* P[j], the end of the backward work, counted from when the first micro-batch can come in;
* Q[j], the same with only forward rates from before (what counts before an all-reduce);
* V[j], the end with all-reduces and updates;

and R, the way round of one micro-batch, and E, one micro-batch's way to the latest end of an all-reduce. Each is a
lower bound for the stages that the label stands for, so a label none of whose numbers is larger than another's
replaces it, and two labels may be merged into their minima: what is found bounds every plan.
"""

from __future__ import annotations

import numpy as np

from penstock.solvers.kernels.compiled import compiled, inner, loop
from penstock.solvers.kernels.request_pool import ALONE, JOINED, PLACED, SPANNING, Pool, add, make_pool
from penstock.solvers.kernels.request_steps import (
    AMONG_SPANNING,
    FROM_SPANNING,
    SAME_RUN,
    TO_OTHER_NODE,
    TO_SPANNING,
    Pieces,
    hop,
    put,
)

FOUND, NONE, EMPTY, TOO_MUCH = range(4)
"""A plan below the limit; none below it; none at all; the search was not finished."""


@compiled
def search(
    pieces: Pieces,
    grid_forward: np.ndarray,
    grid_backward: np.ndarray,
    below_ns: int,
    cap: int,
    most_labels: int,
    most_steps: int,
) -> tuple[int, int, np.ndarray, int]:
    """(FOUND … TOO_MUCH; value; stages (S, 4) from the first on; steps), for plans whose bound is below ``below_ns``.

    ``cap``: labels of a state; more are merged.
    """
    layers = pieces.sent.shape[1] - 1
    most = pieces.limit.shape[1] - 1
    width = 3 * grid_forward.size + 2
    states = (pieces.devices + 1) * (most + 1) * (pieces.node_size + 1)
    stages = make_pool(most_labels, width, (layers + 1) * states)
    hops = make_pool(most_labels, width, states)
    best = np.array([below_ns, -1, 0, 0, 0, 0, 0])
    fresh = np.empty(width, np.int64)
    steps = _search(pieces, grid_forward, grid_backward, stages, hops, best, cap, most_steps, fresh)
    if steps < 0:
        return TOO_MUCH, below_ns, np.empty((0, 4), np.int64), most_steps
    if best[1] < 0:
        return (NONE if best[6] else EMPTY), below_ns, np.empty((0, 4), np.int64), steps
    path = np.empty((pieces.devices, 4), np.int64)
    path[0] = best[2:6]
    count, at = 1, best[1] - 1
    while at >= 0:
        path[count] = stages.made[at]
        at = stages.parent[at]
        count += 1
    return FOUND, best[0], path[:count], steps


@loop
def _search(
    pieces: Pieces,
    grid_forward: np.ndarray,
    grid_backward: np.ndarray,
    stages: Pool,
    hops: Pool,
    best: np.ndarray,
    cap: int,
    most_steps: int,
    fresh: np.ndarray,
) -> int:
    """Steps made; -1: too many, or no room for labels.

    ``best``: the limit or the best value; 1 + the label behind the first stage, -1 without a plan; what made that
    stage (4); whether anything was cut off by the limit.
    """
    layers = pieces.sent.shape[1] - 1
    steps = 0
    for at in range(layers, 0, -1):
        hops.head[:] = -1
        hops.held[:] = 0
        hops.free[0], hops.free[1] = 0, -1
        if at == layers:
            done = _begin(pieces, hops, fresh, cap)
        else:
            done = _send(pieces, grid_forward, grid_backward, stages, hops, best, cap, at, fresh)
        if done < 0 or steps + done > most_steps:
            return -1
        steps += done
        done = _stage(pieces, grid_forward, grid_backward, stages, hops, best, cap, at, fresh)
        if done < 0 or steps + done > most_steps:
            return -1
        steps += done
    return steps


@inner
def _state(pieces: Pieces, used: int, replicas: int, run: int) -> int:
    return (used * pieces.limit.shape[1] + replicas) * (pieces.node_size + 1) + run


@loop
def _begin(pieces: Pieces, hops: Pool, fresh: np.ndarray, cap: int) -> int:
    """Behind the last stage there is nothing."""
    fresh[:] = 0
    for r in range(1, pieces.limit.shape[1]):
        if r <= pieces.node_size:
            add(hops, _state(pieces, r, r, r), fresh, cap, -1, 0, 0, ALONE, 0)
        if r > pieces.node_size or (pieces.spans and r > 1):
            add(hops, _state(pieces, r, r, 0), fresh, cap, -1, 0, 0, SPANNING, 0)
    return 1


@loop
def _send(
    pieces: Pieces,
    grid_forward: np.ndarray,
    grid_backward: np.ndarray,
    stages: Pool,
    hops: Pool,
    best: np.ndarray,
    cap: int,
    at: int,
    fresh: np.ndarray,
) -> int:
    """From the stages that begin at a layer to all stages that may end there; -1 where labels have no room."""
    most, size, total = pieces.limit.shape[1] - 1, pieces.node_size, pieces.devices
    layer = at * (total + 1) * (most + 1) * (size + 1)
    steps = 0
    for used in range(1, total):
        for r in range(1, min(most, used) + 1):
            for q in range(size + 1):
                label = stages.head[layer + _state(pieces, used, r, q)]
                while label >= 0:
                    if _may_be_below(pieces, stages.label[label], grid_forward.size, at, best[0]):
                        for source in range(1, min(most, total - used) + 1):
                            for placed in (JOINED, ALONE, SPANNING):
                                if placed == SPANNING:
                                    if source <= size and (not pieces.spans or source == 1):
                                        continue
                                    way, q2 = (FROM_SPANNING if q > 0 else AMONG_SPANNING), 0
                                elif placed == ALONE:
                                    if source > size:
                                        continue
                                    way, q2 = (TO_OTHER_NODE if q > 0 else TO_SPANNING), source
                                else:
                                    if q == 0 or q + source > size:
                                        continue
                                    way, q2 = SAME_RUN, q + source
                                if pieces.rate[way, source, r] == np.inf:
                                    continue
                                hop(pieces, grid_forward, grid_backward, stages.label[label], at, way, source, r, fresh)
                                steps += 1
                                if _may_be_below(pieces, fresh, grid_forward.size, at, best[0]):
                                    state = _state(pieces, used + source, source, q2)
                                    if not add(hops, state, fresh, cap, label, 0, 0, placed, 0):
                                        return -1
                                else:
                                    best[6] = 1
                    label = stages.next[label]
    return steps


@loop
def _stage(
    pieces: Pieces,
    grid_forward: np.ndarray,
    grid_backward: np.ndarray,
    stages: Pool,
    hops: Pool,
    best: np.ndarray,
    cap: int,
    at: int,
    fresh: np.ndarray,
) -> int:
    """All stages that end before a layer, put before the labels of ``hops``; -1 where labels have no room."""
    most, size, total = pieces.limit.shape[1] - 1, pieces.node_size, pieces.devices
    layer = (total + 1) * (most + 1) * (size + 1)
    steps = 0
    for used in range(1, total + 1):
        for r in range(1, min(most, used) + 1):
            for q in range(size + 1):
                state = _state(pieces, used, r, q)
                if hops.head[state] < 0:
                    continue
                for first in range(at - 1, -1, -1):
                    if first > 0 and used >= total:
                        continue
                    if pieces.work[0, r, first, at] >= best[0]:
                        best[6] = 1
                        break
                    if first > 0 and pieces.least_work[first] >= best[0] * (total - used):
                        best[6] = 1
                        continue
                    for variant in range(pieces.limit.shape[0]):
                        if pieces.limit[variant, r, first, at] == 0:
                            continue
                        label = hops.head[state]
                        while label >= 0:
                            where = 0 if q > 0 else 1
                            put(
                                pieces,
                                grid_forward,
                                grid_backward,
                                hops.label[label],
                                first,
                                at,
                                r,
                                variant,
                                where,
                                fresh,
                            )
                            steps += 1
                            if not _may_be_below(pieces, fresh, grid_forward.size, first, best[0]):
                                best[6] = 1
                            elif first == 0:
                                best[0] = fresh[2 * grid_forward.size]
                                best[1] = hops.parent[label] + 1
                                best[2], best[3] = at, r
                                best[4], best[5] = hops.made[label, PLACED], variant
                            else:
                                placed = hops.made[label, PLACED]
                                place = first * layer + state
                                if not add(stages, place, fresh, cap, hops.parent[label], at, r, placed, variant):
                                    return -1
                            label = hops.next[label]
    return steps


@inner
def _may_be_below(pieces: Pieces, label: np.ndarray, points: int, first: int, below_ns: int) -> bool:
    """Whether the layers before may be added at their quickest without reaching the limit."""
    ahead = pieces.least_forward[first]
    if label[2 * points] + ahead >= below_ns:
        return False
    return label[points] + ahead + pieces.least_backward[first] < below_ns
