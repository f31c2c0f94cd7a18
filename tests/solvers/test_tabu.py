"""The tabu search: its values are the judge's, it never gets worse, it fits memory, and it is exact on tiny plans."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from every_order import times_of_every_order
from line_cases import random_line
from problems import gpipe, warmup_orders, with_just_enough_memory
from random_plans import random_allocation, random_orders, random_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, WEIGHT
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import effective_limits
from penstock.solvers.improve.tabu import improve
from penstock.solvers.improve.tabu.improve import kernel_for
from penstock.solvers.improve.tabu.path_kernel import KINDS
from penstock.solvers.improve.tabu.search_kernel import HALF
from penstock.solvers.judge.clocks.events import run_events
from penstock.solvers.judge.clocks.half_duplex import run_half
from penstock.solvers.judge.lanes import LaneTables, make_lanes
from penstock.solvers.judge.operation_tables import LINES, cost_tables
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders


@pytest.mark.parametrize("seed", range(60))
def test_any_orders_get_no_worse_and_still_fit(seed: int) -> None:
    """Split backwards, recomputations, several stages on a device, replicas in turn, several pipelines, any network."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    allocation = random_allocation(rng, problem)
    orders = random_orders(rng, allocation)
    timeline = simulate(problem, allocation, orders)
    tight = with_just_enough_memory(problem, timeline)
    for given in (problem, tight):
        found = improve(given, allocation, orders, steps=300, seed=seed)
        after = simulate(given, allocation, found.orders)
        assert found.value_ns == after.time_per_global_batch_ns <= timeline.time_per_global_batch_ns
        assert found.steps >= 300
        for device, use in after.uses.items():
            assert given is problem or use.memory.total <= given.capacity_bytes(device)


@pytest.mark.parametrize("seed", range(30))
def test_tiny_plans_reach_the_best_of_all_orders(seed: int) -> None:
    problem, plan = random_line(1000 + seed, most_batches=3)
    best = min(times_of_every_order(problem, plan))
    start = warmup_orders(plan, effective_limits(StageTimes(problem, plan, gpipe(plan))))
    found = improve(problem, plan, start, steps=4000, seed=seed)
    assert found.value_ns == best


def test_the_same_seed_gives_the_same_order() -> None:
    problem, plan = random_line(7)
    first, second = (improve(problem, plan, gpipe(plan), steps=500, seed=3) for _ in range(2))
    assert first.value_ns == second.value_ns
    for one, two in zip(first.orders.rows, second.orders.rows, strict=True):
        assert np.array_equal(one.operations, two.operations)


def test_it_stops_when_told_to() -> None:
    problem, plan = random_line(7)
    assert improve(problem, plan, gpipe(plan), steps=10**9, stopped=lambda: True).steps == 0


def test_rows_with_steps_are_refused() -> None:
    problem, plan = random_line(7)
    stepping = Orders("stepping", gpipe(plan).rows, update_every=(1,) * len(plan.stages))
    with pytest.raises(UnsupportedRequest, match="optimizer steps"):
        improve(problem, plan, stepping, steps=1)


@pytest.mark.parametrize("seed", range(20))
def test_shared_channels_are_timed_as_by_the_event_kernel(seed: int) -> None:
    """Any rows on half-duplex channels, those that wait for ever too: where lanes come, all starts, all transfers."""
    rng = random.Random(seed)
    seen = 0
    while seen < 20:
        problem, plan = _half_duplex_plan(rng)
        orders = random_orders(rng, plan)
        tables = cost_tables(problem, plan, problem.rules.overlap_all_reduce)
        lanes = make_lanes(tables, orders)
        if kernel_for(tables, lanes) != HALF:
            continue
        seen += 1
        for _ in range(4):
            timed = run_half(tables.flows, tables.chains, lanes.arrays)
            known = run_events(tables.flows, tables.chains, tables.ties, lanes.arrays)
            assert np.array_equal(timed[0], known[0])
            assert np.array_equal(timed[1], known[1])
            if np.array_equal(timed[0], lanes.arrays.lane_start[1:]):
                for mine, other in zip(timed[2:], known[2:6], strict=True):
                    assert np.array_equal(mine, other)
            _shuffle(rng, lanes.arrays)


def _half_duplex_plan(rng: random.Random) -> tuple[Problem, Allocation]:
    if rng.random() < 0.5:
        return random_line(rng.randrange(10**6), channel="half")
    problem = random_problem(rng)
    return replace(problem, rules=replace(problem.rules, shared=False, channel="half")), random_allocation(rng, problem)


def _shuffle(rng: random.Random, arrays: LaneTables) -> None:
    """Two neighbours of a lane change places where they are a forward and a backward of other micro-batches."""
    for i in range(len(arrays.row) - 1):
        kinds = {int(arrays.row[i]) // 2 % KINDS, int(arrays.row[i + 1]) // 2 % KINDS}
        lane, next_lane = (arrays.slot_lane[arrays.row[k] // LINES] for k in (i, i + 1))
        others = lane == next_lane and arrays.batch[i] != arrays.batch[i + 1]
        if others and kinds == {FORWARD, BACKWARD} and rng.random() < 0.3:
            for each in (arrays.row, arrays.batch):
                each[i], each[i + 1] = int(each[i + 1]), int(each[i])
    for slot, lane in enumerate(arrays.slot_lane):
        for i in range(arrays.lane_start[lane], arrays.lane_start[lane + 1]):
            if arrays.row[i] // LINES == slot and arrays.row[i] // 2 % KINDS in (BACKWARD, WEIGHT):
                arrays.last_gradient[arrays.round_start[slot]] = i
