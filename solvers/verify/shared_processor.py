"""Check of an elastic-averaging iteration for ``verify``, recomputed from the timeline's intervals.

Each operation must have had its time. Between two instants at which something starts or ends on a device, all running
operations have one speed, which follows from the shares in use. The work of an operation over its interval has to reach
its duration in the last nanosecond and not before (rules: ``solvers.judge.shared_processor``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.schemas.amounts import exact
from penstock.schemas.program import BACKWARD, FORWARD, KINDS, LOOK_AHEAD
from penstock.solvers.costs.memory import averaging_bytes, context_bytes, free_bytes, static_bytes, step_bytes
from penstock.solvers.costs.stage import stage_costs, update_ns
from penstock.solvers.costs.transfer import Transfer, transfer
from penstock.solvers.costs.utilisation import utilisation_ppm
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import micro_batch_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.timeline import Timeline

STEP = -1
"""Kind of a stage's optimizer step; its micro-batch is -1."""

FULL = 720_720
MILLION = 1_000_000


@dataclass(frozen=True)
class Ran:
    """One operation of the timeline."""

    stage: int
    kind: int
    batch: int
    start_ns: int
    end_ns: int

    def __str__(self) -> str:
        if self.kind == STEP:
            return f"the step of stage {self.stage}"
        return f"{KINDS[self.kind]}{self.batch} of stage {self.stage}"


def verify_sharing(problem: Problem, allocation: Allocation, schedule: Schedule, timeline: Timeline) -> list[str]:
    """Return one sentence per fault; empty means valid. The layers and devices of a pipeline are checked elsewhere."""
    if not isinstance(schedule, Orders):
        return [f"Schedule {schedule.name} is periodic; pipelines that average have orders of one iteration."]
    faults = _check_pipelines(allocation) or _check_rows(allocation, schedule, timeline)
    if faults:
        return faults
    run = _Iteration(problem, allocation, timeline)
    faults = [*_check_lanes(run), *_check_work(run), *_check_transfers(run), *_check_channels(run)]
    return [*faults, *_check_numbers(run)] or _check_memory(run)


class _Iteration:
    """A timeline, and the plan that its times are checked against."""

    def __init__(self, problem: Problem, allocation: Allocation, timeline: Timeline) -> None:
        self.problem = problem
        self.allocation = allocation
        self.timeline = timeline
        count = allocation.num_micro_batches
        self.rows = [micro_batch_rows(problem.global_batch_size, count, m) for m in range(count)]

    @cached_property
    def lanes(self) -> dict[int, list[Ran]]:
        """Return the operations of each stage, in the order of its row, the step last."""
        lanes = {}
        for track in self.timeline.tracks:
            times = zip(track.operations.tolist(), track.start_ns.tolist(), track.end_ns.tolist(), strict=True)
            lane = [Ran(s, kind, m, start, end) for (kind, s, m), start, end in times]
            lanes[lane[0].stage] = lane
        for each in self.timeline.updates:
            lanes[each.stage].append(Ran(each.stage, STEP, STEP, each.start_ns, each.end_ns))
        return lanes

    @cached_property
    def at(self) -> dict[tuple[int, int, int], Ran]:
        """Return the operations by (stage, kind, micro-batch)."""
        return {(ran.stage, ran.kind, ran.batch): ran for lane in self.lanes.values() for ran in lane}

    @cached_property
    def stages_of(self) -> dict[int, list[int]]:
        """Return the stages of each device."""
        by_device: dict[int, list[int]] = {}
        for s, stage in enumerate(self.allocation.stages):
            by_device.setdefault(stage.devices[0], []).append(s)
        return by_device

    @cached_property
    def moves(self) -> dict[tuple[int, int, int], tuple[int, int]]:
        """Return (start, end) of the transfers by (stage, direction, micro-batch)."""
        sent = self.timeline.transfers
        columns = (sent.stage, sent.direction, sent.micro_batch, sent.start_ns, sent.end_ns)
        return {(s, way, m): (a, b) for s, way, m, a, b in zip(*(each.tolist() for each in columns), strict=True)}

    @cached_property
    def posted(self) -> dict[tuple[int, int, int], int]:
        """Return when each stage posts the receive of (stage, direction, micro-batch) by decision 6."""
        times = {}
        for s, lane in self.lanes.items():
            latest = {FORWARD: 0, BACKWARD: 0}
            for i, ran in enumerate(lane):
                if ran.kind in latest:
                    place = max(latest[ran.kind], i - LOOK_AHEAD)
                    times[s, 0 if ran.kind == FORWARD else 1, ran.batch] = lane[place - 1].end_ns if place > 0 else 0
                    latest[ran.kind] = i
        return times

    @cached_property
    def costs(self) -> dict[tuple[int, int, int], Transfer | None]:
        """Return the transfer of each (stage, direction, rows of a micro-batch)."""
        return {
            (s, way, size): transfer(self.problem, self.allocation, s, size, way)
            for s in range(len(self.allocation.stages))
            for way in (0, 1)
            for size in set(self.rows)
        }

    def other(self, s: int, way: int) -> int | None:
        """Return the stage that a stage sends to in a direction."""
        return self.allocation.next(s) if way == 0 else self.allocation.previous(s)

    def work_ns(self, ran: Ran) -> int:
        """Return how long an operation takes alone."""
        stage = self.allocation.stages[ran.stage]
        if ran.kind == STEP:
            return update_ns(self.problem, stage)
        cost = stage_costs(self.problem, stage, self.rows[ran.batch])
        return cost.forward_ns if ran.kind == FORWARD else cost.backward_ns + cost.recompute_ns

    def share_ppm(self, ran: Ran) -> int:
        """Return an operation's share of the processor."""
        if ran.kind == STEP:
            return MILLION
        return utilisation_ppm(self.problem, self.allocation, ran.stage, self.rows[ran.batch])

    def name(self, device: int) -> str:
        """Return a device's name."""
        return self.problem.devices[device].name


