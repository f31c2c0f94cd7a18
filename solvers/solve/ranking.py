"""Which of two plans is better, and what a plan lacks.

Ties: time per global batch, fewest devices, then the allocation's layers and devices, then fewest warm-up forwards.
"""

from __future__ import annotations

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Shortage
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.planners.exact.joint import surely_fits
from penstock.solvers.schedules.drafts import Draft

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
    if not draft.row.fewer or max(draft.warmup) <= 1:
        return False
    return not all(surely_fits(problem, allocation, stage) for stage in allocation.stages)
