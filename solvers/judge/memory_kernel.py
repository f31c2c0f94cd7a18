"""Memory of lanes over time, and when they communicate without computing: merges of sorted lists of events.

Every source of events is sorted by itself: a lane's operations (at whose ends receives are posted), the ends of each
flow's messages (send buffers vanish), the ends of the optimizer steps. All events of one instant count together.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.judge.operation_tables import DURATION

ADDED_KEPT, ADDED_BUFFERS, WORKSPACE = 0, 1, 2
GRADIENTS, KEPT, BUFFERS, WORK = 0, 1, 2, 3


@Fields.register
class Streams(NamedTuple):
    """Flows that lanes send or receive, those of lane l from ``begin[l]`` to ``begin[l + 1]``.

    It sends those before ``received[l]``, each transfer of ``size`` bytes. Only micro-batches of ``replica`` modulo
    ``replicas`` are the lane's. ``first`` to ``stop`` are the flow's places in the order of sending.
    """

    begin: np.ndarray
    received: np.ndarray
    size: np.ndarray
    duration: np.ndarray
    replica: np.ndarray
    replicas: np.ndarray
    first: np.ndarray
    stop: np.ndarray


@Fields.register
class Costs(NamedTuple):
    """Bytes by (slot, kind, row class, 0 start or 1 end); static bytes by lane; and three sorted lists for each lane.

    ``size`` has what the start or end adds to what is kept and to buffers, and the workspace from then on.

    ``changes`` of its gradients (time, bytes) from ``change_begin[l]`` on; likewise its optimizer ``steps`` and
    ``reductions`` (start, end). Each list ends with an entry that never comes.
    """

    size: np.ndarray
    static: np.ndarray
    change_begin: np.ndarray
    changes: np.ndarray
    step_begin: np.ndarray
    steps: np.ndarray
    reduction_begin: np.ndarray
    reductions: np.ndarray


class Walk(NamedTuple):
    """Where a merge stands: next place and time of each stream; bytes now and at the first peak."""

    place: np.ndarray
    head: np.ndarray
    now: np.ndarray
    peak: np.ndarray


@compiled
def all_peaks(
    lanes: Any, streams: Any, costs: Any, posted: Any, times: Any, begin: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each lane the bytes at its first peak (gradients, kept, buffers, workspace); busy and communication ns.

    The times are those between ``begin`` and ``last``.
    """
    num_lanes = lanes.lane_start.size - 1
    peaks = np.zeros((num_lanes, 4), dtype=np.int64)
    spent = np.zeros((num_lanes, 2), dtype=np.int64)
    walk = _new_walk(streams)
    empty = np.empty((2, 0), dtype=np.int64)
    for lane in range(num_lanes):
        _merge(lanes, streams, costs, posted, times, walk, lane, empty)
        peaks[lane] = walk.peak
        spent[lane, 0], spent[lane, 1] = _communication(lanes, streams, costs, times, walk, lane, begin, last)
    return peaks, spent


@compiled
def lane_curve(lanes: Any, streams: Any, costs: Any, posted: Any, times: Any, lane: int) -> np.ndarray:
    """(2, n): the times from 0 on at which the lane's memory changes, and its bytes from then on."""
    low, high = streams.begin[lane], streams.received[lane]
    operations = lanes.lane_start[lane + 1] - lanes.lane_start[lane]
    length = 2 * operations + 1 + costs.change_begin[lane + 1] - costs.change_begin[lane]
    length += (streams.stop[low:high] - streams.first[low:high]).sum()
    curve = np.empty((2, length), dtype=np.int64)
    written = _merge(lanes, streams, costs, posted, times, _new_walk(streams), lane, curve)
    return curve[:, :written].copy()


@compiled
def _new_walk(streams: Any) -> Walk:
    count = streams.size.size + 2
    return Walk(
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        np.zeros(4, dtype=np.int64),
    )


@inner
def _head(streams: Any, when: np.ndarray, order: np.ndarray, walk: Any, k: int) -> None:
    """Find the next transfer of the lane's replica in stream ``k``, and its time in ``when``."""
    place, last = walk.place[k], streams.stop[k]
    replicas = streams.replicas[k]
    if replicas > 1:
        while place < last and order[place] % replicas != streams.replica[k]:
            place += 1
        walk.place[k] = place
    walk.head[k] = NEVER_NS if place == last else when[place]


@inner
def _least(walk: Any, low: int, high: int) -> tuple[int, int]:
    """The stream whose next event is the earliest, and when."""
    which, t = -1, NEVER_NS
    for k in range(low, high):
        head = walk.head[k]
        which = k if head < t else which
        t = min(t, head)
    return which, t


