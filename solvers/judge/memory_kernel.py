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
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.judge.operation_tables import DURATION

never_negative(__name__)

ADDED_KEPT, ADDED_BUFFERS, WORKSPACE = 0, 1, 2
GRADIENTS, KEPT, BUFFERS, WORK = 0, 1, 2, 3
PARTS = 4


@Fields.register
class Streams(NamedTuple):
    """Flows that lanes send or receive; lane l's are from ``begin[l]`` to ``begin[l + 1]``.

    Lane l sends the flows before ``received[l]``, each transfer of ``size`` bytes. Only micro-batches of ``replica``
    modulo ``replicas`` are the lane's. ``first`` to ``stop`` are the flow's places in the order of sending.
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
    """Bytes by operation, static bytes by lane, and three sorted lists for each lane.

    ``size``: by (slot, kind, row class, 0 start or 1 end), the bytes that the start or end adds to kept activations and
    to buffers, and the workspace from then on.

    ``changes``, lane l's from ``change_begin[l]`` on: changes of its gradients, and of the bytes that steps after its
    row need while they run (time, bytes, bytes). Likewise its optimizer ``steps`` and ``reductions`` (start, end). Each
    list ends with an entry at NEVER_NS.
    """

    size: np.ndarray
    static: np.ndarray
    change_begin: np.ndarray
    changes: np.ndarray
    step_begin: np.ndarray
    steps: np.ndarray
    reduction_begin: np.ndarray
    reductions: np.ndarray


class Merge(NamedTuple):
    """The state of a merge: next place and time of each stream; bytes at the first peak."""

    place: np.ndarray
    head: np.ndarray
    peak: np.ndarray


@compiled
def all_peaks(
    lanes: Any, streams: Any, costs: Any, posted: Any, times: Any, begin: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each lane's bytes at its first peak (gradients, kept, buffers, workspace), and busy and communication ns.

    Times between ``begin`` and ``last`` count.
    """
    num_lanes = lanes.lane_start.size - 1
    peaks = np.zeros((num_lanes, PARTS), dtype=np.int64)
    spent = np.zeros((num_lanes, 2), dtype=np.int64)
    walk = _new_walk(streams)
    for lane in range(num_lanes):
        _find_peak(lanes, streams, costs, posted, times, walk, lane)
        for part in range(PARTS):  # numba takes two seconds to compile an assignment of arrays
            peaks[lane, part] = walk.peak[part]
        spent[lane, 0], spent[lane, 1] = _communication(lanes, streams, costs, times, walk, lane, begin, last)
    return peaks, spent


@compiled
def lane_curve(lanes: Any, streams: Any, costs: Any, posted: Any, times: Any, lane: int) -> np.ndarray:
    """Return (2, n): the times from 0 on at which the lane's memory changes, and its bytes from then on."""
    low, high = streams.begin[lane], streams.received[lane]
    operations = lanes.lane_start[lane + 1] - lanes.lane_start[lane]
    length = 2 * operations + 1 + costs.change_begin[lane + 1] - costs.change_begin[lane]
    length += (streams.stop[low:high] - streams.first[low:high]).sum()
    curve = np.empty((2, length), dtype=np.int64)
    written = _write_curve(lanes, streams, costs, posted, times, _new_walk(streams), lane, curve)
    return curve[:, :written].copy()


@compiled
def _new_walk(streams: Any) -> Merge:
    count = streams.size.size
    return Merge(np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64), np.zeros(PARTS, dtype=np.int64))


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
    """Return the stream whose next event is the earliest, and that event's time."""
    which, t = -1, NEVER_NS
    for k in range(low, high):
        head = walk.head[k]
        which = k if head < t else which
        t = min(t, head)
    return which, t


