"""Measures of a run of the reference simulator: memory over time, weight versions, and each row's share of the time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from reference_simulator import GRADIENTS, Reference, groups_of

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.memory import static_bytes, weight_bytes
from penstock.solvers.costs.stage import stage_costs, stage_rows
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import UpdateRule


def reference_curve(reference: Reference, device: int) -> dict[int, int]:
    """Return the bytes on a device, by each time at which they change."""
    events: dict[int, int] = {0: reference.problem.devices[device].context_bytes}

    def add(start: int, end: int | None, size: int) -> None:
        events[start] = events.get(start, 0) + size
        if end is not None:
            events[end] = events.get(end, 0) - size

    lane = next(i for i, row in enumerate(reference.orders.rows) if device in row.devices)
    posted = posted_times(reference)
    add(0, None, reference_versions(reference, lane))
    for s, stage in enumerate(reference.allocation.stages):
        if device in stage.devices:
            _stage_events(reference, lane, s, add, posted)
    level, curve = 0, {}
    for t in sorted(events):
        level += events[t]
        curve[t] = level
    return curve


def reference_versions(reference: Reference, lane: int) -> int:
    """Return the bytes of the weight versions that a row keeps beside the current one."""
    pairs = [(s, copies) for (s, other), copies in reference.copies.items() if other == lane]
    return sum((copies - 1) * weight_bytes(reference.problem, reference.allocation.stages[s])[1] for s, copies in pairs)


def reference_misses_versions(reference: Reference, rule: UpdateRule) -> bool:
    """Return whether an operation of a periodic run needs a weight version that does not exist yet, or no longer."""
    return any(_misses_versions(reference, rule, s, lane, copies) for (s, lane), copies in reference.copies.items())


def _misses_versions(reference: Reference, rule: UpdateRule, s: int, lane: int, copies: int) -> bool:
    row = [(k, m) for k, stage, m in reference.orders.rows[lane].operations.tolist() if stage == s]
    last = {m: i for i, (k, m) in enumerate(row) if k in GRADIENTS}
    second_half = 2 * s >= len(reference.allocation.stages)
    newest, version = 0, {}
    for i, (kind, m) in enumerate(row):
        if kind == STEP:
            newest += 1
        if rule == "weight_stashing":
            if kind == FORWARD:
                version[m] = newest
            if len({newest, *(v for other, v in version.items() if last[other] >= i)}) > copies:
                return True
        elif kind != STEP:
            number = m // reference.rounds(s)
            used = number if rule == "double_grouped" and second_half else max(0, number - 1)
            if not newest - copies < used <= newest:
                return True
    return False


def _stage_events(reference: Reference, lane: int, s: int, add, posted) -> None:
    problem, stage = reference.problem, reference.allocation.stages[s]
    static = static_bytes(problem, stage)
    add(0, None, static.parameters + static.optimizer)
    operations = [tuple(map(int, op)) for op in reference.orders.rows[lane].operations if op[1] == s]
    steps = reference.updates[s, lane]
    for number, gradients in reference.round_operations(lane, s).items():
        end = steps[number][1] if number < len(steps) else None
        add(min(reference.start[lane, op] for op in gradients), end, static.gradients)
    for start, end in steps:
        add(start, end, step_workspace(problem, stage))
    apart = any(op[0] == RECOMPUTE for op in operations)
    for op in operations:
        kind, _s, m = op
        if kind == STEP:
            continue
        rows = reference.rows[m]
        cost = stage_costs(problem, stage, rows)
        plain = stage_costs(problem, replace(stage, recompute=()), rows)
        rebuilt = cost.workspace_bytes - plain.workspace_bytes
        inside = rebuilt if kind == BACKWARD and not apart else 0
        add(reference.start[lane, op], reference.end[lane, op], plain.workspace_bytes + inside)
        if kind == FORWARD:
            last = (WEIGHT, s, m) if (WEIGHT, s, m) in operations else (BACKWARD, s, m)
            release = reference.end[lane, last]
            add(reference.start[lane, op], release, cost.kept_bytes + _handed_input(reference, s, rows))
            opening = (RECOMPUTE, s, m) if apart else (INPUT, s, m)
            if opening in operations:
                parts = sum(_stash(problem, stage, a, b, rows) for a, b in stage.recompute)
                add(reference.start[lane, opening], release, parts)
            _buffers(reference, lane, s, m, release, add, posted)


def step_workspace(problem: Problem, stage) -> int:
    """Return the workspace of an optimizer step: the sum over layers, or the maximum where layers step in turn."""
    if problem.update_workspace_bytes is None:
        return 0
    each = [int(problem.update_workspace_bytes[layer]) for layer in range(stage.first, stage.last + 1)]
    if problem.update_in_turn:
        return max(each)
    parts = len(stage.devices) if problem.memory.shard_states else 1
    return (sum(each) + parts - 1) // parts


def _stash(problem: Problem, stage, first: int, last: int, rows: int) -> int:
    kinds = {problem.devices[d].kind for d in stage.devices}
    sums = [problem.costs(kind, stage_rows(stage, rows)).stash_bytes for kind in kinds]
    return max(int(each[last + 1] - each[first]) for each in sums)


def _handed_input(reference: Reference, s: int, rows: int) -> int:
    """Return the bytes of the input from which a stage recomputes its first layers, if no message brought it."""
    problem, stage, before = reference.problem, reference.allocation.stages[s], reference.allocation.previous(s)
    again = [first for first, _last in stage.recompute]
    if before is None or stage.first not in again or not problem.memory.count_buffers:
        return 0
    if transfer(problem, reference.allocation, before, rows, 0) is not None:
        return 0
    return int(problem.forward_bytes[stage.first - 1]) * stage_rows(stage, rows)


def posted_times(reference: Reference) -> dict[tuple[int, tuple[int, int, int]], int]:
    """Return when each row posts the receives of its F, B and I: decision 6, over the row without its steps."""
    times = {}
    for lane, row in enumerate(reference.orders.rows):
        operations = [tuple(each) for each in row.operations.tolist() if each[0] != STEP]
        for at, op in enumerate(operations):
            if op[0] not in (FORWARD, BACKWARD, INPUT):
                continue
            alike = (FORWARD,) if op[0] == FORWARD else (BACKWARD, INPUT)
            place = max(0, at - 2)
            if at > 0 and operations[at - 1][0] in alike and operations[at - 1][1] == op[1]:
                place = at - 1
            times[lane, op] = reference.end[lane, operations[place - 1]] if place > 0 else 0
    return times


def _passed(reference: Reference, posted: dict[tuple[int, tuple[int, int, int]], int], s: int, way: int, m: int) -> int:
    """Return when a message of a stage no longer needs memory at its sender."""
    start, end = reference.transfers[s, way, m]
    reader = reference.allocation.next(s) if way == 0 else reference.allocation.previous(s)
    kinds = (FORWARD,) if way == 0 else (BACKWARD, INPUT)
    lanes = range(len(reference.orders.rows))
    return max(start, *(posted.get((lane, (k, reader, m)), 0) for lane in lanes for k in kinds)) + end - start


def _buffers(reference: Reference, lane: int, s: int, m: int, release: int, add, posted) -> None:
    problem, stage = reference.problem, reference.allocation.stages[s]
    if not problem.memory.count_buffers:
        return
    share = stage_rows(stage, reference.rows[m])
    before, after = reference.allocation.previous(s), reference.allocation.next(s)
    back = next((k, s, m) for k in (BACKWARD, INPUT) if (lane, (k, s, m)) in reference.end)
    if before is not None and (before, 0, m) in reference.transfers:
        size = int(problem.forward_bytes[stage.first - 1]) * share
        add(posted[lane, (FORWARD, s, m)], release, size)
    if after is not None and (after, 1, m) in reference.transfers:
        add(posted[lane, back], release, int(problem.backward_bytes[stage.last]) * share)
    if (s, 0, m) in reference.transfers:
        ready = reference.end[lane, (FORWARD, s, m)]
        add(ready, _passed(reference, posted, s, 0, m), int(problem.forward_bytes[stage.last]) * share)
    if (s, 1, m) in reference.transfers:
        add(
            reference.end[lane, back],
            _passed(reference, posted, s, 1, m),
            int(problem.backward_bytes[stage.first - 1]) * share,
        )


def reference_use(reference: Reference, lane: int) -> tuple[int, int]:
    """Return, per global batch of the window, the time in which a row computes, and in which it only communicates."""
    resident = {s for s, other in reference.updates if other == lane}
    busy = [(t, reference.end[key]) for key, t in reference.start.items() if key[0] == lane]
    if not reference.orders.update_every:
        busy += [pair for (_s, other), each in reference.updates.items() if other == lane for pair in each]
    groups = groups_of(reference.problem, reference.allocation)
    active = []
    for (s, number), each in reference.reductions.items():
        at_stage = [group for group in groups if group.stages[0] == s]
        place = number % sum(len(group.buckets) for group in at_stage)
        stages = next(x.stages for x in at_stage if 0 <= place - x.first_number < len(x.buckets))
        if resident & set(stages):
            active.append(each)
    active += [each for (k, _number), each in reference.ties.items() if resident & set(reference.tied[k].stages)]
    mine = {op for other, op in reference.start if other == lane}
    for (s, way, m), each in reference.transfers.items():
        other = reference.allocation.next(s) if way == 0 else reference.allocation.previous(s)
        if any((FORWARD, end, m) in mine for end in (s, other)):
            active.append(each)
    first, last = reference.window
    edges = sorted({min(max(t, first), last) for pair in (*busy, *active) for t in pair} | {first, last})
    computing = communicating = 0
    for low, high in pairwise(edges):
        if any(a <= low and high <= b for a, b in busy):
            computing += high - low
        elif any(a <= low and high <= b for a, b in active):
            communicating += high - low
    return computing // reference.window_rounds, communicating // reference.window_rounds


def assert_as_reference(timeline: Timeline, reference: Reference) -> None:
    """Check all times to the nanosecond and all memory to the byte."""
    for lane, track in enumerate(timeline.tracks):
        operations = [tuple(map(int, op)) for op in track.operations]
        assert track.start_ns.tolist() == [reference.start[lane, op] for op in operations]
        assert track.end_ns.tolist() == [reference.end[lane, op] for op in operations]
    sent = timeline.transfers
    columns = (sent.stage, sent.direction, sent.micro_batch, sent.start_ns, sent.end_ns)
    spans = {(s, way, m): (start, end) for s, way, m, start, end in zip(*(c.tolist() for c in columns), strict=True)}
    assert spans == reference.transfers
    assert {(r.stage, r.bucket): (r.start_ns, r.end_ns) for r in timeline.reductions} == reference.reductions
    steps = [(s, *step) for s, lane in sorted(reference.updates) for step in reference.updates[s, lane]]
    assert [(u.stage, u.start_ns, u.end_ns) for u in timeline.updates] == steps
    assert [(t.stage, t.bucket, t.start_ns, t.end_ns) for t in timeline.ties] == [
        (reference.tied[k].stages[0], k, *reference.ties[k, number]) for k, number in sorted(reference.ties)
    ]
    assert timeline.time_per_global_batch_ns == reference.time
    assert timeline.window_ns == reference.window
    assert (timeline.rounds, timeline.window_rounds) == (reference.num_rounds, reference.window_rounds)
    for lane, row in enumerate(reference.orders.rows):
        for device in row.devices:
            use = timeline.uses[device]
            assert (use.busy_ns, use.communication_ns) == reference_use(reference, lane)
            assert sum(use[:3]) == reference.time
            curve = reference_curve(reference, device)
            times, sizes = timeline.memory_curve(device)
            assert use.memory.total == max(curve.values()) == sizes.max()
            assert use.memory.versions == reference_versions(reference, lane)
            points = np.asarray(sorted(curve))
            at = np.searchsorted(times, points, side="right") - 1
            assert sizes[at].tolist() == [curve[t] for t in points.tolist()]
