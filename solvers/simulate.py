"""The judge's clock: when every operation, transfer, reduction and update of one step runs (DESIGN 6, ALGORITHMS A.1).

Devices run their rows in order. An operation starts when its lane is free and its input is there: F(s, m) needs the
activation of F(s-1, m); B(s, m) and I(s, m) the gradient of B/I(s+1, m), on the last stage the lane's own F(s, m);
W follows I and R follows F on the same lane. A stage on several lanes has computed a micro-batch when all of them
have. Without R operations a recomputing stage's B (or I) takes the recomputation's time too.

One micro-batch over one edge in one direction is one transfer. In a shared network it needs all resources of its
route at once; in a private one its edge's channel: one for both directions (``half``), one per direction (``full``),
or nothing but time (``none``). The buckets of a replicated stage's all-reduce run one after the other, each from
when the last backward has passed its layers, over the resources of the stage's ring (in a private network over
links of their own).

The one tie rule: at one instant first everything that ends is ended; then waiting transfers and buckets start in
the order of (ready time, sender pipeline, stage, direction, micro-batch or bucket), direction 0 forward, 1 backward,
2 all-reduce, each if all its resources are free at that moment (one that is blocked reserves nothing); then
operations start. This repeats while something of zero duration has ended at the same instant.

A stage's optimizer step runs on each of its lanes after all the lane's operations and after the stage's buckets; a
lane with several stages steps in the order of their last backwards. The makespan is the last end of anything.

Memory: a micro-batch's stash counts from its F's start to its B's end (split backward: to W's end, and so do the
received tensors, which is safe), receive buffers from the transfer's start to the end of the backward that reads
them, send buffers from the operation's end to the transfer's end, gradients from the first backward to the step's
end, workspace inside its operation. Everything at one instant counts together, so an operation of zero duration
has no workspace. A lane's devices all count its largest slice.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, KINDS, WEIGHT
from penstock.solvers.allocation import Allocation
from penstock.solvers.costs import UNREACHABLE_NS
from penstock.solvers.kernels.events import run_events
from penstock.solvers.kernels.inorder import run_in_order
from penstock.solvers.kernels.listing import operation_ends, transfer_list
from penstock.solvers.lanes import Lanes, Times, make_lanes
from penstock.solvers.memory_curve import MemoryProfile
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders, Schedule
from penstock.solvers.tables import DURATION, Tables, cost_tables
from penstock.solvers.timeline import DeviceUse, Interval, Timeline, Track, Transfers
from penstock.solvers.update_rules import UpdateRule


class Ends(NamedTuple):
    """What follows the operations: when lanes finish, buckets and updates (by slot) run, and all is done."""

    lane_ns: np.ndarray
    reductions: tuple[Interval, ...]
    updates: tuple[Interval, ...]
    makespan_ns: int


def simulate(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    *,
    overlap: bool | None = None,
    update_rule: UpdateRule = "synchronous",
) -> Timeline:
    """Judge one step of a schedule: all times, memory and use of every device.

    ``overlap`` says whether all-reduces run beside the last backward (None: as the request's rules say).
    Raises InvalidPlan where operations are missing, doubled or wait for each other in a circle, or devices are not
    connected; UnsupportedRequest for periodic schedules and for plans of several pipelines.
    """
    tables = _tables(problem, allocation, schedule, overlap)
    if tables.unreachable:
        raise InvalidPlan(tables.unreachable[0], remedy="place the stages on devices that a link connects")
    assert isinstance(schedule, Orders)
    lanes = make_lanes(tables, schedule)
    times, lane_ns, bucket_start = _run(tables, lanes, record=True)
    ends = _ends(tables, lanes, lane_ns, bucket_start)
    profile = MemoryProfile.of(tables, lanes, times, ends.updates, ends.reductions)
    return Timeline(
        time_per_global_batch_ns=ends.makespan_ns,
        fill_ns=_fill(lanes, times),
        drain_ns=_drain(lanes, ends),
        tracks=_tracks(lanes, times),
        transfers=_transfers(tables, times),
        reductions=ends.reductions,
        updates=ends.updates,
        uses=_uses(lanes, ends, profile),
        memory_curve=profile.curve,
    )


def makespan_ns(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    *,
    overlap: bool | None = None,
    update_rule: UpdateRule = "synchronous",
) -> int:
    """Only the time per global batch; UNREACHABLE_NS where devices are not connected. Raises as ``simulate``."""
    tables = _tables(problem, allocation, schedule, overlap)
    if tables.unreachable:
        return UNREACHABLE_NS
    assert isinstance(schedule, Orders)
    lanes = make_lanes(tables, schedule)
    _times, lane_ns, bucket_start = _run(tables, lanes, record=len(tables.flows.bucket_ns) > 0)
    return _ends(tables, lanes, lane_ns, bucket_start).makespan_ns


def _tables(problem: Problem, allocation: Allocation, schedule: Schedule, overlap: bool | None) -> Tables:
    if not isinstance(schedule, Orders):
        raise UnsupportedRequest(
            f"Schedule {schedule.name} is periodic; periodic schedules cannot be judged yet.",
            remedy="use a schedule of one flushed step",
        )
    if len(allocation.pipelines) > 1:
        raise UnsupportedRequest(
            f"The plan has {len(allocation.pipelines)} pipelines; the reduction of gradients between pipelines cannot "
            "be judged yet.",
            remedy="use one pipeline with replicated stages",
        )
    return cost_tables(problem, allocation, problem.rules.overlap_all_reduce if overlap is None else overlap)


def _run(tables: Tables, lanes: Lanes, record: bool) -> tuple[Times, np.ndarray, np.ndarray]:
    """Starts (empty without ``record`` where no events were needed), when each lane ends, and bucket starts."""
    flows, arrays = tables.flows, lanes.arrays
    if _goes_in_order(tables, lanes):
        queued = tables.problem.rules.channel == "full"
        position, lane_ns, start, sent, order, bucket_start = run_in_order(flows, arrays, queued, record)
    else:
        position, lane_ns, start, sent, order, bucket_start = run_events(flows, arrays)
    if (position < arrays.lane_start[1:]).any():
        raise InvalidPlan(_deadlock(tables, lanes, position))
    return Times(start, sent, order), lane_ns, bucket_start


def _goes_in_order(tables: Tables, lanes: Lanes) -> bool:
    """Whether channels carry transfers in program order (no ties: nothing that sends takes zero time)."""
    rules = tables.problem.rules
    if rules.shared or rules.channel == "half" or not lanes.one_lane_per_stage:
        return False
    durations = lanes.arrays.table.reshape(len(lanes.slot_stage), len(KINDS), 2, -1)[:, : BACKWARD + 1, :, DURATION]
    return rules.channel == "none" or bool((durations > 0).all())


def _ends(tables: Tables, lanes: Lanes, lane_ns: np.ndarray, bucket_start: np.ndarray) -> Ends:
    flows, arrays = tables.flows, lanes.arrays
    bucket_end = bucket_start + flows.bucket_ns
    reductions = []
    reduced = []
    for s in range(len(tables.static)):
        low, high = int(flows.chain_start[s]), int(flows.chain_start[s + 1])
        reduced.append(int(bucket_end[high - 1]) if high > low else 0)
        reductions += [Interval(s, b - low, int(bucket_start[b]), int(bucket_end[b])) for b in range(low, high)]
    updates: dict[int, Interval] = {}
    for lane, slots in enumerate(lanes.slots):
        t = int(lane_ns[lane])
        for slot in sorted(slots, key=lambda k: (int(arrays.last_gradient[k]), k)):
            s = lanes.slot_stage[slot]
            t = max(t, reduced[s])
            updates[slot] = Interval(s, -1, t, t + tables.update_ns[s])
            t += tables.update_ns[s]
    last = max([update.end_ns for update in updates.values()])
    return Ends(lane_ns, tuple(reductions), tuple(updates[k] for k in sorted(updates)), last)


def _deadlock(tables: Tables, lanes: Lanes, position: np.ndarray) -> str:
    """Follow who waits for whom from the first blocked lane into the circle, and name two lanes on it."""
    arrays = lanes.arrays
    lane = int(np.flatnonzero(position < arrays.lane_start[1:])[0])
    path: list[int] = []
    while lane not in path:
        path.append(lane)
        lane = _waits_for(tables, lanes, position, lane)
    first, second = lane, _waits_for(tables, lanes, position, lane)
    return (
        f"The schedule deadlocks: {_next_operation(tables, lanes, position, first)}, "
        f"while {_next_operation(tables, lanes, position, second)}."
    )


def _waits_for(tables: Tables, lanes: Lanes, position: np.ndarray, lane: int) -> int:
    """The lane that has not yet run the operation whose result the lane's next operation needs."""
    arrays = lanes.arrays
    kind, s, m = (int(v) for v in lanes.rows[lane][position[lane] - arrays.lane_start[lane]])
    source = int(tables.flows.previous[s] if kind == FORWARD else tables.flows.next[s])
    for slot in range(int(arrays.slot_start[source]), int(arrays.slot_start[source + 1])):
        other = int(arrays.slot_lane[slot])
        rest = lanes.rows[other][position[other] - arrays.lane_start[other] :]
        same = (rest[:, 0] == FORWARD) if kind == FORWARD else (rest[:, 0] != FORWARD) & (rest[:, 0] < WEIGHT)
        if (same & (rest[:, 1] == source) & (rest[:, 2] == m)).any():
            return other
    raise AssertionError("a blocked lane waits for an operation that has run")


def _next_operation(tables: Tables, lanes: Lanes, position: np.ndarray, lane: int) -> str:
    kind, s, m = (int(v) for v in lanes.rows[lane][position[lane] - lanes.arrays.lane_start[lane]])
    source = int(tables.flows.previous[s] if kind == FORWARD else tables.flows.next[s])
    name = tables.problem.devices[lanes.devices[lane][0]].name
    return f"{name} waits in {KINDS[kind]}{m} of stage {s} for {KINDS[kind]}{m} of stage {source}"


def _fill(lanes: Lanes, times: Times) -> int:
    """From 0 until the last used device starts its first operation."""
    bounds = lanes.arrays.lane_start
    return max(int(times.start[low]) for low, high in pairwise(bounds) if low < high)


def _drain(lanes: Lanes, ends: Ends) -> int:
    """From when the first device has finished its last operation to the makespan."""
    bounds = lanes.arrays.lane_start
    return ends.makespan_ns - min(int(t) for i, t in enumerate(ends.lane_ns) if bounds[i] < bounds[i + 1])


def _tracks(lanes: Lanes, times: Times) -> tuple[Track, ...]:
    arrays = lanes.arrays
    end = operation_ends(arrays.row, arrays.table, times.start)
    tracks = []
    for lane, devices in enumerate(lanes.devices):
        part = slice(int(arrays.lane_start[lane]), int(arrays.lane_start[lane + 1]))
        tracks.append(Track(devices, lanes.rows[lane], times.start[part], end[part]))
    return tuple(tracks)


def _transfers(tables: Tables, times: Times) -> Transfers:
    stage, direction, end = transfer_list(tables.flows, times.sent)
    return Transfers(stage, direction, times.order, times.sent, end)


def _uses(lanes: Lanes, ends: Ends, profile: MemoryProfile) -> dict[int, DeviceUse]:
    devices = profile.tables.problem.devices
    uses = {}
    for own, peak, (busy, alone) in zip(lanes.devices, *profile.uses(), strict=True):
        for device in own:
            memory = peak._replace(context=devices[device].context_bytes)
            uses[device] = DeviceUse(busy, alone, ends.makespan_ns - busy - alone, memory)
    return dict(sorted(uses.items()))
