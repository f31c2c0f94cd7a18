"""A grid of bounds on the stages and channels before a label: the least rates, and the largest limits.

A plan's rates grow from stage to stage while the limit in flight shrinks. A grid point stands for its values and
anything stricter; a label holds one number per point, so that values between points count as the laxer point.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import inner, loop


class Grid(NamedTuple):
    """Points in rising order of forward and backward step (ns), falling of the limit; the first has no knowledge.

    ``early_forward`` and ``early_limit``: for operations before an all-reduce, which earlier backwards do not delay.
    """

    forward: np.ndarray
    backward: np.ndarray
    limit: np.ndarray
    early_forward: np.ndarray
    early_limit: np.ndarray


class Reach(NamedTuple):
    """The strictest point, for each point, that holds after a further stage or channel.

    ``whole``: by point; by early point ``joined``, with the stage's backward alone, and ``early``.
    """

    whole: np.ndarray
    joined: np.ndarray
    early: np.ndarray


Point = tuple[int, int, int]


def make_grid(points: list[Point], batches: int) -> Grid:
    """Make the grid of (forward, backward, limit), with the point that has no knowledge."""
    whole = sorted({(0, 0, -batches), *((f, b, -k) for f, b, k in points)})
    early = sorted({(0, -batches), *((f, -k) for f, _b, k in points)})
    columns = np.asarray(whole, dtype=np.int64).T
    few = np.asarray(early, dtype=np.int64).T
    return Grid(columns[0].copy(), columns[1].copy(), -columns[2], few[0].copy(), -few[1])


def make_reach(grid: Grid) -> Reach:
    """Make empty arrays for the points that hold after a stage or channel."""
    few = grid.early_forward.size
    return Reach(np.zeros(grid.forward.size, np.int64), np.zeros(few, np.int64), np.zeros(few, np.int64))


@inner
def _point(grid: Grid, forward: int, backward: int, limit: int) -> int:
    j = grid.forward.size - 1
    while j > 0 and (grid.forward[j] > forward or grid.backward[j] > backward or grid.limit[j] < limit):
        j -= 1
    return j


@inner
def _early_point(grid: Grid, forward: int, limit: int) -> int:
    j = grid.early_forward.size - 1
    while j > 0 and (grid.early_forward[j] > forward or grid.early_limit[j] < limit):
        j -= 1
    return j


@loop
def fill_after(grid: Grid, forward: int, backward: int, limit: int, reach: Reach) -> None:
    """Fill in the points that hold after a stage or channel with these steps and this limit."""
    for j in range(grid.forward.size):
        reach.whole[j] = _point(
            grid, max(grid.forward[j], forward), max(grid.backward[j], backward), min(grid.limit[j], limit)
        )
    for j in range(grid.early_forward.size):
        longest, most = max(grid.early_forward[j], forward), min(grid.early_limit[j], limit)
        reach.joined[j] = _point(grid, longest, backward, most)
        reach.early[j] = _early_point(grid, longest, most)
