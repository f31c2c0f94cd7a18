"""List scheduling in which operations overtake what is not ready (``schedules.overtaking``).

Each lane has a list that can run as it stands. When it is free, it takes the first operation of its list that is
ready; what is taken from further behind may not need room that the operations before it will want, nor keep one of
them waiting that is known to be ready soon. So the lists that remain can always run: nothing waits for ever.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled
from penstock.solvers.compiled.heap import pop, push
from penstock.solvers.costs.infinity import NEVER_NS

PARTS = 4
"""``patience`` counts in quarters of an operation's duration."""


class Lists(NamedTuple):
    """N operations, in the order of their lanes' lists; L lanes.

    ``lane_start`` (L + 1,), ``lane`` (N,); ``taken``, ``freed`` (N,): bytes at the start and at the end of each;
    ``behind``, ``lag_ns`` (N, 2): the operations that wait for it (-1: none), and how long after its end they may
    start; ``waits_for`` (N,): how many it waits for itself; ``movable`` (N,): whether it may overtake; ``room`` (L,).
    """

    lane_start: np.ndarray
    lane: np.ndarray
    duration_ns: np.ndarray
    taken: np.ndarray
    freed: np.ndarray
    behind: np.ndarray
    lag_ns: np.ndarray
    waits_for: np.ndarray
    movable: np.ndarray
    room: np.ndarray


@compiled
def run_overtaking(lists: Lists, patience: int) -> np.ndarray:
    """When each operation starts; (N,) int64.

    ``patience``: an operation overtakes only where what it overtakes is not known to be ready within so many quarters
    of its duration.
    """
    lane_start, lane_of, duration, taken, freed, behind, lag, _waits, movable, room = lists
    count, lanes = len(lane_of), len(room)
    missing = lists.waits_for.copy()
    ready = np.zeros(count, dtype=np.int64)
    start = np.zeros(count, dtype=np.int64)
    following = np.arange(1, count + 1)
    head = lane_start[:-1].copy()
    free = np.zeros(lanes, dtype=np.int64)
    held = np.zeros(lanes, dtype=np.int64)
    times = np.empty(3 * count + lanes, dtype=np.int64)
    which = np.empty(3 * count + lanes, dtype=np.int64)
    size = 0
    for lane in range(lanes):
        push(times, which, 0, size, 0, lane)
        size += 1
    while size > 0:
        now, lane = times[0], which[0]
        pop(times, which, 0, size)
        size -= 1
        if free[lane] > now:
            continue
        level, peak, soon = held[lane], held[lane], NEVER_NS // PARTS
        before, op = -1, head[lane]
        found = False
        while op < lane_start[lane + 1]:
            known = missing[op] == 0
            if known and ready[op] <= now:
                if before < 0:
                    found = True
                elif movable[op]:
                    fits = taken[op] == 0 or peak + taken[op] <= room[lane]
                    found = fits and (soon - now) * PARTS >= duration[op] * patience
            if found:
                break
            level += taken[op]
            peak = max(peak, level)
            level -= freed[op]
            if known:
                soon = min(soon, max(ready[op], now))
            before = op
            op = following[op]
        if not found:
            continue
        if before < 0:
            head[lane] = following[op]
        else:
            following[before] = following[op]
        start[op] = now
        end = now + duration[op]
        free[lane] = end
        held[lane] += taken[op] - freed[op]
        push(times, which, 0, size, end, lane)
        size += 1
        for k in range(2):
            other = behind[op, k]
            if other >= 0:
                ready[other] = max(ready[other], end + lag[op, k])
                missing[other] -= 1
                if missing[other] == 0:
                    push(times, which, 0, size, ready[other], lane_of[other])
                    size += 1
    return start
