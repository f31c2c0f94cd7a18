"""SPP's pipeline execution order (section IV-A1, Algorithm 1 lines 1-8; ALGORITHMS 3.3) in closed form.

The paper's queues, read pass by pass on a snapshot of them (R-14), let stage n of S run min(M, 4 (S - n) + 1) forwards
before its first backward, then one of each in turn: DAPPLE's early backward with P_B on 2 S - 1 stages, counting the
channels. ``tests/solvers/schedules/test_spp_schedule.py`` has the procedure itself.
"""

from __future__ import annotations

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules import early_backward as early


def pipeline_execution(problem: Problem, allocation: Allocation) -> Orders:
    """Return SPP's order, with no more in-flight micro-batches than memory holds."""
    return early.early_backward(problem, allocation, warmup=execution_warmup(problem, allocation))


def execution_warmup(problem: Problem, allocation: Allocation) -> tuple[int, ...]:
    """Return SPP's warm-up, clamped by what fits in memory."""
    return early.fitted(problem, allocation, unclamped(allocation))


def unclamped(allocation: Allocation) -> tuple[int, ...]:
    """Return K_n = min(M, 4 (S - n) + 1) for stages n = 1 … S."""
    return tuple(
        min(4 * depth - 3, len(allocation.micro_batches(number)))
        for number, depth in enumerate(early.depths(allocation))
    )
