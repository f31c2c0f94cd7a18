"""Start times by an event heap, for channels and links that several transfers need (ALGORITHMS A.1).

The rules are in ``docs/theory/judge.md``, section 4.

At one instant, first all that ends is ended. Then waiting transfers start in the order of (ready time, stage,
direction, micro-batch), each if all its resources are free; a blocked transfer reserves nothing. Then lanes start. This
repeats while something of zero duration has ended. A blocked user of resources waits in the heap of one busy resource
and is tried again when that resource is freed, so an event costs the logarithm of the number of waiting users.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any

from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.heap import pop, pop_time, push
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.judge.clocks.chains import announce_buckets, close, end_bucket, lead_column
from penstock.solvers.judge.clocks.state import (
    CANDIDATES,
    EVENTS,
    FREED,
    FRESH,
    MASK,
    NOWHERE,
    ON_ITS_WAY,
    OPERATION,
    READY,
    REDUCED,
    SENT,
    SHIFT,
    TOUCHED,
    ClockState,
    free,
    later,
    make_fresh,
    touch,
    touch_stage,
)
from penstock.solvers.judge.clocks.ties import end_tie, halt_ready, step_has_to_wait
from penstock.solvers.judge.operation_tables import DURATION, FLOW, INPUT, LINES, OTHER, OUTPUT, STAGE
from penstock.solvers.judge.operation_tables import NOWHERE as NO_PLACE
from penstock.solvers.model.schedule import STEP

never_negative(__name__)


@loop
def run_events(flows: Any, chains: Any, ties: Any, lanes: Any, state: ClockState) -> None:
    """Bring a new state to its end: ``start`` of operations, ``sent`` and ``order`` of transfers, starts of buckets.

    A lane whose position is below its number of operations is blocked for ever.
    """
    num_lanes = lanes.lane_start.size - 1
    for slot in range(lanes.slot_lane.size):
        close(lanes, state, slot)
    for lane in range(num_lanes):
        touch(state, lane)
        if lanes.lane_start[lane] == lanes.lane_start[lane + 1]:
            _end_row(chains, ties, lanes, state, lane, 0)
    _start_operations(chains, ties, lanes, state, 0)
    while state.size[EVENTS] > 0:
        t = state.event_time[0]
        while state.size[EVENTS] > 0 and state.event_time[0] == t:
            code = state.event_code[0]
            pop_time(state.event_time, state.event_code, state.size[EVENTS])
            state.size[EVENTS] -= 1
            what, subject, m = code >> 60, (code >> SHIFT) & 0xFFFFFFF, code & MASK
            if what == OPERATION:
                _end_operation(flows, chains, ties, lanes, state, subject, t)
            elif what == SENT:
                _end_transfer(flows, lanes, state, subject, m, t)
            elif what == READY:
                make_fresh(state, flows.flow_ns.size + subject)
            elif subject < chains.stage.size:
                end_bucket(flows, chains, ties, lanes, state, subject, t)
            else:
                end_tie(flows, chains, ties, lanes, state, subject - chains.stage.size, t)
        _start_transfers(flows, chains, ties, state, t)
        _start_operations(chains, ties, lanes, state, t)


@inner
def _start_operations(chains: Any, ties: Any, lanes: Any, state: ClockState, t: int) -> None:
    """Start the next operation of each idle lane whose input has arrived."""
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
        if row // 2 % (STEP + 1) == STEP and step_has_to_wait(chains, ties, lanes, state, row // LINES, t):
            continue
        end = t + lanes.table[row, DURATION]
        state.start[i] = t
        state.busy[lane] = True
        state.time[lane] = end
        later(state, end, OPERATION, lane, 0)
        if reduces and i == state.closing[row // LINES]:
            closed = close(lanes, state, row // LINES)
            announce_buckets(chains, state, lanes.table[row, STAGE], closed, end, lead_column(lanes, i))
    state.size[TOUCHED] = 0


@inner
def _end_row(chains: Any, ties: Any, lanes: Any, state: ClockState, lane: int, t: int) -> None:
    """Let a lane that has run all its operations go on to its ties, in a flushed step."""
    if ties.tie_ns.size > 0 and not ties.periodic:
        halt_ready(chains, lanes, state, lane, t)


@inner
def _end_operation(flows: Any, chains: Any, ties: Any, lanes: Any, state: ClockState, lane: int, t: int) -> None:
    i = state.position[lane]
    state.position[lane] = i + 1
    state.busy[lane] = False
    touch(state, lane)
    if i + 1 == lanes.lane_start[lane + 1]:
        _end_row(chains, ties, lanes, state, lane, t)
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
    touch_stage(lanes, state, lanes.table[row, OTHER])


@inner
def _enqueue(flows: Any, state: ClockState, flow: int, m: int, t: int) -> None:
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
        make_fresh(state, flow)
    elif at == state.head[flow] and state.where[flow] >= 0:
        _lower_key(flows, state, flow, m)


@inner
def _lower_key(flows: Any, state: ClockState, flow: int, m: int) -> None:
    """Change the heap entry of a flow whose waiting head has become micro-batch ``m`` of the same instant."""
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
    """Return the user whose head has this second key.

    A chain's key has the chain's number, as a chain has one waiting bucket at a time; ties are numbered after chains.
    """
    rank, m = second >> SHIFT, second & MASK
    s, direction = rank >> 2, rank & 3
    if direction == 2:
        return flows.flow_ns.size + m
    return flows.flow_of[(s * 2 + direction) * 2 + (1 if m >= flows.cut else 0)]


@inner
def _head_key(flows: Any, chains: Any, ties: Any, state: ClockState, user: int) -> tuple[int, int]:
    if user < flows.flow_ns.size:
        m = state.order[state.head[user]]
        ready = state.sent[state.head[user]]
        return ready, ((flows.flow_stage[user] * 4 + flows.flow_direction[user]) << SHIFT) | m
    g = user - flows.flow_ns.size
    if g >= chains.stage.size:
        k = g - chains.stage.size
        return state.tie_ready[k], ((ties.stage[k] * 4 + 2) << SHIFT) | g
    return state.bucket_ready[state.bucket[g]], ((chains.stage[g] * 4 + 2) << SHIFT) | g


@inner
def _end_transfer(flows: Any, lanes: Any, state: ClockState, flow: int, m: int, t: int) -> None:
    free(flows, state, flow)
    s = flows.flow_stage[flow]
    direction = flows.flow_direction[flow]
    other = flows.next[s] if direction == 0 else flows.previous[s]
    total = flows.base[flows.base.size - 1]
    state.arrived[direction * total + flows.base[other] + m - flows.first[other]] = True
    touch_stage(lanes, state, other)


@inner
def _add_candidate(state: ClockState, first: int, second: int) -> None:
    push(state.candidate_first, state.candidate_second, 0, state.size[CANDIDATES], first, second)
    state.size[CANDIDATES] += 1


@inner
def _wake(flows: Any, state: ClockState, resource: int) -> None:
    """Make the first watcher of a free resource a candidate."""
    if state.in_use[resource] or state.watch_size[resource] == 0:
        return
    offset = flows.watch_start[resource]
    first, second = state.watch_first[offset], state.watch_second[offset]
    pop(state.watch_first, state.watch_second, offset, state.watch_size[resource])
    state.watch_size[resource] -= 1
    _add_candidate(state, first, second)


@inner
def _watch(flows: Any, state: ClockState, user: int, resource: int, first: int, second: int) -> None:
    push(state.watch_first, state.watch_second, flows.watch_start[resource], state.watch_size[resource], first, second)
    state.watch_size[resource] += 1
    state.where[user] = resource


@inner
def _start_transfers(flows: Any, chains: Any, ties: Any, state: ClockState, t: int) -> None:
    """Start each transfer that can start, least key first; a candidate from a freed resource adds its next watcher."""
    for k in range(state.size[FRESH]):
        first, second = _head_key(flows, chains, ties, state, state.fresh[k])
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
            if state.in_use[flows.resources[k]]:
                blocked = flows.resources[k]
                break
        if blocked >= 0:
            _watch(flows, state, user, blocked, first, second)
        else:
            _start_head(flows, chains, ties, state, user, second & MASK, t)
        if came_from >= 0:
            _wake(flows, state, came_from)


@inner
def _start_head(flows: Any, chains: Any, ties: Any, state: ClockState, user: int, m: int, t: int) -> None:
    """Start the head of a user's queue; the next entry waits for the resources that the head uses."""
    low, high = flows.resource_start[user], flows.resource_start[user + 1]
    for k in range(low, high):
        state.in_use[flows.resources[k]] = True
    state.where[user] = NOWHERE
    if user >= flows.flow_ns.size:
        g = user - flows.flow_ns.size
        if g >= chains.stage.size:
            k = g - chains.stage.size
            state.tie_start[ties.run_start[k] + state.tie_round[k]] = t
            later(state, t + ties.tie_ns[k], REDUCED, g, 0)
            return
        b, size = state.bucket[g], chains.start[g + 1] - chains.start[g]
        state.bucket_start[chains.run_start[g] + state.bucket_round[g] * size + b - chains.start[g]] = t
        later(state, t + chains.bucket_ns[b], REDUCED, g, 0)
        return
    state.sent[state.head[user]] = t
    state.head[user] += 1
    later(state, t + flows.flow_ns[user], SENT, user, m)
    if state.head[user] < state.tail[user]:
        first, second = _head_key(flows, chains, ties, state, user)
        if low < high:
            _watch(flows, state, user, flows.resources[low], first, second)
        else:
            state.where[user] = ON_ITS_WAY
            _add_candidate(state, first, second)
