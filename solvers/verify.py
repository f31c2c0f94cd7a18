"""Is a judged plan right? All of it is computed again from the problem alone, without any of the judge's code.

Sentences, none when all is good: layers, devices, rows and micro-batches of the plan; every operation once, with its
duration, after what it needs; lanes, channels and links used by one at a time; reductions and updates; memory; and
the numbers that the timeline states (ALGORITHMS A.7, DESIGN 6).
"""

from __future__ import annotations

import numpy as np

from penstock.solvers.allocation import Allocation, Stage
from penstock.solvers.batching import micro_batch_rows, slice_bounds
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders, Schedule
from penstock.solvers.timeline import Timeline
from penstock.solvers.update_rules import UpdateRule
from penstock.solvers.verify_memory import check_memory
from penstock.solvers.verify_times import Clock, check_network, check_operations, check_updates


def verify(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    timeline: Timeline,
    *,
    overlap: bool | None = None,
    update_rule: UpdateRule = "synchronous",
) -> list[str]:
    """What is wrong with a plan and its timeline, a sentence each; empty means good.

    ``overlap``: whether buckets may start before the last backward has ended (None: as the request's rules say).
    """
    faults = check_allocation(problem, allocation)
    if faults:
        return faults
    if not isinstance(schedule, Orders):
        return [f"Schedule {schedule.name} is periodic; periodic schedules cannot be verified yet."]
    if len(allocation.pipelines) > 1:
        return [f"The plan has {len(allocation.pipelines)} pipelines; only one can be verified yet."]
    faults = check_rows(problem, allocation, schedule) or _check_tracks(problem, schedule, timeline)
    if faults:
        return faults
    early = problem.rules.overlap_all_reduce if overlap is None else overlap
    clock = Clock(problem, allocation, timeline, early)
    faults = check_operations(clock)
    if faults:
        return faults
    faults = [*check_network(clock), *check_updates(clock), *_check_numbers(problem, timeline)]
    return faults or check_memory(clock)


def check_allocation(problem: Problem, allocation: Allocation) -> list[str]:
    """Faults of the stages themselves: layers, devices, micro-batches, rows."""
    faults = []
    expected = 0
    for number, pipeline in sorted(enumerate(allocation.pipelines), key=lambda item: item[1].micro_batches):
        first, last = pipeline.micro_batches
        if first != expected or last < first:
            faults.append(f"Pipeline {number} takes micro-batches {first} to {last}, but {expected} is the next.")
        expected = last + 1
        faults += _check_cover(problem, number, pipeline.stages)
    if expected != allocation.num_micro_batches:
        faults.append(f"The pipelines take {expected} micro-batches of {allocation.num_micro_batches}.")
    if not 1 <= allocation.num_micro_batches <= problem.global_batch_size:
        faults.append(
            f"{allocation.num_micro_batches} micro-batches cannot be made of {problem.global_batch_size} samples."
        )
        return faults
    for s, stage in enumerate(allocation.stages):
        faults += _check_stage(problem, allocation, s, stage)
    return faults


def _check_cover(problem: Problem, number: int, stages: tuple[Stage, ...]) -> list[str]:
    faults = []
    layer = 0
    for stage in stages:
        if stage.first != layer or stage.last < stage.first:
            faults.append(
                f"Pipeline {number}: a stage holds layers {stage.first} to {stage.last}, but layer {layer} is the next."
            )
        elif stage.first > 0 and not problem.cuttable[stage.first - 1]:
            faults.append(
                f"Pipeline {number} is cut after layer {problem.layer_names[stage.first - 1]}, "
                "where the profile allows no cut."
            )
        layer = stage.last + 1
    if layer != problem.num_layers:
        faults.append(f"Pipeline {number} holds {layer} layers of {problem.num_layers}.")
    return faults


def _check_stage(problem: Problem, allocation: Allocation, s: int, stage: Stage) -> list[str]:
    faults = []
    if not stage.devices:
        faults.append(f"Stage {s} has no device.")
    if unknown := [d for d in stage.devices if not 0 <= d < problem.num_devices]:
        faults.append(f"Stage {s} names device {unknown[0]}, but there are {problem.num_devices}.")
    if len(set(stage.devices)) != len(stage.devices):
        faults.append(f"Stage {s} names a device twice: {list(stage.devices)}.")
    reached = stage.first
    for first, last in stage.recompute:
        if first < reached or last < first or last > stage.last:
            faults.append(
                f"Stage {s} (layers {stage.first} to {stage.last}) recomputes layers {first} to {last}, "
                "which is no segment of it in order."
            )
        reached = last + 1
    for m in (0, allocation.num_micro_batches - 1):
        rows = micro_batch_rows(problem.global_batch_size, allocation.num_micro_batches, m)
        slices = [slice_bounds(rows, stage.replicas, i) for i in range(stage.replicas)]
        edges = [0, *(high for _low, high in slices)]
        if stage.dispatch == "rows" and ([low for low, _high in slices] != edges[:-1] or edges[-1] != rows):
            faults.append(f"The slices of stage {s} do not tile the {rows} rows of micro-batch {m}.")
    return faults


