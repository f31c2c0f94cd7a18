"""Properties of every plan, on random plans of every shape: each is drawn and simulated once, and checked for all.

The kernels give the times and the memory of the reference simulator, to the nanosecond and the byte. The verifier finds
no fault, and no bound is above the time. A plan fits into the memory that it is stated to need, but not into less.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from problems import as_operations, with_just_enough_memory
from random_plans import (
    random_allocation,
    random_averaging,
    random_crossing_pipelines,
    random_orders,
    random_pattern,
    random_pipelines,
    random_problem,
    tied_plan,
    with_ties,
)
from reference_measures import assert_as_reference, reference_misses_versions
from reference_sharing import assert_as_sharing_reference
from reference_simulator import run_periodic_reference, run_reference

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD, INPUT
from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.bounds.steady_state import most_in_flight
from penstock.solvers.costs.ties import tied_sums
from penstock.solvers.judge.shared_processor import simulate_sharing
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, SCHEDULE_SCOPE
from penstock.solvers.model.schedule import Orders, Pattern, Row
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.verify.verifier import verify

Make = Callable[[random.Random, Problem], Allocation]
MAKES = {"one pipeline": random_allocation, "several": random_pipelines, "crossing": random_crossing_pipelines}
PAST_FAULTS = (1089, 3094, 3548)
"""Seeds of 4,000 for which a bound of an earlier version was above the time of the plan."""
AT_TWO_TIES = 1860
"""A seed whose plan waits for ever at two ties of one lane."""


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("seed", [*range(150), *PAST_FAULTS])
def test_flushed_plans(seed: int, make: Make) -> None:
    rng = random.Random(seed)
    problem = _for_several(rng) if make is not random_allocation else random_problem(rng)
    _ask_everything(rng, problem, make(rng, problem))


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("seed", range(60))
def test_flushed_plans_with_ties(seed: int, make: Make) -> None:
    rng = random.Random(seed)
    problem, allocation = tied_plan(rng, make)
    assert _ask_everything(rng, problem, allocation).ties


def _for_several(rng: random.Random) -> Problem:
    """Draw a problem with devices and samples for two pipelines."""
    while True:
        problem = random_problem(rng)
        if min(problem.num_devices, problem.global_batch_size) > 1:
            return problem


def _ask_everything(rng: random.Random, problem: Problem, allocation: Allocation) -> Timeline:
    orders = random_orders(rng, allocation)
    overlap = rng.choice([None, True, False])
    reference = run_reference(problem, allocation, orders, overlap)
    assert not reference.deadlock
    timeline = simulate(problem, allocation, orders, overlap=overlap)
    assert_as_reference(timeline, reference)
    assert makespan_ns(problem, allocation, orders, overlap=overlap) == reference.makespan
    tight = with_just_enough_memory(problem, timeline)
    for variant in (problem, tight):
        assert verify(variant, allocation, orders, timeline, overlap=overlap) == []
        bound = schedule_bound(variant, allocation, orders, overlap=overlap)
        assert 0 <= bound.bound_ns <= reference.makespan, bound
        assert bound.scope == SCHEDULE_SCOPE
    faults = verify(_with_a_byte_less(tight), allocation, orders, timeline, overlap=overlap)
    assert any(" needs " in fault for fault in faults), faults
    if overlap in (None, problem.rules.overlap_all_reduce):
        for variant in (problem, tight):
            bound = request_bound(variant)
            assert 0 <= bound.bound_ns <= reference.makespan, bound
            assert bound.scope == REQUEST_SCOPE
    return timeline


def _with_a_byte_less(problem: Problem) -> Problem:
    return replace(problem, devices=tuple(replace(d, memory_bytes=d.memory_bytes - 1) for d in problem.devices))


@pytest.mark.parametrize("seed", range(200))
def test_periodic_plans(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    _ask_everything_periodic(rng, problem, *random_pattern(rng, problem)[:3])


@pytest.mark.parametrize("seed", [*range(100), AT_TWO_TIES])
def test_periodic_plans_with_ties(seed: int) -> None:
    rng = random.Random(seed)
    while True:
        problem = with_ties(rng, random_problem(rng))
        allocation, pattern, rule, _run = random_pattern(rng, problem)
        if tied_sums(problem, allocation) and (rule == "double_buffered" or rng.random() < 0.1):
            break
    _ask_everything_periodic(rng, problem, allocation, pattern, rule)


def _ask_everything_periodic(
    rng: random.Random, problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule
) -> None:
    overlap = rng.choice([None, True, False])
    reference = run_periodic_reference(problem, allocation, pattern, rule, overlap)
    assert bool(reference.tied) == (rule == "double_buffered" and bool(tied_sums(problem, allocation)))
    for s, stage in enumerate(allocation.stages):
        for turn, device in enumerate(stage.devices):
            row = next(row for row in reference.orders.rows if device in row.devices)
            turns = (turn, stage.replicas) if stage.dispatch == "round_robin" else (0, 1)
            assert most_in_flight(pattern, s, *turns) == _counted_in_flight(row, s)
    if reference.deadlock:
        with pytest.raises(InvalidPlan, match="deadlock") as caught:
            simulate(problem, allocation, pattern, overlap=overlap, update_rule=rule)
        _, *waiting = re.split(": |, while ", str(caught.value).removesuffix("."))
        assert len(set(waiting)) == 2, "no lane waits for itself"
        return
    timeline = simulate(problem, allocation, pattern, overlap=overlap, update_rule=rule)
    assert_as_reference(timeline, reference)
    assert makespan_ns(problem, allocation, pattern, overlap=overlap, update_rule=rule) == reference.time
    faults = verify(problem, allocation, pattern, timeline, overlap=overlap, update_rule=rule)
    assert bool(faults) == reference_misses_versions(reference, rule)
    assert all("weight version" in fault for fault in faults)
    assert 0 <= schedule_bound(problem, allocation, pattern, rule, overlap=overlap).bound_ns <= reference.time
    if overlap in (None, problem.rules.overlap_all_reduce):
        allowed = replace(problem, update_rules=frozenset({rule}))
        assert 0 <= request_bound(allowed).bound_ns <= reference.time


def _counted_in_flight(row: Row, s: int) -> int:
    """Return the most micro-batches in flight by walking the row."""
    now = most = 0
    for kind, stage, _m in row.operations.tolist():
        if stage == s:
            now += (kind == FORWARD) - (kind in (BACKWARD, INPUT))
            most = max(most, now)
    return most


@pytest.mark.parametrize("seed", range(120))
def test_pipelines_that_average(seed: int) -> None:
    problem, allocation, orders = random_averaging(seed)
    problem = replace(problem, update_rules=frozenset({"elastic_averaging"}))
    timeline = simulate(problem, allocation, orders, update_rule="elastic_averaging")
    value = timeline.time_per_global_batch_ns
    assert_as_sharing_reference(problem, allocation, orders, timeline)
    assert value == makespan_ns(problem, allocation, orders, update_rule="elastic_averaging")
    assert value == simulate_sharing(problem, allocation, orders).time_per_global_batch_ns
    assert verify(problem, allocation, orders, timeline, update_rule="elastic_averaging") == []
    assert schedule_bound(problem, allocation, orders, "elastic_averaging").bound_ns <= value
    assert request_bound(problem).bound_ns <= value


@pytest.mark.parametrize("seed", range(60))
def test_rows_with_two_operations_swapped_wait_forever_in_both_or_in_neither(seed: int) -> None:
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
    reference = run_reference(problem, allocation, orders)
    if reference.deadlock:
        with pytest.raises(InvalidPlan, match=r"deadlock|out of order"):
            simulate(problem, allocation, orders)
    else:
        assert simulate(problem, allocation, orders).time_per_global_batch_ns == reference.makespan
