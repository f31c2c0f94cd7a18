"""Partial schedules of a suffix of a pipeline: the possible next operations, and their effects (BOUNDS Part II, 1.5).

The suffix problem: n equal micro-batches go down the stages of a suffix and back, at most ``limit[s]`` of them between
the start of their forward and the end of their backward on stage s. A state is a row of counts (micro-batches forward
on s, backward on s, sent down edge e, sent up edge e; edge e lies after stage e; then the kind that s has decided to
run next, as the judge runs rows) and a row of times: when each stage is free, when each edge is (shared by both
directions, or down), when it is upwards, and for each micro-batch on its way when it is ready for its next operation.
Equal micro-batches go in index order (exchange two).

Times are raised to their least possible values, so that states compare better; every number stays a lower bound.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import inner
from penstock.solvers.compiled.fields import Fields

DELAY, QUEUE, SHARED, JUDGED = 0, 1, 2, 3
"""Kinds of an edge's channel in one direction: time alone, a separate channel, or one channel for both directions.

The shared channel carries in any order or, as the judge's, first the micro-batch that is ready first, and of two that
are ready at once the forward.
"""

EITHER, FORWARD_NEXT, BACKWARD_NEXT = 0, 1, 2
"""Kinds of the next operation of a stage, where that is decided."""


@Fields.register
class Line(NamedTuple):
    """A pipeline as kernels need it: (S,) int64, times in ns; edge e from stage e to e + 1 (the last one unused).

    ``tail`` is the least time after the end of a stage's last backward, ``after`` the time after it on the stage
    itself. ``phi[s, n]``: n consecutive micro-batches take at least so long on the suffix from s, first start to last
    end.
    """

    forward: np.ndarray
    backward: np.ndarray
    out: np.ndarray
    home: np.ndarray
    lane: np.ndarray
    limit: np.ndarray
    tail: np.ndarray
    after: np.ndarray
    phi: np.ndarray


@Fields.register
class Scratch(NamedTuple):
    """(S,) each: the earliest ends of each stage's next forward and next backward in the state at hand."""

    forward_end: np.ndarray
    backward_end: np.ndarray


@inner
def ready_forward(line: Line, counts: np.ndarray, times: np.ndarray, r: int, s: int, n: int, mask: int) -> int:
    """Return when stage s could begin its next forward; -1: not before another operation is scheduled."""
    stages = line.forward.size
    m = counts[r, s]
    if m >= n or m - counts[r, stages + s] >= line.limit[s] or counts[r, 4 * stages + s] == BACKWARD_NEXT:
        return -1
    if s == 0:
        return times[r, s]
    if m >= counts[r, 2 * stages + s - 1]:
        return -1
    return max(times[r, s], times[r, 3 * stages + (m & mask)])


@inner
def ready_backward(line: Line, counts: np.ndarray, times: np.ndarray, r: int, s: int, n: int, mask: int) -> int:
    """Return when stage s could begin its next backward; -1: not before another operation is scheduled."""
    stages = line.forward.size
    m = counts[r, stages + s]
    arrived = counts[r, s] if s == stages - 1 else counts[r, 3 * stages + s]
    if m >= n or m >= arrived or counts[r, 4 * stages + s] == FORWARD_NEXT:
        return -1
    return max(times[r, s], times[r, 3 * stages + (m & mask)])


@inner
def ready_out(line: Line, counts: np.ndarray, times: np.ndarray, r: int, e: int, mask: int) -> int:
    """Return when the shared channel after stage e could begin to send down; -1: nothing waits."""
    stages = line.forward.size
    m = counts[r, 2 * stages + e]
    if m >= counts[r, e]:
        return -1
    return max(times[r, stages + e], times[r, 3 * stages + (m & mask)])


@inner
def ready_home(line: Line, counts: np.ndarray, times: np.ndarray, r: int, e: int, mask: int) -> int:
    """Return when the shared channel after stage e could begin to send up; -1: nothing waits."""
    stages = line.forward.size
    m = counts[r, 3 * stages + e]
    if m >= counts[r, stages + e + 1]:
        return -1
    return max(times[r, stages + e], times[r, 3 * stages + (m & mask)])


@inner
def apply(line: Line, counts: np.ndarray, times: np.ndarray, r: int, action: int, start: int, mask: int) -> None:
    """Run operation ``action`` (class x S + stage or edge) at ``start``; separate channels carry at once."""
    stages = line.forward.size
    what, s = action // stages, action % stages
    m = counts[r, action]
    counts[r, action] = m + 1
    if what < 2:
        counts[r, 4 * stages + s] = EITHER
    token = 3 * stages + (m & mask)
    if what == 0:
        end = start + line.forward[s]
        times[r, s] = end
        if s < stages - 1 and line.lane[s] < SHARED:
            if line.lane[s] == QUEUE:
                end = max(end, times[r, stages + s]) + line.out[s]
                times[r, stages + s] = end
            else:
                end += line.out[s]
            counts[r, 2 * stages + s] = m + 1
    elif what == 1:
        end = start + line.backward[s]
        times[r, s] = end
        if s == 0:
            end = 0
        elif line.lane[s - 1] < SHARED:
            if line.lane[s - 1] == QUEUE:
                end = max(end, times[r, 2 * stages + s - 1]) + line.home[s - 1]
                times[r, 2 * stages + s - 1] = end
            else:
                end += line.home[s - 1]
            counts[r, 3 * stages + s - 1] = m + 1
    else:
        end = start + (line.out[s] if what == 2 else line.home[s])
        times[r, stages + s] = end
    times[r, token] = end


