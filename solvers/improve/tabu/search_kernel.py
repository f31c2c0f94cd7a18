"""Tabu search over the orders of a plan's rows, each timed as the judge does (BOUNDS Part II, 3).

A step times one order. Some of the swaps on a critical path are tried, the best one is made, and its pair may not
change places back for some moves. After many steps without a better order the search returns to the best one and goes
on from there after some random swaps.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.improve.tabu.path_kernel import (
    KINDS,
    ClockedOrder,
    Search,
    change,
    critical_swaps,
    draw,
    mark,
    may_swap,
    prepare,
)
from penstock.solvers.judge.clocks.channels import EVENTS
from penstock.solvers.judge.clocks.events import run_events
from penstock.solvers.judge.clocks.state import ClockState, restore
from penstock.solvers.judge.clocks.ties import tied_starts
from penstock.solvers.judge.clocks.worklist import run_worklist
from penstock.solvers.judge.operation_tables import LINES, STAGE

TRIED = 4
"""Swaps that are tried for a move."""
SHORTEST, TENURES = 3, 6
"""Moves for which a pair may not change back: 3 to 8."""
MOST_KICKED = 16


@Fields.register
class Clock(NamedTuple):
    """The clock that times the orders; for events its state, and the state's initial ``words``."""

    kind: int
    state: ClockState
    words: np.ndarray


