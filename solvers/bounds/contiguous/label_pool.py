"""Labels of the request's label search: for each state a list of undominated labels, the nearest merged."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import inner, loop

STOP, REPLICAS, PLACED, VARIANT = range(4)
"""Columns of a label's origin: the stage's end, its devices, their place, its variant."""

JOINED, ALONE, SPANNING = range(3)
"""Places of a stage: in the node of the next stage, in a node, in several."""


class Pool(NamedTuple):
    """Labels in lists: ``head`` and ``lengths`` by state; ``next`` by label.

    ``free`` (2,): the first label never used, the last one freed. ``origin``: the columns above. ``ends``: the column
    of a label's value.
    """

    label: np.ndarray
    parent: np.ndarray
    origin: np.ndarray
    next: np.ndarray
    head: np.ndarray
    lengths: np.ndarray
    free: np.ndarray
    ends: int


def make_pool(most_labels: int, width: int, states: int, ends: int) -> Pool:
    """Make empty lists, and room for labels of ``width`` numbers."""
    return Pool(
        np.empty((most_labels, width), np.int64),
        np.empty(most_labels, np.int32),
        np.empty((most_labels, 4), np.int32),
        np.empty(most_labels, np.int32),
        np.full(states, -1, np.int32),
        np.zeros(states, np.int32),
        np.array([0, -1]),
        ends,
    )


@loop
def clear(pool: Pool) -> None:
    """Forget all labels."""
    pool.head[:] = -1
    pool.lengths[:] = 0
    pool.free[0], pool.free[1] = 0, -1


@loop
def add(
    pool: Pool,
    state: int,
    fresh: np.ndarray,
    cap: int,
    parent: int,
    stop: int,
    replicas: int,
    placed: int,
    variant: int,
) -> bool:
    """Put a label into its state's list, unless another is nowhere larger; False where there is no room."""
    width = fresh.size
    label, before = pool.head[state], -1
    while label >= 0:
        above = False
        for k in range(width):
            if pool.label[label, k] > fresh[k]:
                above = True
                break
        if not above:
            return True
        larger = True
        for k in range(width):
            if pool.label[label, k] < fresh[k]:
                larger = False
                break
        after = pool.next[label]
        if larger:
            if before < 0:
                pool.head[state] = after
            else:
                pool.next[before] = after
            pool.next[label] = pool.free[1]
            pool.free[1] = label
            pool.lengths[state] -= 1
        else:
            before = label
        label = after
    if pool.lengths[state] >= cap:
        _merge(pool, state, fresh, parent, stop, replicas, placed, variant)
        return True
    label = pool.free[1]
    if label >= 0:
        pool.free[1] = pool.next[label]
    else:
        label = pool.free[0]
        if label >= pool.parent.size:
            return False
        pool.free[0] += 1
    for k in range(width):
        pool.label[label, k] = fresh[k]
    _sign(pool, label, parent, stop, replicas, placed, variant)
    pool.next[label] = pool.head[state]
    pool.head[state] = label
    pool.lengths[state] += 1
    return True


@inner
def _sign(pool: Pool, label: int, parent: int, stop: int, replicas: int, placed: int, variant: int) -> None:
    pool.parent[label] = parent
    pool.origin[label, STOP], pool.origin[label, REPLICAS] = stop, replicas
    pool.origin[label, PLACED], pool.origin[label, VARIANT] = placed, variant


@loop
def _merge(
    pool: Pool, state: int, fresh: np.ndarray, parent: int, stop: int, replicas: int, placed: int, variant: int
) -> None:
    """Lower the nearest label of a full list to the minima of both; its plan is the plan that ends sooner."""
    width = fresh.size
    nearest, least = -1, 0
    label = pool.head[state]
    while label >= 0:
        apart = 0
        for k in range(width):
            apart += abs(pool.label[label, k] - fresh[k])
        if nearest < 0 or apart < least:
            nearest, least = label, apart
        label = pool.next[label]
    if fresh[pool.ends] < pool.label[nearest, pool.ends]:
        _sign(pool, nearest, parent, stop, replicas, placed, variant)
    for k in range(width):
        pool.label[nearest, k] = min(pool.label[nearest, k], fresh[k])
