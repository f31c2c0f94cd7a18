"""Which of two plans is better, of what kind a plan is, and what it lacks.

Ties: time per global batch, fewest devices, then the allocation's layers and devices, then fewest warm-up forwards.
"""

from __future__ import annotations

from penstock.schemas.program import BACKWARD
from penstock.solvers.all_plans.kinds import CONTIGUOUS, EVERY_PLAN, ONE_PIPELINE, STAGES_APART
from penstock.solvers.allocation import Allocation
from penstock.solvers.planners.joint import surely_fits
from penstock.solvers.planners.proposal import Draft
from penstock.solvers.problem import Problem
from penstock.solvers.result import Bound, Candidate, Shortage
from penstock.solvers.schedule import Orders, Schedule
from penstock.solvers.timeline import Timeline

Key = tuple[int, int, tuple[object, ...], int, str]


def key_of(value_ns: int, allocation: Allocation, schedule: Schedule) -> Key:
    """The less the better."""
    stages = tuple((s.first, s.last, s.devices, s.dispatch, s.recompute) for s in allocation.stages)
    used = len({d for s in allocation.stages for d in s.devices})
    warmup = sum(schedule.warmup) if isinstance(schedule, Orders) else 0
    return value_ns, used, (stages, allocation.num_micro_batches), warmup, schedule.name


def excess_of(problem: Problem, allocation: Allocation, timeline: Timeline) -> Shortage | None:
    """The device whose simulated peak exceeds its memory most; None when all fit."""
    worst: Shortage | None = None
    for device, use in timeline.uses.items():
        needed, available = use.memory.total, problem.capacity_bytes(device)
        if needed > available and (worst is None or needed - available > worst.missing_bytes):
            stage = next(s for s in allocation.stages if device in s.devices)
            worst = Shortage(stage.first, stage.last, device, needed, available)
    return worst


def may_lack(problem: Problem, allocation: Allocation, draft: Draft) -> bool:
    """Whether a draft may turn out to need fewer micro-batches in flight."""
    if draft.name != "early-backward" or max(draft.warmup) <= 1:
        return False
    return not all(surely_fits(problem, allocation, stage) for stage in allocation.stages)


def is_contiguous(found: Candidate) -> bool:
    """Whether planners' proofs speak of such plans: a flushed pipeline, stages apart, by rows, whole backwards."""
    stages = found.allocation.stages
    devices = [device for stage in stages for device in stage.devices]
    apart = len(found.allocation.pipelines) == 1 and len(set(devices)) == len(devices)
    by_rows = all(stage.dispatch == "rows" or stage.replicas == 1 for stage in stages)
    if found.update_rule != "synchronous" or not isinstance(found.schedule, Orders) or not (apart and by_rows):
        return False
    return all((row.operations[:, 0] <= BACKWARD).all() for row in found.schedule.rows)


KINDS = (CONTIGUOUS, STAGES_APART, ONE_PIPELINE, EVERY_PLAN)
"""Of plans; each includes those before it. Two of them begin alike: the longer one stands first."""


def kind_of(bound: Bound) -> str:
    """The kind of plans that a bound of the request speaks of; its own model where that is none of ``KINDS``."""
    return next((kind for kind in KINDS if bound.model.startswith(kind)), bound.model)


def includes(kind: str, other: str) -> bool:
    """Whether all plans of the other kind are of this one."""
    return kind in KINDS and KINDS.index(kind) >= KINDS.index(other)
