"""Every plan of a small space once up to symmetry, with a correct count in advance."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from problems import make_network, make_problem

from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import window_bound_ns
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.shortages import shortage_of
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.improve.neighbourhood.batch import Catalogue
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.planners.exact.chain_tables import WHOLE_BACKWARDS, ChainTables

NODES = [(1,), (4,), (2, 2), (2, 1, 1), (3, 1), (1, 1, 1, 1), (2, 3)]


def layers(count: int, seed: int = 0, **changes: object) -> Problem:
    draw = np.random.default_rng(seed)
    settings: dict[str, object] = {
        "boundary_bytes": draw.integers(0, 900, count - 1).tolist(),
        "parameter_bytes": draw.integers(0, 9_000, count).tolist(),
        "nodes": (2, 2),
        "between_bytes_per_s": 3 * 10**8,
        "global_batch_size": 12,
    }
    return make_problem(draw.integers(100, 3_000, count).tolist(), **(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_the_count_is_what_is_listed(nodes: tuple[int, ...]) -> None:
    space = Space.of(layers(4, nodes=nodes, micro_batch_sizes=(1, 2)))
    listed = sum(
        len(list(space.placements(stages))) * len(space.partitions(stages))
        for stages in range(1, space.most_stages + 1)
    )
    assert space.count() == len(space.batches) * listed


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_one_placement_stands_for_each_orbit(nodes: tuple[int, ...], stages: int) -> None:
    problem = layers(5, nodes=nodes)
    space = Space.of(problem)
    all_placements = list(space.placements(stages))
    swaps = list(_symmetries(nodes))
    orbits = set()
    for stage_of in product(range(stages + 1), repeat=problem.num_devices):
        if set(range(stages)) <= set(stage_of):
            orbits.add(min(tuple(stage_of[d] for d in swap) for swap in swaps))
    assert len(all_placements) == len(orbits)
    listed = set()
    for groups in all_placements:
        stage_of = [stages] * problem.num_devices
        for s, devices in enumerate(groups):
            for d in devices:
                stage_of[d] = s
        listed.add(min(tuple(stage_of[d] for d in swap) for swap in swaps))
    assert listed == orbits
    assert len({space.orbit(groups) for groups in all_placements}) == len(all_placements)


def _symmetries(nodes: tuple[int, ...]):
    """Yield the permutations of the devices that keep nodes together and their sizes."""
    starts = np.concatenate(([0], np.cumsum(nodes))).tolist()
    node_devices = [range(low, high) for low, high in pairwise(starts)]
    for order in permutations(range(len(nodes))):
        if all(nodes[i] == nodes[j] for i, j in enumerate(order)):
            for inside in product(*(permutations(node_devices[j]) for j in order)):
                yield [d for group in inside for d in group]


def test_devices_and_nodes_that_differ_are_told_apart() -> None:
    same = layers(3, nodes=(2, 2))
    assert Space.of(same).nodes == ((((0, 1),), ((2, 3),)),)
    memory = replace(same, devices=(replace(same.devices[0], memory_bytes=7), *same.devices[1:]))
    assert Space.of(memory).nodes == ((((0,), (1,)),), (((2, 3),),))
    pinned = replace(same, pins=(Pin(0, 0, frozenset({0, 1})),))
    assert Space.of(pinned).nodes == ((((0, 1),),), (((2, 3),),))
    wired = make_network((2, 2))
    slower = wired.cables[1]._replace(bandwidth_bytes_per_s=1)
    uneven = layers(3, network=replace(wired, cables=(wired.cables[0], slower)))
    assert Space.of(uneven).nodes == ((((0, 1),),), (((2, 3),),))


def test_a_measured_matrix_shows_which_devices_are_alike() -> None:
    matrix = np.full((4, 4), 10**9, dtype=np.int64)
    alike = layers(3, network=replace(make_network((2, 2)), matrix_bytes_per_s=matrix))
    assert Space.of(alike).nodes == ((((0, 1),), ((2, 3),)),)
    matrix = matrix.copy()
    matrix[0, 2] = 5
    assert Space.of(layers(3, network=replace(make_network((2, 2)), matrix_bytes_per_s=matrix))).count() > (
        Space.of(alike).count()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"channel": "full", "update_ns": 50},
        {"channel": "none", "global_batch_size": 13, "micro_batch_sizes": (3,)},
        {"stash_bytes": 500, "memory_bytes": 40_000},
        {"kinds": ["fast", "cpu", "fast", "cpu"], "speed": {"fast": 2.0}},
        {"shared": True, "latency_ns": 9},
        {"transfer": "nic", "micro_batch_sizes": (5,)},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_bounds_of_many_plans_are_those_of_each(changes: dict[str, object]) -> None:
    """The kernel against ``window_bound_ns``: as tight without a memory limit, never above the work's."""
    space = Space.of(layers(5, 3, **changes))
    for batch in space.batches:
        tables = ChainTables(space, batch)
        catalogue = Catalogue(space.problem, batch.num_micro_batches)
        for stages in range(1, space.most_stages + 1):
            partitions, placements = space.partitions(stages), list(space.placements(stages))
            bounds = tables.bounds(partitions, placements)
            for p, placement in enumerate(placements):
                plans = [space.allocation(batch, firsts, placement) for firsts in partitions]
                plan_bounds = catalogue.bounds_ns(catalogue.rows([plan.stages for plan in plans]))
                assert (plan_bounds >= bounds[p]).all()
                for plan, bound, plan_bound in zip(plans, bounds[p].tolist(), plan_bounds.tolist(), strict=True):
                    if plan_bound == NEVER_NS:
                        assert shortage_of(space.problem, plan, (1,) * stages) is not None
                    if bound == NEVER_NS:
                        assert shortage_of(space.problem, plan, (1,) * stages) is not None
                        continue
                    times = StageTimes(space.problem, plan, WHOLE_BACKWARDS)
                    work = max(times.device_ns(d) for stage in plan.stages for d in stage.devices)
                    reference = max(window_bound_ns(times), work)
                    assert bound == reference or ("memory_bytes" in changes and bound <= reference)
                    assert plan_bound in (reference, NEVER_NS)


