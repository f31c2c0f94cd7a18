"""Kernels against the plain Python twin, to the unit, on random plans of every shape; the verifier agrees too."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from judge_twin import Twin, run_periodic_twin, run_twin
from problems import as_operations
from random_plans import (
    random_allocation,
    random_crossing_pipelines,
    random_orders,
    random_pattern,
    random_pipelines,
    random_problem,
)
from twin_measures import twin_curve, twin_misses_versions, twin_use, twin_versions

from penstock.schemas.errors import InvalidPlan
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.verify.verifier import verify


def assert_equal(timeline: Timeline, twin: Twin) -> None:
    """All times to the nanosecond, all memory to the byte."""
    for lane, track in enumerate(timeline.tracks):
        operations = [tuple(map(int, op)) for op in track.operations]
        assert track.start_ns.tolist() == [twin.start[lane, op] for op in operations]
        assert track.end_ns.tolist() == [twin.end[lane, op] for op in operations]
    sent = timeline.transfers
    columns = (sent.stage, sent.direction, sent.micro_batch, sent.start_ns, sent.end_ns)
    found = {(s, way, m): (start, end) for s, way, m, start, end in zip(*(c.tolist() for c in columns), strict=True)}
    assert found == twin.transfers
    assert {(r.stage, r.bucket): (r.start_ns, r.end_ns) for r in timeline.reductions} == twin.reductions
    steps = [(s, *step) for s, lane in sorted(twin.updates) for step in twin.updates[s, lane]]
    assert [(u.stage, u.start_ns, u.end_ns) for u in timeline.updates] == steps
    assert [(t.stage, t.bucket, t.start_ns, t.end_ns) for t in timeline.ties] == [
        (twin.tied[k].stages[0], k, *twin.ties[k, number]) for k, number in sorted(twin.ties)
    ]
    assert timeline.time_per_global_batch_ns == twin.time
    assert timeline.window_ns == twin.window
    assert (timeline.rounds, timeline.window_rounds) == (twin.num_rounds, twin.window_rounds)
    for lane, row in enumerate(twin.orders.rows):
        for device in row.devices:
            use = timeline.uses[device]
            assert (use.busy_ns, use.communication_ns) == twin_use(twin, lane)
            assert sum(use[:3]) == twin.time
            curve = twin_curve(twin, device)
            times, sizes = timeline.memory_curve(device)
            assert use.memory.total == max(curve.values()) == sizes.max()
            assert use.memory.versions == twin_versions(twin, lane)
            points = np.asarray(sorted(curve))
            at = np.searchsorted(times, points, side="right") - 1
            assert sizes[at].tolist() == [curve[t] for t in points.tolist()]


@pytest.mark.parametrize("seed", range(300))
def test_kernels_equal_the_twin(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    allocation = random_allocation(rng, problem)
    orders = random_orders(rng, allocation)
    overlap = rng.choice([None, True, False])
    twin = run_twin(problem, allocation, orders, overlap)
    timeline = simulate(problem, allocation, orders, overlap=overlap)
    assert not twin.deadlock
    assert_equal(timeline, twin)
    assert makespan_ns(problem, allocation, orders, overlap=overlap) == twin.makespan
    assert verify(problem, allocation, orders, timeline, overlap=overlap) == []


@pytest.mark.parametrize("make", [random_pipelines, random_crossing_pipelines])
@pytest.mark.parametrize("seed", range(200))
def test_kernels_equal_the_twin_on_several_pipelines(
    seed: int, make: Callable[[random.Random, Problem], Allocation]
) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    while min(problem.num_devices, problem.global_batch_size) < 2:
        problem = random_problem(rng)
    allocation = make(rng, problem)
    orders = random_orders(rng, allocation)
    overlap = rng.choice([None, True, False])
    twin = run_twin(problem, allocation, orders, overlap)
    timeline = simulate(problem, allocation, orders, overlap=overlap)
    assert_equal(timeline, twin)
    assert makespan_ns(problem, allocation, orders, overlap=overlap) == twin.makespan
    assert verify(problem, allocation, orders, timeline, overlap=overlap) == []


@pytest.mark.parametrize("seed", range(200))
def test_kernels_equal_the_twin_on_periodic_plans(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    allocation, pattern, rule, _run = random_pattern(rng, problem)
    overlap = rng.choice([None, True, False])
    twin = run_periodic_twin(problem, allocation, pattern, rule, overlap)
    if twin.deadlock:
        with pytest.raises(InvalidPlan, match="deadlock"):
            simulate(problem, allocation, pattern, overlap=overlap, update_rule=rule)
        return
    timeline = simulate(problem, allocation, pattern, overlap=overlap, update_rule=rule)
    assert_equal(timeline, twin)
    assert makespan_ns(problem, allocation, pattern, overlap=overlap, update_rule=rule) == twin.time
    faults = verify(problem, allocation, pattern, timeline, overlap=overlap, update_rule=rule)
    assert bool(faults) == twin_misses_versions(twin, rule)
    assert all("weight version" in fault for fault in faults)


@pytest.mark.parametrize("seed", range(60))
def test_the_twin_and_the_kernels_block_alike(seed: int) -> None:
    rng = random.Random(1000 + seed)
    problem = random_problem(rng)
    allocation = random_allocation(rng, problem)
    orders = random_orders(rng, allocation)
    rows = []
    for row in orders.rows:
        operations = row.operations.tolist()
        i, j = rng.randrange(max(1, len(operations))), rng.randrange(max(1, len(operations)))
        if operations:
            operations[i], operations[j] = operations[j], operations[i]
        rows.append(replace(row, operations=as_operations(operations)))
    orders = Orders("swapped", tuple(rows))
    twin = run_twin(problem, allocation, orders)
    if twin.deadlock:
        with pytest.raises(InvalidPlan, match=r"deadlock|out of order"):
            simulate(problem, allocation, orders)
    else:
        assert simulate(problem, allocation, orders).time_per_global_batch_ns == twin.makespan
