"""Which of two plans is better, and what a plan lacks.

Ties: time per global batch, fewest devices, then the allocation's layers and devices, then fewest warm-up forwards.
"""

from __future__ import annotations

from penstock.solvers.costs.shortages import surely_fits
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.schedules.drafts import Draft

Key = tuple[int, int, tuple[object, ...], int, str]


def key_of(value_ns: int, allocation: Allocation, schedule: Schedule) -> Key:
    """The less the better."""
    stages = tuple((s.first, s.last, s.devices, s.dispatch, s.recompute) for s in allocation.stages)
    used = len({d for s in allocation.stages for d in s.devices})
    warmup = sum(schedule.warmup) if isinstance(schedule, Orders) else 0
    return value_ns, used, (stages, allocation.num_micro_batches), warmup, schedule.name


def may_lack(problem: Problem, allocation: Allocation, draft: Draft) -> bool:
    """Whether a draft may turn out to need fewer micro-batches in flight."""
    if not draft.row.fewer or max(draft.warmup) <= 1:
        return False
    return not all(surely_fits(problem, allocation, stage) for stage in allocation.stages)