@pytest.mark.parametrize(
    ("lanes", "alike"), [(1, [4]), (2, [2, 2]), (3, [2, 2]), (4, [4]), (9, [4])], ids=lambda each: str(each)
)
def test_devices_are_alike_if_swapping_them_moves_no_card(lanes: int, alike: list[int]) -> None:
    """The first of three cards has devices 0 and 3; cards 1 and 2 have one each."""
    space = Space.of(layers(3, nodes=(4, 4), lanes=lanes))
    (nodes,) = space.nodes
    assert [[len(devices) for devices in nest] for nest in nodes] == [alike, alike]


@pytest.mark.parametrize("nodes", [*NODES, (2, 2, 2)], ids=str)
@pytest.mark.parametrize("rules", [{"transfer": "nic"}, {"shared": True}], ids=str)
def test_where_slices_count_a_plan_of_every_order_is_listed(nodes: tuple[int, ...], rules: dict[str, object]) -> None:
    """Devices may be swapped where that leaves the order of each stage's replicas; seed 1443 of the audit."""
    problem = layers(5, nodes=nodes, **rules)
    space = Space.of(problem)
    assert space.is_complete
    swaps = list(_symmetries(nodes))
    for stages in (1, 2, 3)[: 3 if len(nodes) < 4 else 2]:
        listed = {_stage_of_device(problem, groups, stages) for groups in space.placements(stages)}
        for wanted in product(range(stages + 1), repeat=problem.num_devices):
            if set(range(stages)) <= set(wanted):
                assert any(_moved_in_order(wanted, swap, stages) in listed for swap in swaps), wanted


def test_a_space_of_too_many_orders_lists_orbits_and_claims_no_class() -> None:
    problem = layers(5, nodes=(2, 2, 2), transfer="nic")
    whole = Space.of(problem)
    orbits = Space.of(problem, whole.count() - 1)
    assert (whole.is_complete, orbits.is_complete) == (True, False)
    assert orbits.count() < whole.count()
    assert Space.of(layers(5, nodes=(2, 2, 2)), 1).is_complete


def _stage_of_device(problem: Problem, groups: tuple[tuple[int, ...], ...], unused: int) -> tuple[int, ...]:
    stages = dict.fromkeys(range(problem.num_devices), unused)
    stages |= {device: s for s, devices in enumerate(groups) for device in devices}
    return tuple(stages[device] for device in range(problem.num_devices))


def _moved_in_order(wanted: tuple[int, ...], swap: list[int], stages: int) -> tuple[int, ...] | None:
    """Return the stages of devices after a swap; None where it changes the order of a stage's replicas."""
    for stage in range(stages):
        places = [swap[device] for device, number in enumerate(wanted) if number == stage]
        if places != sorted(places):
            return None
    moved = [stages] * len(wanted)
    for device, number in enumerate(wanted):
        moved[swap[device]] = number
    return tuple(moved)
