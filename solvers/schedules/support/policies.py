"""The micro-batches that early backward keeps in flight on each stage: vectors worth simulating, by policy."""

from __future__ import annotations

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.schedules import early_backward as early
from penstock.solvers.schedules.pipeline_execution import execution_warmup

SINGLE = {"A": early.policy_a, "B": early.policy_b, "acr": early.by_acr, "pe": execution_warmup}
"""The policies of one vector."""


def vectors_of(problem: Problem, allocation: Allocation, policy: str) -> list[tuple[int, ...]]:
    """Return the K-vectors of a policy; ``best``: P_A, P_B, two between them, and as many forwards as memory holds.

    ``near``: P_A, and one more forward.
    """
    if policy in SINGLE:
        return [SINGLE[policy](problem, allocation)]
    depths = early.depths(allocation)
    wanted = [
        depths,
        tuple(min(d + 1, 2 * d - 1) for d in depths),
        tuple((3 * d - 1) // 2 for d in depths),
        tuple(2 * d - 1 for d in depths),
        (allocation.num_micro_batches,) * len(depths),
    ][: 2 if policy == "near" else None]
    return list(dict.fromkeys(early.fitted(problem, allocation, each) for each in wanted))
