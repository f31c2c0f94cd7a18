"""Start times by a worklist where both ways of an edge share a private channel: any rows, no event heap.

A lane runs until its next input is unknown. A channel takes the transfer that is ready first, forwards before backwards
(``docs/theory/judge.md``, section 4; ALGORITHMS A.1), as soon as nothing earlier can come the other way: the other
sender waits for this very channel, or cannot make anything by then. The earliest of all waiting transfers can always be
taken, because whatever is made later follows an arrival. Valid where every stage lies on one lane and what sends takes
time. O(operations), and a look over the channels for each time that nothing else goes on.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.judge.clocks.worklist import bucket_starts
from penstock.solvers.judge.operation_tables import (
    CHANNEL,
    DURATION,
    FLOW,
    FLOW_NS,
    INPUT,
    LINES,
    NOWHERE,
    OTHER,
    OUTPUT,
    STAGE,
)
from penstock.solvers.model.schedule import STEP

NEVER = 2**62
AHEAD = 6
"""Operations of the other sender that are looked at to see when it could send."""


class Walk(NamedTuple):
    """Where a run stands; S stages, which are slots, L lanes.

    ``arrived``: when inputs arrive, -1 before that is known. ``position`` and ``time`` (L,). ``start``, ``sent``,
    ``order`` as the judge has them, ``tail`` of each flow. What waits for channels: ``ready`` and ``maker`` by sender
    and way, of which ``made`` (2, S) came and ``taken`` (2, S) went; the edge behind stage s is ``free`` (S,).
    Lanes to ``visit``, whether they are ``listed``; the stages of lane l are ``own[own_start[l] :]``.
    """

    arrived: np.ndarray
    position: np.ndarray
    time: np.ndarray
    start: np.ndarray
    sent: np.ndarray
    order: np.ndarray
    tail: np.ndarray
    ready: np.ndarray
    maker: np.ndarray
    made: np.ndarray
    taken: np.ndarray
    free: np.ndarray
    visit: np.ndarray
    listed: np.ndarray
    waiting: np.ndarray
    own: np.ndarray
    own_start: np.ndarray


@compiled
def run_half(
    flows: Any, chains: Any, lanes: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(position and time reached by each lane, operation starts, transfer starts, order of each flow, bucket starts).

    A lane whose position is below its number of operations is blocked for ever.
    """
    stages = flows.base.size - 1
    total = flows.base[stages]
    num_lanes = lanes.lane_start.size - 1
    transfers = flows.flow_offset[flows.flow_offset.size - 1]
    walk = Walk(
        np.full(2 * total, -1, dtype=np.int64),
        lanes.lane_start[:-1].copy(),
        np.zeros(num_lanes, dtype=np.int64),
        np.empty(lanes.batch.size, dtype=np.int64),
        np.empty(transfers, dtype=np.int64),
        np.empty(transfers, dtype=np.int32),
        flows.flow_offset.copy(),
        np.empty(2 * total, dtype=np.int64),
        np.empty(2 * total, dtype=np.int64),
        np.zeros((2, stages), dtype=np.int64),
        np.zeros((2, stages), dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        np.arange(num_lanes),
        np.ones(num_lanes, dtype=np.bool_),
        np.asarray([0, num_lanes]),
        np.empty(stages, dtype=np.int64),
        np.zeros(num_lanes + 1, dtype=np.int64),
    )
    _sort_stages(lanes, walk)
    _work(flows, lanes, walk)
    bucket_start = np.zeros(chains.bucket_ns.size, dtype=np.int64)
    if bucket_start.size > 0:
        bucket_starts(chains, lanes, walk.start, bucket_start)
    return walk.position, walk.time, walk.start, walk.sent, walk.order, bucket_start


@loop
def _sort_stages(lanes: Any, walk: Walk) -> None:
    count = 0
    for lane in range(walk.own_start.size - 1):
        walk.own_start[lane] = count
        for s in range(walk.own.size):
            if lanes.slot_lane[s] == lane:
                walk.own[count] = s
                count += 1
    walk.own_start[walk.own_start.size - 1] = count


@loop
def _work(flows: Any, lanes: Any, walk: Walk) -> None:
    size, stages = walk.visit.size, walk.free.size
    while True:
        while walk.waiting[1] > 0:
            head = walk.waiting[0]
            lane = walk.visit[head]
            walk.waiting[0] = head + 1 if head + 1 < size else 0
            walk.waiting[1] -= 1
            walk.listed[lane] = False
            _run(flows, lanes, walk, lane)
            for k in range(walk.own_start[lane], walk.own_start[lane + 1]):
                s = walk.own[k]
                for edge in range(max(0, s - 1), min(s + 1, stages - 1)):
                    _send(flows, lanes, walk, edge)
        if not _take_earliest(flows, lanes, walk):
            break


@inner
def _wake(lanes: Any, walk: Walk, lane: int, place: int) -> None:
    """Visit a lane if its next operation waits for what came to this place of ``arrived``."""
    i = walk.position[lane]
    if walk.listed[lane] or i == lanes.lane_start[lane + 1]:
        return
    if lanes.table[lanes.row[i], INPUT] + lanes.batch[i] == place:
        walk.listed[lane] = True
        size = walk.visit.size
        tail = walk.waiting[0] + walk.waiting[1]
        walk.visit[tail if tail < size else tail - size] = lane
        walk.waiting[1] += 1


@inner
def _run(flows: Any, lanes: Any, walk: Walk, lane: int) -> None:
    """Run a lane until it blocks; what it makes waits for its channel, or is there at once."""
    t, i = walk.time[lane], walk.position[lane]
    stop, total = lanes.lane_start[lane + 1], flows.base[walk.free.size]
    while i < stop:
        row, m = lanes.row[i], lanes.batch[i]
        place = lanes.table[row, INPUT]
        if place != NOWHERE:
            a = walk.arrived[place + m]
            if a < 0:
                break
            t = max(t, a)
        walk.start[i] = t
        t += lanes.table[row, DURATION]
        place = lanes.table[row, OUTPUT]
        if place != NOWHERE:
            if lanes.table[row, FLOW] < 0:
                walk.arrived[place + m] = t
                target = lanes.slot_lane[lanes.table[row, OTHER]]
                if target != lane:
                    _wake(lanes, walk, target, place + m)
            else:
                s, way = lanes.table[row, STAGE], lanes.table[row, CHANNEL] & 1
                at = way * total + flows.base[s] + walk.made[way, s]
                walk.ready[at] = t
                walk.maker[at] = i
                walk.made[way, s] += 1
        i += 1
    walk.position[lane] = i
    walk.time[lane] = t


@inner
def _send(flows: Any, lanes: Any, walk: Walk, edge: int) -> None:
    """Take from an edge's two queues what can be taken for certain."""
    total = flows.base[walk.free.size]
    while True:
        forward, backward = walk.taken[0, edge], walk.taken[1, edge + 1]
        out, back = forward < walk.made[0, edge], backward < walk.made[1, edge + 1]
        if not out and not back:
            return
        if out:
            there = walk.ready[flows.base[edge] + forward]
        else:
            there = _soonest(lanes, walk, edge, 0, walk.ready[total + flows.base[edge + 1] + backward])
        home = walk.ready[total + flows.base[edge + 1] + backward] if back else _soonest(lanes, walk, edge, 1, there)
        way = 0 if there <= home else 1
        if not (back if way else out):
            return
        _take(flows, lanes, walk, way, edge + way)


@inner
def _soonest(lanes: Any, walk: Walk, edge: int, way: int, enough: int) -> int:
    """The sender of an edge's one way makes nothing for it before; NEVER if it waits for the other way of the edge."""
    s = edge + way
    lane = lanes.slot_lane[s]
    t, i = walk.time[lane], walk.position[lane]
    stop = lanes.lane_start[lane + 1]
    last = min(stop, i + AHEAD)
    while i < last and t <= enough:
        row = lanes.row[i]
        if lanes.table[row, STAGE] == s:
            place, kind = lanes.table[row, INPUT], row // 2 % (STEP + 1)
            if place != NOWHERE and (kind == FORWARD) == (way == 1) and walk.arrived[place + lanes.batch[i]] < 0:
                sender = (edge + 1 - way) * LINES + (FORWARD if way == 1 else BACKWARD) * 2 + row % 2
                if lanes.table[sender, FLOW] >= 0:
                    return NEVER
        t += lanes.table[row, DURATION]
        if lanes.table[row, STAGE] == s and lanes.table[row, FLOW] >= 0 and lanes.table[row, CHANNEL] & 1 == way:
            return t
        i += 1
    return NEVER if i == stop else t


@inner
def _take(flows: Any, lanes: Any, walk: Walk, way: int, s: int) -> None:
    """The channel carries what stage s has made first of what waits."""
    at = way * flows.base[walk.free.size] + flows.base[s] + walk.taken[way, s]
    walk.taken[way, s] += 1
    i = walk.maker[at]
    row, m = lanes.row[i], lanes.batch[i]
    flow = lanes.table[row, FLOW]
    t = max(walk.free[s - way], walk.ready[at])
    walk.sent[walk.tail[flow]] = t
    walk.order[walk.tail[flow]] = m
    walk.tail[flow] += 1
    t += lanes.table[row, FLOW_NS]
    walk.free[s - way] = t
    place = lanes.table[row, OUTPUT] + m
    walk.arrived[place] = t
    _wake(lanes, walk, lanes.slot_lane[lanes.table[row, OTHER]], place)


@inner
def _take_earliest(flows: Any, lanes: Any, walk: Walk) -> bool:
    """Take the earliest of all waiting transfers, if there is one."""
    first, stage, its_way = NEVER, -1, 0
    total = flows.base[walk.free.size]
    for edge in range(walk.free.size - 1):
        for way in range(2):
            s = edge + way
            if walk.taken[way, s] < walk.made[way, s]:
                ready = walk.ready[way * total + flows.base[s] + walk.taken[way, s]]
                if ready < first:
                    first, stage, its_way = ready, s, way
    if stage >= 0:
        _take(flows, lanes, walk, its_way, stage)
    return stage >= 0
