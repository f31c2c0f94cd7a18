"""GPU groups against their real GPUs: the traffic of every lane, link by link, on 1,000 clusters of five forms."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, count, permutations, product

import numpy as np
import pytest
from drawn_cells import drawn_problem
from page_network import Links
from problems import make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.costs.memory import static_bytes
from penstock.solvers.costs.transfer import row_pairs, transfer
from penstock.solvers.degrees.cells import cells_of
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Collective, Degrees, Module, Modules, Sharding, undominated
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.solve.driver import solve
from penstock.solvers.verify.verifier import verify

SOME = (Degrees(tensor=2), Degrees(tensor=4), Degrees(tensor=2, context=2), Degrees(tensor=1, context=4))
EXPERTS = (
    Degrees(expert=2),
    Degrees(tensor=2, expert=4),
    Degrees(tensor=4, expert=2),
    Degrees(tensor=2, context=2, expert=2, expert_tensor=2),
)
CLUSTERS = 250
"""Clusters per degrees."""


def lanes_ns(cells: Problem, source: Stage, target: Stage, rows: int, direction: int) -> int:
    """Return a transfer's time by every lane's real route: the largest latency plus the most loaded link's time."""
    assert cells.real is not None
    network = cells.real.network
    cut = source.last if direction == 0 else target.last
    per_row = int((cells.forward_bytes, cells.backward_bytes)[direction][cut])
    load: Counter[int] = Counter()
    latency = 0
    for u, v, share in row_pairs(source, target, rows):
        for gpu, other in zip(cells.cells[u], cells.cells[v], strict=True):
            route = network.route(gpu, other)
            assert route is not None
            latency = max(latency, route.latency_ns)
            for resource in route.resources:
                load[resource] += share * per_row
    durations = [-(-size * 10**9 // network.resources[link].bandwidth_bytes_per_s) for link, size in load.items()]
    return latency + max(durations)


@pytest.mark.cases(1)
@pytest.mark.parametrize("degrees", SOME, ids=str)
def test_a_transfer_takes_what_its_lanes_take_together(degrees: Degrees) -> None:
    compared = 0
    for seed in range(CLUSTERS):
        rng = random.Random(seed)
        cells = contract(drawn_problem(rng, degrees), Choice(degrees))
        if cells.num_devices < 2:
            continue
        at = rng.sample(range(cells.num_devices), rng.randint(2, cells.num_devices))
        split = rng.randint(1, len(at) - 1)
        stages = Stage(0, 1, tuple(sorted(at[:split]))), Stage(2, 3, tuple(sorted(at[split:])))
        allocation = single_pipeline(stages, 1)
        for rows, direction in product((4, 5), (0, 1)):
            ends = stages if direction == 0 else stages[::-1]
            move = transfer(cells, allocation, direction, rows, direction)
            if move is None:
                continue
            expected = lanes_ns(cells, *ends, rows, direction)
            assert move.duration_ns == expected, seed
            compared += 1
    assert compared > CLUSTERS


@pytest.mark.cases(2)
@pytest.mark.parametrize("degrees", SOME, ids=str)
def test_a_lane_has_its_part_of_each_link(degrees: Degrees) -> None:
    """Rings of collectives use two numbers: the width of the narrowest link between two groups, and the latency."""
    for seed in range(CLUSTERS):
        cells = contract(drawn_problem(random.Random(seed), degrees), Choice(degrees))
        assert cells.real is not None
        network = cells.real.network
        for u, v in permutations(range(cells.num_devices), 2):
            routes = [network.route(*lane) for lane in zip(cells.cells[u], cells.cells[v], strict=True)]
            passing = Counter(link for route in routes if route is not None for link in route.resources)
            part = min(network.resources[link].bandwidth_bytes_per_s // lanes for link, lanes in passing.items())
            group_route = cells.network.route(u, v)
            assert group_route is not None
            assert group_route.latency_ns == max(route.latency_ns for route in routes if route is not None)
            assert cells.network.bandwidth(u, v) == part, (seed, u, v)


@pytest.mark.cases(1)
@pytest.mark.parametrize("degrees", SOME, ids=str)
def test_a_pass_takes_the_time_of_its_collectives_too(degrees: Degrees) -> None:
    """Rings by hand: tensor groups are neighbours, context groups every t-th GPU."""
    for seed in range(CLUSTERS):
        problem = drawn_problem(random.Random(seed), degrees)
        cells = contract(problem, Choice(degrees))
        (variant,) = problem.variants
        for base, total in zip(variant.measured["cpu"], cells.measured["cpu"], strict=True):
            for layer, collectives in enumerate(base.collectives):
                added = Counter(dict.fromkeys(("forward", "backward"), 0))
                for each in collectives:
                    slowest = max(by_hand_ns(problem, group, each) for group in groups_of(cells, each.over))
                    added[each.phase] += max(0, slowest - each.hidden_ns)
                assert total.forward_ns[layer] == base.forward_ns[layer] + added["forward"]
                assert total.backward_ns[layer] == base.backward_ns[layer] + added["backward"]
                assert total.weight_ns[layer] == base.weight_ns[layer]


def groups_of(cells: Problem, over: str) -> list[tuple[int, ...]]:
    """List the GPUs of each group of a collective."""
    assert cells.choice is not None
    t = cells.choice.degrees.tensor
    if over == "tensor":
        return [cell[at : at + t] for cell in cells.cells for at in range(0, len(cell), t)]
    return [cell[lane::t] for cell in cells.cells for lane in range(t)]


def by_hand_ns(problem: Problem, group: tuple[int, ...], each: Collective) -> int:
    """Return a collective's time: hierarchical all-reduces run in nodes, then among them; others are one ring."""
    if each.bytes == 0:
        return 0
    nodes = [[gpu for gpu in group if problem.network.node_of[gpu] == node] for node in problem.network.nodes_of(group)]
    in_turn = problem.rules.all_reduce == "hierarchical" and each.operation not in ("send", "all_to_all")
    if not in_turn or len(nodes) in (1, len(group)):
        return ring_ns(problem, group, each)
    inside = max(ring_ns(problem, tuple(members), each) for members in nodes if len(members) > 1)
    return inside + ring_ns(problem, tuple(members[0] for members in nodes), each, Links(problem.network).across(group))


def ring_ns(problem: Problem, group: tuple[int, ...], each: Collective, width: int | None = None) -> int:
    """Return the time of a ring.

    An all-reduce sends 2 (n − 1) / n of the tensor in 2 (n − 1) steps; its halves and an all-to-all take half of that.
    """
    n, network = len(group), problem.network
    links = Links(network)
    ring = [network.route(u, v) for u, v in links.ring(group)]
    latency = max(route.latency_ns for route in ring if route)
    steps, parts = {"send": (1, 1), "all_reduce": (2 * (n - 1), n)}.get(each.operation, (n - 1, n))
    moved_ns = math.ceil(Fraction(steps * each.bytes * 10**9, parts * (width or links.ring_width(group))))
    return moved_ns + each.count * steps * latency


@pytest.mark.cases(7)
@pytest.mark.parametrize("sharding", ["none", "optimizer"])
@pytest.mark.parametrize("degrees", [*SOME, *EXPERTS], ids=str)
def test_memory_is_that_of_one_gpu(degrees: Degrees, sharding: Sharding) -> None:
    """Sharded states are divided by the number of GPUs with the same parameters, in the group and in other replicas."""
    for seed in range(40):
        problem = drawn_problem(random.Random(seed), degrees)
        cells = contract(problem, Choice(degrees, sharding))
        (variant,) = problem.variants
        stage = Stage(1, 2, tuple(range(cells.num_devices)))
        weights = int(variant.parameter_bytes[3] - variant.parameter_bytes[1])
        states = problem.memory.state_factor * weights
        if sharding == "optimizer":
            copies = [range(degrees.cell)[::stride] for stride in (degrees.tensor, degrees.expert_group)]
            parts = [
                math.ceil(Fraction(trained - experts, len(copies[0]))) + math.ceil(Fraction(experts, len(copies[1])))
                for trained, experts in zip(
                    np.diff(variant.trainable_bytes).tolist(), np.diff(variant.expert_bytes).tolist(), strict=True
                )
            ]
            states = math.ceil(Fraction(problem.memory.state_factor * sum(parts[1:3]), cells.num_devices))
        assert sum(static_bytes(cells, stage)) == 2 * weights + states, seed
        assert {device.context_bytes for device in cells.devices} == {7}


@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_a_gpus_step_needs_room_for_its_part(sharding: Sharding) -> None:
    degrees = Degrees(tensor=2, context=2)
    problem = drawn_problem(random.Random(1), degrees)
    assert contract(problem, Choice(degrees, sharding)).update_workspace_bytes is None
    trained = np.diff(problem.trainable_bytes)
    cells = contract(replace(problem, update_workspace_bytes=3 * trained), Choice(degrees, sharding))
    stepped = np.diff(problem.variants[0].trainable_bytes if sharding == "none" else cells.owned_bytes)
    assert cells.update_workspace_bytes is not None
    assert cells.update_workspace_bytes.tolist() == (3 * stepped * (trained > 0)).tolist()


@pytest.mark.tier("ci")
@pytest.mark.parametrize("planner", ["gpipe", "dapple", "dp", "spp"])
def test_planners_bounds_and_judge_work_on_cells(planner: str) -> None:
    """A solve verifies its plan, and the bound on every plan of the request is not above its time."""
    for seed in range(6):
        cells = contract(drawn_problem(random.Random(seed), Degrees(tensor=2)), Choice(Degrees(tensor=2)))
        plan = solve(cells, planner, max_plans=6).best
        assert plan is not None, seed
        assert request_bound(cells).bound_ns <= plan.value_ns
        assert verify(cells, plan.allocation, plan.schedule, plan.timeline, overlap=plan.overlap_all_reduce) == []


def test_degrees_of_one_change_nothing_but_the_sharding() -> None:
    problem = make_problem([10] * 4, nodes=(2, 2))
    for sharding in ("none", "optimizer"):
        same = contract(problem, Choice(sharding=sharding))
        changed = {name for name in same.__dataclass_fields__ if getattr(same, name) is not getattr(problem, name)}
        assert changed == {"choices", "choice", "memory", "results"}
        assert same.memory == replace(problem.memory, shard_states=sharding == "optimizer")


def test_cells_are_neighbours_of_one_kind() -> None:
    network = replace(make_problem([1], nodes=(5, 4, 4)).network)
    problem = make_problem([1], network=network, kinds=["a"] * 5 + ["a", "a", "b", "b"] + ["a", "a", "a", "b"])
    assert cells_of(problem, Degrees(tensor=2)) == ((0, 1), (2, 3), (5, 6), (7, 8), (9, 10))
    with pytest.raises(UnsupportedRequest, match="needs 8 neighbouring GPUs of one kind"):
        cells_of(problem, Degrees(context=8))
    alike = make_problem([1], nodes=(5, 4, 4, 4))
    assert cells_of(alike, Degrees(context=8)) == (tuple(range(5, 13)),)


def test_a_node_of_72_has_one_cell_of_64_and_larger_cells_are_whole_nodes() -> None:
    racks = make_problem([1], nodes=(72, 72))
    assert cells_of(racks, Degrees(expert=64)) == (tuple(range(64)), tuple(range(72, 136)))
    assert len(cells_of(racks, Degrees(tensor=8, context=9, expert=144))) == 1
    with pytest.raises(UnsupportedRequest, match="needs 128 neighbouring GPUs of one kind"):
        cells_of(racks, Degrees(expert=128))
    boxes = make_problem([1], nodes=(8,) * 5)
    assert cells_of(boxes, Degrees(tensor=2, expert=16)) == (tuple(range(16)), tuple(range(16, 32)))


@pytest.mark.parametrize("seed", range(20))
def test_a_set_of_modules_is_left_out_only_where_another_is_no_worse(seed: int) -> None:
    rng = np.random.default_rng(seed)
    modules: tuple[Module, ...] = ("attention", "mlp", "norm")
    sets = [each for size in (1, 2, 3) for each in combinations(modules, size)]
    points = [
        ({each: (rng.integers(0, 4, 2), rng.integers(0, 4, 2)) for each in modules}, rng.integers(3, 8, 2))
        for _ in range(int(rng.integers(1, 3)))
    ]
    kept = undominated(sets, points)

    def cost(each: Modules) -> list[int]:
        """Return the times and the bytes that are not freed."""
        numbers: list[int] = []
        for table, stash in points:
            for layer in range(2):
                numbers.append(sum(int(table[module][0][layer]) for module in each))
                numbers.append(int(stash[layer]) - min(int(stash[layer]), sum(int(table[m][1][layer]) for m in each)))
        return numbers

    for each in sets:
        assert any(all(a <= b for a, b in zip(cost(one), cost(each), strict=True)) for one in kept)
    for one, other in permutations(kept, 2):
        assert any(a > b for a, b in zip(cost(one), cost(other), strict=True))


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (
            Degrees(tensor=2, expert=3),
            "2 GPUs share a sequence and 3 GPUs share experts, but neither",
        ),
        (Degrees(tensor=8), "tensor 8 needs 8 GPUs in one node, but the largest node has 4"),
        (Degrees(context=3), "the profile has no costs at context 3"),
        (Degrees(tensor=4), "the profile has no costs at tensor 4"),
    ],
)
def test_what_cannot_be_is_refused(degrees: Degrees, words: str) -> None:
    with pytest.raises(UnsupportedRequest, match=words):
        contract(make_problem([10] * 4, nodes=(4, 4)), Choice(degrees))


def test_pins_hold_for_whole_cells() -> None:
    drawn = (drawn_problem(random.Random(seed), Degrees(tensor=2)) for seed in count())
    problem = next(each for each in drawn if each.num_devices >= 4)
    pinned = replace(problem, pins=(Pin(0, 1, frozenset({0, 1, 2})),))
    assert contract(pinned, Choice(Degrees(tensor=2))).pins == (Pin(0, 1, frozenset({0})),)
    astride = replace(problem, pins=(Pin(0, 1, frozenset({1, 2})),))
    with pytest.raises(UnsupportedRequest, match="contain no whole group of 2 GPUs"):
        contract(astride, Choice(Degrees(tensor=2)))
