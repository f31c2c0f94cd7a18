"""Plans in: any plan document becomes an allocation and a schedule of the core."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from penstock.schemas import plan as wire
from penstock.schemas.errors import Fault, InvalidDocument, InvalidPlan
from penstock.schemas.program import parse_row
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.degrees import Choice, Modules, modules_of, without_parts
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Pattern, PatternOperation, Row, Schedule

HOME = -1
"""The number of a row's only stage while its text is parsed."""


def from_plan(plan: wire.Plan, problem: Problem) -> tuple[Allocation, Schedule]:
    """Build allocation and schedule of a plan document.

    Raises InvalidPlan naming each unknown device, layer or operation.
    """
    faults: list[Fault] = []
    _refuse_several_stages(plan, problem)
    number_of = {device.name: d for d, device in enumerate(problem.devices)}
    pipelines = []
    for p, pipeline in enumerate(plan.pipelines):
        stages = []
        for s, stage in enumerate(pipeline.stages):
            where = f"/pipelines/{p}/stages/{s}"
            first, last = stage.layers
            if not first <= last < problem.num_layers:
                faults.append(
                    Fault(f"{where}/layers", f"{[first, last]} is not a range of layers 0…{problem.num_layers - 1}")
                )
                continue
            try:
                devices = _devices(problem, stage.devices, number_of)
            except InvalidPlan as error:
                faults.append(Fault(f"{where}/devices", error.detail))
                continue
            try:
                ranges, modules = _again(problem, stage)
            except InvalidPlan as error:
                faults.append(Fault(f"{where}/recompute", error.detail))
                continue
            codecs = (None, *(pipeline.codecs or (None,) * (len(pipeline.stages) - 1)), None)
            coded = codecs[s] is not None, codecs[s + 1] is not None
            stages.append(Stage(first, last, devices, stage.dispatch, ranges, coded, modules))
        first_batch, last_batch = pipeline.micro_batches
        if not first_batch <= last_batch < plan.num_micro_batches:
            faults.append(
                Fault(
                    f"/pipelines/{p}/micro_batches", f"not a range within micro-batches 0…{plan.num_micro_batches - 1}"
                )
            )
        pipelines.append(Pipeline(tuple(stages), pipeline.micro_batches))
    faults += _batch_faults(plan, problem)
    if faults:
        raise InvalidPlan("the plan does not fit its request", faults=tuple(faults))
    allocation = Allocation(tuple(pipelines), plan.num_micro_batches)
    return allocation, _schedule(plan.schedule, allocation, number_of)


def _refuse_several_stages(plan: wire.Plan, problem: Problem) -> None:
    """Raise InvalidPlan for several stages under a sharding that needs a single one."""
    stages = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    if stages > 1 and problem.choice is not None and problem.choice.in_one_stage:
        what = "parameters would be gathered" if plan.sharding == "parameters" else "gradients would be summed"
        raise InvalidPlan(
            f"the plan has sharding {plan.sharding} and {stages} stages: {what} again for each of "
            f"{plan.num_micro_batches} micro-batches",
            faults=(Fault("/sharding", f"{plan.sharding} needs one stage on all GPUs"),),
            remedy="sharding parameters_kept or optimizer, or one stage",
        )


def _again(problem: Problem, stage: wire.Stage) -> tuple[tuple[wire.LayerRange, ...], Modules]:
    """Return the ranges that a stage recomputes whole, and its recomputed modules. Raises InvalidPlan."""
    first, last = stage.layers
    if isinstance(stage.recompute, wire.RecomputedModules):
        unknown = [module for module in stage.recompute.modules if module not in problem.modules]
        if unknown:
            available = (
                f"costs of recomputing {', '.join(problem.modules)}" if problem.modules else "costs for no module"
            )
            at = problem.choice or Choice()
            raise InvalidPlan(
                f"the profile has no costs of recomputing {unknown[0]} at {at.degrees}; it has {available}"
            )
        return (), without_parts(modules_of([stage.recompute.modules]))
    if isinstance(stage.recompute, str):
        return () if stage.recompute == "none" else (stage.layers,), ()
    outside = [each for each in stage.recompute if not first <= each[0] <= each[1] <= last]
    if outside:
        raise InvalidPlan(f"{list(outside[0])} is not a range within layers {[first, last]}")
    return stage.recompute, ()


