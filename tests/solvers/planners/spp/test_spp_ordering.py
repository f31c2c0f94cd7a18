"""Recursive device ordering against networkx, and its guarantees for servers (ALGORITHMS 3.1)."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from problems import make_network, make_problem

from penstock.solvers.model.network import Network
from penstock.solvers.planners.spp.ordering import (
    DeviceSet,
    Graph,
    dense_bandwidths,
    device_order,
    graph_of,
    halves,
    merged,
)
from penstock.solvers.planners.spp.stoer_wagner_kernel import minimum_cut


def random_weights(seed: int, size: int, largest: int = 50, sparse: float = 0.0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    table = np.triu(draw.integers(1, largest, (size, size)), 1) * (draw.random((size, size)) >= sparse)
    return np.asarray(table + table.T, dtype=np.int64)


def single(weights: np.ndarray) -> Graph:
    """Return a graph in which every device is a separate set: nothing contracted."""
    return Graph(weights, tuple(DeviceSet(d, (d,)) for d in range(len(weights))))


def matrix_problem(weights: np.ndarray) -> Network:
    size = len(weights)
    names = tuple(f"n{d}/0" for d in range(size))
    return Network(names, tuple(f"n{d}" for d in range(size)), tuple(range(size)), (None,) * size, (), weights)


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_a_minimum_cut(seed: int) -> None:
    weights = random_weights(seed, 2 + seed % 9, largest=3 if seed % 2 else 50)
    value, side = minimum_cut(weights.copy(), np.ones(len(weights), dtype=np.int64))
    assert 0 < side.sum() <= len(weights) // 2
    assert value == weights[side][:, ~side].sum() == nx.stoer_wagner(nx.from_numpy_array(weights))[0]


def test_equal_cuts_go_to_the_smaller_then_the_first_side() -> None:
    ring = np.zeros((4, 4), dtype=np.int64)
    for v in range(4):
        ring[v, (v + 1) % 4] = ring[(v + 1) % 4, v] = 1
    value, side = minimum_cut(ring, np.ones(4, dtype=np.int64))
    assert (value, side.tolist()) == (2, [True, False, False, False])


def test_two_servers_with_interleaved_numbers() -> None:
    """ALGORITHMS 3.1: devices 0, 2 on one server and 1, 3 on the other; 10 inside, 1 across."""
    weights = np.asarray([[0, 1, 10, 1], [1, 0, 1, 10], [10, 1, 0, 1], [1, 10, 1, 0]], dtype=np.int64)
    assert minimum_cut(weights.copy(), np.ones(4, dtype=np.int64))[0] == 4
    assert device_order(single(weights)) == device_order(merged(weights, [(d,) for d in range(4)])) == (0, 2, 1, 3)


@pytest.mark.parametrize("seed", range(30))
def test_every_level_is_cut_where_it_is_weakest(seed: int) -> None:
    """Also with interchangeable devices contracted: bandwidths of few values on a few servers make many of them."""
    draw = np.random.default_rng(seed)
    server = np.sort(draw.integers(0, 4, 9))
    between = random_weights(seed, 4, 4)
    weights = np.asarray(np.where(server[:, None] == server[None, :], 5, between[np.ix_(server, server)]))
    np.fill_diagonal(weights, 0)
    graph = merged(weights, [(d,) for d in range(9)])
    assert len(graph.sets) <= 4
    waiting = [graph.sets]
    while waiting:
        part = waiting.pop()
        if len(part) == 1:
            continue
        sides = halves(graph, part)
        first, second = ([d for twins in side for d in twins.devices] for side in sides)
        whole = nx.from_numpy_array(weights[np.ix_(first + second, first + second)])
        least = nx.stoer_wagner(whole)[0] if nx.is_connected(whole) else 0
        assert weights[np.ix_(first, second)].sum() == least
        assert min(first) < min(second)
        waiting += sides


@pytest.mark.parametrize("orientation", ["id", "bandwidth"])
@pytest.mark.parametrize("seed", range(10))
def test_servers_stay_together(seed: int, orientation: str) -> None:
    """Links inside a server outweigh the links out of it."""
    draw = np.random.default_rng(seed)
    server = draw.permutation(np.repeat(np.arange(4), 3))
    weights = np.asarray(np.where(server[:, None] == server[None, :], 200, random_weights(seed, 12, 20)))
    np.fill_diagonal(weights, 0)
    order = device_order(merged(weights, [(d,) for d in range(12)]), orientation)  # type: ignore[arg-type]
    assert sorted(order) == list(range(12))
    seen = [int(server[d]) for d in order]
    assert sum(a != b for a, b in pairwise(seen)) == 3


@pytest.mark.parametrize("seed", range(10))
def test_bandwidth_orientation_widens_the_last_joint(seed: int) -> None:
    weights = random_weights(seed, 7)
    graph = single(weights)
    left, right = (device_order(Graph(weights, side), "bandwidth") for side in halves(graph, graph.sets))
    order = device_order(graph, "bandwidth")
    joint = weights[order[len(left) - 1], order[len(left)]]
    assert joint == max(weights[a, b] for a in (left[0], left[-1]) for b in (right[0], right[-1]))


def test_a_disconnected_graph_gives_its_smallest_component_first_of_all() -> None:
    weights = np.zeros((5, 5), dtype=np.int64)
    weights[np.ix_([0, 1, 2], [0, 1, 2])] = 3
    weights[3, 4] = weights[4, 3] = 1
    np.fill_diagonal(weights, 0)
    sides = halves(single(weights), single(weights).sets)
    assert [[d for twins in side for d in twins.devices] for side in sides] == [[0, 1, 2], [3, 4]]
    assert device_order(graph_of(make_problem([1], network=matrix_problem(weights)))) == (0, 1, 2, 3, 4)


def test_of_two_directions_the_slower_one_counts() -> None:
    weights = np.asarray([[0, 9, 1], [2, 0, 8], [1, 8, 0]], dtype=np.int64) * 10**9
    problem = make_problem([1], network=matrix_problem(weights))
    np.testing.assert_array_equal(dense_bandwidths(problem), np.asarray([[0, 2, 1], [2, 0, 8], [1, 8, 0]]) * 10**9)


def test_equal_servers_are_few_sets_and_large_clusters_cheap() -> None:
    problem = make_problem([1], network=make_network((8,) * 64, inside_bytes_per_s=10**11))
    graph = graph_of(problem)
    assert len(graph.sets) == 64
    assert device_order(graph) == tuple(range(512))
    bare = graph_of(make_problem([1], network=make_network((1,) * 40)))
    assert len(bare.sets) == 1


@pytest.mark.parametrize("nodes", [(3, 2), (1, 4)])
def test_bandwidths_are_those_of_the_network(nodes: tuple[int, ...]) -> None:
    problem = make_problem([1], network=make_network(nodes, inside_bytes_per_s=7, between_bytes_per_s=3))
    np.testing.assert_array_equal(
        dense_bandwidths(problem)[~np.eye(5, dtype=bool)], problem.network.dense_bandwidth()[~np.eye(5, dtype=bool)]
    )
