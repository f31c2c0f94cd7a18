"""List scheduling: at the earliest time at which a lane is free it starts an operation, until nothing can start.

The operation to start is chosen in one of two ways, and in both nothing waits for ever (``schedules.overtaking``).

Each lane may have a *list* that can run as it stands, of which it takes the first operation that is ready. An operation
from further back may not use memory that the operations before it will need, nor delay an operation before it that
will soon be ready. So the remaining lists can always run.

Or each lane has a *ranking* of (stage, kind) pairs, and takes the first that is ready and has memory. Micro-batches go
through each stage in order. A forward leaves the memory that one micro-batch needs on each later stage of its lane, so
that the oldest micro-batch can always go on.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.compiled.heap import pop, push
from penstock.solvers.costs.infinity import NEVER_NS

PARTS = 4
"""The unit of ``patience``: quarters of an operation's duration."""
HORIZON_NS = NEVER_NS // PARTS


@Fields.register
class Jobs(NamedTuple):
    """N operations on L lanes.

    - ``lane`` (N,); ``room`` (L,): the free memory.
    - ``need``, ``freed`` (N,): bytes needed from the start and freed at the end of each operation.
    - ``following``, ``lag_ns`` (N, K): the operations that wait for it (-1: none), and the least time after its end.
    - ``waits_for`` (N,): the number of operations for which it waits.

    Lists: the operations of lane l are the ones from ``lane_start[l]`` on; ``movable`` (N,): whether it may overtake.

    Rankings, where ``number`` > 0: ``ranking`` (L, pairs), the preferred ones first. Micro-batch m of pair q is
    operation q ``number`` + m; ``kept`` by pair: the memory that it leaves for later stages.
    """

    lane: np.ndarray
    duration_ns: np.ndarray
    need: np.ndarray
    freed: np.ndarray
    following: np.ndarray
    lag_ns: np.ndarray
    waits_for: np.ndarray
    room: np.ndarray
    lane_start: np.ndarray = np.zeros(0, dtype=np.int64)
    movable: np.ndarray = np.zeros(0, dtype=np.bool_)
    number: int = 0
    ranking: np.ndarray = np.zeros((0, 0), dtype=np.int64)
    kept: np.ndarray = np.zeros(0, dtype=np.int64)


class Desk(NamedTuple):
    """The state of a run.

    - ``missing``: how many others an operation waits for, ``ready``: when it is ready, ``start``: when it starts.
    - ``free``: when a lane is free; ``resident``: the bytes that its operations hold.
    - ``at``: by lane, where its list begins, or by pair, how many operations are done.
    - ``following``: the next operation in lists.
    - ``times``, ``lanes``, ``size``: a heap of times and lanes, and its number of entries.
    """

    missing: np.ndarray
    ready: np.ndarray
    start: np.ndarray
    free: np.ndarray
    resident: np.ndarray
    at: np.ndarray
    following: np.ndarray
    times: np.ndarray
    lanes: np.ndarray
    size: np.ndarray


@compiled
def run_list(jobs: Jobs, patience: int) -> np.ndarray:
    """Return when each operation starts, -1 if it never does (rankings without enough memory); (N,) int64.

    ``patience``: an operation runs before another that it overtakes, or that is preferred, only where the other will
    not be ready within so many quarters of its duration.
    """
    count, lanes = len(jobs.lane), len(jobs.room)
    entries = (1 + jobs.following.shape[1]) * count + lanes
    desk = Desk(
        jobs.waits_for.copy(),
        np.zeros(count, dtype=np.int64),
        np.full(count, -1, dtype=np.int64),
        np.zeros(lanes, dtype=np.int64),
        np.zeros(lanes, dtype=np.int64),
        np.zeros(len(jobs.kept), dtype=np.int64) if jobs.number > 0 else jobs.lane_start[:-1].copy(),
        np.arange(1, count + 1),
        np.zeros(entries, dtype=np.int64),
        np.arange(entries),
        np.full(1, lanes, dtype=np.int64),
    )
    _run(jobs, patience, desk)
    return desk.start


@loop
def _run(jobs: Jobs, patience: int, desk: Desk) -> None:
    while desk.size[0] > 0:
        now, lane = desk.times[0], desk.lanes[0]
        pop(desk.times, desk.lanes, 0, desk.size[0])
        desk.size[0] -= 1
        if desk.free[lane] > now:
            continue
        op = _preferred(jobs, patience, desk, lane, now) if jobs.number else _first(jobs, patience, desk, lane, now)
        if op < 0:
            continue
        desk.start[op] = now
        end = now + jobs.duration_ns[op]
        desk.free[lane] = end
        desk.resident[lane] += jobs.need[op] - jobs.freed[op]
        _look_again(desk, end, lane)
        for k in range(jobs.following.shape[1]):
            other = jobs.following[op, k]
            if other >= 0:
                desk.ready[other] = max(desk.ready[other], end + jobs.lag_ns[op, k])
                desk.missing[other] -= 1
                if desk.missing[other] == 0:
                    _look_again(desk, desk.ready[other], jobs.lane[other])


@inner
def _look_again(desk: Desk, time: int, lane: int) -> None:
    push(desk.times, desk.lanes, 0, desk.size[0], time, lane)
    desk.size[0] += 1


@inner
def _first(jobs: Jobs, patience: int, desk: Desk, lane: int, now: int) -> int:
    """Take the first operation of a lane's list that may start, or -1."""
    level, peak, soon = desk.resident[lane], desk.resident[lane], HORIZON_NS
    before, op = -1, desk.at[lane]
    while op < jobs.lane_start[lane + 1]:
        has_inputs = desk.missing[op] == 0
        if has_inputs and desk.ready[op] <= now:
            if before < 0:
                desk.at[lane] = desk.following[op]
                return op
            fits = jobs.need[op] == 0 or peak + jobs.need[op] <= jobs.room[lane]
            if jobs.movable[op] and fits and (soon - now) * PARTS >= jobs.duration_ns[op] * patience:
                desk.following[before] = desk.following[op]
                return op
        level += jobs.need[op]
        peak = max(peak, level)
        level -= jobs.freed[op]
        if has_inputs:
            soon = min(soon, max(desk.ready[op], now))
        before, op = op, desk.following[op]
    return -1


@inner
def _preferred(jobs: Jobs, patience: int, desk: Desk, lane: int, now: int) -> int:
    """Take the first operation of a lane's ranking that is ready and has memory, or -1."""
    soon = HORIZON_NS
    for k in range(jobs.ranking.shape[1]):
        q = jobs.ranking[lane, k]
        op = q * jobs.number + desk.at[q]
        if desk.at[q] == jobs.number or desk.missing[op] > 0:
            continue
        if jobs.need[op] > 0 and desk.resident[lane] + jobs.need[op] + jobs.kept[q] > jobs.room[lane]:
            continue
        if desk.ready[op] > now:
            soon = min(soon, desk.ready[op])
        elif (soon - now) * PARTS >= jobs.duration_ns[op] * patience:
            desk.at[q] += 1
            return op
    return -1
