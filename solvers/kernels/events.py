"""Start times by an event heap, for channels and links that several transfers want (DESIGN 6; ALGORITHMS A.1).

At one instant: first everything that ends is ended, then waiting transfers start in the order of (ready time, stage,
direction, micro-batch), each if all its resources are free (a blocked one reserves nothing), then lanes start;
again while something of zero duration ended. A blocked user of resources waits in the heap of one busy resource
and is looked at again when that resource is freed, so an event costs the logarithm of what waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.kernels.compiled import compiled, inner, loop
from penstock.solvers.kernels.heap import pop, pop_time, push, push_time
from penstock.solvers.kernels.inorder import lead_column
from penstock.solvers.tables import DURATION, FLOW, INPUT, LINES, OTHER, OUTPUT, STAGE
from penstock.solvers.tables import NOWHERE as NO_PLACE

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


@compiled
def run_events(
    flows: Any, chains: Any, lanes: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(position and time reached by each lane, operation starts, transfer starts, order of each flow, bucket starts).

    A lane whose position is below its number of operations is blocked for ever.
    """
    state = _new_state(flows, chains, lanes)
    _run(flows, chains, lanes, state)
    return state.position, state.time, state.start, state.sent, state.order, state.bucket_start


@loop
def _run(flows: Any, chains: Any, lanes: Any, state: State) -> None:
    num_lanes = lanes.lane_start.size - 1
    for slot in range(lanes.slot_lane.size):
        _close(lanes, state, slot)
    for lane in range(num_lanes):
        _touch(state, lane)
    _start_operations(chains, lanes, state, 0)
    while state.size[EVENTS] > 0:
        t = state.event_time[0]
        while state.size[EVENTS] > 0 and state.event_time[0] == t:
            code = state.event_code[0]
            pop_time(state.event_time, state.event_code, state.size[EVENTS])
            state.size[EVENTS] -= 1
            what, subject, m = code >> 60, (code >> SHIFT) & 0xFFFFFFF, code & MASK
            if what == OPERATION:
                _end_operation(flows, lanes, state, subject, t)
            elif what == SENT:
                _end_transfer(flows, lanes, state, subject, m, t)
            elif what == READY:
                _make_fresh(state, flows.flow_ns.size + subject)
            else:
                _end_bucket(flows, chains, lanes, state, subject, t)
        _start_transfers(flows, chains, state, t)
        _start_operations(chains, lanes, state, t)


@compiled
def _new_state(flows: Any, chains: Any, lanes: Any) -> State:
    count = flows.base.size - 1
    num_chains = chains.stage.size
    num_lanes = lanes.lane_start.size - 1
    num_flows = flows.flow_ns.size
    users = num_flows + num_chains
    resources = flows.watch_start.size - 1
    transfers = flows.flow_offset[num_flows]
    free = 0
    for flow in range(num_flows):
        if flows.resource_start[flow] == flows.resource_start[flow + 1]:
            free += flows.flow_offset[flow + 1] - flows.flow_offset[flow]
    events = num_lanes + users + num_chains + free + 1
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
def _touch(state: State, lane: int) -> None:
    if not state.is_touched[lane]:
        state.is_touched[lane] = True
        state.touched[state.size[TOUCHED]] = lane
        state.size[TOUCHED] += 1


@inner
def _touch_stage(lanes: Any, state: State, s: int) -> None:
    for slot in range(lanes.slot_start[s], lanes.slot_start[s + 1]):
        _touch(state, lanes.slot_lane[slot])


@inner
def _later(state: State, t: int, what: int, subject: int, m: int) -> None:
    code = (what << 60) | (subject << SHIFT) | m
    push_time(state.event_time, state.event_code, state.size[EVENTS], t, code)
    state.size[EVENTS] += 1


@inner
def _make_fresh(state: State, user: int) -> None:
    state.where[user] = ON_ITS_WAY
    state.fresh[state.size[FRESH]] = user
    state.size[FRESH] += 1