def check_rows(problem: Problem, allocation: Allocation, orders: Orders) -> list[str]:
    """Faults of the schedule's rows: who is in them, and every operation of their stages once."""
    holds: dict[int, set[int]] = {}
    for s, stage in enumerate(allocation.stages):
        for device in stage.devices:
            holds.setdefault(device, set()).add(s)
    placed = [device for row in orders.rows for device in row.devices]
    faults = [f"Device {d} of a row does not exist." for d in placed if not 0 <= d < problem.num_devices]
    if faults:
        return faults
    names = [device.name for device in problem.devices]
    faults += [f"Device {names[d]} is in {placed.count(d)} rows." for d in sorted(set(placed)) if placed.count(d) > 1]
    faults += [f"Device {names[d]} holds no stage, but is in a row." for d in sorted(set(placed) - set(holds))]
    faults += [f"Device {names[d]} holds a stage, but is in no row." for d in sorted(set(holds) - set(placed))]
    if faults:
        return faults
    for row in orders.rows:
        if any(holds[d] != holds[row.devices[0]] for d in row.devices):
            faults.append(f"The devices {[names[d] for d in row.devices]} share a row, but hold different stages.")
            continue
        faults += _check_row(allocation, names, holds[row.devices[0]], row.devices, np.asarray(row.operations))
    return faults


def _check_row(
    allocation: Allocation, names: list[str], stages: set[int], devices: tuple[int, ...], operations: np.ndarray
) -> list[str]:
    where = f"the row of {names[devices[0]]}"
    if operations.ndim != 2 or operations.shape[1] != 3:
        return [f"The operations in {where} have the shape {operations.shape} instead of (n, 3)."]
    kinds, own, batches = operations.T
    if strange := sorted(set(np.unique(own).tolist()) - stages):
        return [f"Stage {strange[0]} is in {where}, which does not hold it."]
    if kinds.size and (kinds.min() < 0 or kinds.max() > 4):
        return [f"An operation in {where} has kind {int(kinds.max())}."]
    faults = []
    for s in sorted(stages):
        stage, expected = allocation.stages[s], np.asarray(allocation.micro_batches(s))
        if stage.dispatch == "round_robin":
            if len(devices) > 1:
                faults.append(f"The replicas of round-robin stage {s} share {where}.")
            expected = expected[expected % stage.replicas == stage.devices.index(devices[0])]
        per_kind = [np.sort(batches[(own == s) & (kinds == kind)]) for kind in range(5)]
        forward, backward, gradient, weight, again = per_kind
        once = np.array_equal(forward, expected)
        once = once and np.array_equal(np.sort(np.concatenate((backward, gradient))), expected)
        once = once and np.array_equal(gradient, weight)
        if not once or (again.size and not np.array_equal(again, expected)):
            faults.append(
                f"Stage {s} in {where}: forward and backward do not run exactly once for each of {len(expected)} "
                f"micro-batches (F {len(forward)}, B {len(backward)}, I {len(gradient)}, W {len(weight)}, "
                f"R {len(again)})."
            )
    return faults


def _check_tracks(problem: Problem, orders: Orders, timeline: Timeline) -> list[str]:
    if [row.devices for row in orders.rows] != [track.devices for track in timeline.tracks]:
        return ["The timeline's tracks are not the schedule's rows."]
    return [
        f"The track of {problem.devices[row.devices[0]].name} does not run the operations of its row in order."
        for row, track in zip(orders.rows, timeline.tracks, strict=True)
        if not np.array_equal(row.operations, track.operations)
    ]


def _check_numbers(problem: Problem, timeline: Timeline) -> list[str]:
    """The timeline's own summary: makespan, and every device's time adding up to it."""
    faults = []
    ends = [int(track.end_ns.max()) for track in timeline.tracks if track.end_ns.size]
    ends += [each.end_ns for each in (*timeline.reductions, *timeline.updates)]
    ends += [int(timeline.transfers.end_ns.max())] if timeline.transfers.end_ns.size else []
    stated = timeline.time_per_global_batch_ns
    if max(ends) != stated:
        faults.append(f"The timeline states {stated} ns, but the last thing ends at {max(ends)} ns.")
    for device, use in timeline.uses.items():
        parts = use.busy_ns + use.communication_ns + use.idle_ns
        if parts != stated or min(use[:3]) < 0:
            faults.append(
                f"The times of {problem.devices[device].name} (busy {use.busy_ns}, communication "
                f"{use.communication_ns}, idle {use.idle_ns} ns) do not add up to {stated} ns."
            )
    return faults
