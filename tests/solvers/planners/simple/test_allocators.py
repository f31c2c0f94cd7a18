"""Allocators: data parallelism, GPipe's block partition against enumeration, micro-batch candidates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.grid.block_partition import block_partition, smallest_largest, smallest_largest_on
from penstock.solvers.model.micro_batches import Batch, batch_of, candidates, dapple_replicas
from penstock.solvers.planners.simple.dp import data_parallel


def by_enumeration(weights: list[int], blocks: int, cuttable: list[bool]) -> list[int]:
    """Return the lexicographically first bounds whose largest block is smallest."""
    places = [i + 1 for i in range(len(weights) - 1) if cuttable[i]]
    every = [[0, *cuts, len(weights)] for cuts in itertools.combinations(places, blocks - 1)]
    return min(every, key=lambda b: (max(sum(weights[i:j]) for i, j in itertools.pairwise(b)), b))


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=9), st.integers(1, 9))
def test_partition_is_the_first_of_the_best(layers: list[tuple[int, bool]], blocks: int) -> None:
    weights, cuttable = [w for w, _ in layers], [c for _, c in layers[:-1]]
    if blocks > 1 + sum(cuttable):
        blocks = 1 + sum(cuttable)
    assert smallest_largest(weights, blocks, cuttable) == by_enumeration(weights, blocks, cuttable)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 40))
def test_largest_block_is_near_the_mean(weights: list[int], blocks: int) -> None:
    """Bárány and Grinberg: at most the mean plus the largest layer."""
    blocks = min(blocks, len(weights))
    bounds = smallest_largest(weights, blocks, [True] * (len(weights) - 1))
    largest = max(sum(weights[i:j]) for i, j in itertools.pairwise(bounds))
    assert largest <= sum(weights) / blocks + max(weights)


@pytest.mark.parametrize("seed", range(100))
def test_partition_over_unequal_devices_is_the_best(seed: int) -> None:
    """Every block counts with its device's times."""
    draw = np.random.default_rng(seed)
    layers = int(draw.integers(1, 8))
    blocks = min(int(draw.integers(1, 5)), layers)
    kinds = draw.integers(0, 20, (2, layers))
    weights = [kinds[k] for k in draw.integers(0, 2, blocks)]
    every = [[0, *cuts, layers] for cuts in itertools.combinations(range(1, layers), blocks - 1)]

    def largest(bounds: list[int]) -> int:
        return max(int(w[i:j].sum()) for w, (i, j) in zip(weights, itertools.pairwise(bounds), strict=True))

    best = smallest_largest_on(weights, [True] * (layers - 1))
    assert best in every
    assert largest(best) == min(map(largest, every))


def test_time_is_that_of_the_devices_that_hold_the_stages() -> None:
    """By hand: a device twice as fast takes four of six equal layers; layers and parameters do not depend on speed."""
    problem = make_problem([600] * 6, parameter_bytes=1, nodes=(2,), kinds=["fast", "cpu"], speed={"fast": 2.0})
    batch = batch_of(problem, 1)
    cuts = {by: block_partition(problem, batch, 2, by=by).stages[0].last for by in ("time", "layers", "parameters")}
    assert cuts == {"time": 3, "layers": 2, "parameters": 2}


def test_block_partition_by_time_layers_or_parameters() -> None:
    problem = make_problem([8, 1, 1, 1, 1, 1, 1], parameter_bytes=[1, 1, 1, 1, 1, 1, 30], nodes=(2,))
    batch = batch_of(problem, 1)
    cuts = {by: block_partition(problem, batch, 2, by=by).stages[0].last for by in ("time", "layers", "parameters")}
    assert cuts == {"time": 0, "layers": 2, "parameters": 5}
    assert [s.devices for s in block_partition(problem, batch, 2).stages] == [(0,), (1,)]


def test_block_partition_cuts_only_where_the_profile_allows() -> None:
    problem = make_problem([1] * 6, nodes=(4,), cuttable=[False, True, False, False, False])
    batch = batch_of(problem, 1)
    assert [(s.first, s.last) for s in block_partition(problem, batch, 2).stages] == [(0, 1), (2, 5)]
    with pytest.raises(UnsupportedRequest, match="3 stages need 3 devices and separable blocks") as refused:
        block_partition(problem, batch, 3)
    assert refused.value.remedy == "between 1 and 2 stages"


def test_data_parallelism_uses_as_many_devices_as_the_batch_feeds() -> None:
    problem = make_problem([1, 1], nodes=(4,), global_batch_size=6, min_slice=1)
    assert data_parallel(problem, batch_of(problem, 6)).stages[0].devices == (0, 1, 2, 3)
    assert data_parallel(problem, batch_of(problem, 3)).stages[0].devices == (0, 1, 2)
    assert data_parallel(problem, batch_of(problem, 1)).stages[0].devices == (0,)


def test_micro_batches_are_uneven_rather_than_lost() -> None:
    """R-1: floor would drop 128 of 2,048 samples for a 15:1 plan with slices of 32."""
    problem = make_problem([1, 1], global_batch_size=2048, min_slice=32)
    assert batch_of(problem, 15 * 32) == Batch(num_micro_batches=5, most_rows=410, least_rows=409)


def test_named_sizes_are_taken_and_no_others() -> None:
    problem = make_problem([1, 1], global_batch_size=12, micro_batch_sizes=(3, 5, 6))
    assert [b.num_micro_batches for b in candidates(problem, (1, 4))] == [2, 3, 4]


def test_generated_sizes_feed_the_replicas() -> None:
    """Powers of two, the measured size, and min_slice × replicas (DAPPLE's rule), each number of batches once."""
    problem = make_problem([1, 1], nodes=(3,), global_batch_size=24, micro_batch_sizes=(), measured_rows=3)
    assert dapple_replicas(problem) == (1, 2, 3)
    assert [b.num_micro_batches for b in candidates(problem, dapple_replicas(problem))] == [1, 2, 3, 4, 6, 8, 12, 24]
    assert all(b.most_rows * b.num_micro_batches >= 24 for b in candidates(problem))


def test_candidates_keep_slices_above_the_minimum_and_their_number_modest() -> None:
    problem = make_problem([1, 1], nodes=(8, 8), global_batch_size=5040, micro_batch_sizes=(), min_slice=7)
    batches = candidates(problem, dapple_replicas(problem))
    assert len(batches) <= 24
    assert min(b.least_rows for b in batches) >= 7
    assert len({b.num_micro_batches for b in batches}) == len(batches)


def test_a_batch_below_the_smallest_slice_has_no_candidates() -> None:
    assert candidates(make_problem([1, 1], global_batch_size=3, micro_batch_sizes=(), min_slice=4)) == ()
