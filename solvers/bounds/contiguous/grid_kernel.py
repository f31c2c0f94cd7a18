"""What is known of the stages and channels before a label: rates that they have at least, limits at most.

A plan's own rates grow from stage to stage while the limit in flight shrinks. A grid point stands for what it says or
anything stricter; a label holds one number per point, so what is between points counts as the laxer one.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import inner, loop


class Grid(NamedTuple):
    """Points in rising order of forward and backward step (ns), falling of the limit; the first knows nothing.

    ``early_forward`` and ``early_limit``: for what precedes an all-reduce, which backwards before it do not delay.
    """

    forward: np.ndarray
    backward: np.ndarray
    limit: np.ndarray
    early_forward: np.ndarray
    early_limit: np.ndarray


class Reach(NamedTuple):
    """Of each point, the strictest that holds after a stage or channel, too.

    ``whole``: by point; by early point ``joined``, with the stage's own backward alone, and ``early``.
    """

    whole: np.ndarray
    joined: np.ndarray
    early: np.ndarray


Point = tuple[int, int, int]


def make_grid(points: list[Point], batches: int) -> Grid:
    """The grid of (forward, backward, limit), with the point that knows nothing."""
    whole = sorted({(0, 0, -batches), *((f, b, -k) for f, b, k in points)})
    early = sorted({(0, -batches), *((f, -k) for f, _b, k in points)})
    columns = np.asarray(whole, dtype=np.int64).T
    few = np.asarray(early, dtype=np.int64).T
    return Grid(columns[0].copy(), columns[1].copy(), -columns[2], few[0].copy(), -few[1])


def make_reach(grid: Grid) -> Reach:
    """Room for it."""
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
    """Fill in what holds after a stage or channel with these steps and this limit."""
    for j in range(grid.forward.size):
        reach.whole[j] = _point(
            grid, max(grid.forward[j], forward), max(grid.backward[j], backward), min(grid.limit[j], limit)
        )
    for j in range(grid.early_forward.size):
        longest, most = max(grid.early_forward[j], forward), min(grid.early_limit[j], limit)
        reach.joined[j] = _point(grid, longest, backward, most)
        reach.early[j] = _early_point(grid, longest, most)
