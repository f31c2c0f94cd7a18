"""Check of memory for ``verify``: recompute every device's curve from the timeline's times and compare it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.schemas.amounts import amount, exact
from penstock.schemas.program import BACKWARD, CODEC_HEADER_BYTES, FORWARD, INPUT, LOOK_AHEAD, RECOMPUTE, WEIGHT
from penstock.solvers.costs.communicators import runtime_bytes
from penstock.solvers.costs.memory import context_bytes, free_bytes, static_bytes, step_bytes, weight_bytes
from penstock.solvers.costs.stage import input_bytes, stage_costs, stage_rows
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Track
from penstock.solvers.verify.clock import Clock

Events = list[tuple[np.ndarray, np.ndarray]]
Copies = Callable[[int, np.ndarray], int]


def one_copy(_stage: int, _operations: np.ndarray) -> int:
    """Return the number of weight copies in a flushed step: one."""
    return 1


def check_memory(clock: Clock, copies: Copies = one_copy) -> list[str]:
    """Check that every device is within its capacity, and that the timeline's peaks are right.

    ``copies``: how many copies of a stage's weights a lane with these operations of the stage keeps.
    """
    faults = []
    last_posted = _last_posted(clock)
    for track in clock.timeline.tracks:
        versions = _version_bytes(clock, track, copies)
        at, peak = _peak(clock, track, versions, last_posted)
        for device in track.devices:
            if (claimed := clock.timeline.uses[device].memory.versions) != versions:
                name = clock.problem.devices[device].name
                faults.append(
                    f"The timeline states {claimed} bytes of weight versions on {name}; it is {versions} bytes."
                )
            hardware = clock.problem.devices[device]
            needed = peak + runtime_bytes(clock.problem, clock.allocation, device)
            available = free_bytes(clock.problem, (device,)) + context_bytes(clock.problem, device)
            if needed > available:
                headroom = hardware.memory_bytes - available
                faults.append(
                    f"{hardware.name} needs {exact(needed)} at {at} ns, but has {exact(available)} "
                    f"({amount(hardware.memory_bytes)} less {amount(headroom)} of headroom)."
                )
            stated = clock.timeline.uses[device].memory.total
            if stated != needed:
                faults.append(f"The timeline states a peak of {stated} bytes on {hardware.name}; it is {needed} bytes.")
    return faults


def _version_bytes(clock: Clock, track: Track, copies: Copies) -> int:
    """Return the bytes of weight copies in addition to the current ones, of all stages of a lane."""
    total = 0
    for s in clock.stages_on(track):
        kept = copies(s, track.operations[track.operations[:, 1] == s])
        total += (kept - 1) * weight_bytes(clock.problem, clock.allocation.stages[s])[1]
    return total


def _peak(clock: Clock, track: Track, static: int, last_posted: np.ndarray) -> tuple[int, int]:
    """Return (first time, bytes) of the highest sum; all changes at one instant count together."""
    events: Events = []
    for s in clock.stages_on(track):
        sizes = static_bytes(clock.problem, clock.allocation.stages[s])
        static += sizes.parameters + sizes.optimizer
        events += _gradient_events(clock, track, s, sizes.gradients)
        needed = step_bytes(clock.problem, clock.allocation.stages[s])
        events += [
            (at, np.full(len(at), size)) for at, size in zip(_steps(clock, track, s), (needed, -needed), strict=True)
        ]
        events += _operation_events(clock, track, s)
        if clock.problem.memory.count_buffers:
            events += _buffer_events(clock, track, s, last_posted)
    events.append((np.zeros(1, dtype=np.int64), np.asarray([static])))
    time = np.concatenate([each for each, _sizes in events])
    size = np.concatenate([each for _times, each in events])
    order = np.argsort(time, kind="stable")
    time, level = time[order], np.cumsum(size[order])
    settled = np.append(time[1:] != time[:-1], True)
    time, level = time[settled], level[settled]
    highest = int(np.argmax(level))
    return int(time[highest]), int(level[highest])


def _gradient_events(clock: Clock, track: Track, s: int, size: int) -> Events:
    """Return gradients from the first of each round to the end of its step; without a step they stay."""
    kinds, stages, batches = track.operations.T
    places = np.flatnonzero((stages == s) & (kinds != FORWARD) & (kinds != RECOMPUTE) & (kinds != STEP))
    number = batches[places] // clock.round_size(s)
    begun, first = np.unique(number, return_index=True)
    start = track.start_ns[places[first]]
    freed = _steps(clock, track, s)[1]
    end = freed[begun[begun < len(freed)]]
    return [(start, np.full(len(start), size)), (end, np.full(len(end), -size))]


def _steps(clock: Clock, track: Track, s: int) -> tuple[np.ndarray, np.ndarray]:
    """Return when each round's optimizer step of a stage starts and has ended on a lane."""
    if clock.every:
        is_step = (track.operations[:, 0] == STEP) & (track.operations[:, 1] == s)
        return np.asarray(track.start_ns[is_step]), np.asarray(track.end_ns[is_step])
    place = [each.devices for each, _at in clock.of_stage[s]].index(track.devices)
    step = clock.updates_of[s][place]
    return np.asarray([step.start_ns], dtype=np.int64), np.asarray([step.end_ns], dtype=np.int64)


