"""The request of a solve, for every task and every planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, Reason
from penstock.solvers.planners.effort import THOROUGH, Effort


@dataclass(frozen=True)
class Setting:
    """A problem, the planner that runs on it, and the limits of the solve.

    - ``options`` are the ``planner``'s. ``schedule``: the requested one, or ``auto``.
    - ``workers``: processes for a large request, by default as many as processors. The answer does not depend on it.
    - ``gap``: the relative distance to a bound at which a plan is good enough.
    - ``max_plans``: how many plans of one planner are simulated; a count, so the answer is the same on every machine.
    - ``first_feasible``: stop at the first plan that fits. ``prove_bounds``: compute bounds of classes of plans.
    - ``whole``: a bound on every plan of the request, if one is proven already.
    - ``effort``: when planners end by themselves.
    - ``excluded``: planners and phases that ``auto`` skips, each with the reason that the answer gives, or None.
    - ``upper_bound_ns``: plans that take longer may be left out; None: no limit.
    """

    problem: Problem
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    planner: str = "auto"
    options: Mapping[str, object] = field(default_factory=dict)
    workers: int | None = None
    gap: float = 0.0
    schedule: str = "auto"
    max_plans: int | None = None
    first_feasible: bool = False
    prove_bounds: bool = True
    whole: Bound | None = None
    effort: Effort = THOROUGH
    excluded: Mapping[str, Reason | None] = field(default_factory=dict)
    upper_bound_ns: int | None = None
