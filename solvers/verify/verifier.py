"""The check of a judged plan: all of it is computed again from the problem alone, without any of the judge's code.

The result is one sentence per fault, none when all is good. Checked are the layers, devices, rows and micro-batches of
the plan; every operation, which must run once, with its duration, after its inputs. Lanes, channels and links must have
one user at a time. Reductions, updates, memory and the numbers that the timeline states must be right (ALGORITHMS A.7).
A periodic plan is checked in the run that ``unroll`` defines, together with every optimizer step within its row, the
weight versions that are alive, and the steady window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np

from penstock.schemas.notation import MAX_OPERATIONS
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.degrees import without_parts
from penstock.solvers.model.micro_batches import micro_batch_rows, slice_bounds
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP, Orders, Pattern, Row, Schedule
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.unroll import unroll
from penstock.solvers.model.update_rules import PERIODIC_RULES, UpdateRule, micro_batches_per_update
from penstock.solvers.verify.clock import Clock
from penstock.solvers.verify.codecs import check_codecs
from penstock.solvers.verify.memory import Copies, check_memory, one_copy
from penstock.solvers.verify.numbers import check_steady_numbers, check_step_numbers
from penstock.solvers.verify.shared_processor import verify_sharing
from penstock.solvers.verify.times import check_network, check_operations
from penstock.solvers.verify.updates import check_updates
from penstock.solvers.verify.versions import check_versions, copies_held


def verify(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    timeline: Timeline,
    *,
    overlap: bool | None = None,
    update_rule: UpdateRule = "synchronous",
) -> list[str]:
    """Return one sentence per fault of a plan and its timeline; empty means valid.

    ``overlap``: whether buckets may start before the last backward has ended (None: as in the request's rules).
    """
    faults = check_allocation(problem, allocation, update_rule) or check_rule(
        problem, allocation, schedule, update_rule
    )
    if faults:
        return faults
    if update_rule == "elastic_averaging":
        return verify_sharing(problem, allocation, schedule, timeline)
    early = problem.rules.overlap_all_reduce if overlap is None else overlap
    if isinstance(schedule, Orders):
        clock = Clock(problem, allocation, timeline, early)
        faults = check_rows(problem, allocation, schedule) or _check_tracks(problem, schedule, timeline)
        return faults or _check_run(clock, one_copy, check_step_numbers)
    run = unroll(problem, allocation, schedule, update_rule)
    names = [device.name for device in problem.devices]
    faults = check_rows(run.problem, run.allocation, run.orders)
    faults = faults or check_versions(names, allocation, run, update_rule)
    faults = faults or _check_tracks(problem, run.orders, timeline)
    clock = Clock(
        run.problem, run.allocation, timeline, early, run.orders.update_every, update_rule == "double_buffered"
    )
    return faults or _check_run(
        clock,
        lambda s, operations: copies_held(update_rule, allocation, s, operations),
        lambda clock: check_steady_numbers(clock, run),
    )


def _check_run(clock: Clock, copies: Copies, numbers: Callable[[Clock], list[str]]) -> list[str]:
    """Check times, numbers and memory of one run."""
    faults = check_operations(clock)
    if faults:
        return faults
    return [*check_network(clock), *check_updates(clock), *numbers(clock)] or check_memory(clock, copies)


def check_rule(problem: Problem, allocation: Allocation, schedule: Schedule, update_rule: UpdateRule) -> list[str]:
    """Check that the schedule suits the update rule, and that a pattern can be unrolled."""
    if isinstance(schedule, Pattern):
        if update_rule not in PERIODIC_RULES:
            return [f"Schedule {schedule.name} is periodic: it has no flush, which {update_rule} updates need."]
        if len(allocation.pipelines) > 1:
            return [f"A periodic plan has one pipeline; this one has {len(allocation.pipelines)}."]
        return _check_pattern(allocation, schedule) or _check_turns(allocation, update_rule)
    if update_rule in PERIODIC_RULES:
        return [f"Schedule {schedule.name} is one flushed step; {update_rule} updates need a periodic schedule."]
    if schedule.update_every:
        return [f"Schedule {schedule.name} has optimizer steps in its rows, which only unrolled patterns have."]
    return []


def _check_pattern(allocation: Allocation, pattern: Pattern) -> list[str]:
    """Check that a pattern's operations have existing stages and micro-batches, and are not too many when unrolled."""
    per_period = pattern.micro_batches_per_period
    faults = []
    for operation in pattern.operations:
        place = f"The pattern's operation {operation}"
        if not 0 <= operation.stage < len(allocation.stages):
            faults.append(f"{place} names stage {operation.stage} of {len(allocation.stages)}.")
        elif not 0 <= operation.kind < STEP:
            faults.append(f"{place} has kind {operation.kind}.")
        elif not 0 <= operation.micro_batch < per_period:
            faults.append(f"{place} works on micro-batch {operation.micro_batch} of {per_period} in a period.")
    if faults or not pattern.operations:
        return faults or [f"The pattern {pattern.name} has no operations."]
    listed = Counter((operation.stage, operation.micro_batch, operation.kind) for operation in pattern.operations)
    for s, m in product(range(len(allocation.stages)), range(per_period)):
        forward, backward, gradient, weight, again = (listed[s, m, kind] for kind in range(STEP))
        if forward != 1 or backward + gradient != 1 or gradient != weight or again > 1:
            faults.append(
                f"Pattern {pattern.name} does not run stage {s} exactly once for micro-batch {m} of its period "
                f"(F {forward}, B {backward}, I {gradient}, W {weight}, R {again})."
            )
    if faults:
        return faults
    deepest = (max(operation.shift for operation in pattern.operations) + 1) * per_period
    micro_batches = 6 * (deepest + allocation.num_micro_batches)
    if micro_batches * len(pattern.operations) > MAX_OPERATIONS * per_period:
        return [f"Pattern {pattern.name} overlaps too many periods: its run has over {MAX_OPERATIONS} operations."]
    return []


def _check_turns(allocation: Allocation, update_rule: UpdateRule) -> list[str]:
    """Check that every round-robin replica has a micro-batch for each update."""
    return [
        f"Stage {s} steps after every {every} micro-batches, but its {stage.replicas} replicas take turns."
        for s, stage in enumerate(allocation.stages)
        if stage.dispatch == "round_robin"
        and (every := micro_batches_per_update(update_rule, stage, allocation.num_micro_batches)) < stage.replicas
    ]


def check_allocation(problem: Problem, allocation: Allocation, update_rule: UpdateRule = "synchronous") -> list[str]:
    """Return faults of the stages themselves: layers, devices, micro-batches, rows.

    Pipelines share the micro-batches of a global batch; under elastic averaging each takes a whole global batch.
    """
    faults = []
    expected = 0
    for number, pipeline in sorted(enumerate(allocation.pipelines), key=lambda item: item[1].micro_batches):
        first, last = pipeline.micro_batches
        expected = 0 if update_rule == "elastic_averaging" else expected
        if first != expected or last < first:
            faults.append(f"Pipeline {number} takes micro-batches {first} to {last}, but {expected} is the next.")
        expected = last + 1
        faults += _check_cover(problem, number, pipeline.stages)
    if expected != allocation.num_micro_batches:
        faults.append(f"The pipelines take {expected} micro-batches of {allocation.num_micro_batches}.")
    if not 1 <= allocation.num_micro_batches <= problem.global_batch_size:
        faults.append(
            f"{allocation.num_micro_batches} micro-batches cannot be made of {problem.batch_samples} samples."
        )
        return faults
    for s, stage in enumerate(allocation.stages):
        faults += _check_stage(problem, allocation, s, stage)
    return faults or list(check_codecs(problem, allocation, update_rule))


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
    if stage.modules != without_parts(stage.modules):
        faults.append(f"Stage {s} recomputes {' and '.join(stage.modules)}, of which one is a part of another.")
    if stage.modules and (stage.recompute or not set(stage.modules) <= set(problem.modules)):
        named, measured = " and ".join(stage.modules), " and ".join(problem.modules) or "no module"
        faults.append(
            f"Stage {s} recomputes {named}, of layers that it "
            + (
                "recomputes whole."
                if stage.recompute
                else f"has no such costs of: the profile knows those of {measured}."
            )
        )
    for m in (0, allocation.num_micro_batches - 1):
        rows = micro_batch_rows(problem.global_batch_size, allocation.num_micro_batches, m)
        slices = [slice_bounds(rows, stage.replicas, i) for i in range(stage.replicas)]
        edges = [0, *(high for _low, high in slices)]
        if stage.dispatch == "rows" and ([low for low, _high in slices] != edges[:-1] or edges[-1] != rows):
            faults.append(f"The slices of stage {s} do not tile the {rows} rows of micro-batch {m}.")
    return faults


def check_rows(
    problem: Problem, allocation: Allocation, orders: Orders, update_rule: UpdateRule = "synchronous"
) -> list[str]:
    """Check the schedule's rows: their devices, and every operation of their stages once.

    A device has one row; under elastic averaging it has a row for each pipeline that uses it.
    """
    shared = update_rule == "elastic_averaging"
    holds: dict[Place, set[int]] = {}
    for s, stage in enumerate(allocation.stages):
        for device in stage.devices:
            holds.setdefault((device, allocation.pipeline_of[s] if shared else 0), set()).add(s)
    of_row = [_row_pipeline(allocation, row) if shared else 0 for row in orders.rows]
    placed = [(device, p) for p, row in zip(of_row, orders.rows, strict=True) for device in row.devices]
    faults = [f"Device {d} of a row does not exist." for d, _p in placed if not 0 <= d < problem.num_devices]
    if faults:
        return faults
    names = [device.name for device in problem.devices]
    if None in of_row:
        return [f"Row {of_row.index(None)} mixes pipelines; where they average, a device has a row for each of them."]
    faults += [f"Device {names[d]} is in {count} rows." for (d, _p), count in Counter(placed).items() if count > 1]
    faults += [f"Device {names[d]} holds no stage, but is in a row." for d, _p in sorted(set(placed) - set(holds))]
    faults += [f"Device {names[d]} holds a stage, but is in no row." for d, _p in sorted(set(holds) - set(placed))]
    if faults:
        return faults
    for p, row in zip(of_row, orders.rows, strict=True):
        stages = holds[row.devices[0], p]
        if any(holds[d, p] != stages for d in row.devices):
            faults.append(f"The devices {[names[d] for d in row.devices]} share a row, but hold different stages.")
            continue
        faults += _check_row(allocation, names, stages, row, bool(orders.update_every))
    return faults


Place = tuple[int, int | None]
"""A device, and the pipeline whose stages it runs there."""


def _row_pipeline(allocation: Allocation, row: Row) -> int | None:
    """Return the pipeline of a row's operations; None where they belong to several pipelines, or to none."""
    existing = range(len(allocation.stages))
    pipelines = {allocation.pipeline_of[s] for s in np.unique(row.operations[:, 1]).tolist() if s in existing}
    return pipelines.pop() if len(pipelines) == 1 else None


def _check_row(
    allocation: Allocation,
    names: list[str],
    stages: set[int],
    row: Row,
    stepping: bool,
) -> list[str]:
    devices, operations = row.devices, np.asarray(row.operations)
    where = f"the row of {names[devices[0]]}"
    if operations.ndim != 2 or operations.shape[1] != 3:
        return [f"The operations in {where} have the shape {operations.shape} instead of (n, 3)."]
    kinds, stage_of, batches = operations.T
    last_kind = STEP if stepping else STEP - 1
    if strange := sorted(set(np.unique(stage_of).tolist()) - stages):
        return [f"Stage {strange[0]} is in {where}, which does not hold it."]
    if kinds.size and (kinds.min() < 0 or kinds.max() > last_kind):
        return [f"An operation in {where} has kind {int(kinds.max())}."]
    faults = []
    for s in sorted(stages):
        stage, expected = allocation.stages[s], np.asarray(allocation.micro_batches(s))
        if stage.dispatch == "round_robin":
            if len(devices) > 1:
                faults.append(f"The replicas of round-robin stage {s} share {where}.")
            expected = expected[expected % stage.replicas == stage.devices.index(devices[0])]
        per_kind = [np.sort(batches[(stage_of == s) & (kinds == kind)]) for kind in range(5)]
        forward, backward, gradient, weight, again = per_kind
        once = np.array_equal(forward, expected)
        once = once and np.array_equal(np.sort(np.concatenate((backward, gradient))), expected)
        once = once and np.array_equal(gradient, weight)
        if not once or (again.size and not np.array_equal(again, expected)):
            faults.append(
                f"Stage {s} in {where}: forward and backward do not run exactly once for each of {len(expected)} "
                f"micro-batches (F {len(forward)}, B {len(backward)}, I {len(gradient)}, W {len(weight)}, "
                f"R {len(again)}){_first_wrong(expected, per_kind)}."
            )
    return faults


def _first_wrong(expected: np.ndarray, per_kind: list[np.ndarray]) -> str:
    """Return the first operation of a stage that is missing, doubled or too much, as the end of a sentence."""
    forward, backward, gradient, weight, again = per_kind
    gradients = np.sort(np.concatenate((backward, gradient)))
    pairs = (("F", expected, forward), ("B", expected, gradients), ("W", gradient, weight), ("R", expected, again))
    for letter, want, have in pairs if again.size else pairs[:-1]:
        for wrong, what in (
            (np.setdiff1d(want, have), "is missing"),
            (np.setdiff1d(have, want), "has nothing to do there"),
            (have[1:][have[1:] == have[:-1]], "is there twice"),
        ):
            if wrong.size:
                return f": {letter}{wrong[0]} {what}"
    return ""


def _check_tracks(problem: Problem, orders: Orders, timeline: Timeline) -> list[str]:
    if [row.devices for row in orders.rows] != [track.devices for track in timeline.tracks]:
        return ["The timeline's tracks are not the schedule's rows."]
    return [
        f"The track of {problem.devices[row.devices[0]].name} does not run the operations of its row in order."
        for row, track in zip(orders.rows, timeline.tracks, strict=True)
        if not np.array_equal(row.operations, track.operations)
    ]