def _sizes(clock: Clock, s: int, rows: int) -> tuple[int, int, int, int]:
    """Return (kept, workspace, rebuilt within a backward, rebuilt by a separate recomputation), in bytes."""
    problem, stage = clock.problem, clock.allocation.stages[s]
    cost = stage_costs(problem, stage, rows)
    plain = stage_costs(problem, stage.plain, rows)
    inputs = {first: input_bytes(problem, first, stage_rows(stage, rows)) for first, _last in stage.recompute}
    counted = sum(size for first, size in inputs.items() if first > stage.first or not problem.memory.count_buffers)
    whole = plain.kept_bytes + counted - cost.kept_bytes
    before = clock.allocation.previous(s)
    received = before is not None and transfer(problem, clock.allocation, before, rows, 0) is not None
    handed = inputs.get(stage.first, 0) if problem.memory.count_buffers and not received else 0
    return cost.kept_bytes + handed, plain.workspace_bytes, cost.workspace_bytes - plain.workspace_bytes, whole


def _operation_events(clock: Clock, track: Track, s: int) -> Events:
    at = np.flatnonzero(track.operations[:, 1] == s)
    kinds, _stages, batches = track.operations[at].T
    start, end = track.start_ns[at], track.end_ns[at]
    apart = bool((kinds == RECOMPUTE).any())
    events: Events = []
    for size in clock.sizes():
        kept, workspace, inside, whole = _sizes(clock, s, size)
        rows = clock.rows[batches] == size
        for kind in range(5):
            mask = rows & (kinds == kind)
            extra = inside if kind == BACKWARD and not apart else 0
            events.append((start[mask], np.full(mask.sum(), workspace + extra)))
            events.append((end[mask], np.full(mask.sum(), -workspace - extra)))
        events.append((start[rows & (kinds == FORWARD)], np.full((rows & (kinds == FORWARD)).sum(), kept)))
        last = rows & ((kinds == BACKWARD) | (kinds == WEIGHT))
        events.append((end[last], np.full(last.sum(), -kept)))
        opens = rows & (kinds == (RECOMPUTE if apart else INPUT))
        closes = last if apart else rows & (kinds == WEIGHT)
        events.append((start[opens], np.full(opens.sum(), whole)))
        events.append((end[closes], np.full(closes.sum(), -whole)))
    return events


