"""Lanes of cables, against networks with every card as a separate switch with a separate cable, device by device."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from problems import make_network
from random_plans import random_allocation, random_crossing_pipelines, random_orders, random_problem

from penstock.solvers.costs.tables.routes import routes_of
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.network import Cable, Network
from penstock.solvers.model.problem import Problem

SEEDS = 150
RATE = 840 * 10**6
"""A number that all numbers of lanes divide."""
AT_ONCE = 10**18
"""Bytes per second of the way from a device to its card."""


def drawn(rng: random.Random, network: Network, lanes: tuple[int, ...]) -> Network:
    """Put the nodes around a switch or in racks, each with its number of cards, or with one that all devices share."""
    spread, full = rng.random() < 0.5, rng.random() < 0.5
    cables = [
        Cable(host, f"rack{i % 2}" if spread else "switch", RATE * rng.choice((1, 2, 3)), rng.choice((0, 2)), full, n)
        for i, (host, n) in enumerate(zip(network.node_names, lanes, strict=True))
    ]
    if spread:
        cables += [Cable(f"rack{i}", "spine", RATE * rng.choice((1, 5)), 1, full) for i in range(2)]
    return Network(network.device_names, network.node_names, network.node_of, network.insides, tuple(cables))


def expanded(network: Network) -> Network:
    """Replace card i of a node by a separate switch, with a cable for each device of the node that uses it."""
    cables = []
    for cable in network.cables:
        if cable.lanes == 1:
            cables.append(cable)
            continue
        node = network.node_names.index(cable.a)
        devices = [d for d, of in enumerate(network.node_of) if of == node]
        each = cable.bandwidth_bytes_per_s // cable.lanes
        used = {number % cable.lanes for number in range(len(devices))}
        cables += [
            Cable(f"{cable.a} card {i}", cable.b, each, cable.latency_ns, cable.full_duplex) for i in sorted(used)
        ]
        cables += [
            Cable(network.device_names[d], f"{cable.a} card {number % cable.lanes}", AT_ONCE, 0, True)
            for number, d in enumerate(devices)
        ]
    return Network(network.device_names, network.node_names, network.node_of, network.insides, tuple(cables))


def sizes_of(network: Network) -> list[int]:
    return [network.node_of.count(node) for node in range(len(network.node_names))]


@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [random_allocation, random_crossing_pipelines], ids=["one pipeline", "crossing"])
def test_plans_take_as_long_as_with_a_cable_for_each_card(make) -> None:  # type: ignore[no-untyped-def]
    """A card for each device, or one for all: transfers, rings, and waits in a shared network."""
    differ = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        problem = random_problem(rng)
        if len(problem.network.node_names) < 2 or problem.global_batch_size < 2:
            continue
        sizes = sizes_of(problem.network)
        lanes = tuple(rng.choice((1, size, size + 1)) for size in sizes)
        network = drawn(rng, problem.network, lanes)
        one, other = (replace(problem, network=each) for each in (network, expanded(network)))
        allocation = make(rng, one)
        orders = random_orders(rng, allocation)
        timeline, expected = simulate(one, allocation, orders), simulate(other, allocation, orders)
        assert timeline.time_per_global_batch_ns == expected.time_per_global_batch_ns, seed
        whole = replace(problem, network=replaced(network))
        differ += simulate(whole, allocation, orders).time_per_global_batch_ns != timeline.time_per_global_batch_ns
    assert differ > SEEDS // 10


def replaced(network: Network) -> Network:
    """Return the network without lanes."""
    cables = tuple(cable._replace(lanes=1) for cable in network.cables)
    return Network(network.device_names, network.node_names, network.node_of, network.insides, cables)


def test_devices_that_share_a_card_share_its_bandwidth() -> None:
    """Transfers with any number of cards, and the table of routes that compiled searches read."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        problem = replace(random_problem(rng), rules=replace(random_problem(rng).rules, shared=True))
        sizes = sizes_of(problem.network)
        network = drawn(rng, problem.network, tuple(rng.choice((1, 2, 3, 4)) for _ in sizes))
        one, other = (replace(problem, network=each) for each in (network, expanded(network)))
        allocation = random_allocation(rng, one)
        for stage in range(len(allocation.stages)):
            for way in (0, 1):
                pair = [transfer(each, allocation, stage, 7, way) for each in (one, other)]
                assert (pair[0] and pair[0].duration_ns) == (pair[1] and pair[1].duration_ns), seed
        assert_same_routes(one)


def assert_same_routes(problem: Problem) -> None:
    network = problem.network
    table = routes_of(problem)
    for u, v in permutations(range(problem.num_devices), 2):
        route, number = network.route(u, v), table.route_of[u, v]
        assert (route is None) == (number < 0)
        if route is not None:
            assert tuple(table.resource[table.start[number] : table.start[number + 1]]) == route.resources
            assert (table.latency_ns[number], table.narrowest[number]) == (route.latency_ns, network.bandwidth(u, v))


def test_a_ring_uses_as_many_cards_as_it_has_members() -> None:
    network = make_network((4, 4), inside_bytes_per_s=10**12, between_bytes_per_s=8 * 10**9, lanes=4)
    each = 2 * 10**9
    assert [network.ring_bandwidth(d) for d in ([0, 4], [0, 4, 5], [0, 1, 4, 5], range(8))] == [
        each, each, 2 * each, 4 * each,
    ]  # fmt: skip
    shared = make_network((4, 4), inside_bytes_per_s=10**12, between_bytes_per_s=8 * 10**9, lanes=2)
    assert shared.ring_bandwidth([0, 2, 4, 6]) == shared.ring_bandwidth([0, 4]) == 4 * 10**9
    assert shared.ring_bandwidth([0, 1, 4, 5]) == shared.ring_bandwidth(range(8)) == 8 * 10**9


def test_a_ring_is_as_slow_as_the_link_that_all_its_cards_share() -> None:
    cables = [Cable(f"n{i}", f"rack{i}", 8 * 10**9, 0, True, 4) for i in range(2)]
    cables += [Cable(f"rack{i}", "spine", 3 * 10**9, 0, True) for i in range(2)]
    network = replace(make_network((4, 4), inside_bytes_per_s=10**12), cables=tuple(cables))
    assert network.ring_bandwidth([0, 4]) == 2 * 10**9
    assert network.ring_bandwidth(range(8)) == network.bandwidth_across(range(8)) == 3 * 10**9


def test_each_lane_is_a_resource_of_the_link() -> None:
    network = make_network((2, 2), lanes=2)
    names = [network.resources[r].name for u, v in ((0, 3), (1, 2)) for r in network.route(u, v).resources]  # type: ignore[union-attr]
    assert names == ["n0→switch, lane 0", "switch→n1, lane 1", "n0→switch, lane 1", "switch→n1, lane 0"]
    assert {network.resources[r].ends for r in network.route(0, 3).resources} == {("n0", "switch"), ("switch", "n1")}  # type: ignore[union-attr]
    assert np.all(network.dense_bandwidth()[:2, 2:] == 5 * 10**8)
