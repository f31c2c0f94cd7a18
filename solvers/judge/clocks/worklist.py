"""Start times by a worklist: each lane runs until it blocks. Private channels need no event heap.

Valid where every stage lies on one lane and operations that send take time (or channels are pure delays). A lane runs
until the arrival of its next input is unknown. A one-way channel carries its lane's outputs at once. A channel for both
ways carries a transfer as soon as no earlier one can come the other way: the other sender waits for this very channel,
or has no output by then. When no lane can go on, the earliest of all waiting transfers is carried.

The rules are in ``docs/theory/judge.md``, section 4; ``docs/theory/solvers.md``, section D, shows why the times equal
the event heap's. O(operations), and a pass over the edges each time that no lane can go on.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.judge.clocks.chains import bucket_starts
from penstock.solvers.judge.clocks.channels import (
    FREE,
    HALF,
    Channels,
    carry,
    earliest_waiting,
    get,
    goes_first,
    new_channels,
    put,
)
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

never_negative(__name__)

AHEAD = 6
"""The most operations of the other sender that are inspected to find when it could send."""


class Walk(NamedTuple):
    """The worklist's state; S stages, which are slots, L lanes.

    ``arrived``: when inputs arrive, -1 while unknown. ``position`` and ``time`` (L,). ``blocked`` (L,): the place of
    ``arrived`` that a lane waits for, -1: it does not wait. ``channels``: a waiting transfer's number is the place
    where it arrives. ``visit``: the lanes to visit. ``first_stage`` (L,): the first stage of each lane, -1: none.
    ``after`` (S,): the next stage of the same lane, -1: none. By 2 edge + way: ``places`` (2 S, 2): the range of
    ``arrived`` that is filled over a channel; ``hops`` (2 S, 4): the receiving lane, its first place of row class 1,
    and the transfer's time by row class.
    """

    arrived: np.ndarray
    position: np.ndarray
    time: np.ndarray
    blocked: np.ndarray
    channels: Channels
    visit: np.ndarray
    first_stage: np.ndarray
    after: np.ndarray
    places: np.ndarray
    hops: np.ndarray


@compiled
def run_worklist(
    flows: Any, chains: Any, lanes: Any, channel: int, record: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return each lane's position and time, starts of operations and transfers, each flow's order, starts of buckets.

    ``channel``: FREE, FULL or HALF. Without ``record`` the last four stay empty. A lane whose position is below its
    number of operations is blocked for ever.
    """
    num_lanes = lanes.lane_start.size - 1
    walk = Walk(
        np.full(flows.places, -1, dtype=np.int64),
        lanes.lane_start[:-1].copy(),
        np.zeros(num_lanes, dtype=np.int64),
        np.full(num_lanes, -1, dtype=np.int64),
        new_channels(flows.base, channel),
        np.arange(num_lanes),
        np.full(num_lanes, -1, dtype=np.int64),
        np.empty(lanes.slot_lane.size, dtype=np.int64),
        np.zeros((2 * lanes.slot_lane.size, 2), dtype=np.int64),
        np.zeros((2 * lanes.slot_lane.size, 4), dtype=np.int64),
    )
    _list_stages(flows, lanes, walk)
    _work(lanes, walk, channel)
    transfers = flows.flow_offset[flows.flow_offset.size - 1] if record else 0
    start = np.empty(lanes.batch.size if record else 0, dtype=np.int64)
    sent, order = np.empty(transfers, dtype=np.int64), np.empty(transfers, dtype=np.int32)
    bucket_start = np.zeros(chains.bucket_ns.size if record else 0, dtype=np.int64)
    if record:
        _record(lanes, walk, flows.flow_offset.copy(), start, sent, order)
    if bucket_start.size > 0:
        bucket_starts(chains, lanes, start, bucket_start)
    return walk.position, walk.time, start, sent, order, bucket_start