def _check_pipelines(allocation: Allocation) -> list[str]:
    faults = []
    for p, pipeline in enumerate(allocation.pipelines):
        if pipeline.stages != allocation.pipelines[0].stages:
            faults.append(f"Pipeline {p} is cut or placed unlike pipeline 0.")
        if pipeline.micro_batches != (0, allocation.num_micro_batches - 1):
            faults.append(f"Pipeline {p} takes micro-batches {pipeline.micro_batches}, not a global batch of its own.")
    for s, stage in enumerate(allocation.pipelines[0].stages):
        if len(stage.devices) != 1:
            faults.append(f"Stage {s} has {len(stage.devices)} devices; pipelines that average have one for each.")
    devices = [stage.devices for stage in allocation.pipelines[0].stages]
    if len(set(devices)) != len(devices):
        faults.append("A device holds two stages of the same pipeline.")
    return faults


def _check_rows(allocation: Allocation, orders: Orders, timeline: Timeline) -> list[str]:
    if [row.devices for row in orders.rows] != [track.devices for track in timeline.tracks]:
        return ["The timeline's tracks are not the schedule's rows."]
    count, seen, faults = allocation.num_micro_batches, [], []
    for number, (row, track) in enumerate(zip(orders.rows, timeline.tracks, strict=True)):
        if not np.array_equal(row.operations, track.operations):
            faults.append(f"Track {number} does not run the operations of its row in order.")
        stages = sorted(set(row.operations[:, 1].tolist()))
        seen += stages
        expected = [(kind, stages[0], m) for kind in (FORWARD, BACKWARD) for m in range(count)]
        if len(stages) != 1 or sorted(map(tuple, row.operations.tolist())) != expected:
            faults.append(f"Row {number} does not run F and B of one stage once for each of {count} micro-batches.")
        elif row.devices != allocation.stages[stages[0]].devices:
            faults.append(f"Row {number} runs stage {stages[0]} on a device that does not hold it.")
    if sorted(seen) != list(range(len(allocation.stages))):
        faults.append(f"The rows run stages {sorted(seen)} instead of each of {len(allocation.stages)} once.")
    if [each.stage for each in timeline.updates] != list(range(len(allocation.stages))):
        faults.append("Not every stage has one optimizer step.")
    return faults


def _check_lanes(run: _Iteration) -> list[str]:
    """Check that operations run one after the other, forwards before their backwards."""
    faults = []
    for s, lane in run.lanes.items():
        faults += [f"{b} starts before {a} ends." for a, b in pairwise(lane) if b.start_ns < a.end_ns]
        for m in range(len(run.rows)):
            if run.at[s, BACKWARD, m].start_ns < run.at[s, FORWARD, m].end_ns:
                faults.append(f"B{m} of stage {s} starts before its F{m} ends.")
    if any(lane[0].start_ns < 0 for lane in run.lanes.values()):
        faults.append("An operation starts before time 0.")
    return faults


