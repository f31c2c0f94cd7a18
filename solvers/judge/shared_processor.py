"""The judge of elastic averaging: N pipelines that share their devices' processors (AvgPipe, section 3).

Its rules in full: ``docs/theory/judge.md``, section 7.

**The iteration.** Each of N equal pipelines, all on the same K devices (stage k of every pipeline on device k), trains
on a different global batch in M micro-batches and updates its own weights. So every pipeline of such an allocation has
the micro-batches 0 to M - 1, ``num_micro_batches`` is M, and operation (kind, stage, micro-batch) means a micro-batch
of the global batch of that stage's pipeline. An iteration trains N global batches: ``time_per_global_batch_ns`` is its
length over N, rounded up. Each row of the schedule holds one stage: a device is in N rows, whose operations run at the
same time.

**Sharing.** Each operation uses a share u of its device's processor (``utilisation``). While operations run on a device
together, all of them run at the speed min(1, 1 / Σu). Shares are whole millionths, speeds whole 720720ths, rounded down
(so that 1 / n is exact for up to 16 pipelines). An operation ends at the first whole nanosecond at which its progress,
at these speeds, has reached the time that it takes alone. An optimizer step uses the whole processor.

**Order.** Lanes run their rows in order. Transfers follow the rules and the one tie rule of ``simulate``; in a private
network the channel between two neighbouring devices is the same for all pipelines. A stage steps when its last backward
has ended: the local update, diluted with the reference model (equation in ALGORITHMS 6.1), one pass over the weights
that costs ``update_ns``. The reference model's work runs in a separate process and takes no time here (6).

**Memory** of a device. For each pipeline: parameters, optimizer states, gradients (from its first backward to its
step's end), the update Δ, which is kept until the next iteration's, and activations as ``simulate`` counts them. Once:
the reference model. While a step runs: the copy of the reference model that it has pulled. Reference, updates and copy
are each as large as the trainable parameters; the first two are ``versions``, the last is workspace.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, KINDS
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.costs.utilisation import WHOLE, utilisation_ppm
from penstock.solvers.judge.clocks.shared_processor import SPEED, Shared, run_sharing
from penstock.solvers.judge.shared_memory import Clocks, DeviceMemory, covered_ns
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.timeline import DeviceUse, Interval, Timeline, Track, Transfers

LONGEST_NS = 2**62 // SPEED
"""Limit of a device's work in an iteration, in ns: clocks have 64 bits."""


def parallel_pipelines(stages: tuple[Stage, ...], num_pipelines: int, num_micro_batches: int) -> Allocation:
    """Return N equal pipelines, each with ``num_micro_batches`` of a different global batch."""
    return Allocation((Pipeline(stages, (0, num_micro_batches - 1)),) * num_pipelines, num_micro_batches)


