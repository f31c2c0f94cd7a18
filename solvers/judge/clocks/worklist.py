"""Start times by a worklist: each lane runs until it blocks. For private links in order, no event heap is needed.

Valid where every stage lies on one lane and each direction of an edge has a channel of its own (or is a pure
delay): a channel then carries its transfers in the order in which the producing lane makes them. O(operations).
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.judge.operation_tables import CHANNEL, DURATION, FLOW, FLOW_NS, INPUT, NOWHERE, OTHER, OUTPUT
from penstock.solvers.model.schedule import STEP


class State(NamedTuple):
    """What the worklist changes; ``arrived`` is when inputs arrive, -1 before that is known."""

    arrived: np.ndarray
    channel_free: np.ndarray
    position: np.ndarray
    time: np.ndarray
    start: np.ndarray
    sent: np.ndarray
    order: np.ndarray
    tail: np.ndarray
    stack: np.ndarray
    waits: np.ndarray


@compiled
def run_in_order(
    flows: Any, chains: Any, lanes: Any, queued: bool, record: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(position and time reached by each lane, operation starts, transfer starts, order of each flow, bucket starts).

    ``queued``: a channel carries one transfer at a time. Without ``record`` the last four stay empty. A lane whose
    position is below its number of operations is blocked for ever.
    """
    count = flows.base.size - 1
    num_lanes = lanes.lane_start.size - 1
    transfers = flows.flow_offset[flows.flow_offset.size - 1] if record else 0
    state = State(
        np.full(flows.places, -1, dtype=np.int64),
        np.zeros(count * 2, dtype=np.int64),
        lanes.lane_start[:-1].copy(),
        np.zeros(num_lanes, dtype=np.int64),
        np.empty(lanes.batch.size if record else 0, dtype=np.int64),
        np.empty(transfers, dtype=np.int64),
        np.empty(transfers, dtype=np.int32),
        flows.flow_offset.copy(),
        np.arange(num_lanes),
        np.ones(num_lanes, dtype=np.bool_),
    )
    _work(lanes, state, queued, record)
    bucket_start = np.zeros(chains.bucket_ns.size if record else 0, dtype=np.int64)
    if bucket_start.size > 0:
        bucket_starts(chains, lanes, state.start, bucket_start)
    return state.position, state.time, state.start, state.sent, state.order, bucket_start


@loop
def _work(lanes: Any, state: State, queued: bool, record: bool) -> None:
    """Run lanes from the stack; a lane whose input has come is put back on it."""
    size = state.stack.size
    head, waiting = 0, size
    while waiting > 0:
        lane = state.stack[head]
        head = head + 1 if head + 1 < size else 0
        waiting -= 1
        state.waits[lane] = False
        t = state.time[lane]
        i = state.position[lane]
        stop = lanes.lane_start[lane + 1]
        while i < stop:
            row, m = lanes.row[i], lanes.batch[i]
            place = lanes.table[row, INPUT]
            if place != NOWHERE:
                a = state.arrived[place + m]
                if a < 0:
                    break
                t = max(t, a)
            if record:
                state.start[i] = t
            t += lanes.table[row, DURATION]
            i += 1
            place = lanes.table[row, OUTPUT]
            if place == NOWHERE:
                continue
            state.arrived[place + m] = _send(lanes, state, row, m, t, queued, record)
            target = lanes.slot_lane[lanes.table[row, OTHER]]
            if not state.waits[target] and target != lane:
                state.waits[target] = True
                tail = head + waiting
                state.stack[tail if tail < size else tail - size] = target
                waiting += 1
        state.position[lane] = i
        state.time[lane] = t


@inner
def _send(lanes: Any, state: State, row: int, m: int, t: int, queued: bool, record: bool) -> int:
    """When what was made at ``t`` is there: at once, or after the channel is free and has carried it."""
    flow = lanes.table[row, FLOW]
    if flow < 0:
        return t
    channel = lanes.table[row, CHANNEL]
    if queued:
        t = max(t, state.channel_free[channel])
    if record:
        place = state.tail[flow]
        state.sent[place] = t
        state.order[place] = m
        state.tail[flow] = place + 1
    t += lanes.table[row, FLOW_NS]
    state.channel_free[channel] = t
    return t


@loop
def bucket_starts(chains: Any, lanes: Any, start: np.ndarray, bucket_start: np.ndarray) -> None:
    """Buckets of a flushed step on links of their own, each after the one before it and after it is ready."""
    for s in range(chains.member_start.size - 1):
        last = lanes.last_gradient[s]
        if last < 0:
            continue
        end = start[last] + lanes.table[lanes.row[last], DURATION]
        column = lead_column(lanes, last)
        for k in range(chains.member_start[s], chains.member_start[s + 1]):
            g = chains.member_group[k]
            for b in range(chains.start[g], chains.start[g + 1]):
                lead = chains.lead_ns[4 * (chains.member_lead[k] + b - chains.start[g]) + column]
                bucket_start[b] = max(bucket_start[b], end - lead)
    for g in range(chains.start.size - 1):
        t = 0
        for b in range(chains.start[g], chains.start[g + 1]):
            t = max(t, bucket_start[b])
            bucket_start[b] = t
            t += chains.bucket_ns[b]


@inner
def lead_column(lanes: Any, operation: int) -> int:
    """Which of a bucket's four leads holds: after a B or a W, of row class 0 or 1."""
    kind, row_class = lanes.row[operation] // 2 % (STEP + 1), lanes.row[operation] % 2
    return (2 if kind == 3 else 0) + row_class