def _devices(problem: Problem, names: tuple[str, ...], number_of: dict[str, int]) -> tuple[int, ...]:
    """Return a stage's devices by number; with degrees the GPU groups that are named. Raises InvalidPlan."""
    if problem.real is None:
        unknown = [name for name in names if name not in number_of]
        if unknown:
            raise InvalidPlan(f"the topology has no device {unknown[0]!r}")
        return tuple(number_of[name] for name in names)
    size = len(problem.cells[0])
    cells = []
    for at in range(0, len(names), size):
        cell = number_of.get(names[at])
        gpu_names = () if cell is None else problem.names(cell)
        if gpu_names != names[at : at + size]:
            raise InvalidPlan(
                f"a replica at {problem.choice} needs {size} neighbouring GPUs in the topology's order, unlike "
                f"{', '.join(names[at : at + size])}"
            )
        assert cell is not None
        cells.append(cell)
    return tuple(cells)


def _batch_faults(plan: wire.Plan, problem: Problem) -> list[Fault]:
    faults = []
    samples, each = problem.batch_samples, problem.samples_per_row
    if plan.global_batch_size != samples:
        faults.append(Fault("/global_batch_size", f"the plan has {plan.global_batch_size}, the request {samples}"))
    least = plan.global_batch_size // each
    most = -(-least // plan.num_micro_batches) * each
    if plan.num_micro_batches > least or most != plan.micro_batch_size:
        of = "" if each == 1 else f" of multiples of {each}"
        faults.append(
            Fault(
                "/micro_batch_size",
                f"{plan.global_batch_size} samples in {plan.num_micro_batches} micro-batches{of} have {most} rows "
                f"in the largest, not {plan.micro_batch_size}",
            )
        )
    return faults


def _schedule(schedule: wire.PlanSchedule, allocation: Allocation, number_of: dict[str, int]) -> Schedule:
    if schedule.pattern is not None:
        return _pattern(schedule)
    homes = home_stages(allocation)
    rows = []
    for r, row in enumerate(schedule.rows):
        where = f"/schedule/rows/{r}"
        unknown = [name for name in row.devices if name not in number_of]
        if unknown:
            raise InvalidPlan(
                f"the schedule names device {unknown[0]!r}, which the topology lacks",
                faults=(Fault(f"{where}/devices", repr(unknown[0])),),
            )
        idle = [name for name in row.devices if number_of[name] not in homes]
        if idle:
            raise InvalidPlan(
                "the schedule has a row for a device without a stage",
                faults=(Fault(f"{where}/devices", f"{idle[0]!r} holds no stage"),),
                remedy="give the device a stage or leave it out of the rows",
            )
        by_home: dict[int | None, list[int]] = {}
        for name in row.devices:
            by_home.setdefault(homes[number_of[name]], []).append(number_of[name])
        for home, devices in by_home.items():
            try:
                operations = _operations(row.text, home)
            except InvalidDocument as error:
                raise InvalidPlan(error.detail, faults=(Fault(f"{where}/text", error.detail), *error.faults)) from None
            rows.append(Row(tuple(devices), operations))
    return Orders(schedule.name, tuple(rows), schedule.warmup)


def _operations(text: str, home: int | None) -> np.ndarray:
    """Parse a row's operations, (n, 3) int32; a text that many stages share is parsed once."""
    if home is None:
        return np.array(parse_row(text), dtype=np.int32).reshape(-1, 3)
    operations = _parsed(text).copy()
    operations[operations[:, 1] == HOME, 1] = home
    return operations


@lru_cache(maxsize=64)
def _parsed(text: str) -> np.ndarray:
    return np.array(parse_row(text, HOME), dtype=np.int32).reshape(-1, 3)


def _pattern(schedule: wire.PlanSchedule) -> Pattern:
    assert schedule.pattern is not None
    operations: list[PatternOperation] = []
    for i, o in enumerate(schedule.pattern.operations):
        parsed = parse_row(o.operation)
        if len(parsed) != 1:
            raise InvalidPlan(
                f"a pattern's entry needs one operation, not {len(parsed)}",
                faults=(Fault(f"/schedule/pattern/operations/{i}", o.operation),),
            )
        kind, stage, micro_batch = parsed[0]
        operations.append(PatternOperation(kind, stage, o.start_ns, o.shift, micro_batch))
    return Pattern(
        schedule.name, schedule.pattern.period_ns, schedule.pattern.micro_batches_per_period, tuple(operations)
    )


def home_stages(allocation: Allocation) -> dict[int, int | None]:
    """Return the only stage of each device, or None for a device with several."""
    homes: dict[int, int | None] = {}
    for number, stage in enumerate(allocation.stages):
        for device in stage.devices:
            homes[device] = None if device in homes else number
    return homes