def _check_work(run: _Iteration) -> list[str]:
    """Check that every operation has had its time, and not a nanosecond more than it needs."""
    return [fault for stages in run.stages_of.values() for fault in _check_device(run, stages)]


def _check_device(run: _Iteration, stages: list[int]) -> list[str]:
    everything = [ran for s in stages for ran in run.lanes[s]]
    instants = sorted({t for ran in everything for t in (ran.start_ns, ran.end_ns)})
    served = dict.fromkeys(everything, 0)
    last_speed = dict.fromkeys(everything, 0)
    waiting = sorted(everything, key=lambda ran: ran.start_ns, reverse=True)
    running: list[Ran] = []
    for low, high in pairwise(instants):
        while waiting and waiting[-1].start_ns <= low:
            running.append(waiting.pop())
        running = [ran for ran in running if ran.end_ns > low]
        if not running:
            continue
        used = sum(run.share_ppm(ran) for ran in running)
        speed = min(FULL, FULL * MILLION // used)
        for ran in running:
            served[ran] += speed * (high - low)
            last_speed[ran] = speed
    faults = []
    for ran in everything:
        wanted = run.work_ns(ran) * FULL
        if served[ran] < wanted:
            faults.append(
                f"{ran} ends at {ran.end_ns} ns, when it has had {served[ran] // FULL} of {wanted // FULL} ns."
            )
        elif served[ran] - last_speed[ran] >= wanted > 0 or (wanted == 0 and ran.end_ns > ran.start_ns):
            faults.append(f"{ran} ends at {ran.end_ns} ns, later than when it has had its {wanted // FULL} ns.")
    return faults


def _check_transfers(run: _Iteration) -> list[str]:
    """Check that each transfer runs once, with its duration, after its producer and before its consumer."""
    faults = []
    if len(run.moves) != run.timeline.transfers.stage.size:
        faults.append("A transfer is in the timeline twice.")
    expected = set()
    for (s, kind, m), ran in run.at.items():
        if kind == STEP:
            continue
        way = 0 if kind == FORWARD else 1
        other = run.other(s, way)
        if other is None:
            continue
        move = run.costs[s, way, run.rows[m]]
        available = ran.end_ns
        if move is not None:
            expected.add((s, way, m))
            if (s, way, m) not in run.moves:
                faults.append(f"What {ran} makes does not travel.")
                continue
            start, available = run.moves[s, way, m]
            if start < ran.end_ns:
                faults.append(f"What {ran} makes leaves before it has been computed.")
            if available - start != move.duration_ns:
                faults.append(f"What {ran} makes travels {available - start} ns instead of {move.duration_ns} ns.")
        if run.at[other, kind, m].start_ns < available:
            faults.append(f"{run.at[other, kind, m]} starts before its input has arrived.")
    if strange := sorted(set(run.moves) - expected):
        faults.append(f"Stage {strange[0][0]} sends micro-batch {strange[0][2]}, which nothing asks for.")
    return faults


def _check_channels(run: _Iteration) -> list[str]:
    """Check that no two transfers run at once on a link, or on the channel between two devices."""
    used: dict[str, list[tuple[int, int]]] = {}
    for (s, way, m), times in run.moves.items():
        for name in _channels(run, s, way, run.rows[m]):
            used.setdefault(name, []).append(times)
    faults = []
    for name, intervals in sorted(used.items()):
        late = [b for a, b in pairwise(sorted(intervals)) if b[0] < a[1]]
        if late:
            faults.append(f"Two transfers use {name} at {late[0][0]} ns.")
    return faults


def _channels(run: _Iteration, s: int, way: int, size: int) -> Iterator[str]:
    rules, move, other = run.problem.rules, run.costs[s, way, size], run.other(s, way)
    if move is None or other is None:
        return
    if rules.shared:
        yield from (run.problem.network.resources[r].name for r in move.resources)
    elif rules.channel != "none":
        names = [run.name(run.allocation.stages[each].devices[0]) for each in (s, other)]
        yield f"the channel of {' and '.join(sorted(names))}" + (
            f", direction {way}" if rules.channel == "full" else ""
        )


def _check_numbers(run: _Iteration) -> list[str]:
    """Check the timeline's summary: the iteration, its batches, and every device's times, which must add up."""
    timeline, batches = run.timeline, len(run.allocation.pipelines)
    last = max(ran.end_ns for lane in run.lanes.values() for ran in lane)
    faults = []
    if timeline.window_ns != (0, last) or timeline.rounds != batches or timeline.window_rounds != batches:
        faults.append(
            f"The iteration lasts {last} ns and trains {batches} global batches; the timeline says otherwise."
        )
    value = -(-last // batches)
    if timeline.time_per_global_batch_ns != value:
        faults.append(f"The timeline states {timeline.time_per_global_batch_ns} ns per global batch; it is {value} ns.")
    if set(timeline.uses) != set(run.stages_of):
        faults.append("The timeline states the use of other devices than the plan's.")
        return faults
    for device, stages in run.stages_of.items():
        busy = [(ran.start_ns, ran.end_ns) for s in stages for ran in run.lanes[s]]
        moving = [each for (s, way, _m), each in run.moves.items() if {s, run.other(s, way)} & set(stages)]
        whole = _covered_ns(busy + moving)
        computing = _covered_ns(busy)
        stated = timeline.uses[device]
        expected = (computing // batches, (whole - computing) // batches)
        if stated[:2] != expected or sum(stated[:3]) != value:
            faults.append(
                f"{run.name(device)} computes {expected[0]} ns and only communicates {expected[1]} ns of {value} ns "
                f"per global batch; the timeline states {stated[:3]}."
            )
    return faults


def _covered_ns(intervals: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _check_memory(run: _Iteration) -> list[str]:
    """Check that every device is within its capacity, and that the timeline's peaks are right."""
    faults = []
    for device, stages in run.stages_of.items():
        stage = run.allocation.stages[stages[0]]
        static = static_bytes(run.problem, stage)
        averaged = averaging_bytes(run.problem, stage, len(stages)).always
        level = len(stages) * (static.parameters + static.optimizer) + averaged
        context = context_bytes(run.problem, device)
        level += context
        changes: dict[int, int] = {0: 0}
        for s in stages:
            for start, end, size in _kept(run, s):
                changes[start] = changes.get(start, 0) + size
                changes[end] = changes.get(end, 0) - size
        peak = 0
        for t in sorted(changes):
            level += changes[t]
            peak = max(peak, level)
        available, stated = free_bytes(run.problem, (device,)) + context, run.timeline.uses[device].memory.total
        if peak > available:
            faults.append(f"{run.name(device)} needs {exact(peak)}, but has {exact(available)}.")
        if stated != peak:
            faults.append(f"The timeline states a peak of {stated} bytes on {run.name(device)}; it is {peak} bytes.")
    return faults


def _kept(run: _Iteration, s: int) -> Iterator[tuple[int, int, int]]:
    """Yield (from, to, bytes) of the memory that one pipeline's stage occupies for a time."""
    problem, stage = run.problem, run.allocation.stages[s]
    first = min(run.at[s, BACKWARD, m].start_ns for m in range(len(run.rows)))
    step = run.at[s, STEP, STEP]
    yield first, step.end_ns, static_bytes(problem, stage).gradients
    averaged = averaging_bytes(problem, stage, len(run.allocation.pipelines)).at_step
    yield step.start_ns, step.end_ns, step_bytes(problem, stage) + averaged
    for m, rows in enumerate(run.rows):
        forward, backward = run.at[s, FORWARD, m], run.at[s, BACKWARD, m]
        cost = stage_costs(problem, stage, rows)
        plain = stage_costs(problem, stage.plain, rows)
        yield forward.start_ns, backward.end_ns, cost.kept_bytes
        yield forward.start_ns, forward.end_ns, plain.workspace_bytes
        yield backward.start_ns, backward.end_ns, cost.workspace_bytes
        if not problem.memory.count_buffers:
            continue
        edges = (
            (0, forward, stage.last, stage.first - 1, problem.forward_bytes),
            (1, backward, stage.first - 1, stage.last, problem.backward_bytes),
        )
        for way, computed, out, into, sizes in edges:
            if (s, way, m) in run.moves:
                start, end = run.moves[s, way, m]
                receiver = run.other(s, way)
                assert receiver is not None
                yield computed.end_ns, max(start, run.posted[receiver, way, m]) + end - start, int(sizes[out]) * rows
            sender = run.other(s, 1 - way)
            if sender is not None and (sender, way, m) in run.moves:
                yield run.posted[s, way, m], backward.end_ns, int(sizes[into]) * rows
