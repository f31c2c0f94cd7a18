"""Routes and bandwidths: the tree's bottleneck is the widest path's, and a NIC is shared by its node's devices."""

import random
from itertools import pairwise, permutations

import numpy as np
import pytest

from penstock.solvers.model.network import Cable, Inside, Network

NVLINK = Inside("pairs", 300, 0, True)


def two_nodes(inside: Inside | None = NVLINK, full: bool = True) -> Network:
    return Network(
        device_names=("a/0", "a/1", "b/0", "b/1"),
        node_names=("a", "b"),
        node_of=(0, 0, 1, 1),
        insides=(inside, inside),
        cables=(Cable("a", "s", 10, 5, full), Cable("b", "s", 20, 7, full)),
    )


def names(network: Network, source: int, target: int) -> list[str]:
    route = network.route(source, target)
    assert route is not None
    return [network.resources[r].name for r in route.resources]


def test_devices_of_a_node_share_its_nic_and_not_their_nvlink() -> None:
    network = two_nodes()
    assert names(network, 0, 2) == names(network, 1, 3) == ["a→s", "s→b"]
    assert names(network, 2, 0) == ["b→s", "s→a"]
    assert network.bandwidth(0, 2) == 10
    assert network.route(0, 2).latency_ns == 12
    assert set(names(network, 0, 1)).isdisjoint(names(network, 1, 0))


def test_a_half_duplex_link_is_one_resource_for_both_directions() -> None:
    network = two_nodes(full=False)
    assert sorted(network.route(0, 2).resources) == sorted(network.route(2, 0).resources)


@pytest.mark.parametrize(
    ("form", "full", "shared"),
    [
        pytest.param("bus", True, True, id="a bus is one medium"),
        pytest.param("ports", True, False, id="full-duplex ports: out of 0 is not into 0"),
        pytest.param("ports", False, True, id="half-duplex ports: 0 has one port"),
        pytest.param("pairs", True, False, id="pairs have their own channel"),
    ],
)
def test_what_two_ways_through_device_0_share(form: str, full: bool, shared: bool) -> None:
    inside = Inside(form, 300, 0, full)
    network = Network(("a/0", "a/1", "a/2"), ("a",), (0, 0, 0), (inside,), ())
    assert bool(set(network.route(0, 1).resources) & set(network.route(2, 0).resources)) is shared


def test_a_device_with_a_nic_of_its_own_does_not_use_its_nodes() -> None:
    cables = (Cable("a/0", "s", 10, 0, True), Cable("a", "s", 1, 0, True), Cable("b", "s", 20, 0, True))
    network = Network(("a/0", "a/1", "b/0"), ("a", "b"), (0, 0, 1), (NVLINK, NVLINK), cables)
    assert network.has_own_nic == (True, False, False)
    assert network.bandwidth(0, 2) == 10
    assert network.bandwidth(1, 2) == 1
    assert network.ring_bandwidth([0, 1, 2]) == 2  # half of the bytes by each card
    assert network.ring_bandwidth([1, 2]) == 1


def test_nothing_connects_two_islands() -> None:
    network = Network(("a/0", "b/0"), ("a", "b"), (0, 1), (None, None), ())
    assert network.route(0, 1) is None
    assert network.bandwidth(0, 1) == 0


def test_the_trees_bottleneck_is_the_widest_paths() -> None:
    rng = random.Random(1)
    for _ in range(60):
        size = rng.randint(2, 6)
        places = [f"n{i}" for i in range(size)]
        cables = tuple(
            Cable(a, b, rng.randint(1, 9), 0, True)
            for i, a in enumerate(places)
            for b in places[i + 1 :]
            if rng.random() < 0.6
        )
        devices = tuple(f"{p}/0" for p in places)
        network = Network(devices, tuple(places), tuple(range(size)), (None,) * size, cables)
        for u in range(size):
            for v in range(size):
                if u != v:
                    assert network.bandwidth(u, v) == widest(cables, places[u], places[v])


def widest(cables: tuple[Cable, ...], start: str, goal: str) -> int:
    """Return the width of the widest path, by trying every simple path."""
    wide = {}
    for cable in cables:
        for ends in ((cable.a, cable.b), (cable.b, cable.a)):
            wide[ends] = max(wide.get(ends, 0), cable.bandwidth_bytes_per_s)
    between = {place for ends in wide for place in ends} - {start, goal}
    best = 0
    for length in range(len(between) + 1):
        for middle in permutations(sorted(between), length):
            path = (start, *middle, goal)
            best = max(best, min(wide.get(step, 0) for step in pairwise(path)))
    return best


def test_a_ring_has_the_smallest_bandwidth_of_all_pairs() -> None:
    network = two_nodes()
    for group in ([0, 1], [0, 2], [0, 1, 2], [0, 1, 2, 3], [2, 3]):
        assert network.ring_bandwidth(group) == min(network.bandwidth(u, v) for u in group for v in group if u != v)


def test_a_measured_matrix_keeps_each_direction() -> None:
    table = np.array([[0, 5], [3, 0]], dtype=np.int64)
    latency = np.array([[0, 1], [2, 0]], dtype=np.int64)
    network = Network(("a/0", "b/0"), ("a", "b"), (0, 1), (None, None), (), table, latency)
    assert (network.bandwidth(0, 1), network.bandwidth(1, 0)) == (5, 3)
    assert (network.route(0, 1).latency_ns, network.route(1, 0).latency_ns) == (1, 2)
    assert network.ring_bandwidth([0, 1]) == 3
    assert network.dense_bandwidth().tolist() == table.tolist()


def test_the_ring_goes_node_by_node() -> None:
    assert two_nodes().ring([3, 0, 2, 1]) == [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 0, 1)]
