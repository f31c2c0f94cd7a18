"""Start times by a worklist: each lane runs until it blocks. For private links in order, no event heap is needed.

Valid where every stage lies on one lane and each direction of an edge has a channel of its own (or is a pure
delay): a channel then carries its transfers in the order in which the producing lane makes them. O(operations).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.kernels.compiled import compiled, inner, loop


class State(NamedTuple):
    """What the worklist changes; ``arrived`` (2, total) is when inputs arrive, -1 before that is known."""

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
    gradient_end: np.ndarray


@compiled
def run_in_order(
    flows: Any, lanes: Any, queued: bool, record: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(position and time reached by each lane, operation starts, transfer starts, order of each flow, bucket starts).

    ``queued``: a channel carries one transfer at a time. Without ``record`` operation starts, transfer starts and
    orders stay empty. A lane whose position is below its number of operations is blocked for ever.
    """
    count = flows.base.size - 1
    num_lanes = lanes.lane_start.size - 1
    transfers = flows.flow_offset[flows.flow_offset.size - 1] if record else 0
    state = State(
        np.full((2, flows.base[count]), -1, dtype=np.int64),
        np.zeros(count * 2, dtype=np.int64),
        lanes.lane_start[:-1].copy(),
        np.zeros(num_lanes, dtype=np.int64),
        np.empty(lanes.operations.shape[0] if record else 0, dtype=np.int64),
        np.empty(transfers, dtype=np.int64),
        np.empty(transfers, dtype=np.int32),
        flows.flow_offset.copy(),
        np.arange(num_lanes - 1, -1, -1),
        np.ones(num_lanes, dtype=np.bool_),
        np.zeros(count, dtype=np.int64),
    )
    _work(flows, lanes, state, queued, record)
    bucket_start = np.empty(flows.bucket_ns.size, dtype=np.int64)
    _bucket_starts(flows, lanes, state.gradient_end, bucket_start)
    return state.position, state.time, state.start, state.sent, state.order, bucket_start


@loop
def _work(flows: Any, lanes: Any, state: State, queued: bool, record: bool) -> None:
    """Run lanes from the stack; a lane whose input has come is put back on it."""
    height = state.stack.size
    while height > 0:
        height -= 1
        lane = state.stack[height]
        state.waits[lane] = False
        t = state.time[lane]
        i = state.position[lane]
        while i < lanes.lane_start[lane + 1]:
            kind, s, m = lanes.operations[i, 0], lanes.operations[i, 1], lanes.operations[i, 2]
            other = flows.next[s] if kind == 0 else flows.previous[s]
            if kind <= 2:
                source = flows.previous[s] if kind == 0 else flows.next[s]
                if source >= 0:
                    a = state.arrived[0 if kind == 0 else 1, flows.base[s] + m - flows.first[s]]
                    if a < 0:
                        break
                    t = max(t, a)
            c = 1 if m >= flows.cut else 0
            if record:
                state.start[i] = t
            t += lanes.duration_ns[(s * 5 + kind) * 2 + c]
            if i == lanes.last_gradient[s]:
                state.gradient_end[s] = t
            i += 1
            if kind > 2 or other < 0:
                continue
            _send(flows, state, s, kind, m, c, t, queued, record)
            target = lanes.slot_lane[other]
            if not state.waits[target] and target != lane:
                state.waits[target] = True
                state.stack[height] = target
                height += 1
        state.position[lane] = i
        state.time[lane] = t


@inner
def _send(flows: Any, state: State, s: int, kind: int, m: int, c: int, t: int, queued: bool, record: bool) -> None:
    """Pass on what was made at ``t``: at once, or over the channel when that is free."""
    direction = 0 if kind == 0 else 1
    other = flows.next[s] if kind == 0 else flows.previous[s]
    flow = flows.flow_of[(s * 2 + direction) * 2 + c]
    if flow >= 0:
        if queued:
            t = max(t, state.channel_free[s * 2 + direction])
        if record:
            state.sent[flows.flow_offset[flow] + m - flows.flow_first[flow]] = t
            state.order[state.tail[flow]] = m
            state.tail[flow] += 1
        t += flows.flow_ns[flow]
        state.channel_free[s * 2 + direction] = t
    state.arrived[direction, flows.base[other] + m - flows.first[other]] = t


@loop
def _bucket_starts(flows: Any, lanes: Any, gradient_end: np.ndarray, start: np.ndarray) -> None:
    """Buckets on links of their own, each after the one before it and after it is ready."""
    for s in range(gradient_end.size):
        t = 0
        for b in range(flows.chain_start[s], flows.chain_start[s + 1]):
            column = lead_column(flows, lanes, lanes.last_gradient[s])
            t = max(t, gradient_end[s] - flows.bucket_lead_ns[4 * b + column])
            start[b] = t
            t += flows.bucket_ns[b]


@inner
def lead_column(flows: Any, lanes: Any, operation: int) -> int:
    """Which of a bucket's four leads holds: after a B or a W, of row class 0 or 1."""
    weight = 2 if lanes.operations[operation, 0] == 3 else 0
    return weight + (1 if lanes.operations[operation, 2] >= flows.cut else 0)
