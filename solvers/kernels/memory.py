"""A lane's memory over time: operations, receive and send buffers and updates, merged in the order of time.

Every source of events is sorted by itself: the lane's operations, each flow's starts (receive buffers appear) or
ends (send buffers vanish), the ends of the optimizer steps. All events of one instant count together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.kernels.compiled import compiled, inner, loop

NEVER = 2**63 - 1
START_KEPT, END_KEPT, END_BUFFER, WORKSPACE = 0, 1, 2, 3
GRADIENTS, KEPT, BUFFERS, WORK = 0, 1, 2, 3


class Streams(NamedTuple):
    """Flows that a lane sends or receives; each array (n,).

    ``size`` is what one transfer adds (receives) or removes (sends, whose ends count: ``delay`` is their
    duration, else 0). Only micro-batches of ``replica`` modulo ``replicas`` are the lane's. ``sent`` + micro-batch
    is the place of a transfer's start; ``first`` to ``stop`` are the flow's places in the order of sending.
    """

    size: np.ndarray
    delay: np.ndarray
    duration: np.ndarray
    replica: np.ndarray
    replicas: np.ndarray
    sent: np.ndarray
    first: np.ndarray
    stop: np.ndarray


class Rows(NamedTuple):
    """What a lane runs, its costs by (slot, kind, row class), and its optimizer steps (time, bytes freed)."""

    operations: np.ndarray
    slot_of: np.ndarray
    duration: np.ndarray
    size: np.ndarray
    first_gradient: np.ndarray
    gradients: np.ndarray
    steps: np.ndarray


class Walk(NamedTuple):
    """Where the merge stands: next place and time of each stream; bytes now and at the first peak."""

    place: np.ndarray
    head: np.ndarray
    now: np.ndarray
    peak: np.ndarray


@compiled
def lane_memory(
    rows: Any, streams: Any, times: Any, begin: int, stop: int, cut: int, static: int, curve: Any
) -> tuple[int, np.ndarray]:
    """(length of the curve, bytes at the first peak: gradients, kept, buffers, workspace).

    The lane's operations are ``begin`` to ``stop``. The curve (times, bytes) is written where it has room, from
    time 0 with ``static`` on.
    """
    count = streams.size.size
    walk = Walk(
        streams.first.copy(), np.zeros(count, dtype=np.int64), np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64)
    )
    written = _merge(rows, streams, times, walk, begin, stop, cut, static, curve)
    return written, walk.peak


@inner
def _head(streams: Any, times: Any, walk: Any, k: int) -> None:
    """Find stream ``k``'s next transfer of the lane's replica."""
    place, last = walk.place[k], streams.stop[k]
    replicas = streams.replicas[k]
    if replicas > 1:
        while place < last and times.order[place] % replicas != streams.replica[k]:
            place += 1
        walk.place[k] = place
    walk.head[k] = NEVER if place == last else times.sent[streams.sent[k] + times.order[place]] + streams.delay[k]


@loop
def _merge(
    rows: Any, streams: Any, times: Any, walk: Any, begin: int, stop: int, cut: int, static: int, curve: Any
) -> int:
    count = streams.size.size
    for k in range(count):
        _head(streams, times, walk, k)
    now, written, step = walk.now, 0, 0
    highest, level = -1, static
    record = curve[0].size > 0
    if record:
        curve[0][0], curve[1][0], written = 0, static, 1
    i, running, row = begin, False, 0
    own = times.start[i] if i < stop else NEVER
    freed = rows.steps[0, 0]
    while True:
        t = min(own, freed)
        for k in range(count):
            t = min(t, walk.head[k])
        if t == NEVER:
            break
        while own == t:
            if running:
                now[KEPT] += rows.size[row, END_KEPT]
                now[BUFFERS] += rows.size[row, END_BUFFER]
                now[WORK] = 0
                running = False
                i += 1
                own = times.start[i] if i < stop else NEVER
            else:
                slot = rows.slot_of[rows.operations[i, 1]]
                row = (slot * 5 + rows.operations[i, 0]) * 2 + (1 if rows.operations[i, 2] >= cut else 0)
                if rows.first_gradient[slot] == i:
                    now[GRADIENTS] += rows.gradients[slot]
                now[KEPT] += rows.size[row, START_KEPT]
                now[WORK] = rows.size[row, WORKSPACE]
                own = t + rows.duration[row]
                running = True
        for k in range(count):
            while walk.head[k] == t:
                now[BUFFERS] += streams.size[k]
                walk.place[k] += 1
                _head(streams, times, walk, k)
        while freed == t:
            now[GRADIENTS] -= rows.steps[step, 1]
            step += 1
            freed = rows.steps[step, 0]
        reached = static + now[GRADIENTS] + now[KEPT] + now[BUFFERS] + now[WORK]
        if reached > highest:
            highest = reached
            for j in range(4):
                walk.peak[j] = now[j]
        if record and reached != level:
            if curve[0][written - 1] == t:
                written -= 1
            curve[0][written], curve[1][written] = t, reached
            written += 1
        level = reached
    return written


@compiled
def lane_communication(
    rows: Any, streams: Any, times: Any, begin: int, stop: int, cut: int, extra: np.ndarray, spans: np.ndarray
) -> int:
    """Nanoseconds in which the lane does not compute while one of its transfers or reductions runs.

    ``extra`` rows (start, end) are its reductions, sorted by start; ``spans`` rows (start, end) what it computes
    after its operations: optimizer steps, and at last (makespan, makespan).
    """
    count = streams.size.size + 1
    first = np.zeros(count, dtype=np.int64)
    first[: count - 1] = streams.first
    return _gaps(rows, streams, times, begin, stop, cut, extra, spans, first, first.copy())


@loop
def _gaps(
    rows: Any,
    streams: Any,
    times: Any,
    begin: int,
    stop: int,
    cut: int,
    extra: np.ndarray,
    spans: np.ndarray,
    first: np.ndarray,
    walk: np.ndarray,
) -> int:
    total, free = 0, 0
    for i in range(begin, stop):
        start = times.start[i]
        if start > free:
            total += _covered(streams, times, extra, first, walk, free, start)
        slot = rows.slot_of[rows.operations[i, 1]]
        c = 1 if rows.operations[i, 2] >= cut else 0
        free = start + rows.duration[(slot * 5 + rows.operations[i, 0]) * 2 + c]
    for i in range(spans.shape[0]):
        if spans[i, 0] > free:
            total += _covered(streams, times, extra, first, walk, free, spans[i, 0])
        free = spans[i, 1]
    return total


@inner
def _interval(streams: Any, times: Any, extra: np.ndarray, k: int, at: int) -> tuple[int, int]:
    """Interval at a place of a stream, or number ``at`` of the reductions; empty if not the lane's, late at the end."""
    if k == streams.size.size:
        return (extra[at, 0], extra[at, 1]) if at < extra.shape[0] else (NEVER, NEVER)
    if at == streams.stop[k]:
        return NEVER, NEVER
    m = times.order[at]
    if streams.replicas[k] > 1 and m % streams.replicas[k] != streams.replica[k]:
        return 0, -1
    t = times.sent[streams.sent[k] + m]
    return t, t + streams.duration[k]


@loop
def _covered(
    streams: Any, times: Any, extra: np.ndarray, first: np.ndarray, walk: np.ndarray, low: int, high: int
) -> int:
    """Nanoseconds of [low, high) in which an interval of a stream runs; moves ``first`` past what ended before."""
    for k in range(first.size):
        at = first[k]
        while _interval(streams, times, extra, k, at)[1] <= low:
            at += 1
        first[k] = at
        walk[k] = at
    total, reached = 0, low
    while reached < high:
        best_start, best_end = NEVER, NEVER
        for k in range(first.size):
            start, end = _interval(streams, times, extra, k, walk[k])
            while end <= reached:
                walk[k] += 1
                start, end = _interval(streams, times, extra, k, walk[k])
            if start < best_start:
                best_start, best_end = start, end
        if best_start >= high:
            break
        begin = max(reached, best_start)
        reached = min(high, best_end)
        total += reached - begin
    return total