def sharing_makespan_ns(problem: Problem, allocation: Allocation, schedule: Schedule) -> int:
    """Return only the time per global batch; NEVER_NS if devices are not connected. Raises as ``simulate_sharing``."""
    lanes = _lanes(problem, allocation, schedule)
    if disconnected(problem, allocation) is not None:
        return NEVER_NS
    return -(-_run(problem, allocation, lanes).makespan_ns // len(allocation.pipelines))


def simulate_sharing(problem: Problem, allocation: Allocation, schedule: Schedule) -> Timeline:
    """Judge one iteration: all times, memory and use of every device.

    Raises InvalidPlan where the pipelines are not equal, operations are missing, doubled or wait for each other in a
    circle, or devices are not connected; UnsupportedRequest for replicas, several stages of a pipeline on a device,
    split backwards, and times that 64 bits cannot count.
    """
    lanes = _lanes(problem, allocation, schedule)
    if (sentence := disconnected(problem, allocation)) is not None:
        raise InvalidPlan(sentence, remedy="place the stages on devices that a link connects")
    clocks = _run(problem, allocation, lanes)
    iteration, batches = clocks.makespan_ns, len(allocation.pipelines)
    graph, number = StepGraph(problem, allocation), len(allocation.pipelines[0].stages)
    steps = clocks.start[:, -1], clocks.end[:, -1]
    profiles = {
        allocation.stages[k].devices[0]: DeviceMemory.of(graph, k, lanes.operations, clocks) for k in range(number)
    }
    assert isinstance(schedule, Orders)
    return Timeline(
        time_per_global_batch_ns=-(-iteration // batches),
        fill_ns=int(clocks.start[:, 0].max()),
        drain_ns=iteration - int(clocks.end[:, -2].min()),
        tracks=tuple(
            Track(row.devices, row.operations, clocks.start[s, :-1], clocks.end[s, :-1])
            for row, s in zip(schedule.rows, lanes.stage_of_row, strict=True)
        ),
        transfers=_transfers(clocks),
        reductions=(),
        updates=tuple(Interval(s, -1, int(a), int(b)) for s, (a, b) in enumerate(zip(*steps, strict=True))),
        uses={
            device: _use(problem, device, clocks, slice(k, None, number), memory, batches)
            for k, (device, memory) in enumerate(profiles.items())
        },
        memory_curve=lambda device: profiles[device].curve(),
        activations_curve=lambda device: profiles[device].activations(),
        window_ns=(0, iteration),
        rounds=batches,
        window_rounds=batches,
    )


class _Lanes(NamedTuple):
    """Operations (S, 2 M, 3) of each stage, and the stage of each row of the schedule."""

    operations: np.ndarray
    stage_of_row: tuple[int, ...]


def _lanes(problem: Problem, allocation: Allocation, schedule: Schedule) -> _Lanes:
    """Return the rows by stage, checked."""
    if not isinstance(schedule, Orders):
        raise InvalidPlan(f"Schedule {schedule.name} is periodic; averaged pipelines need orders of one iteration.")
    _check_pipelines(problem, allocation)
    stage_of_row = []
    for number, row in enumerate(schedule.rows):
        stages = set(row.operations[:, 1].tolist())
        if len(stages) != 1 or not stages <= set(range(len(allocation.stages))):
            raise InvalidPlan(f"Row {number} of schedule {schedule.name} holds stages {sorted(stages)} instead of one.")
        (s,) = stages
        if row.devices != allocation.stages[s].devices:
            raise InvalidPlan(f"Row {number} of schedule {schedule.name} runs stage {s}, which other devices hold.")
        stage_of_row.append(s)
    if sorted(stage_of_row) != list(range(len(allocation.stages))):
        raise InvalidPlan(f"Schedule {schedule.name} has to have one row for each of {len(allocation.stages)} stages.")
    rows = [schedule.rows[r].operations for _s, r in sorted((s, r) for r, s in enumerate(stage_of_row))]
    for s, operations in enumerate(rows):
        _check_row(problem, allocation, s, operations)
    return _Lanes(np.stack(rows), tuple(stage_of_row))


def _check_pipelines(problem: Problem, allocation: Allocation) -> None:
    first = allocation.pipelines[0]
    whole = (0, allocation.num_micro_batches - 1)
    for p, pipeline in enumerate(allocation.pipelines):
        if pipeline.stages != first.stages:
            raise InvalidPlan(
                f"Pipeline {p} has other cuts or devices than pipeline 0; averaged pipelines have to be equal."
            )
        if pipeline.micro_batches != whole:
            raise InvalidPlan(
                f"Pipeline {p} takes micro-batches {pipeline.micro_batches}; each averaged pipeline "
                f"has to take a whole global batch: {whole}."
            )
    devices = [device for stage in first.stages for device in stage.devices]
    if any(stage.replicas > 1 for stage in first.stages) or len(set(devices)) < len(devices):
        raise UnsupportedRequest(
            "averaged pipelines can be simulated only with one device per stage",
            remedy="more parallel pipelines instead of replicas",
        )


def _check_row(problem: Problem, allocation: Allocation, s: int, operations: np.ndarray) -> None:
    kinds, _stages, batches = operations.T
    where = f"the row of {problem.devices[allocation.stages[s].devices[0]].name} for stage {s}"
    if strange := sorted(set(kinds.tolist()) - {FORWARD, BACKWARD}):
        name = KINDS[strange[0]] if strange[0] < len(KINDS) else "STEP"
        raise UnsupportedRequest(
            f"{where} has {name} operations; averaged pipelines can be simulated only with backwards that are not "
            "split",
            remedy="a schedule of F and B",
        )
    place = np.full((2, allocation.num_micro_batches), -1, dtype=np.int64)
    for kind in (FORWARD, BACKWARD):
        at = np.flatnonzero(kinds == kind)
        if not np.array_equal(np.sort(batches[at]), np.arange(allocation.num_micro_batches)):
            raise InvalidPlan(f"{where} does not run {KINDS[kind]} once for each of its micro-batches.")
        place[kind, batches[at]] = at
    if (place[FORWARD] > place[BACKWARD]).any():
        m = int(np.flatnonzero(place[FORWARD] > place[BACKWARD])[0])
        raise InvalidPlan(f"{where} runs B{m} before F{m}.")


def disconnected(problem: Problem, allocation: Allocation) -> str | None:
    """Return which stages are not connected, as a sentence; None when all are."""
    rows = most_rows(problem, allocation)
    for s in range(len(allocation.pipelines[0].stages)):
        for way in (0, 1):
            move = transfer(problem, allocation, s, rows, way)
            if move is not None and move.duration_ns >= NEVER_NS:
                return f"Nothing connects the devices of stage {s} with those of stage {s + 1 - 2 * way}."
    return None


def _run(problem: Problem, allocation: Allocation, lanes: _Lanes) -> Clocks:
    shared = _tables(problem, allocation, lanes.operations)
    work = int(shared.duration.sum(axis=1).reshape(len(allocation.pipelines), -1).sum(axis=0).max())
    if work >= LONGEST_NS:
        raise UnsupportedRequest(
            f"an iteration has {work} ns of work for a device; a device that pipelines share allows less than "
            f"{LONGEST_NS} ns",
            remedy="check the units of the profile: nanoseconds",
        )
    start, end, sent, arrival, position = run_sharing(shared)
    blocked = np.flatnonzero(position < shared.duration.shape[1])
    if blocked.size:
        s = int(blocked[0])
        kind, _s, m = lanes.operations[s, position[s]].tolist()
        raise InvalidPlan(f"The schedule deadlocks: {KINDS[kind]}{m} of stage {s} waits forever.")
    return Clocks(start, end, sent, arrival)


def _tables(problem: Problem, allocation: Allocation, operations: np.ndarray) -> Shared:
    costs = _stage_tables(problem, allocation)
    place = np.arange(len(operations))[:, None]
    batches = operations[:, :, 2].astype(np.int64)
    way = operations[:, :, 0].astype(np.int64)
    row_class = (batches >= costs.cut).astype(np.int64)
    step = np.full((len(operations), 1), WHOLE, dtype=np.int64)
    return Shared(
        num_devices=len(allocation.pipelines[0].stages),
        num_resources=costs.num_resources,
        duration=np.hstack((costs.duration[place, way, row_class], costs.update_ns[:, None])),
        share=np.hstack((costs.share[place, row_class], step)),
        way=way,
        batch=batches,
        flow_ns=costs.flow_ns,
        resource_start=costs.resource_start,
        resources=costs.resources,
    )


class _StageTables(NamedTuple):
    """Costs of all stages by row class: (S, 2, 2) with the way, (S, 2) shares; flows as in ``Shared``."""

    cut: int
    duration: np.ndarray
    share: np.ndarray
    update_ns: np.ndarray
    flow_ns: np.ndarray
    num_resources: int
    resource_start: np.ndarray
    resources: np.ndarray


@lru_cache(maxsize=32)
def _stage_tables(problem: Problem, allocation: Allocation) -> _StageTables:
    graph = StepGraph(problem, allocation)
    rows, counts = zip(*graph.classes, strict=True)
    stages = allocation.pipelines[0].stages
    duration, share, flow_ns, used = [], [], [], []
    for k in range(len(stages)):
        costs = [graph.costs[k][c].durations_ns() for c in (0, -1)]
        duration.append([[each[kind] for each in costs] for kind in (FORWARD, BACKWARD)])
        share.append([utilisation_ppm(problem, allocation, k, rows[c]) for c in (0, -1)])
        for way in (0, 1):
            each = [-1 if move is None else move.duration_ns for move in graph.moves[k][way]]
            flow_ns.append(np.repeat(each, counts))
            used.append(graph.channels(k, way))
    pipelines = len(allocation.pipelines)
    ids = sorted({r for each in used for r in each})
    flat = [ids.index(r) for _ in range(pipelines) for each in used for r in each]
    lengths = [len(each) for each in used] * pipelines
    return _StageTables(
        cut=counts[0],
        duration=np.tile(np.asarray(duration, dtype=np.int64), (pipelines, 1, 1)),
        share=np.tile(np.asarray(share, dtype=np.int64), (pipelines, 1)),
        update_ns=np.asarray(graph.update_ns, dtype=np.int64),
        flow_ns=np.tile(np.asarray(flow_ns, dtype=np.int64), (pipelines, 1)),
        num_resources=len(ids),
        resource_start=prefix_sums(lengths),
        resources=np.asarray(flat, dtype=np.int64),
    )


def _transfers(clocks: Clocks) -> Transfers:
    """Return the transfers flow by flow, in the order of sending."""
    flow, m = np.nonzero(clocks.sent >= 0)
    order = np.lexsort((m, clocks.sent[flow, m], flow))
    flow, m = flow[order], m[order]
    return Transfers(
        (flow // 2).astype(np.int32),
        (flow % 2).astype(np.int8),
        m.astype(np.int32),
        clocks.sent[flow, m],
        clocks.arrival[flow, m],
    )


def _use(problem: Problem, device: int, clocks: Clocks, part: slice, memory: DeviceMemory, batches: int) -> DeviceUse:
    """Return a device's use of the iteration, per global batch."""
    start, end = clocks.start[part].ravel(), clocks.end[part].ravel()
    flows = _flows_of(part, len(clocks.start))
    moving = clocks.sent[flows] >= 0
    sent, arrival = clocks.sent[flows][moving], clocks.arrival[flows][moving]
    busy = covered_ns(start, end)
    covered = covered_ns(np.concatenate((start, sent)), np.concatenate((end, arrival)))
    value = -(-clocks.makespan_ns // batches)
    per_batch = busy // batches, (covered - busy) // batches
    return DeviceUse(*per_batch, value - sum(per_batch), memory.breakdown())


def _flows_of(part: slice, stages: int) -> list[int]:
    """Return a device's flows: its stages' flows, the previous stages' forwards, and the next stages' backwards."""
    numbers = range(*part.indices(stages))
    number = part.step
    flows = [2 * s + way for s in numbers for way in (0, 1)]
    flows += [2 * (s - 1) for s in numbers if s % number > 0]
    return flows + [2 * (s + 1) + 1 for s in numbers if s % number < number - 1]
