"""List scheduling by kinds: a free lane takes the first kind of its ranking that is ready and has room.

Micro-batches go through each stage in order. A forward leaves the room that one micro-batch needs on each later stage
of its lane, so that the oldest micro-batch can always go on: nothing waits for ever (``schedules.overtaking``).
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled
from penstock.solvers.compiled.heap import pop, push
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.schedules.support.overtaking_kernel import PARTS


class Jobs(NamedTuple):
    """Operations number q M + m: entry q = (stage, kind) of micro-batch m; Q entries, L lanes, M micro-batches.

    By operation: ``duration_ns``, ``taken``, ``freed``, ``behind`` (QM, 2), ``lag_ns`` (QM, 2), ``waits_for``. By
    entry: its ``lane``, and ``kept``, the room that it leaves for later stages. ``ranking`` (L, entries of a lane): the
    preferred ones first; ``room`` (L,).
    """

    duration_ns: np.ndarray
    taken: np.ndarray
    freed: np.ndarray
    behind: np.ndarray
    lag_ns: np.ndarray
    waits_for: np.ndarray
    lane: np.ndarray
    kept: np.ndarray
    ranking: np.ndarray
    room: np.ndarray


@compiled
def run_construct(jobs: Jobs, number: int, patience: int) -> np.ndarray:
    """When each operation starts, -1 for what never does; (QM,) int64.

    ``patience``: an operation runs only where none that is preferred is known to be ready within so many quarters of
    its duration.
    """
    duration, taken, freed, behind, lag = jobs.duration_ns, jobs.taken, jobs.freed, jobs.behind, jobs.lag_ns
    lane_of, kept, ranking, room = jobs.lane, jobs.kept, jobs.ranking, jobs.room
    count, lanes = len(duration), len(room)
    missing = jobs.waits_for.copy()
    ready = np.zeros(count, dtype=np.int64)
    start = np.full(count, -1, dtype=np.int64)
    done = np.zeros(len(lane_of), dtype=np.int64)
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
        soon, chosen = NEVER_NS // PARTS, -1
        for k in range(ranking.shape[1]):
            q = ranking[lane, k]
            op = q * number + done[q]
            if done[q] == number or missing[op] > 0:
                continue
            if taken[op] > 0 and held[lane] + taken[op] + kept[q] > room[lane]:
                continue
            if ready[op] > now:
                soon = min(soon, ready[op])
            elif (soon - now) * PARTS >= duration[op] * patience:
                chosen = op
                break
        if chosen < 0:
            continue
        done[chosen // number] += 1
        start[chosen] = now
        end = now + duration[chosen]
        free[lane] = end
        held[lane] += taken[chosen] - freed[chosen]
        push(times, which, 0, size, end, lane)
        size += 1
        for k in range(2):
            other = behind[chosen, k]
            if other >= 0:
                ready[other] = max(ready[other], end + lag[chosen, k])
                missing[other] -= 1
                if missing[other] == 0:
                    push(times, which, 0, size, ready[other], lane_of[other // number])
                    size += 1
    return start
