"""What changes while the event kernel runs, and its smallest steps."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner
from penstock.solvers.compiled.heap import push_time

OPERATION, SENT, READY, REDUCED = 0, 1, 2, 3
EVENTS, FRESH, FREED, CANDIDATES, TOUCHED = 0, 1, 2, 3, 4
NOWHERE, ON_ITS_WAY = -2, -1
SHIFT = 32
MASK = (1 << 32) - 1


class State(NamedTuple):
    """Everything that changes while events run; ``size`` counts the entries of the lists and heaps."""

    size: np.ndarray
    event_time: np.ndarray
    event_code: np.ndarray
    position: np.ndarray
    time: np.ndarray
    busy: np.ndarray
    start: np.ndarray
    done: np.ndarray
    arrived: np.ndarray
    sent: np.ndarray
    order: np.ndarray
    head: np.ndarray
    tail: np.ndarray
    where: np.ndarray
    taken: np.ndarray
    watch_first: np.ndarray
    watch_second: np.ndarray
    watch_size: np.ndarray
    fresh: np.ndarray
    freed: np.ndarray
    candidate_first: np.ndarray
    candidate_second: np.ndarray
    touched: np.ndarray
    is_touched: np.ndarray
    bucket: np.ndarray
    bucket_round: np.ndarray
    bucket_ready: np.ndarray
    bucket_start: np.ndarray
    lanes_left: np.ndarray
    closing: np.ndarray
    closing_place: np.ndarray
    halt_left: np.ndarray
    halt_next: np.ndarray
    halt_passed: np.ndarray
    tie_left: np.ndarray
    tie_round: np.ndarray
    tie_ready: np.ndarray
    tie_start: np.ndarray


@compiled
def new_state(flows: Any, chains: Any, ties: Any, lanes: Any, halt_left: np.ndarray) -> State:
    count = flows.base.size - 1
    num_chains = chains.stage.size
    num_lanes = lanes.lane_start.size - 1
    num_flows = flows.flow_ns.size
    users = num_flows + num_chains + ties.tie_ns.size
    halts = lanes.halt_start.size - 1
    resources = flows.watch_start.size - 1
    transfers = flows.flow_offset[num_flows]
    untied = 0
    for flow in range(num_flows):
        if flows.resource_start[flow] == flows.resource_start[flow + 1]:
            untied += flows.flow_offset[flow + 1] - flows.flow_offset[flow]
    events = num_lanes + users + num_chains + untied + 1
    watch = flows.watch_start[resources]
    return State(
        np.zeros(5, dtype=np.int64),
        np.empty(events, dtype=np.int64),
        np.empty(events, dtype=np.int64),
        lanes.lane_start[:-1].copy(),
        np.zeros(num_lanes, dtype=np.int64),
        np.zeros(num_lanes, dtype=np.bool_),
        np.empty(lanes.batch.size, dtype=np.int64),
        np.zeros(2 * flows.base[count], dtype=np.uint16),
        np.zeros(flows.places, dtype=np.bool_),
        np.full(transfers, -1, dtype=np.int64),
        np.empty(transfers, dtype=np.int32),
        flows.flow_offset[:-1].copy(),
        flows.flow_offset[:-1].copy(),
        np.full(users, NOWHERE, dtype=np.int64),
        np.zeros(resources, dtype=np.bool_),
        np.empty(watch, dtype=np.int64),
        np.empty(watch, dtype=np.int64),
        np.zeros(resources, dtype=np.int64),
        np.empty(users, dtype=np.int64),
        np.empty(resources, dtype=np.int64),
        np.empty(users + resources + 1, dtype=np.int64),
        np.empty(users + resources + 1, dtype=np.int64),
        np.empty(num_lanes, dtype=np.int64),
        np.zeros(num_lanes, dtype=np.bool_),
        chains.start[:-1].copy(),
        np.zeros(num_chains, dtype=np.int64),
        np.zeros(chains.bucket_ns.size, dtype=np.int64),
        np.full(chains.run_start[num_chains], -1, dtype=np.int64),
        _lanes_of_rounds(chains, lanes),
        np.empty(lanes.slot_lane.size, dtype=np.int64),
        lanes.round_start[:-1] - 1,
        halt_left,
        np.zeros(halts, dtype=np.int64),
        np.zeros(halts, dtype=np.bool_),
        np.diff(lanes.tie_start),
        np.zeros(ties.tie_ns.size, dtype=np.int64),
        np.zeros(ties.tie_ns.size, dtype=np.int64),
        np.full(ties.run_start[ties.tie_ns.size], -1, dtype=np.int64),
    )


@compiled
def _lanes_of_rounds(chains: Any, lanes: Any) -> np.ndarray:
    """How many lanes have gradients in each round of each chain."""
    left = np.zeros(chains.round_start[chains.stage.size], dtype=np.int64)
    if chains.bucket_ns.size == 0:
        return left
    for s in range(chains.member_start.size - 1):
        for k in range(chains.member_start[s], chains.member_start[s + 1]):
            g = chains.member_group[k]
            for slot in range(lanes.slot_start[s], lanes.slot_start[s + 1]):
                for update_round in range(chains.rounds[g]):
                    if lanes.last_gradient[lanes.round_start[slot] + update_round] >= 0:
                        left[chains.round_start[g] + update_round] += 1
    return left


@inner
def touch(state: State, lane: int) -> None:
    if not state.is_touched[lane]:
        state.is_touched[lane] = True
        state.touched[state.size[TOUCHED]] = lane
        state.size[TOUCHED] += 1


@inner
def touch_stage(lanes: Any, state: State, s: int) -> None:
    for slot in range(lanes.slot_start[s], lanes.slot_start[s + 1]):
        touch(state, lanes.slot_lane[slot])


@inner
def later(state: State, t: int, what: int, subject: int, m: int) -> None:
    code = (what << 60) | (subject << SHIFT) | m
    push_time(state.event_time, state.event_code, state.size[EVENTS], t, code)
    state.size[EVENTS] += 1


@inner
def make_fresh(state: State, user: int) -> None:
    state.where[user] = ON_ITS_WAY
    state.fresh[state.size[FRESH]] = user
    state.size[FRESH] += 1


@inner
def free(flows: Any, state: State, user: int) -> None:
    for k in range(flows.resource_start[user], flows.resource_start[user + 1]):
        resource = flows.resources[k]
        state.taken[resource] = False
        state.freed[state.size[FREED]] = resource
        state.size[FREED] += 1