@inner
def _start_operations(chains: Any, lanes: Any, state: State, t: int) -> None:
    """Start the next operation of each idle lane whose input is there."""
    reduces = chains.bucket_ns.size > 0
    for k in range(state.size[TOUCHED]):
        lane = state.touched[k]
        state.is_touched[lane] = False
        i = state.position[lane]
        if state.busy[lane] or i == lanes.lane_start[lane + 1]:
            continue
        row = lanes.row[i]
        place = lanes.table[row, INPUT]
        if place != NO_PLACE and not state.arrived[place + lanes.batch[i]]:
            continue
        end = t + lanes.table[row, DURATION]
        state.start[i] = t
        state.busy[lane] = True
        state.time[lane] = end
        _later(state, end, OPERATION, lane, 0)
        if reduces and i == state.closing[row // LINES]:
            closed = _close(lanes, state, row // LINES)
            _announce_buckets(chains, state, lanes.table[row, STAGE], closed, end, lead_column(lanes, i))
    state.size[TOUCHED] = 0


@inner
def _close(lanes: Any, state: State, slot: int) -> int:
    """The number of the round whose last gradient a slot now makes; looks up the one after it."""
    first, stop = lanes.round_start[slot], lanes.round_start[slot + 1]
    closed = state.closing_place[slot]
    place = closed + 1
    while place < stop and lanes.last_gradient[place] < 0:
        place += 1
    state.closing_place[slot] = place
    state.closing[slot] = lanes.last_gradient[place] if place < stop else -1
    return closed - first


@inner
def _announce_buckets(chains: Any, state: State, s: int, update_round: int, end: int, column: int) -> None:
    """A lane's last gradient of a round ends at ``end``: with the last lane's the first bucket's time is known."""
    for k in range(chains.member_start[s], chains.member_start[s + 1]):
        g = chains.member_group[k]
        low, high = chains.start[g], chains.start[g + 1]
        if low == high or update_round >= chains.rounds[g]:
            continue
        for b in range(low, high):
            lead = chains.lead_ns[4 * (chains.member_lead[k] + b - low) + column]
            state.bucket_ready[b] = max(state.bucket_ready[b], end - lead)
        left = chains.round_start[g] + update_round
        state.lanes_left[left] -= 1
        if state.lanes_left[left] == 0:
            _later(state, state.bucket_ready[low], READY, g, 0)


@inner
def _end_operation(flows: Any, lanes: Any, state: State, lane: int, t: int) -> None:
    i = state.position[lane]
    state.position[lane] = i + 1
    state.busy[lane] = False
    _touch(state, lane)
    row, m = lanes.row[i], lanes.batch[i]
    s = lanes.table[row, STAGE]
    place = lanes.table[row, OUTPUT]
    if place == NO_PLACE:
        return
    if lanes.lanes_needed[s] > 1:
        state.done[place + m] += 1
        if state.done[place + m] < lanes.lanes_needed[s]:
            return
    flow = lanes.table[row, FLOW]
    if flow >= 0:
        _enqueue(flows, state, flow, m, t)
        return
    state.arrived[place + m] = True
    _touch_stage(lanes, state, lanes.table[row, OTHER])


@inner
def _enqueue(flows: Any, state: State, flow: int, m: int, t: int) -> None:
    """Add micro-batch ``m``, ready at ``t``, to the flow's queue; among equals of one instant by micro-batch."""
    at = state.tail[flow]
    while at > state.head[flow] and state.order[at - 1] > m and state.sent[at - 1] == t:
        state.order[at] = state.order[at - 1]
        state.sent[at] = t
        at -= 1
    state.order[at] = m
    state.sent[at] = t
    state.tail[flow] += 1
    if state.where[flow] == NOWHERE:
        _make_fresh(state, flow)
    elif at == state.head[flow] and state.where[flow] >= 0:
        _lower_key(flows, state, flow, m)


@inner
def _lower_key(flows: Any, state: State, flow: int, m: int) -> None:
    """The waiting head of a flow has become micro-batch ``m`` of the same instant: mend its entry."""
    resource = state.where[flow]
    offset, size = flows.watch_start[resource], state.watch_size[resource]
    rank = flows.flow_stage[flow] * 4 + flows.flow_direction[flow]
    for k in range(size):
        second = state.watch_second[offset + k]
        if second >> SHIFT == rank and _user(flows, second) == flow:
            first = state.watch_first[offset + k]
            push(state.watch_first, state.watch_second, offset, k, first, (rank << SHIFT) | m)
            return


@inner
def _user(flows: Any, second: int) -> Any:
    """The user whose head has this second key; a chain's key names the chain: it has one waiting bucket at a time."""
    rank, m = second >> SHIFT, second & MASK
    s, direction = rank >> 2, rank & 3
    if direction == 2:
        return flows.flow_ns.size + m
    return flows.flow_of[(s * 2 + direction) * 2 + (1 if m >= flows.cut else 0)]


@inner
def _head_key(flows: Any, chains: Any, state: State, user: int) -> tuple[int, int]:
    if user < flows.flow_ns.size:
        m = state.order[state.head[user]]
        ready = state.sent[state.head[user]]
        return ready, ((flows.flow_stage[user] * 4 + flows.flow_direction[user]) << SHIFT) | m
    g = user - flows.flow_ns.size
    return state.bucket_ready[state.bucket[g]], ((chains.stage[g] * 4 + 2) << SHIFT) | g


@inner
def _free(flows: Any, state: State, user: int) -> None:
    for k in range(flows.resource_start[user], flows.resource_start[user + 1]):
        resource = flows.resources[k]
        state.taken[resource] = False
        state.freed[state.size[FREED]] = resource
        state.size[FREED] += 1


@inner
def _end_transfer(flows: Any, lanes: Any, state: State, flow: int, m: int, t: int) -> None:
    _free(flows, state, flow)
    s = flows.flow_stage[flow]
    direction = flows.flow_direction[flow]
    other = flows.next[s] if direction == 0 else flows.previous[s]
    total = flows.base[flows.base.size - 1]
    state.arrived[direction * total + flows.base[other] + m - flows.first[other]] = True
    _touch_stage(lanes, state, other)


@inner
def _end_bucket(flows: Any, chains: Any, lanes: Any, state: State, g: int, t: int) -> None:
    user = flows.flow_ns.size + g
    _free(flows, state, user)
    b = state.bucket[g] + 1
    if b < chains.start[g + 1]:
        state.bucket[g] = b
        state.bucket_ready[b] = max(state.bucket_ready[b], t)
        if state.bucket_ready[b] == t:
            _make_fresh(state, user)
        else:
            _later(state, state.bucket_ready[b], READY, g, 0)
        return
    state.bucket[g] = chains.start[g]
    state.bucket_round[g] += 1
    total = flows.base[flows.base.size - 1]
    if flows.places > 2 * total:
        s = chains.stage[g]
        state.arrived[2 * total + flows.base[s] + state.bucket_round[g] * chains.every[s] - 1] = True
        _touch_stage(lanes, state, s)


@inner
def _add_candidate(state: State, first: int, second: int) -> None:
    push(state.candidate_first, state.candidate_second, 0, state.size[CANDIDATES], first, second)
    state.size[CANDIDATES] += 1


@inner
def _wake(flows: Any, state: State, resource: int) -> None:
    """Make the first watcher of a free resource a candidate."""
    if state.taken[resource] or state.watch_size[resource] == 0:
        return
    offset = flows.watch_start[resource]
    first, second = state.watch_first[offset], state.watch_second[offset]
    pop(state.watch_first, state.watch_second, offset, state.watch_size[resource])
    state.watch_size[resource] -= 1
    _add_candidate(state, first, second)


@inner
def _watch(flows: Any, state: State, user: int, resource: int, first: int, second: int) -> None:
    push(state.watch_first, state.watch_second, flows.watch_start[resource], state.watch_size[resource], first, second)
    state.watch_size[resource] += 1
    state.where[user] = resource


@inner
def _start_transfers(flows: Any, chains: Any, state: State, t: int) -> None:
    """Start what can start, least key first; a candidate that came from a freed resource calls its next watcher."""
    for k in range(state.size[FRESH]):
        first, second = _head_key(flows, chains, state, state.fresh[k])
        _add_candidate(state, first, second)
    state.size[FRESH] = 0
    for k in range(state.size[FREED]):
        _wake(flows, state, state.freed[k])
    state.size[FREED] = 0
    while state.size[CANDIDATES] > 0:
        first, second = state.candidate_first[0], state.candidate_second[0]
        pop(state.candidate_first, state.candidate_second, 0, state.size[CANDIDATES])
        state.size[CANDIDATES] -= 1
        user = _user(flows, second)
        came_from = state.where[user]
        blocked = -1
        for k in range(flows.resource_start[user], flows.resource_start[user + 1]):
            if state.taken[flows.resources[k]]:
                blocked = flows.resources[k]
                break
        if blocked >= 0:
            _watch(flows, state, user, blocked, first, second)
        else:
            _start_head(flows, chains, state, user, second & MASK, t)
        if came_from >= 0:
            _wake(flows, state, came_from)


@inner
def _start_head(flows: Any, chains: Any, state: State, user: int, m: int, t: int) -> None:
    """Start the head of a user's queue; what comes next waits for the resources just taken."""
    low, high = flows.resource_start[user], flows.resource_start[user + 1]
    for k in range(low, high):
        state.taken[flows.resources[k]] = True
    state.where[user] = NOWHERE
    if user >= flows.flow_ns.size:
        g = user - flows.flow_ns.size
        b, size = state.bucket[g], chains.start[g + 1] - chains.start[g]
        state.bucket_start[chains.run_start[g] + state.bucket_round[g] * size + b - chains.start[g]] = t
        _later(state, t + chains.bucket_ns[b], REDUCED, g, 0)
        return
    state.sent[state.head[user]] = t
    state.head[user] += 1
    _later(state, t + flows.flow_ns[user], SENT, user, m)
    if state.head[user] < state.tail[user]:
        first, second = _head_key(flows, chains, state, user)
        if low < high:
            _watch(flows, state, user, flows.resources[low], first, second)
        else:
            state.where[user] = ON_ITS_WAY
            _add_candidate(state, first, second)
