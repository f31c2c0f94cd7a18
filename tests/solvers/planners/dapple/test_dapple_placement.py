"""Placement policies: ALGORITHMS 2.4's examples, and the occupancies that they reach."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest
from problems import make_network, make_problem

from penstock.solvers.costs.tables.device_line import server_classes
from penstock.solvers.model.network import Cable, Network
from penstock.solvers.planners.dapple.placement import POLICIES, Policy, geometry, take

EIGHT = [list(range(8)), list(range(8, 16)), list(range(16, 24))]
OCCUPIED = [0, 1, 8, 9, 10, 11]


def place(
    policy: Policy, servers: Sequence[Sequence[int]], occupied: Collection[int], need: int
) -> tuple[int, ...] | None:
    """Return the devices that a policy gives to a stage of ``need`` replicas, sorted; None if too few are free."""
    free = [[device for device in server if device not in occupied] for server in servers]
    sizes = tuple(len(server) for server in servers)
    counts = take(policy, sizes, tuple(s - len(f) for s, f in zip(sizes, free, strict=True)), need)
    if counts is None:
        return None
    return tuple(sorted(device for f, count in zip(free, counts, strict=True) for device in f[:count]))


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("policy", "occupied", "need", "expected"),
    [
        ("fresh", OCCUPIED, 6, [16, 17, 18, 19, 20, 21]),
        ("append", OCCUPIED, 6, [2, 3, 4, 5, 6, 7]),
        ("scatter", OCCUPIED, 6, [2, 3, 4, 12, 13, 14]),
        ("append", OCCUPIED, 12, [2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 16, 17]),
        ("fresh", OCCUPIED, 10, [2, 3, 16, 17, 18, 19, 20, 21, 22, 23]),
        ("scatter", [], 6, [0, 1, 8, 9, 16, 17]),
    ],
)
def test_examples(policy: Policy, occupied: list[int], need: int, expected: list[int]) -> None:
    """The three policies on three servers of eight devices, some of them occupied (ALGORITHMS 2.4)."""
    assert place(policy, EIGHT, occupied, need) == tuple(expected)


@pytest.mark.tier("ci")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_gives_what_is_asked_from_what_is_free(policy: Policy) -> None:
    for need in range(1, 19):
        devices = place(policy, EIGHT, OCCUPIED, need)
        assert devices is not None
        assert len(devices) == need
        assert not set(devices) & set(OCCUPIED)
    assert place(policy, EIGHT, OCCUPIED, 19) is None


def _mark(servers: list[list[int]], sets: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return how much each server gives to each set, servers sorted: equal for interchangeable servers."""
    return tuple(sorted(tuple(len(set(server) & set(s)) for s in sets) for server in servers))


@pytest.mark.tier("ci")
def test_geometry_reaches_the_sets_that_the_policies_give() -> None:
    """Two placements after each other by ``place`` are two transitions, up to interchangeable servers."""
    servers = [[0, 1], [2, 3], [4, 5]]
    reachable = geometry((2, 2, 2), (0, 0, 0), tuple(range(1, 7)), POLICIES, 10_000)
    assert reachable is not None

    def chains(state: int, depth: int, named: list[int], sets: list[tuple[int, ...]]) -> set[object]:
        marks: set[object] = {_mark(servers, sets)}
        if depth == 0:
            return marks
        for t in range(int(reachable.first[state]), int(reachable.first[state + 1])):
            used = reachable.states[state]
            picked = [d for p, n in enumerate(named) for d in servers[n][used[p] : used[p] + reachable.take[t, p]]]
            order = [named[p] for p in reachable.order[t]]
            marks |= chains(int(reachable.target[t]), depth - 1, order, [*sets, tuple(picked)])
        return marks

    def placements(depth: int, sets: list[tuple[int, ...]]) -> set[object]:
        marks: set[object] = {_mark(servers, sets)}
        occupied = [d for s in sets for d in s]
        if depth == 0:
            return marks
        for policy, need in itertools.product(POLICIES, range(1, 7)):
            devices = place(policy, servers, occupied, need)
            if devices is not None:
                marks |= placements(depth - 1, [*sets, devices])
        return marks

    assert chains(0, 2, [0, 1, 2], []) == placements(2, [])


def test_geometry_gives_up_beyond_its_limit() -> None:
    assert geometry((8, 8, 8, 8), (0, 0, 0, 0), tuple(range(1, 33)), POLICIES, 500) is None


def test_interchangeable_servers() -> None:
    problem = make_problem([1, 2], nodes=(2, 2, 3))
    assert server_classes(problem) == (0, 0, 1)
    smaller = replace(
        problem, devices=tuple(replace(d, memory_bytes=5) if d.name == "n1/0" else d for d in problem.devices)
    )
    assert server_classes(smaller) == (0, 1, 2)


def test_servers_on_different_switches_are_not_interchangeable() -> None:
    plain = make_network((1, 1, 1))
    cables = (*plain.cables[:2], Cable("n2", "other", 10**9, 0, True), Cable("other", "switch", 10**9, 0, True))
    network = replace(plain, cables=cables)
    assert server_classes(make_problem([1, 2], network=network)) == (0, 0, 1)


def test_two_servers_joined_directly_are_interchangeable() -> None:
    network = replace(make_network((2, 2)), cables=(Cable("n0", "n1", 10**9, 0, True),))
    assert server_classes(make_problem([1, 2], network=network)) == (0, 0)


def test_servers_of_a_matrix_are_compared_by_their_bandwidths() -> None:
    plain = make_network((1, 1, 1))
    table = np.full((3, 3), 10**9, dtype=np.int64)

    def classes(matrix: np.ndarray) -> tuple[int, ...]:
        network = Network(
            plain.device_names, plain.node_names, plain.node_of, (None,) * 3, (), matrix, np.zeros_like(matrix)
        )
        return server_classes(make_problem([1, 2], network=network))

    assert classes(table) == (0, 0, 0)
    table[0, 1] = 2 * 10**9
    assert classes(table) == (0, 1, 2)
