"""``improve``: a better order for a plan's rows by tabu search under the judge's own rules (BOUNDS Part II, 3)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.costs.memory import free_bytes, spare_bytes, static_bytes
from penstock.solvers.improve.tabu.path_kernel import KINDS, Search, prepare
from penstock.solvers.improve.tabu.search_kernel import Clock, search_orders
from penstock.solvers.judge.clocks.channels import EVENTS
from penstock.solvers.judge.lanes import Lanes, make_lanes, new_state
from penstock.solvers.judge.operation_tables import LINES, cost_tables
from penstock.solvers.judge.simulate import clock_for, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row

PIECE = 2000
"""Least steps between two checks of memory and of whether to stop."""
ROUNDS, TIMED = 5, 20_000_000
"""Limits for long rows that a worklist times: steps for each operation, and operations timed in all."""


class Improvement(NamedTuple):
    """The best order that fits, or the initial one, with its judged time; ``steps``: how many orders were timed."""

    orders: Orders
    value_ns: int
    steps: int


def improve(
    problem: Problem,
    allocation: Allocation,
    orders: Orders,
    *,
    steps: int,
    seed: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> Improvement:
    """Search among the orders near ``orders``, one flushed step of any kind whose rows can run, for at most ``steps``.

    A stage's operations of one kind stay in their order. The same arguments give the same answer, unless ``stopped``
    returns True. Raises UnsupportedRequest for rows that contain optimizer steps.
    """
    if orders.update_every:
        raise UnsupportedRequest(
            f"schedule {orders.name} has optimizer steps in its rows, but the tabu search needs one flushed step",
            remedy="give the orders of one flushed step",
        )
    tables = cost_tables(problem, allocation, problem.rules.overlap_all_reduce)
    timeline = simulate(problem, allocation, orders)
    best = Improvement(orders, timeline.time_per_global_batch_ns, 0)
    lanes = make_lanes(tables, orders)
    search = _search(problem, allocation, orders, lanes, seed)
    state = new_state(tables.flows, tables.chains, tables.ties, lanes.arrays)
    clock = Clock(clock_for(tables, lanes), state, state.words.copy())
    longest = _longest_piece(clock.kind, len(lanes.arrays.row))
    rows, batches = lanes.arrays.row.copy(), lanes.arrays.batch.copy()
    spent = 0
    while spent < steps and not stopped():
        piece = min(longest, steps - spent)
        value, timed = search_orders(
            tables.flows,
            tables.chains,
            tables.ties,
            lanes.arrays,
            np.asarray(tables.graph.update_ns, dtype=np.int64),
            clock,
            search,
            piece,
        )
        spent += timed
        if value < best.value_ns:
            candidate = _orders(orders, lanes)
            short = _short_lanes(problem, allocation, candidate)
            if not short:
                best = Improvement(candidate, int(value), spent)
                rows, batches = lanes.arrays.row.copy(), lanes.arrays.batch.copy()
                continue
            peaks = _peaks(lanes, search)
            lanes.arrays.row[:], lanes.arrays.batch[:] = rows, batches
            prepare(lanes.arrays, search)
            resident = _peaks(lanes, search)
            search.room[short] = np.maximum(peaks[short] - 1, resident[short])
        lanes.arrays.row[:], lanes.arrays.batch[:] = rows, batches
    return best._replace(steps=spent)


def _longest_piece(clock: int, operations: int) -> int:
    """Return the steps of a piece: the longer the rows, the longer the search goes on without a better order."""
    return PIECE if clock == EVENTS else max(PIECE, min(ROUNDS * operations, TIMED // operations))


def _search(problem: Problem, allocation: Allocation, orders: Orders, lanes: Lanes, seed: int) -> Search:
    """Return the search's arrays; a row with one stage counts micro-batches in flight, with several their bytes."""
    arrays, times = lanes.arrays, StageTimes(problem, allocation, orders)
    slots, count = len(lanes.slot_stage), len(arrays.row)
    weight, room = np.ones(slots, dtype=np.int64), np.zeros(len(lanes.devices), dtype=np.int64)
    for lane, slots_of_lane in enumerate(lanes.slots):
        stages = [lanes.slot_stage[slot] for slot in slots_of_lane]
        if len(slots_of_lane) == 1:
            room[lane] = times.in_flight(stages[0])
            continue
        weight[list(slots_of_lane)] = [times.flight_bytes(s) for s in stages]
        static = sum(static_bytes(problem, allocation.stages[s]).total for s in stages)
        room[lane] = free_bytes(problem, lanes.devices[lane]) - static
    search = Search(
        place=np.full((slots, 2, allocation.num_micro_batches), -1, dtype=np.int64),
        weight=weight,
        room=room,
        level=np.zeros(count, dtype=np.int64),
        until=np.zeros(1 << 16, dtype=np.int64),
        random=np.asarray([(2 * seed + 1) * 0x9E3779B97F4A7C15 % 2**64], dtype=np.uint64),
        candidates=np.zeros(4 * count, dtype=np.int64),
    )
    prepare(arrays, search)
    room[:] = np.maximum(room, _peaks(lanes, search))
    return search


def _peaks(lanes: Lanes, search: Search) -> np.ndarray:
    """Return the most in flight on each row, in the order that ``lanes`` has now."""
    bounds = lanes.arrays.lane_start.tolist()
    peaks = [search.level[low:high].max(initial=0) for low, high in pairwise(bounds)]
    return np.asarray(peaks, dtype=np.int64)


def _short_lanes(problem: Problem, allocation: Allocation, orders: Orders) -> list[int]:
    """Return the rows whose devices lack memory."""
    spare = spare_bytes(problem, simulate(problem, allocation, orders))
    return [lane for lane, row in enumerate(orders.rows) if any(spare[device] < 0 for device in row.devices)]


def _orders(orders: Orders, lanes: Lanes) -> Orders:
    """Return the order that ``lanes`` has now."""
    arrays = lanes.arrays
    stage = np.asarray(lanes.slot_stage, dtype=np.int32)
    operations = np.column_stack((arrays.row // 2 % KINDS, stage[arrays.row // LINES], arrays.batch)).astype(np.int32)
    rows = []
    for lane, row in enumerate(orders.rows):
        low, high = int(arrays.lane_start[lane]), int(arrays.lane_start[lane + 1])
        rows.append(Row(row.devices, operations[low:high]))
    return Orders("tabu", tuple(rows))