@loop
def _merge(
    lanes: Any, streams: Any, costs: Any, posted: Any, times: Any, walk: Any, lane: int, curve: np.ndarray
) -> int:
    """Walk through a lane's events in time; writes the curve where it has room, and the first peak."""
    low, high = streams.begin[lane], streams.received[lane]
    for k in range(low, high):
        walk.place[k] = streams.first[k]
        _head(streams, posted.freed, posted.order, walk, k)
    static = costs.static[lane]
    level, written = static + posted.first[lane], 0
    record = curve.shape[1] > 0
    if record:
        curve[0, 0], curve[1, 0], written = 0, level, 1
    i, stop = lanes.lane_start[lane], lanes.lane_start[lane + 1]
    change = costs.change_begin[lane]
    gradients, kept, buffers, work, running = 0, 0, posted.first[lane], 0, 0
    row = lanes.row[i] if i < stop else 0
    own = times.start[i] if i < stop else costs.changes[change, 0]
    which, other = _least(walk, low, high)
    following = min(own, other)
    highest = level if following > 0 else -1
    walk.peak[:] = 0
    walk.peak[BUFFERS] = buffers
    while following != NEVER_NS:
        t = following
        if other == t:
            buffers -= streams.size[which]
            walk.place[which] += 1
            _head(streams, posted.freed, posted.order, walk, which)
            which, other = _least(walk, low, high)
        elif i < stop:
            while costs.changes[change, 0] == t:
                gradients += costs.changes[change, 1]
                change += 1
            kept += costs.size[2 * row + running, ADDED_KEPT]
            buffers += costs.size[2 * row + running, ADDED_BUFFERS] + (posted.size[i] if running else 0)
            work = costs.size[2 * row + running, WORKSPACE]
            own = t + lanes.table[row, DURATION]
            i += running
            running = 1 - running
            if running == 0:
                row = lanes.row[i] if i < stop else 0
                own = times.start[i] if i < stop else costs.changes[change, 0]
        else:
            gradients += costs.changes[change, 1]
            change += 1
            own = costs.changes[change, 0]
        following = min(own, other)
        if following == t:
            continue
        reached = static + gradients + kept + buffers + work
        if reached > highest:
            highest = reached
            walk.peak[GRADIENTS], walk.peak[KEPT], walk.peak[BUFFERS], walk.peak[WORK] = gradients, kept, buffers, work
        if record and reached != level:
            written -= 1 if curve[0, written - 1] == t else 0
            curve[0, written], curve[1, written] = t, reached
            written += 1
            level = reached
    return written


@loop
def _communication(
    lanes: Any, streams: Any, costs: Any, times: Any, walk: Any, lane: int, begin: int, last: int
) -> tuple[int, int]:
    """Nanoseconds in which a lane computes, and in which it does not while one of its transfers or reductions runs.

    It communicates alone only in the gaps between what it computes.
    """
    for k in range(streams.begin[lane], streams.begin[lane + 1]):
        walk.place[k] = streams.first[k]
        _head(streams, times.sent, times.order, walk, k)
    walk.place[streams.size.size] = costs.reduction_begin[lane]
    i, stop = lanes.lane_start[lane], lanes.lane_start[lane + 1]
    step = costs.step_begin[lane]
    busy, alone, free = 0, 0, begin
    while True:
        own = times.start[i] if i < stop else costs.steps[step, 0]
        if free < min(own, last):
            alone += _in_gap(streams, costs, times, walk, lane, free, min(own, last))
        if own >= last:
            return busy, alone
        if i < stop:
            end = own + lanes.table[lanes.row[i], DURATION]
            i += 1
        else:
            end = costs.steps[step, 1]
            step += 1
        busy += max(0, min(end, last) - max(own, begin))
        free = max(free, end)


@inner
def _in_gap(streams: Any, costs: Any, times: Any, walk: Any, lane: int, begin: int, end: int) -> int:
    """How much of a gap the lane's transfers and reductions cover together; each list is sorted by starts."""
    low, high, reduction = streams.begin[lane], streams.begin[lane + 1], walk.place[streams.size.size]
    for k in range(low, high):
        while walk.head[k] <= begin - streams.duration[k]:
            walk.place[k] += 1
            _head(streams, times.sent, times.order, walk, k)
    while costs.reductions[reduction, 1] <= begin:
        reduction += 1
    covered, reached = 0, begin
    while reached < end:
        which, t = _least(walk, low, high)
        if costs.reductions[reduction, 0] < t:
            t, stop = costs.reductions[reduction, 0], costs.reductions[reduction, 1]
            reduction += 1 if stop <= end else 0
        elif t < end:
            stop = t + streams.duration[which]
            if stop <= end:
                walk.place[which] += 1
                _head(streams, times.sent, times.order, walk, which)
        if t >= end:
            break
        covered += max(0, min(stop, end) - max(t, reached))
        reached = max(reached, min(stop, end))
    walk.place[streams.size.size] = reduction
    return covered