@loop
def _list_stages(flows: Any, lanes: Any, walk: Walk) -> None:
    """Fill ``first_stage``, ``after``, ``places`` and ``hops``."""
    stages = walk.after.size
    for s in range(stages - 1, -1, -1):
        lane = lanes.slot_lane[s]
        walk.after[s] = walk.first_stage[lane]
        walk.first_stage[lane] = s
    for edge in range(stages - 1):
        for way in range(2):
            sender, receiver = edge + way, edge + 1 - way
            line = sender * LINES + 2 * (BACKWARD if way else FORWARD)
            low = way * flows.base[stages] + flows.base[receiver]
            high = low + flows.base[receiver + 1] - flows.base[receiver]
            cut = max(low, min(low + flows.cut - flows.first[receiver], high))
            walk.places[2 * edge + way, 0] = low if lanes.table[line, FLOW] >= 0 else cut
            walk.places[2 * edge + way, 1] = high if lanes.table[line + 1, FLOW] >= 0 else cut
            walk.hops[2 * edge + way, 0] = lanes.slot_lane[receiver]
            walk.hops[2 * edge + way, 1] = cut
            walk.hops[2 * edge + way, 2] = lanes.table[line, FLOW_NS]
            walk.hops[2 * edge + way, 3] = lanes.table[line + 1, FLOW_NS]


@loop
def _work(lanes: Any, walk: Walk, channel: int) -> None:
    """Visit lanes until none can go on; with channels for both ways carry all possible transfers after each visit."""
    waiting, stages = walk.visit.size, walk.after.size
    while True:
        while waiting > 0:
            waiting -= 1
            lane = walk.visit[waiting]
            waiting = _run(lanes, walk, channel, lane, waiting)
            if channel == HALF:
                s = walk.first_stage[lane]
                while s >= 0:
                    for edge in range(max(0, s - 1), min(s + 1, stages - 1)):
                        waiting = _settle(lanes, walk, edge, waiting)
                    s = walk.after[s]
        earliest = earliest_waiting(walk.channels, stages) if channel == HALF else -1
        if earliest < 0:
            break
        waiting = _take(walk, earliest, waiting)


@inner
def _run(lanes: Any, walk: Walk, channel: int, lane: int, waiting: int) -> int:
    """Run a lane until it blocks; each output arrives at once, is carried, or waits for its channel.

    Returns how many lanes remain to be visited, as ``_arrive``, ``_settle`` and ``_take`` do.
    """
    t, i, stop = walk.time[lane], walk.position[lane], lanes.lane_start[lane + 1]
    while i < stop:
        row, m = lanes.row[i], lanes.batch[i]
        place = lanes.table[row, INPUT]
        if place != NOWHERE:
            a = walk.arrived[place + m]
            if a < 0:
                walk.blocked[lane] = place + m
                break
            t = max(t, a)
        t += lanes.table[row, DURATION]
        i += 1
        place = lanes.table[row, OUTPUT] + m
        if lanes.table[row, OUTPUT] == NOWHERE:
            continue
        end = t
        if lanes.table[row, FLOW] >= 0:
            takes, at = lanes.table[row, FLOW_NS], _channel(lanes, row)
            if channel == HALF:
                if not _is_alone(lanes, walk, at):
                    put(walk.channels, at, t, place)
                    continue
                at &= ~1
            end = takes + (t if channel == FREE else carry(walk.channels, at, t, takes))
        waiting = _arrive(walk, lanes.slot_lane[lanes.table[row, OTHER]], place, end, waiting)
    walk.position[lane] = i
    walk.time[lane] = t
    return waiting


