"""Start times by a worklist: each lane runs until it blocks. For private links in order, no event heap is needed.

Valid where every stage lies on one lane and each direction of an edge has a channel of its own (or is a pure
delay): a channel then carries its transfers in the order in which the producing lane makes them. O(operations).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.kernels.compiled import compiled, inner


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
    total = flows.base[count]
    arrived = np.full((2, total), -1, dtype=np.int64)
    channel_free = np.zeros(count * 2, dtype=np.int64)
    position = lanes.lane_start[:-1].copy()
    time = np.zeros(num_lanes, dtype=np.int64)
    transfers = flows.flow_offset[flows.flow_offset.size - 1] if record else 0
    start = np.empty(lanes.operations.shape[0] if record else 0, dtype=np.int64)
    sent = np.full(transfers, -1, dtype=np.int64)
    order = np.empty(transfers, dtype=np.int32)
    tail = flows.flow_offset.copy()
    stack = np.empty(num_lanes + 1, dtype=np.int64)
    waits = np.ones(num_lanes, dtype=np.bool_)
    for lane in range(num_lanes):
        stack[lane] = num_lanes - 1 - lane
    height = num_lanes
    operations = lanes.operations
    gradient_end = np.zeros(count, dtype=np.int64)
    while height > 0:
        height -= 1
        lane = stack[height]
        waits[lane] = False
        t = time[lane]
        i = position[lane]
        stop = lanes.lane_start[lane + 1]
        while i < stop:
            kind, s, m = operations[i, 0], operations[i, 1], operations[i, 2]
            direction = 0 if kind == 0 else 1
            other = s
            if kind <= 2:
                source = flows.previous[s] if kind == 0 else flows.next[s]
                if source >= 0:
                    a = arrived[direction, flows.base[s] + m - flows.first[s]]
                    if a < 0:
                        break
                    t = max(t, a)
                other = flows.next[s] if kind == 0 else flows.previous[s]
            c = 1 if m >= flows.cut else 0
            if record:
                start[i] = t
            t += lanes.duration_ns[(s * 5 + kind) * 2 + c]
            if i == lanes.last_gradient[s]:
                gradient_end[s] = t
            i += 1
            if kind > 2 or other < 0:
                continue
            x = t
            flow = flows.flow_of[(s * 2 + direction) * 2 + c]
            if flow >= 0:
                if queued:
                    x = max(x, channel_free[s * 2 + direction])
                if record:
                    sent[flows.flow_offset[flow] + m - flows.flow_first[flow]] = x
                    order[tail[flow]] = m
                    tail[flow] += 1
                x += flows.flow_ns[flow]
                channel_free[s * 2 + direction] = x
            arrived[direction, flows.base[other] + m - flows.first[other]] = x
            target = lanes.slot_lane[other]
            if not waits[target] and target != lane:
                waits[target] = True
                stack[height] = target
                height += 1
        position[lane] = i
        time[lane] = t
    return position, time, start, sent, order, _bucket_starts(flows, lanes, gradient_end)


@compiled
def _bucket_starts(flows: Any, lanes: Any, gradient_end: np.ndarray) -> np.ndarray:
    """Buckets on links of their own, each after the one before it and after it is ready."""
    start = np.empty(flows.bucket_ns.size, dtype=np.int64)
    for s in range(gradient_end.size):
        t = np.int64(0)
        last = lanes.last_gradient[s]
        for b in range(flows.chain_start[s], flows.chain_start[s + 1]):
            column = lead_column(flows, lanes, last)
            t = max(t, gradient_end[s] - flows.bucket_lead_ns[4 * b + column])
            start[b] = t
            t += flows.bucket_ns[b]
    return start


@inner
def lead_column(flows: Any, lanes: Any, operation: int) -> int:
    """Which of a bucket's four leads holds: after a B or a W, of row class 0 or 1."""
    weight = 2 if lanes.operations[operation, 0] == 3 else 0
    return weight + (1 if lanes.operations[operation, 2] >= flows.cut else 0)
