"""The worklist clock against the event heap on private channels: every start, every transfer, to the nanosecond."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from line_cases import random_line
from random_plans import (
    random_allocation,
    random_crossing_pipelines,
    random_orders,
    random_pattern,
    random_pipelines,
    random_problem,
    with_ties,
)

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.judge.clocks.channels import EVENTS, FREE, FULL, HALF
from penstock.solvers.judge.clocks.events import run_events
from penstock.solvers.judge.clocks.ties import tied_starts
from penstock.solvers.judge.clocks.worklist import run_worklist
from penstock.solvers.judge.lanes import Lanes, LaneTables, make_lanes, new_state
from penstock.solvers.judge.operation_tables import DURATION, FLOW, LINES, Tables, cost_tables
from penstock.solvers.judge.simulate import clock_for
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP

CHANNELS = {FREE: "none", FULL: "full", HALF: "half"}
Plan = tuple[Tables, Lanes]


def assert_timed_alike(tables: Tables, lanes: Lanes) -> None:
    """Check that both clocks stop at the same places; of complete runs all starts too, with and without a record."""
    clock = clock_for(tables, lanes)
    state = new_state(tables.flows, tables.chains, tables.ties, lanes.arrays)
    run_events(tables.flows, tables.chains, tables.ties, lanes.arrays, state)
    expected = state.position, state.time, state.start, state.sent, state.order, state.bucket_start, state.tie_start
    full = run_worklist(tables.flows, tables.chains, lanes.arrays, clock, True)
    short = run_worklist(tables.flows, tables.chains, lanes.arrays, clock, False)
    for each in (full, short):
        assert np.array_equal(each[0], expected[0])
        assert np.array_equal(each[1], expected[1])
    if np.array_equal(full[0], lanes.arrays.lane_start[1:]):
        for mine, other in zip(full[2:], expected[2:6], strict=True):
            assert np.array_equal(mine, other)
        ties = tied_starts(tables.chains, tables.ties, lanes.arrays, full[1], full[5])
        assert np.array_equal(ties, expected[6])


def _with_channel(problem: Problem, clock: int) -> Problem:
    return replace(problem, rules=replace(problem.rules, shared=False, channel=CHANNELS[clock]))


def _flushed(rng: random.Random, clock: int) -> Plan:
    """Draw one flushed step in any order that can run, with recomputation, split backwards, ties, shared devices."""
    if rng.random() < 0.3:
        problem, plan = random_line(rng.randrange(10**6), channel=CHANNELS[clock])
    else:
        problem = with_ties(rng, _with_channel(random_problem(rng), clock))
        make = rng.choice([random_allocation, random_allocation, random_pipelines, random_crossing_pipelines])
        if min(problem.num_devices, problem.global_batch_size) < 2:
            make = random_allocation
        plan = make(rng, problem)
    tables = cost_tables(problem, plan, problem.rules.overlap_all_reduce)
    return tables, make_lanes(tables, random_orders(rng, plan))


def _periodic(rng: random.Random, clock: int) -> Plan:
    """Draw some global batches without a flush, with steps in the rows."""
    problem = _with_channel(random_problem(rng), clock)
    _plan, _pattern, rule, run = random_pattern(rng, problem)
    every = run.orders.update_every
    tables = cost_tables(run.problem, run.allocation, problem.rules.overlap_all_reduce, every, rule)
    return tables, make_lanes(tables, run.orders)


@pytest.mark.parametrize("clock", [HALF, FULL, FREE], ids=CHANNELS.get)
@pytest.mark.parametrize("seed", range(20))
def test_any_rows_are_timed_as_by_the_event_heap(seed: int, clock: int) -> None:
    """Rows that wait for ever are timed alike too."""
    rng = random.Random(seed)
    seen = 0
    while seen < (20 if clock == HALF else 5):
        tables, lanes = _flushed(rng, clock)
        if clock_for(tables, lanes) == EVENTS or tables.unreachable:
            continue
        seen += 1
        for _ in range(4):
            assert_timed_alike(tables, lanes)
            if clock == FREE and _at_once(lanes):
                break
            _shuffle(rng, lanes.arrays)


@pytest.mark.cases(3)
@pytest.mark.parametrize("clock", [HALF, FULL], ids=CHANNELS.get)
@pytest.mark.parametrize("seed", range(10))
def test_steps_in_rows_are_timed_as_by_the_event_heap(seed: int, clock: int) -> None:
    rng = random.Random(5000 + seed)
    seen = 0
    for _ in range(60):
        tables, lanes = _periodic(rng, clock)
        if clock_for(tables, lanes) == EVENTS or tables.unreachable:
            continue
        seen += 1
        assert_timed_alike(tables, lanes)
    assert seen > 5


def test_the_drawn_plans_have_what_the_worklist_must_handle() -> None:
    rng = random.Random(0)
    seen: set[str] = set()
    for _ in range(400):
        tables, lanes = _flushed(rng, HALF)
        if clock_for(tables, lanes) != HALF:
            continue
        kinds = set((lanes.arrays.row // 2 % (STEP + 1)).tolist())
        seen |= {name for name, kind in (("R", RECOMPUTE), ("I", INPUT), ("W", WEIGHT)) if kind in kinds}
        seen |= {"ties"} if tables.sums else set()
        seen |= {"reductions"} if len(tables.chains.bucket_ns) else set()
        seen |= {"stages together"} if any(len(slots) > 1 for slots in lanes.slots) else set()
        seen |= {"pipelines"} if len(tables.allocation.pipelines) > 1 else set()
        seen |= {"row classes"} if len(tables.graph.classes) > 1 else set()
    assert seen == {"R", "I", "W", "ties", "reductions", "stages together", "pipelines", "row classes"}


def test_what_sends_in_no_time_is_left_to_the_event_heap() -> None:
    problem, plan = random_line(3, channel="half")
    tables = cost_tables(problem, plan, True)
    lanes = make_lanes(tables, random_orders(random.Random(0), plan))
    assert clock_for(tables, lanes) == HALF
    sends = lanes.arrays.table[:, FLOW] >= 0
    lanes.arrays.table[sends, DURATION] = 0
    assert clock_for(tables, lanes) == (EVENTS if sends.any() else HALF)


def _at_once(lanes: Lanes) -> bool:
    return bool((lanes.arrays.table[lanes.arrays.row, DURATION] == 0).any())


def _shuffle(rng: random.Random, arrays: LaneTables) -> None:
    """Swap neighbours of a lane where they are a forward and a backward of different micro-batches."""
    for i in range(len(arrays.row) - 1):
        kinds = {int(arrays.row[i]) // 2 % (STEP + 1), int(arrays.row[i + 1]) // 2 % (STEP + 1)}
        lane, next_lane = (arrays.slot_lane[arrays.row[k] // LINES] for k in (i, i + 1))
        others = lane == next_lane and arrays.batch[i] != arrays.batch[i + 1]
        if others and kinds == {FORWARD, BACKWARD} and rng.random() < 0.3:
            for each in (arrays.row, arrays.batch):
                each[i], each[i + 1] = int(each[i + 1]), int(each[i])
    for slot, lane in enumerate(arrays.slot_lane):
        for i in range(arrays.lane_start[lane], arrays.lane_start[lane + 1]):
            if arrays.row[i] // LINES == slot and arrays.row[i] // 2 % (STEP + 1) in (BACKWARD, WEIGHT):
                arrays.last_gradient[arrays.round_start[slot]] = i