@inner
def _is_alone(lanes: Any, walk: Walk, channel: int) -> bool:
    """Return whether ``_settle`` would carry a transfer over ``channel`` (2 edge + way) at once.

    Then no transfer waits for the edge, and the sender of the other way waits for an input that comes this way.
    """
    blocked = walk.blocked[lanes.slot_lane[channel // 2 + 1 - (channel & 1)]]
    nothing = walk.channels.first[channel] == NEVER_NS and walk.channels.first[channel ^ 1] == NEVER_NS
    return nothing and walk.places[channel, 0] <= blocked < walk.places[channel, 1]


@inner
def _channel(lanes: Any, row: int) -> int:
    """Return 2 edge + way of a row's transfer; the table has 2 stage + way."""
    return lanes.table[row, CHANNEL] - 2 * (lanes.table[row, CHANNEL] & 1)


@inner
def _arrive(walk: Walk, lane: int, place: int, t: int, waiting: int) -> int:
    """Let an input of a lane arrive at its place; if the lane waits for it, add the lane to ``visit``."""
    walk.arrived[place] = t
    if walk.blocked[lane] != place:
        return waiting
    walk.blocked[lane] = -1
    walk.visit[waiting] = lane
    return waiting + 1


@inner
def _settle(lanes: Any, walk: Walk, edge: int, waiting: int) -> int:
    """Carry all transfers of an edge that surely come next."""
    while True:
        forward, backward = walk.channels.first[2 * edge], walk.channels.first[2 * edge + 1]
        way = 0 if goes_first(0, forward, backward) else 1
        if way == 0:
            if forward == NEVER_NS:
                return waiting
            if backward == NEVER_NS and not goes_first(0, forward, _soonest(lanes, walk, edge, 1, forward)):
                return waiting
        elif forward == NEVER_NS and not goes_first(1, backward, _soonest(lanes, walk, edge, 0, backward)):
            return waiting
        waiting = _take(walk, 2 * edge + way, waiting)


@inner
def _take(walk: Walk, channel: int, waiting: int) -> int:
    """Carry the transfer that has been waiting longest one way over an edge (``channel`` is 2 edge + way)."""
    ready = walk.channels.first[channel]
    place = get(walk.channels, channel)
    takes = walk.hops[channel, 3 if place >= walk.hops[channel, 1] else 2]
    end = carry(walk.channels, channel & ~1, ready, takes) + takes
    return _arrive(walk, walk.hops[channel, 0], place, end, waiting)


@inner
def _soonest(lanes: Any, walk: Walk, edge: int, way: int, enough: int) -> int:
    """Return the earliest next output of an edge's sender one way; NEVER_NS if it waits for the edge's other way.

    Times after ``enough`` are not exact.
    """
    s = edge + way
    lane = lanes.slot_lane[s]
    low, high = walk.places[2 * edge + 1 - way, 0], walk.places[2 * edge + 1 - way, 1]
    if low <= walk.blocked[lane] < high:
        return NEVER_NS
    t, i, stop = walk.time[lane], walk.position[lane], lanes.lane_start[lane + 1]
    last = min(stop, i + AHEAD)
    while i < last and t <= enough:
        row = lanes.row[i]
        if lanes.table[row, STAGE] == s:
            place = lanes.table[row, INPUT] + lanes.batch[i]
            if low <= place < high and walk.arrived[place] < 0:
                return NEVER_NS
            t += lanes.table[row, DURATION]
            if lanes.table[row, FLOW] >= 0 and lanes.table[row, CHANNEL] & 1 == way:
                return t
        else:
            t += lanes.table[row, DURATION]
        i += 1
    return NEVER_NS if i == stop else t


@loop
def _record(lanes: Any, walk: Walk, tail: np.ndarray, start: np.ndarray, sent: np.ndarray, order: np.ndarray) -> None:
    """Write the starts of operations, and of transfers flow by flow, from the arrivals of inputs.

    ``tail``: the next place of each flow. One lane sends a flow, in the order of its operations.
    """
    for lane in range(walk.time.size):
        t = 0
        for i in range(lanes.lane_start[lane], walk.position[lane]):
            row, m = lanes.row[i], lanes.batch[i]
            place, flow = lanes.table[row, INPUT], lanes.table[row, FLOW]
            if place != NOWHERE:
                t = max(t, walk.arrived[place + m])
            start[i] = t
            t += lanes.table[row, DURATION]
            if flow >= 0:
                sent[tail[flow]] = walk.arrived[lanes.table[row, OUTPUT] + m] - lanes.table[row, FLOW_NS]
                order[tail[flow]] = m
                tail[flow] += 1
