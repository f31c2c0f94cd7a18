"""Of which plans a bound speaks: the words that its model begins with, and whether a plan is one of those."""

from __future__ import annotations

from penstock.schemas.program import INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.allocation import Allocation
from penstock.solvers.result import REQUEST_SCOPE, Bound, Candidate
from penstock.solvers.schedule import Orders, Schedule
from penstock.solvers.update_rules import UpdateRule

EVERY_PLAN = "every plan"
ONE_PIPELINE = "every plan of one pipeline"
CONTIGUOUS = "one contiguous pipeline"
STAGES_APART = "every pipeline of stages on devices of their own"

TARGETS = "plans within the target's limits"
ANY_ORDER = "any of its orders"
"""A bound of a target's plans names the order that it speaks of, or this."""


def applies(bound: Bound, candidate: Candidate) -> bool:
    """Whether the plan is one of those that the bound speaks of."""
    if bound.scope != REQUEST_SCOPE:
        return True
    plan = candidate.allocation, candidate.schedule, candidate.update_rule
    if bound.model.startswith(TARGETS):
        return bound.model.endswith((f" under {candidate.schedule.name}", f" under {ANY_ORDER}"))
    if bound.model.startswith(ONE_PIPELINE):
        return is_one_pipeline(*plan)
    if bound.model.startswith(CONTIGUOUS):
        return is_one_pipeline(*plan) and _apart(candidate.allocation) and RECOMPUTE not in _kinds(candidate.schedule)
    if bound.model.startswith(STAGES_APART):
        return is_one_pipeline(*plan) and _apart(candidate.allocation) and _whole(candidate.allocation)
    return bound.model.startswith(EVERY_PLAN)


def speaks_of_targets(bound: Bound, *, whole_backwards: bool) -> bool:
    """Whether a bound speaks of all plans of a target, whose orders may all have whole backwards."""
    if bound.model.startswith(TARGETS):
        return bound.model.endswith(ANY_ORDER)
    return not bound.model.startswith(ONE_PIPELINE) or whole_backwards


def is_one_pipeline(allocation: Allocation, schedule: Schedule, update_rule: UpdateRule) -> bool:
    """A flushed pipeline, replicas by rows, whole backwards; devices may hold several stages, which may recompute.

    Nothing is encoded: these bounds count transfers in full.
    """
    if update_rule != "synchronous" or len(allocation.pipelines) > 1 or {INPUT, WEIGHT} & _kinds(schedule):
        return False
    if any(True in stage.coded for stage in allocation.stages):
        return False
    return all(stage.dispatch == "rows" or stage.replicas == 1 for stage in allocation.stages)


def _apart(allocation: Allocation) -> bool:
    """Whether every stage has devices of its own."""
    devices = [device for stage in allocation.stages for device in stage.devices]
    return len(set(devices)) == len(devices)


def _whole(allocation: Allocation) -> bool:
    """Whether stages that recompute do so whole."""
    return all(stage.recompute in ((), ((stage.first, stage.last),)) for stage in allocation.stages)


def _kinds(schedule: Schedule) -> set[int]:
    if isinstance(schedule, Orders):
        return {kind for row in schedule.rows for kind in set(row.operations[:, 0].tolist())}
    return {operation.kind for operation in schedule.operations}
