"""The cases of a sweep, a row of its table for each answer, and its Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from penstock.planning.pareto import front, graded
from penstock.schemas.api.jobs import ProblemDetails, ResultOut
from penstock.schemas.api.sweep import Method, SweepRequest, SweepRow
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import Plan
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.model.result import REQUEST_SCOPE

MAX_CASES = 1000
ALIKE = 0.01
DEVICES = 2
"""Index of the coordinate of ``_point`` that counts devices, where a difference of 1 is significant."""


@dataclass(frozen=True)
class Case:
    """One plan request of a sweep."""

    request: PlanRequest

    def row(self, **figures: Any) -> SweepRow:
        """Return the case's row of the table, with the given fields of its answer."""
        request, topology, profile = self.request, self.request.topology, self.request.profile
        shape = profile.shape if isinstance(profile, ModelProfile) else None
        return SweepRow(
            topology=topology.name if isinstance(topology, ClusterTopology) else topology,
            global_batch_size=request.global_batch_size,
            planner=request.planner,
            schedule=request.schedule,
            update_rules=request.update_rules,
            profile=profile.name if isinstance(profile, ModelProfile) else None,
            sequence_length=None if shape is None else shape.sequence_length,
            **figures,
        )


def cases(sweep: SweepRequest, max_cases: int = MAX_CASES) -> list[Case]:
    """Return a plan request for each combination; the last axis (update rules) varies fastest.

    Raises InvalidDocument for more than ``max_cases``, and for a combination that contradicts itself.
    """
    request, over = sweep.request, sweep.over
    axes: dict[str, Sequence[Any]] = {
        "profile": over.profiles or (),
        "topology": over.topologies,
        "global_batch_size": over.global_batch_sizes,
        "planner": over.planners,
        "schedule": over.schedules,
        "update_rules": [(rule,) for rule in over.update_rules],
    }
    varied = {name: values for name, values in axes.items() if values}
    count = 1
    for values in varied.values():
        count *= len(values)
    if count > max_cases:
        sizes = " × ".join(f"{len(values)} {name}" for name, values in varied.items())
        raise InvalidDocument(
            f"the sweep has {count} cases ({sizes}); the limit is {max_cases}", remedy="sweep over fewer values"
        )
    fields = {name: getattr(request, name) for name in PlanRequest.model_fields}
    return [Case(_combined(fields, dict(zip(varied, values, strict=True)))) for values in product(*varied.values())]


def _combined(fields: dict[str, Any], values: dict[str, Any]) -> PlanRequest:
    try:
        return PlanRequest.parse(fields | values)
    except InvalidDocument as error:
        shown = {name: getattr(value, "name", value) for name, value in values.items()}
        raise InvalidDocument(
            f"the case {shown} is not a valid plan request: {error.detail}", faults=error.faults
        ) from None


def figures(result: ResultOut) -> dict[str, Any]:
    """Return the figures of a planner's answer for its row."""
    return {
        "state": "succeeded",
        "status": result.status,
        "why": result.sentence,
        "seconds": round(result.seconds, 6),
        "gap": next((c.gap for c in result.certificates if c.scope == REQUEST_SCOPE), None),
        "plan_hash": result.plan_hash,
        **({} if result.plan is None else _figures_of(result.plan)),
    }


def answered(case: Case, result: ResultOut) -> SweepRow:
    """Return the row of a planner's answer."""
    return case.row(**figures(result))


def refused(case: Case, problem: ProblemDetails) -> SweepRow:
    """Return the row of a case without an answer: no planner accepts it, or it failed."""
    state = "unsupported" if problem.code == "unsupported-request" else "failed"
    return case.row(state=state, why=f"{problem.detail}; {problem.remedy}" if problem.remedy else problem.detail)


def _figures_of(plan: Plan) -> dict[str, Any]:
    assert plan.prediction is not None
    time_ns = plan.prediction.time_per_global_batch_ns
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    return {
        "method": Method(planner=plan.planner, schedule=plan.schedule.name, update_rule=plan.update_rule),
        "time_per_global_batch_ns": time_ns,
        "samples_per_s": plan.global_batch_size / time_ns * 1e9,
        "peak_memory_bytes": plan.prediction.peak_memory_bytes,
        "devices": len({device for stage in stages for device in stage.devices}),
        "cost_per_sample": plan.prediction.cost_per_sample,
        "degrees": plan.degrees,
        "sharding": plan.sharding,
        "chosen": plan.chosen,
        "stages": len({stage.devices for stage in stages}),
    }


def with_front(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """Return the rows, with the Pareto front of each sequence length marked. Costs count when every plan has one.

    Differences below ALIKE, except in devices, put no row on the front, unless all else is equally good.
    """
    lengths = dict.fromkeys(row.sequence_length for row in rows)
    if len(lengths) > 1:
        numbers_of = {
            each: [number for number, row in enumerate(rows) if row.sequence_length == each] for each in lengths
        }
        fronts = {each: with_front([rows[number] for number in numbers]) for each, numbers in numbers_of.items()}
        marked_rows = {
            number: row for each in lengths for number, row in zip(numbers_of[each], fronts[each], strict=True)
        }
        return tuple(marked_rows[number] for number in range(len(rows)))
    planned = [number for number, row in enumerate(rows) if row.samples_per_s is not None]
    priced = all(rows[number].cost_per_sample is not None for number in planned)
    points = [_point(rows[number], priced) for number in planned]
    coarse = list(zip(*(_coarse(place, values) for place, values in enumerate(zip(*points, strict=True))), strict=True))
    both = [a and b for a, b in zip(front(points), front(coarse), strict=True)]
    inside = dict(zip(planned, both, strict=True))
    return tuple(row.model_copy(update={"pareto": inside.get(number, False)}) for number, row in enumerate(rows))


def _coarse(place: int, values: Sequence[float]) -> list[float]:
    return list(values) if place == DEVICES else [*map(float, graded(values, ALIKE))]


def _point(row: SweepRow, priced: bool) -> tuple[float, ...]:
    assert row.samples_per_s is not None
    assert row.peak_memory_bytes is not None
    assert row.devices is not None
    cost = (row.cost_per_sample or 0.0,) if priced else ()
    return (-row.samples_per_s, row.peak_memory_bytes, row.devices, *cost)