@compiled
def search_orders(
    flows: Any, chains: Any, ties: Any, lanes: Any, update_ns: np.ndarray, clock: Clock, search: Search, steps: int
) -> tuple[int, int]:
    """Search from the order in ``lanes``, and leave the best order in it; return its time, and the orders timed."""
    prepare(lanes, search)
    value, last, run = judge(flows, chains, ties, lanes, update_ns, clock)
    best, best_row, best_batch = value, lanes.row.copy(), lanes.batch.copy()
    tried, move, since = 1, 0, 0
    search.until[:] = 0
    patience = max(64, steps // 8)
    while tried < steps:
        move += 1
        count = critical_swaps(flows, lanes, search, run, last)
        chosen, value = -1, NEVER_NS
        next_last, next_run = last, run
        for k in range(min(count, TRIED)):
            at = k + draw(search, count - k)
            i = search.candidates[at]
            search.candidates[at] = search.candidates[k]
            key = _key(lanes, search, i)
            swap(lanes, search, i)
            trial, its_last, its_run = judge(flows, chains, ties, lanes, update_ns, clock)
            tried += 1
            if trial < value and (search.until[key] <= move or trial < best):
                chosen, value, next_last, next_run = i, trial, its_last, its_run
            swap(lanes, search, i)
        if chosen >= 0:
            swap(lanes, search, chosen)
            search.until[_key(lanes, search, chosen)] = move + SHORTEST + draw(search, TENURES)
            last, run = next_last, next_run
        if value < best:
            best, since = value, tried
            best_row[:] = lanes.row
            best_batch[:] = lanes.batch
        elif chosen < 0 or tried - since > patience:
            lanes.row[:] = best_row
            lanes.batch[:] = best_batch
            prepare(lanes, search)
            tried += _kick(flows, chains, ties, lanes, update_ns, clock, search)
            value, last, run = judge(flows, chains, ties, lanes, update_ns, clock)
            tried += 1
            since = tried
    lanes.row[:] = best_row
    lanes.batch[:] = best_batch
    prepare(lanes, search)
    return best, tried


@compiled
def _kick(flows: Any, chains: Any, ties: Any, lanes: Any, update_ns: np.ndarray, clock: Clock, search: Search) -> int:
    """Make some random swaps that leave an order which can run; return how many orders were timed."""
    tried = 0
    if lanes.row.size < 2:
        return tried
    for _ in range(MOST_KICKED):
        i = draw(search, lanes.row.size - 1)
        if lanes.slot_lane[lanes.row[i] // LINES] != lanes.slot_lane[lanes.row[i + 1] // LINES]:
            continue
        if draw(search, 2) == 0 or not may_swap(lanes, search, i):
            continue
        swap(lanes, search, i)
        tried += 1
        if judge(flows, chains, ties, lanes, update_ns, clock)[0] == NEVER_NS:
            swap(lanes, search, i)
    return tried


@loop
def _key(lanes: Any, search: Search, i: int) -> int:
    """Return the index in ``until`` of the pair of operations i and i + 1."""
    batches = search.place.shape[2]
    first = lanes.row[i] * batches + lanes.batch[i]
    second = lanes.row[i + 1] * batches + lanes.batch[i + 1]
    return (first * 1000003 + second * 7919) & (search.until.size - 1)


@loop
def swap(lanes: Any, search: Search, i: int) -> None:
    """Swap operations i and i + 1 of a lane."""
    lanes.row[i], lanes.row[i + 1] = lanes.row[i + 1], lanes.row[i]
    lanes.batch[i], lanes.batch[i + 1] = lanes.batch[i + 1], lanes.batch[i]
    first, second = lanes.row[i] // LINES, lanes.row[i + 1] // LINES
    lane = lanes.slot_lane[first]
    before = search.level[i - 1] if i > lanes.lane_start[lane] else 0
    search.level[i] = before + change(lanes.row[i] // 2 % KINDS, search.weight[first])
    mark(lanes, search, i)
    mark(lanes, search, i + 1)
    if first != second:
        if lanes.last_gradient[lanes.round_start[first]] == i + 1:
            lanes.last_gradient[lanes.round_start[first]] = i
        if lanes.last_gradient[lanes.round_start[second]] == i:
            lanes.last_gradient[lanes.round_start[second]] = i + 1
    elif lanes.last_gradient[lanes.round_start[first]] == i:
        lanes.last_gradient[lanes.round_start[first]] = i + 1
    elif lanes.last_gradient[lanes.round_start[first]] == i + 1:
        lanes.last_gradient[lanes.round_start[first]] = i


@compiled
def judge(
    flows: Any, chains: Any, ties: Any, lanes: Any, update_ns: np.ndarray, clock: Clock
) -> tuple[int, int, ClockedOrder]:
    """Return the order's makespan (NEVER_NS if it blocks), the operation that it waits for last, and all starts."""
    if clock.kind == EVENTS:
        state = clock.state
        restore(state, clock.words)
        run_events(flows, chains, ties, lanes, state)
        position, lane_ns, bucket_start, tie_start = state.position, state.time, state.bucket_start, state.tie_start
        start, sent, order = state.start.copy(), state.sent.copy(), state.order.copy()
    else:
        position, lane_ns, start, sent, order, bucket_start = run_worklist(flows, chains, lanes, clock.kind, True)
        tie_start = tied_starts(chains, ties, lanes, lane_ns, bucket_start)
    value, last = _end(chains, ties, lanes, update_ns, position, lane_ns, bucket_start, tie_start)
    return value, last, ClockedOrder(start, sent, order)


@loop
def _end(
    chains: Any,
    ties: Any,
    lanes: Any,
    update_ns: np.ndarray,
    position: np.ndarray,
    lane_ns: np.ndarray,
    bucket_start: np.ndarray,
    tie_start: np.ndarray,
) -> tuple[int, int]:
    """Return when the steps of all lanes end (NEVER_NS if a lane is blocked), and the operation waited for last."""
    for lane in range(position.size):
        if position[lane] < lanes.lane_start[lane + 1]:
            return NEVER_NS, -1
    value, last = 0, -1
    for lane in range(position.size):
        t, cause, step = lane_ns[lane], lanes.lane_start[lane + 1] - 1, -1
        if lanes.halt_start[lane] < lanes.halt_start[lane + 1]:
            k = lanes.halt_tie[lanes.halt_start[lane + 1] - 1]
            t, cause = tie_start[k] + ties.tie_ns[k], _last_to_come(lanes, lane_ns, k)
        while True:
            step = _next_step(lanes, lane, step)
            if step == NEVER_NS:
                break
            slot = step % lanes.slot_lane.size
            place = lanes.last_gradient[lanes.round_start[slot]]
            s = lanes.table[slot * LINES, STAGE]
            for k in range(chains.member_start[s], chains.member_start[s + 1]):
                g = chains.member_group[k]
                if chains.start[g] < chains.start[g + 1]:
                    reduced = bucket_start[chains.run_start[g + 1] - 1] + chains.bucket_ns[chains.start[g + 1] - 1]
                    if reduced > t:
                        t, cause = reduced, place
            t += update_ns[s]
        if t > value:
            value, last = t, cause
    return value, last


@inner
def _last_to_come(lanes: Any, lane_ns: np.ndarray, k: int) -> int:
    """Return the last operation of the lane that is the last to reach a tie."""
    latest = lanes.tie_halt[lanes.tie_start[k]]
    for i in range(lanes.tie_start[k], lanes.tie_start[k + 1]):
        if lane_ns[lanes.tie_halt[i]] > lane_ns[latest]:
            latest = lanes.tie_halt[i]
    return lanes.lane_start[latest + 1] - 1


@loop
def _next_step(lanes: Any, lane: int, after: int) -> int:
    """Return the place and slot, in one number, of the lane's next step after ``after``; NEVER_NS: no more steps.

    Slots step in the order of their last gradients.
    """
    first, slots = NEVER_NS, lanes.slot_lane.size
    for slot in range(slots):
        if lanes.slot_lane[slot] == lane:
            key = (lanes.last_gradient[lanes.round_start[slot]] + 1) * slots + slot
            if after < key < first:
                first = key
    return first
