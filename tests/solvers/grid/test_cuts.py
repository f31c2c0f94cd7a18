"""Cuts of a chain against enumeration: with ends to keep, with memory to hold, and the cuts one place away."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock.solvers.grid.block_partition import moved_cuts, smallest_largest_on
from penstock.solvers.grid.memory_cut import Demand, memory_cut
from penstock.solvers.grid.places import apart, side_by_side

pytestmark = pytest.mark.tier("quick")


def all_bounds(layers: int, parts: int) -> list[list[int]]:
    """Return the bounds of every cut into non-empty parts."""
    return [[0, *cuts, layers] for cuts in itertools.combinations(range(1, layers), parts - 1)]


def test_cuts_that_keep_the_ends_are_the_best_of_these() -> None:
    """The last end of a part never falls from one layer to the next, as where pins give it."""
    draw = np.random.default_rng(5)
    kept = 0
    for _ in range(60):
        layers = int(draw.integers(2, 8))
        parts = int(draw.integers(1, min(4, layers) + 1))
        weights = [draw.integers(1, 20, layers) for _ in range(parts)]
        ends = [np.maximum.accumulate(draw.integers(1, layers + 2, layers + 1).clip(max=layers)) for _ in range(parts)]

        def largest(bounds: list[int], weights: list[np.ndarray] = weights) -> int:
            return max(int(w[i:j].sum()) for w, (i, j) in zip(weights, itertools.pairwise(bounds), strict=True))

        allowed = [
            bounds
            for bounds in all_bounds(layers, parts)
            if all(j <= end[i] for end, (i, j) in zip(ends, itertools.pairwise(bounds), strict=True))
        ]
        bounds = smallest_largest_on(weights, [True] * (layers - 1), ends)
        if bounds is None:
            assert allowed == []
        else:
            kept += 1
            assert bounds in allowed
            assert largest(bounds) == min(map(largest, allowed))
    assert 10 < kept < 60


def test_the_longest_part_is_as_short_as_memory_allows() -> None:
    draw = np.random.default_rng(6)
    full = 0
    for _ in range(60):
        layers = int(draw.integers(2, 8))
        parts = int(draw.integers(1, min(4, layers) + 1))
        time, size = (np.concatenate(([0], np.cumsum(draw.integers(1, 20, layers)))) for _ in range(2))
        room = draw.integers(10, 60, parts)
        pairs = [list(itertools.pairwise(bounds)) for bounds in all_bounds(layers, parts)]
        fitting = [
            max(int(time[j] - time[i]) for i, j in each)
            for each in pairs
            if all(size[j] - size[i] <= most for most, (i, j) in zip(room, each, strict=True))
        ]
        cut = memory_cut(Demand(np.tile(time, (parts, 1)), np.tile(size, (parts, 1))[None]), room[None])
        if cut is None:
            full += 1
            assert fitting == []
        else:
            assert max(int(time[j] - time[i]) for i, j in itertools.pairwise(cut)) == min(fitting)
    assert 5 < full < 55


def test_cuts_move_alone_and_then_together() -> None:
    assert list(moved_cuts([0, 1, 3, 4])) == [[0, 2, 3, 4], [0, 1, 2, 4]]
    assert list(moved_cuts([0, 2, 3, 6])) == [[0, 1, 3, 6], [0, 2, 4, 6], [0, 1, 2, 6], [0, 3, 4, 6]]
    assert list(moved_cuts([0, 2, 3, 6], 1)) == [[0, 1, 3, 6], [0, 2, 4, 6]]


def test_ranks_take_neighbours_or_devices_apart() -> None:
    assert side_by_side(range(7), 3) == ((0, 1, 2), (3, 4, 5))
    assert apart(range(6), 2) == ((0, 2, 4), (1, 3, 5))
