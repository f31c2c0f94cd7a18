"""A lane's memory over time: operations, receive and send buffers and updates, merged in the order of time.

Every source of events is sorted by itself: the lane's operations, each flow's starts (receive buffers appear) or
ends (send buffers vanish), the ends of the optimizer steps. All events of one instant count together.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

NEVER = np.int64(2**63 - 1)
START_KEPT, END_KEPT, END_BUFFER, WORKSPACE = 0, 1, 2, 3


@numba.njit(cache=True)
def lane_memory(
    flows: Any,
    lanes: Any,
    times: Any,
    lane: int,
    table: np.ndarray,
    streams: np.ndarray,
    gradients: np.ndarray,
    steps: np.ndarray,
    static: int,
    curve_time: np.ndarray,
    curve_bytes: np.ndarray,
) -> tuple[int, np.ndarray]:
    """(length of the curve, bytes at the first peak: gradients, kept, buffers, workspace).

    ``table`` (slots, 5, 2, 4) has each operation's bytes; a stream is (flow, bytes, 1 if its ends count, replica,
    replicas); ``gradients`` (slots,) appear with the first backward; ``steps`` rows are (time, bytes freed).
    The curve is written where the two last arrays have room (len > 0), starting at time 0 with ``static``.
    """
    count = streams.shape[0]
    position = np.zeros(count, dtype=np.int64)
    last = np.zeros(count, dtype=np.int64)
    head = np.full(count, NEVER, dtype=np.int64)
    for k in range(count):
        flow = streams[k, 0]
        position[k] = flows.flow_offset[flow] - 1
        last[k] = flows.flow_offset[flow + 1]
        _advance(flows, times, streams, position, last, head, k)
    now = np.zeros(4, dtype=np.int64)
    peak = np.zeros(4, dtype=np.int64)
    highest, level, written = np.int64(-1), np.int64(static), 0
    record = curve_time.size > 0
    if record:
        curve_time[0], curve_bytes[0], written = 0, static, 1
    i, stop, running, step = lanes.lane_start[lane], lanes.lane_start[lane + 1], False, 0
    operation_time = times.start[i] if i < stop else NEVER
    row = 0
    while True:
        t = operation_time
        for k in range(count):
            t = min(t, head[k])
        if step < steps.shape[0]:
            t = min(t, steps[step, 0])
        if t == NEVER:
            break
        while operation_time == t:
            if running:
                now[1] += table[row, END_KEPT]
                now[2] += table[row, END_BUFFER]
                now[3] = 0
                running = False
                i += 1
                operation_time = times.start[i] if i < stop else NEVER
            else:
                kind, s, m = lanes.operations[i, 0], lanes.operations[i, 1], lanes.operations[i, 2]
                slot = lanes.slot_of[lane, s]
                row = (slot * 5 + kind) * 2 + (1 if m >= flows.cut else 0)
                if lanes.first_gradient[slot] == i:
                    now[0] += gradients[slot]
                now[1] += table[row, START_KEPT]
                now[3] = table[row, WORKSPACE]
                operation_time = t + lanes.duration_ns[row]
                running = True
        for k in range(count):
            while head[k] == t:
                now[2] += streams[k, 1]
                _advance(flows, times, streams, position, last, head, k)
        while step < steps.shape[0] and steps[step, 0] == t:
            now[0] -= steps[step, 1]
            step += 1
        level_now = static + now[0] + now[1] + now[2] + now[3]
        if level_now > highest:
            highest = level_now
            peak[:] = now
        if record and level_now != level:
            if curve_time[written - 1] == t:
                written -= 1
            curve_time[written] = t
            curve_bytes[written] = level_now
            written += 1
        level = level_now
    return written, peak


@numba.njit(cache=True)
def _advance(
    flows: Any, times: Any, streams: np.ndarray, position: np.ndarray, last: np.ndarray, head: np.ndarray, k: int
) -> None:
    """Step stream ``k`` to its next transfer of the lane's replica."""
    flow = streams[k, 0]
    at = position[k] + 1
    while at < last[k] and times.order[at] % streams[k, 4] != streams[k, 3]:
        at += 1
    position[k] = at
    if at == last[k]:
        head[k] = NEVER
        return
    t = times.sent[flows.flow_offset[flow] - flows.flow_first[flow] + times.order[at]]
    head[k] = t + flows.flow_ns[flow] if streams[k, 2] == 1 else t


