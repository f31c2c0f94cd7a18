"""A judged step as a complete hint: a value for every variable, so that CP-SAT begins with a solution.

Identical micro-batches are put into index order: the k-th start belongs to the k-th micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.solvers.improve.job_shop.model import Model, Scheduled, Values
from penstock.solvers.improve.job_shop.shop import Operation
from penstock.solvers.model.timeline import Timeline


def give_hint(model: Model, timeline: Timeline) -> None:
    """Set the hint from a judged step that has the rows of the model's shop."""
    values: Values = {model.makespan.index: timeline.time_per_global_batch_ns // model.unit_ns}
    _starts_of_operations(model, timeline, values)
    _starts_of_transfers(model, timeline, values)
    for each in timeline.reductions:
        step = model.reductions.get((each.stage, each.bucket))
        if step is not None:
            values[step.start.index] = each.start_ns // model.unit_ns
    for variable, computed in model.defined:
        values[variable.index] = computed(values)
    hint = model.cp.proto.solution_hint
    hint.vars.extend(sorted(values))
    hint.values.extend(values[index] for index in sorted(values))


def _starts_of_operations(model: Model, timeline: Timeline, values: Values) -> None:
    rows = {devices: row for row, devices in enumerate(model.shop.devices)}
    alike: dict[object, list[tuple[int, Scheduled]]] = defaultdict(list)
    starts: dict[object, list[int]] = defaultdict(list)
    for track in timeline.tracks:
        row = rows[track.devices]
        for (kind, s, m), start in zip(track.operations.tolist(), track.start_ns.tolist(), strict=True):
            mark = (kind, s, row, model.shop.group_of[m])
            alike[mark].append((m, model.steps[Operation(kind, s, m, row)]))
            starts[mark].append(start)
    for key, steps in alike.items():
        _in_index_order(model, steps, starts[key], values)


def _starts_of_transfers(model: Model, timeline: Timeline, values: Values) -> None:
    moves = timeline.transfers
    alike: dict[object, list[tuple[int, Scheduled]]] = defaultdict(list)
    starts: dict[object, list[int]] = defaultdict(list)
    columns = (moves.direction.tolist(), moves.stage.tolist(), moves.micro_batch.tolist(), moves.start_ns.tolist())
    for direction, s, m, start in zip(*columns, strict=True):
        step = model.transfers.get((direction, s, m))
        if step is not None:
            mark = (direction, s, model.shop.group_of[m])
            alike[mark].append((m, step))
            starts[mark].append(start)
    for key, steps in alike.items():
        _in_index_order(model, steps, starts[key], values)


def _in_index_order(model: Model, steps: Iterable[tuple[int, Scheduled]], starts: list[int], values: Values) -> None:
    ordered = sorted(steps, key=lambda each: each[0])
    for (_m, step), start in zip(ordered, sorted(starts), strict=True):
        values[step.start.index] = start // model.unit_ns
