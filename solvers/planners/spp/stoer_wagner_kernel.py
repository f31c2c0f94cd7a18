"""Global minimum cut of a weighted graph by Stoer and Wagner, on a dense matrix (SPP, Algorithm 2 line 4).

.. [1] Stoer and Wagner, A simple min-cut algorithm (Journal of the ACM, 1997).
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import compiled, loop

OFFSET = -(2**62)


@compiled
def minimum_cut(weight: np.ndarray, count: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the weight of the minimum cut, and its smaller side as a mask over the n >= 2 vertices; O(n^3).

    ``weight``: (n, n) symmetric int64 with zeros on the diagonal, destroyed; ``count``: how many devices a vertex
    represents. The search starts at vertex 0. Among the n - 1 cuts of the phases ties go to the side with fewer
    devices, then to the lexicographically smaller vertices.
    """
    n = len(count)
    best = np.zeros(n, dtype=np.bool_)
    value = _cut(weight, count, np.arange(n), np.empty(n, dtype=np.int64), np.empty(n, dtype=np.bool_), best)
    return value, best


@loop
def _cut(
    weight: np.ndarray, count: np.ndarray, slot: np.ndarray, pull: np.ndarray, side: np.ndarray, best: np.ndarray
) -> int:
    """Run phases until one vertex is left. ``slot[v]``: the row that vertex v has been merged into."""
    devices = 0
    for v in range(len(count)):
        devices += count[v]
    value, fewest = -1, 0
    for left in range(len(count), 1, -1):
        before, last = _phase(weight, pull, left)
        cut = pull[last] - OFFSET
        if value < 0 or cut <= value:
            size = _side(slot, count, last, devices, side)
            if value < 0 or cut < value or size < fewest or (size == fewest and _comes_first(side, best)):
                value, fewest = cut, size
                for v in range(len(side)):
                    best[v] = side[v]
        _merge(weight, slot, left, before, last)
    return value


@loop
def _phase(weight: np.ndarray, pull: np.ndarray, left: int) -> tuple[int, int]:
    """Order vertices by how strongly the vertices before pull them; return the last two.

    ``pull`` keeps the cut of the last. Ordered vertices are lowered by ``OFFSET``, so that both inner loops run over
    all of the row without a branch.
    """
    for v in range(left):
        pull[v] = weight[0, v]
    pull[0] = OFFSET
    before, last = 0, 0
    for _step in range(left - 1):
        most = OFFSET
        for v in range(left):
            most = max(most, pull[v])
        chosen = 0
        while pull[chosen] != most:
            chosen += 1
        before, last = last, chosen
        pull[chosen] += OFFSET
        for v in range(left):
            pull[v] += weight[chosen, v]
    return before, last


@loop
def _side(slot: np.ndarray, count: np.ndarray, last: int, devices: int, side: np.ndarray) -> int:
    """Write the smaller of the two sides, of equal sides the one with vertex 0.

    Returns its number of devices.
    """
    size = 0
    for v in range(len(slot)):
        side[v] = slot[v] == last
        if side[v]:
            size += count[v]
    if 2 * size < devices or (2 * size == devices and side[0]):
        return size
    for v in range(len(slot)):
        side[v] = not side[v]
    return devices - size


@loop
def _comes_first(side: np.ndarray, other: np.ndarray) -> bool:
    for v in range(len(side)):
        if side[v] != other[v]:
            return bool(side[v])
    return False


@loop
def _merge(weight: np.ndarray, slot: np.ndarray, left: int, kept: int, gone: int) -> None:
    """Add row and column ``gone`` to ``kept``, and move the last row into its place."""
    for v in range(left):
        weight[kept, v] += weight[gone, v]
        weight[v, kept] = weight[kept, v]
    weight[kept, kept] = 0
    end = left - 1
    for v in range(left):
        weight[gone, v] = weight[end, v]
        weight[v, gone] = weight[gone, v]
    weight[gone, gone] = 0
    joined = gone if kept == end else kept
    for v in range(len(slot)):
        if slot[v] == gone or slot[v] == kept:
            slot[v] = joined
        elif slot[v] == end:
            slot[v] = gone