@loop
def _find_peak(lanes: Any, streams: Any, costs: Any, posted: Any, times: Any, walk: Any, lane: int) -> None:
    """Write a lane's bytes at its first peak.

    Only the lane's operations and steps can raise its bytes, so only their starts and ends are searched.
    """
    low, high = streams.begin[lane], streams.received[lane]
    for k in range(low, high):
        walk.place[k] = streams.first[k]
        _head(streams, posted.freed, posted.order, walk, k)
    first, stop = lanes.lane_start[lane], lanes.lane_start[lane + 1]
    change = costs.change_begin[lane]
    fixed, kept, buffers, work, stepping, highest = costs.static[lane], 0, posted.first[lane], 0, 0, -1
    static = fixed
    for part in range(PARTS):
        walk.peak[part] = 0
    if (times.start[first] if first < stop else costs.changes[change, 0]) > 0:
        highest = static + buffers
        walk.peak[BUFFERS] = buffers
    for i in range(first, stop):
        line, t = 2 * lanes.row[i], times.start[i]
        change, fixed, stepping = _changed(costs, change, t, fixed, stepping)
        kept += costs.size[line, ADDED_KEPT]
        buffers += costs.size[line, ADDED_BUFFERS]
        work = costs.size[line, WORKSPACE]
        end = t + lanes.table[lanes.row[i], DURATION]
        if t < end and fixed + kept + buffers + work + stepping > highest:
            buffers = _without_sent(streams, posted, walk, low, high, t, buffers)
            highest = _note_peak(walk, highest, static, fixed - static, kept, buffers, work + stepping)
        change, fixed, stepping = _changed(costs, change, end, fixed, stepping)
        kept += costs.size[line + 1, ADDED_KEPT]
        buffers += costs.size[line + 1, ADDED_BUFFERS] + posted.size[i]
        work = costs.size[line + 1, WORKSPACE]
        following = times.start[i + 1] if i + 1 < stop else costs.changes[change, 0]
        if end < following and fixed + kept + buffers + work + stepping > highest:
            buffers = _without_sent(streams, posted, walk, low, high, end, buffers)
            highest = _note_peak(walk, highest, static, fixed - static, kept, buffers, work + stepping)
    while costs.changes[change, 0] < NEVER_NS:
        t = costs.changes[change, 0]
        change, fixed, stepping = _changed(costs, change, t, fixed, stepping)
        if fixed + kept + buffers + work + stepping > highest:
            buffers = _without_sent(streams, posted, walk, low, high, t, buffers)
            highest = _note_peak(walk, highest, static, fixed - static, kept, buffers, work + stepping)


@inner
def _changed(costs: Any, change: int, t: int, fixed: int, stepping: int) -> tuple[int, int, int]:
    """Apply the changes of gradients and of steps' bytes at ``t``; return the next change, and both sizes after it."""
    while costs.changes[change, 0] == t:
        fixed += costs.changes[change, 1]
        stepping += costs.changes[change, 2]
        change += 1
    return change, fixed, stepping


@inner
def _without_sent(streams: Any, posted: Any, walk: Any, low: int, high: int, t: int, buffers: int) -> int:
    """Return the buffers' bytes without the buffers of messages that have passed by ``t``."""
    for k in range(low, high):
        while walk.head[k] <= t:
            buffers -= streams.size[k]
            walk.place[k] += 1
            _head(streams, posted.freed, posted.order, walk, k)
    return buffers


@inner
def _note_peak(walk: Any, highest: int, static: int, gradients: int, kept: int, buffers: int, work: int) -> int:
    """Write the parts of a lane's bytes if their sum is more than ``highest``; return the new highest."""
    reached = static + gradients + kept + buffers + work
    if reached <= highest:
        return highest
    walk.peak[GRADIENTS], walk.peak[KEPT], walk.peak[BUFFERS], walk.peak[WORK] = gradients, kept, buffers, work
    return reached


