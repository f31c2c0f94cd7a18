"""Communicators that are counted from an allocation equal the communicators that the programs of its ranks need."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from drawn_cells import drawn_problem
from problems import chain, gpipe, make_problem, straight
from random_plans import (
    random_allocation,
    random_crossing_pipelines,
    random_orders,
    random_pipelines,
    random_problem,
    with_ties,
)

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import Program
from penstock.solvers.costs.communicators import communicator_bytes, runtime_bytes
from penstock.solvers.costs.memory import fits, micro_batches_that_fit
from penstock.solvers.degrees.contract import contract
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.problem import Problem
from penstock.solvers.verify.verifier import verify

MAKES = {"one pipeline": random_allocation, "several": random_pipelines, "crossing": random_crossing_pipelines}
EDGE, GROUP = 1, 1_000_000


def counted(problem: Problem, edge: int = EDGE, group: int = GROUP) -> Problem:
    """Return the problem on devices whose communicators take these bytes per edge and group."""
    devices = tuple(replace(device, edge_bytes=edge, group_bytes=group) for device in problem.devices)
    return replace(problem, devices=devices)


def needed(programs: Sequence[Program]) -> dict[str, int]:
    """Return the bytes that each device's messages and groups need, by the device's name."""
    needs = {}
    for program in programs:
        edges = set()
        for one in program.instructions():
            if one.kind.startswith(("SEND", "RECV")):
                channel = program.channels[one.channel]
                low, high = channel.rows[program.row_class(one.micro_batch % program.num_micro_batches)]
                edges |= {(one.kind.startswith("SEND"), channel.peer)} if high > low else set()
        groups = sum(program.rank in group and len(group) > 1 for group in program.groups)
        needs[program.device] = EDGE * len(edges) + GROUP * groups
    return needs


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("seed", range(60))
def test_ranks_need_as_many_as_are_counted(seed: int, make) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    while min(problem.num_devices, problem.global_batch_size) < 2:
        problem = random_problem(rng)
    problem = counted(with_ties(rng, problem))
    allocation = make(rng, problem)
    try:
        programs = lower(problem, allocation, random_orders(rng, allocation), transport="gloo")
    except InvalidPlan:
        return
    names = {device.name: d for d, device in enumerate(problem.devices)}
    counts = communicator_bytes(problem, allocation)
    assert {name: counts[names[name]] for name in needed(programs)} == needed(programs)


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(tensor=2),
        Degrees(context=2),
        Degrees(tensor=2, context=2),
        Degrees(expert=2),
        Degrees(tensor=2, expert=4),
        Degrees(tensor=4, expert=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(8))
def test_gpus_of_cells_need_as_many_as_are_counted(seed: int, degrees: Degrees) -> None:
    rng = random.Random(seed)
    real = counted(drawn_problem(rng, degrees))
    cells = contract(real, Choice(degrees))
    devices = list(range(min(cells.num_devices, 3)))
    groups = [(2, devices[:1]), (2, devices[1:])] if len(devices) > 1 else [(4, devices)]
    allocation = chain(groups, 1)
    counts = communicator_bytes(cells, allocation)
    per_cell = {real.devices[gpu].name: counts[cell] for cell in devices for gpu in cells.cells[cell]}
    assert needed(lower(cells, allocation, gpipe(allocation), transport="gloo")) == per_cell


def test_they_are_part_of_the_context_and_have_to_fit() -> None:
    """By hand: two stages, the second on two devices. Device 0 has four edges, the others two and a group."""
    problem = make_problem(
        [1, 1], None, 4, 10, nodes=(3,), global_batch_size=2, micro_batch_sizes=(2,), context_bytes=5
    )
    plain, allocation = problem, chain([(1, [0]), (1, [1, 2])], 1)
    problem = counted(problem, edge=7, group=100)
    assert [runtime_bytes(problem, allocation, d) for d in range(3)] == [5 + 4 * 7, 5 + 2 * 7 + 100, 5 + 2 * 7 + 100]
    timeline = simulate(problem, allocation, gpipe(allocation))
    before = simulate(plain, allocation, gpipe(allocation))
    assert verify(problem, allocation, gpipe(allocation), timeline) == []
    assert verify(problem, allocation, gpipe(allocation), before) != []
    for d, more in enumerate((28, 114, 114)):
        assert timeline.uses[d].memory.context == 5 + more
        assert timeline.uses[d].memory.total == before.uses[d].memory.total + more
        assert (timeline.memory_curve(d)[1] - before.memory_curve(d)[1]).tolist() == [more] * len(
            before.memory_curve(d)[0]
        )
    assert fits(problem, timeline)
    most = max(use.memory.total for use in timeline.uses.values())
    tight = replace(problem, devices=tuple(replace(d, memory_bytes=most - 1) for d in problem.devices))
    assert not fits(tight, timeline)
    assert any(" needs " in fault for fault in verify(tight, allocation, gpipe(allocation), timeline))


def test_a_replicated_stage_needs_its_group_before_anything_is_in_flight() -> None:
    problem = counted(make_problem([1], parameter_bytes=10, nodes=(2,), memory_bytes=10 + 10 + 50), group=51)
    assert micro_batches_that_fit(problem, Stage(0, 0, (0,)), 1) > 0
    assert micro_batches_that_fit(problem, Stage(0, 0, (0, 1)), 2) == 0
    assert communicator_bytes(problem, straight(problem, 1)) == {0: 0}