@numba.njit(cache=True)
def lane_communication(
    flows: Any, lanes: Any, times: Any, lane: int, streams: np.ndarray, extra: np.ndarray, steps: np.ndarray, end: int
) -> int:
    """Nanoseconds in which the lane does not compute while one of its transfers or reductions runs.

    ``streams`` as above (here every flow of the lane once); ``extra`` rows (start, end) are its reductions, sorted
    by start; ``steps`` rows (start, end) its optimizer steps in order; ``end`` is the makespan.
    """
    count = streams.shape[0] + 1
    first = np.zeros(count, dtype=np.int64)
    for k in range(count - 1):
        first[k] = flows.flow_offset[streams[k, 0]]
    walk = np.zeros(count, dtype=np.int64)
    total = np.int64(0)
    gap_start = np.int64(0)
    i, stop = lanes.lane_start[lane], lanes.lane_start[lane + 1]
    for item in range(i, stop + steps.shape[0] + 1):
        if item < stop:
            kind, s, m = lanes.operations[item, 0], lanes.operations[item, 1], lanes.operations[item, 2]
            slot = lanes.slot_of[lane, s]
            gap_end = times.start[item]
            after = gap_end + lanes.duration_ns[(slot * 5 + kind) * 2 + (1 if m >= flows.cut else 0)]
        elif item < stop + steps.shape[0]:
            gap_end, after = steps[item - stop, 0], steps[item - stop, 1]
        else:
            gap_end, after = end, end
        if gap_end > gap_start:
            total += _covered(flows, times, streams, extra, first, walk, gap_start, gap_end)
        gap_start = after
    return total


@numba.njit(cache=True)
def _interval(flows: Any, times: Any, streams: np.ndarray, extra: np.ndarray, k: int, at: int) -> tuple[int, int, bool]:
    """Interval number ``at`` of a stream, or of the reductions; False behind the last."""
    if k == streams.shape[0]:
        return (extra[at, 0], extra[at, 1], True) if at < extra.shape[0] else (NEVER, NEVER, False)
    flow = streams[k, 0]
    while at < flows.flow_offset[flow + 1] and times.order[at] % streams[k, 4] != streams[k, 3]:
        return np.int64(0), np.int64(-1), True
    if at == flows.flow_offset[flow + 1]:
        return NEVER, NEVER, False
    t = times.sent[flows.flow_offset[flow] - flows.flow_first[flow] + times.order[at]]
    return t, t + flows.flow_ns[flow], True


@numba.njit(cache=True)
def _covered(
    flows: Any,
    times: Any,
    streams: np.ndarray,
    extra: np.ndarray,
    first: np.ndarray,
    walk: np.ndarray,
    low: int,
    high: int,
) -> int:
    """Nanoseconds of [low, high) in which an interval of a stream runs; moves ``first`` past what ended before."""
    for k in range(first.size):
        at = first[k]
        while True:
            _start, end, there = _interval(flows, times, streams, extra, k, at)
            if not there or end > low:
                break
            at += 1
        first[k] = at
        walk[k] = at
    total, reached = np.int64(0), np.int64(low)
    while reached < high:
        best, best_start, best_end = -1, NEVER, NEVER
        for k in range(first.size):
            start, end, there = _interval(flows, times, streams, extra, k, walk[k])
            while there and end <= reached:
                walk[k] += 1
                start, end, there = _interval(flows, times, streams, extra, k, walk[k])
            if there and start < best_start:
                best, best_start, best_end = k, start, end
        if best < 0 or best_start >= high:
            break
        begin = max(reached, best_start)
        reached = min(high, best_end)
        total += reached - begin
    return total
