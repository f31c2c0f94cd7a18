"""Parts for devices that hold one of each group: against enumeration of all parts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from penstock.solvers.planners.wpipe.partition import (
    EXACT_PLACES,
    MAX_PLACES,
    Demand,
    even_partition,
    partition,
)

Bounds = tuple[int, ...]


def random_demands(draw: random.Random, groups: int, count: int, places: int) -> tuple[Demand, ...]:
    """Draw layers of random lengths and sizes; devices have different speeds, and bytes count differently."""
    layers = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(places - 1)]
    speeds = [draw.choice((1, 1, 2)) for _ in range(count)]
    weights = [[draw.randint(0, 2) for _ in range(2 * count)] for _ in range(groups)]
    demands = []
    for g in range(groups):
        time_ns = np.cumsum([[0, *(t * speed for t, _ in layers)] for speed in speeds], axis=1)
        size = [[[0, *(b * weights[g][c * count + i] for _, b in layers)] for i in range(count)] for c in (0, 1)]
        demands.append(Demand(time_ns, np.cumsum(size, axis=2)))
    return tuple(demands)


def enumerated(
    demands: tuple[Demand, ...], room: np.ndarray, value_of: Callable[[tuple[Demand, ...], Bounds], int]
) -> tuple[int, list[Bounds]] | None:
    """Return the smallest value of the partitions that fit, and every partition that has it."""
    count, places = demands[0].time_ns.shape
    best: int | None = None
    partitions: list[Bounds] = []
    for cuts in itertools.combinations(range(1, places - 1), len(demands) * count - 1):
        bounds = (0, *cuts, places - 1)
        if not fits(demands, room, bounds):
            continue
        value = value_of(demands, bounds)
        if best is None or value < best:
            best, partitions = value, []
        if value == best:
            partitions.append(bounds)
    return None if best is None else (best, partitions)


def fits(demands: tuple[Demand, ...], room: np.ndarray, bounds: Bounds) -> bool:
    count = demands[0].time_ns.shape[0]
    for c, i in itertools.product(range(len(room)), range(count)):
        parts = [(g, bounds[g * count + i], bounds[g * count + i + 1]) for g in range(len(demands))]
        if sum(demands[g].bytes[c, i, q] - demands[g].bytes[c, i, p] for g, p, q in parts) > room[c, i]:
            return False
    return True


def length(demands: tuple[Demand, ...], bounds: Bounds) -> int:
    count = demands[0].time_ns.shape[0]
    total = 0
    for g, demand in enumerate(demands):
        part = bounds[g * count : (g + 1) * count + 1]
        total += max(
            int(demand.time_ns[i, q] - demand.time_ns[i, p]) for i, (p, q) in enumerate(itertools.pairwise(part))
        )
    return total


def load(demands: tuple[Demand, ...], bounds: Bounds) -> int:
    """Return the largest time of a device in both of its parts."""
    count = demands[0].time_ns.shape[0]
    loads = []
    for i in range(count):
        parts = [(g, bounds[g * count + i], bounds[g * count + i + 1]) for g in range(len(demands))]
        loads.append(sum(int(demands[g].time_ns[i, q] - demands[g].time_ns[i, p]) for g, p, q in parts))
    return max(loads)


def test_even_loads_are_the_smallest() -> None:
    draw = random.Random(5)
    found_any = 0
    for _ in range(150):
        count = draw.randint(1, 3)
        demands = random_demands(draw, 2, count, draw.randint(2 * count + 1, 2 * count + 4))
        room = np.full((2, count), draw.choice((10, 20, 30, 10**6)))
        expected = enumerated(demands, room, load)
        bounds = even_partition(*demands, room)
        assert (bounds is None) == (expected is None)
        if bounds is not None and expected is not None:
            assert tuple(bounds) in expected[1]
            found_any += 1
    assert found_any > 50


@pytest.mark.parametrize("groups", [1, 2])
def test_partition_is_the_best_that_fits(groups: int) -> None:
    """Devices may have different speeds, and memory may leave no partition at all."""
    draw = random.Random(groups)
    outcomes = {"none": 0, "free": 0, "tight": 0}
    for _ in range(250):
        count = draw.randint(1, 3)
        places = draw.randint(groups * count + 1, groups * count + 4)
        demands = random_demands(draw, groups, count, places)
        room = np.full((2, count), draw.choice((10, 15, 20, 25, 30, 40, 10**6)))
        expected = enumerated(demands, room, length)
        bounds = partition(demands, room)
        if expected is None:
            assert bounds is None
            outcomes["none"] += 1
            continue
        assert bounds is not None
        assert tuple(bounds) in expected[1]
        free = enumerated(demands, np.full_like(room, 10**6), length)
        assert free is not None
        outcomes["free" if free[0] == expected[0] else "tight"] += 1
    assert min(outcomes.values()) > 10, outcomes


def test_long_chains_are_cut_well_where_memory_binds() -> None:
    """Beyond ``EXACT_PLACES`` the omitted cuts cost little: within 10 % of the optimum, 3 % on average."""
    draw = random.Random(3)
    ratios = []
    for _ in range(12):
        demands = random_demands(draw, 2, 2, EXACT_PLACES + 6)
        whole = max(int(demand.bytes[:, :, -1].max()) for demand in demands)
        room = np.full((2, 2), max(1, whole * 6 // 10))
        expected = enumerated(demands, room, length)
        bounds = partition(demands, room)
        if expected is None or bounds is None:
            assert expected is None
            continue
        assert fits(demands, room, tuple(bounds))
        ratios.append(length(demands, tuple(bounds)) / expected[0])
    assert len(ratios) > 6
    assert max(ratios) < 1.10
    assert sum(ratios) / len(ratios) < 1.03


def test_an_even_load_per_device_is_not_enough() -> None:
    """Ten equal layers on four devices: 2 + 1 on each of two devices is an even load.

    But the longest parts may add up to 4; all twos have to fall into one half.
    """
    time_ns = np.tile(np.arange(11), (4, 1))
    demand = Demand(time_ns, np.zeros((1, 4, 11), dtype=np.int64))
    bounds = partition((demand, demand), np.zeros((1, 4), dtype=np.int64))
    assert bounds is not None
    assert length((demand, demand), tuple(bounds)) == 3


def test_very_long_chains_keep_the_places_of_their_halves() -> None:
    """Beyond ``MAX_PLACES`` too, parts that need not be raised are the best, and parts that must be stay near."""
    draw = random.Random(7)
    layers = np.array([0, *(draw.randint(50, 150) for _ in range(3 * MAX_PLACES))])
    time_ns = np.tile(np.cumsum(layers), (3, 1))
    size = np.cumsum(np.ones((1, 3, len(layers)), dtype=np.int64), axis=2)
    for room, worst in ((10**6, 1.01), (97, 1.15)):
        demands = Demand(time_ns, 2 * size), Demand(time_ns, size * 0)
        bounds = partition(demands, np.full((1, 3), room))
        assert bounds is not None
        assert fits(demands, np.full((1, 3), room), tuple(bounds))
        assert length(demands, tuple(bounds)) < worst * layers.sum() / 3