@loop
def _write_curve(
    lanes: Any, streams: Any, costs: Any, posted: Any, times: Any, walk: Any, lane: int, curve: np.ndarray
) -> int:
    """Write a lane's bytes from each time on at which they change; return the number of such times."""
    low, high = streams.begin[lane], streams.received[lane]
    for k in range(low, high):
        walk.place[k] = streams.first[k]
        _head(streams, posted.freed, posted.order, walk, k)
    i, stop = lanes.lane_start[lane], lanes.lane_start[lane + 1]
    change, running = costs.change_begin[lane], 0
    level, work = costs.static[lane] + posted.first[lane], 0
    next_ns = times.start[i] if i < stop else costs.changes[change, 0]
    curve[0, 0], curve[1, 0], written = 0, level, 1
    which, other = _least(walk, low, high)
    while True:
        t = min(next_ns, NEVER_NS - 1)
        while other <= t:
            freed = other
            level -= streams.size[which]
            walk.place[which] += 1
            _head(streams, posted.freed, posted.order, walk, which)
            which, other = _least(walk, low, high)
            if freed < min(t, other):
                written = _note(curve, written, freed, level + work)
        if next_ns == NEVER_NS:
            return written
        while costs.changes[change, 0] == t:
            level += costs.changes[change, 1] + costs.changes[change, 2]
            change += 1
        if i == stop:
            next_ns = costs.changes[change, 0]
        else:
            line = 2 * lanes.row[i] + running
            level += costs.size[line, ADDED_KEPT] + costs.size[line, ADDED_BUFFERS]
            work = costs.size[line, WORKSPACE]
            next_ns = t + lanes.table[lanes.row[i], DURATION]
            if running:
                level += posted.size[i]
                i += 1
                next_ns = times.start[i] if i < stop else costs.changes[change, 0]
            running = 1 - running
        if next_ns > t:
            written = _note(curve, written, t, level + work)


@inner
def _note(curve: np.ndarray, written: int, t: int, reached: int) -> int:
    """Write the lane's bytes from ``t`` on, if they have changed; return the curve's new end."""
    if curve[1, written - 1] == reached:
        return written
    written -= 1 if curve[0, written - 1] == t else 0
    curve[0, written], curve[1, written] = t, reached
    return written + 1


@loop
def _communication(
    lanes: Any, streams: Any, costs: Any, times: Any, walk: Any, lane: int, begin: int, last: int
) -> tuple[int, int]:
    """Return the ns in which a lane computes, and in which it only has transfers or reductions running.

    It only communicates in the gaps between its operations: up to ``reach``, the end of the last transfer or reduction
    that has begun, or else from the next one's start. Received transfers are checked first, as they mostly fill the
    gap.
    """
    low, high = streams.begin[lane], streams.begin[lane + 1]
    for k in range(low, high):
        walk.place[k] = streams.first[k]
        _head(streams, times.sent, times.order, walk, k)
    i, stop = lanes.lane_start[lane], lanes.lane_start[lane + 1]
    step, reduction = costs.step_begin[lane], costs.reduction_begin[lane]
    busy, alone, free, reach = 0, 0, begin, begin
    while True:
        next_ns = times.start[i] if i < stop else costs.steps[step, 0]
        end = min(next_ns, last)
        while free < end:
            if reach <= free:
                while costs.reductions[reduction, 0] <= free:
                    reach = max(reach, costs.reductions[reduction, 1])
                    reduction += 1
                following = costs.reductions[reduction, 0]
                for k in range(high - 1, low - 1, -1):
                    while walk.head[k] <= free:
                        reach = max(reach, walk.head[k] + streams.duration[k])
                        walk.place[k] += 1
                        _head(streams, times.sent, times.order, walk, k)
                    following = min(following, walk.head[k])
                    if reach >= end:
                        break
                if reach <= free:
                    free = min(end, following)
                    continue
            alone += min(end, reach) - free
            free = min(end, reach)
        if next_ns >= last:
            return busy, alone
        if i < stop:
            end = next_ns + lanes.table[lanes.row[i], DURATION]
            i += 1
        else:
            end = costs.steps[step, 1]
            step += 1
        busy += max(0, min(end, last) - max(next_ns, begin))
        free = max(free, end)