def _posted(track: Track) -> np.ndarray:
    """Return when the receives of each operation of a track are posted, also for operations that read no message.

    An operation's receive is placed before the later of the previous operation of its stage and direction and the
    ``LOOK_AHEAD``-th operation before it, and is posted when the operation before that place has ended; steps do not
    count.
    """
    running = np.flatnonzero(track.operations[:, 0] != STEP)
    ends = np.concatenate((np.zeros(1, dtype=np.int64), track.end_ns[running]))
    kinds, stages, _batches = track.operations[running].T
    reads = np.flatnonzero((kinds == FORWARD) | (kinds == BACKWARD) | (kinds == INPUT))
    ways = 2 * stages[reads] + (kinds[reads] == FORWARD)
    by_way = np.argsort(ways, kind="stable")
    again = np.flatnonzero(np.diff(ways[by_way]) == 0)
    previous = np.zeros(len(reads), dtype=np.int64)
    previous[by_way[again + 1]] = reads[by_way[again]]
    posted = np.zeros(len(track.operations), dtype=np.int64)
    posted[running[reads]] = ends[np.maximum(previous, reads - LOOK_AHEAD)]
    return posted


def _last_posted(clock: Clock) -> np.ndarray:
    """Return (2, S, M): when the last device that reads a message has posted its receive, by reading stage."""
    latest = np.zeros((2, len(clock.allocation.stages), clock.allocation.num_micro_batches), dtype=np.int64)
    for track in clock.timeline.tracks if clock.problem.memory.count_buffers else ():
        kinds, stages, batches = track.operations.T
        posted = _posted(track)
        for way, mask in ((0, kinds == FORWARD), (1, (kinds == BACKWARD) | (kinds == INPUT))):
            np.maximum.at(latest[way], (stages[mask], batches[mask]), posted[mask])
    return latest


def _buffer_events(clock: Clock, track: Track, s: int, last_posted: np.ndarray) -> Events:
    """Return receive buffers from posting to the last backward, and send buffers until their messages have passed.

    A message passes in its transfer's duration, from when that has started and all receivers have posted a receive.
    """
    at = np.flatnonzero(track.operations[:, 1] == s)
    operations = track.operations[at]
    ends = np.full((STEP + 1, clock.allocation.num_micro_batches), -1, dtype=np.int64)
    ends[operations[:, 0], operations[:, 2]] = track.end_ns[at]
    posted = np.zeros_like(ends)
    posted[operations[:, 0], operations[:, 2]] = _posted(track)[at]
    read = np.maximum(ends[BACKWARD], ends[WEIGHT])
    computed = (ends[FORWARD], np.maximum(ends[BACKWARD], ends[INPUT]))
    wanted = (posted[FORWARD], np.maximum(posted[BACKWARD], posted[INPUT]))
    sent = clock.timeline.transfers
    share = np.zeros(len(clock.rows), dtype=np.int64)
    for size in clock.sizes():
        share[clock.rows == size] = stage_rows(clock.allocation.stages[s], size)
    events: Events = []
    for way, per_sample in ((0, clock.problem.forward_bytes), (1, clock.problem.backward_bytes)):
        sender = clock.allocation.previous(s) if way == 0 else clock.allocation.next(s)
        if sender is not None:
            _places, batches = _transfers(clock, sender, way, ends)
            size = share[batches] * per_sample[_cut(clock, sender, way)]
            if clock.allocation.stages[s].coded[way]:
                halved, tensors = clock.problem.encodable[_cut(clock, sender, way)]
                size = 2 * size - np.minimum(size, share[batches] * halved) // 2 + CODEC_HEADER_BYTES * tensors
            events += [(wanted[way][batches], size), (read[batches], -size)]
        receiver = clock.other(s, way)
        if receiver is not None:
            places, batches = _transfers(clock, s, way, ends)
            size = share[batches] * per_sample[_cut(clock, s, way)]
            waits = np.maximum(0, last_posted[way, receiver, batches] - sent.start_ns[places])
            events += [(computed[way][batches], size), (sent.end_ns[places] + waits, -size)]
    return events


def _transfers(clock: Clock, sender: int, way: int, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the transfers of an edge, and their micro-batches, that the lane with these ends takes part in."""
    places = clock.sent_by(sender, way)
    batches = clock.timeline.transfers.micro_batch[places]
    mine = ends[FORWARD][batches] >= 0
    return places[mine], batches[mine]


def _cut(clock: Clock, sender: int, way: int) -> int:
    stage = clock.allocation.stages[sender]
    return stage.last if way == 0 else stage.first - 1