@inner
def settle(line: Line, counts: np.ndarray, times: np.ndarray, r: int, scratch: Scratch, n: int, mask: int) -> int:
    """Raise the state's times to their least possible values; return the least time of any completion of it."""
    _next_ends(line, counts, times, r, scratch, n, mask)
    stages, bound = line.forward.size, 0
    for s in range(stages):
        forwards, backwards = counts[r, s], counts[r, stages + s]
        tail, f, b = line.tail[s], line.forward[s], line.backward[s]
        if backwards == n:
            bound = max(bound, times[r, s] + tail)
            continue
        begin = scratch.backward_end[s] - b
        free = begin
        if forwards < n:
            start = scratch.forward_end[s] - f
            free = min(free, start)
            bound = max(bound, start + line.phi[s, n - forwards] + tail)
        free = max(free, times[r, s])
        times[r, s] = free
        work = (n - forwards) * f + (n - backwards) * b
        most = min(line.limit[s] - forwards + backwards, n - forwards) * f
        bound = max(bound, begin + work - min(begin - free, most) + tail)
        if s > 0:
            arrived, start = counts[r, 2 * stages + s - 1], scratch.forward_end[s] - f
            for m in range(forwards, arrived):
                token = 3 * stages + (m & mask)
                times[r, token] = start = max(start, times[r, token])
                bound = max(bound, start + line.phi[s, n - m] + tail)
                start += f
        arrived = forwards if s == stages - 1 else counts[r, 3 * stages + s]
        bound = max(bound, _after_backward(line, s, begin, backwards, n) + tail)
        for m in range(backwards, arrived):
            token = 3 * stages + (m & mask)
            times[r, token] = begin = max(begin, times[r, token])
            bound = max(bound, _after_backward(line, s, begin, m, n) + tail)
            begin += b
        if s < stages - 1 and line.lane[s] >= SHARED:
            bound = max(bound, _settle_channel(line, counts, times, r, s, n, mask))
    return bound


@inner
def _after_backward(line: Line, s: int, begin: int, m: int, n: int) -> int:
    """Return the earliest end of stage s when its backward of micro-batch m begins at ``begin`` at the earliest."""
    rest = (n - m) * line.backward[s]
    after = n - m - line.limit[s]
    if after > 0:
        rest = max(rest, line.backward[s] + line.phi[s, after])
    return begin + rest


@inner
def _settle_channel(line: Line, counts: np.ndarray, times: np.ndarray, r: int, e: int, n: int, mask: int) -> int:
    stages = line.forward.size
    free = times[r, stages + e]
    sent, returned = counts[r, 2 * stages + e], counts[r, 3 * stages + e]
    bound = 0
    if returned < n:
        load = (n - sent) * line.out[e] + (n - returned) * line.home[e]
        bound = free + load + line.backward[e] + line.tail[e]
    start = free
    for m in range(sent, counts[r, e]):
        token = 3 * stages + (m & mask)
        start = max(start, times[r, token])
        if line.lane[e] == SHARED:
            times[r, token] = start
        start += line.out[e]
        bound = max(bound, start + line.phi[e + 1, n - m] + line.tail[e + 1])
    start = free
    for m in range(returned, counts[r, stages + e + 1]):
        token = 3 * stages + (m & mask)
        start = max(start, times[r, token])
        if line.lane[e] == SHARED:
            times[r, token] = start
        start += line.home[e]
        bound = max(bound, _after_backward(line, e, start, m, n) + line.tail[e])
    return bound


@inner
def _next_ends(line: Line, counts: np.ndarray, times: np.ndarray, r: int, scratch: Scratch, n: int, mask: int) -> None:
    """Write the earliest ends of each stage's next forward and backward, along the ways of their micro-batches.

    Down first without the limits in flight, then up, then down with them: a stage that is full waits for a backward.
    """
    stages = line.forward.size
    ends, back_ends = scratch.forward_end, scratch.backward_end
    for s in range(stages):
        m = counts[r, s]
        start = times[r, s]
        if m < n and s > 0:
            if counts[r, 2 * stages + s - 1] > m:
                start = max(start, times[r, 3 * stages + (m & mask)])
            else:
                ready = times[r, 3 * stages + (m & mask)] if counts[r, s - 1] > m else ends[s - 1]
                start = max(start, max(ready, times[r, stages + s - 1]) + line.out[s - 1])
        ends[s] = start + line.forward[s]
    for s in range(stages - 1, -1, -1):
        m = counts[r, stages + s]
        start = times[r, s]
        if m < n:
            if s == stages - 1:
                start = max(start, times[r, 3 * stages + (m & mask)] if counts[r, s] > m else ends[s])
            elif counts[r, 3 * stages + s] > m:
                start = max(start, times[r, 3 * stages + (m & mask)])
            else:
                ready = times[r, 3 * stages + (m & mask)] if counts[r, stages + s + 1] > m else back_ends[s + 1]
                free = times[r, stages + s] if line.lane[s] >= SHARED else times[r, 2 * stages + s]
                start = max(start, max(ready, free) + line.home[s])
            if counts[r, 4 * stages + s] == FORWARD_NEXT:
                start = max(start, ends[s])
        back_ends[s] = start + line.backward[s]
    for s in range(stages):
        m = counts[r, s]
        if m >= n:
            continue
        if m - counts[r, stages + s] >= line.limit[s] or counts[r, 4 * stages + s] == BACKWARD_NEXT:
            ends[s] = max(ends[s], back_ends[s] + line.forward[s])
        if s > 0 and counts[r, s - 1] == m:
            ends[s] = max(ends[s], max(ends[s - 1], times[r, stages + s - 1]) + line.out[s - 1] + line.forward[s])
