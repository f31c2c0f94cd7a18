"""Answers of kernels, as JSON: simulated times of drawn plans, and plans of planners on a small request.

``python -m interpreted_answers`` prints the answers of interpreted kernels.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

SEEDS = range(12)
PLANNERS = ("even", "gpipe", "dapple", "spp", "relax", "chimera", "zero-bubble")
PLANS = 6
"""Plans that each planner may simulate."""


def answers() -> dict[str, Any]:
    """Return times, peaks and use by seed, and time and stages by planner."""
    from random_plans import random_allocation, random_orders, random_problem
    from small_request import a_request

    from penstock.convert import to_problem
    from penstock.solvers.judge.simulate import simulate
    from penstock.solvers.solve.driver import solve

    results: dict[str, Any] = {}
    for seed in SEEDS:
        rng = random.Random(seed)
        problem = random_problem(rng)
        allocation = random_allocation(rng, problem)
        line = simulate(problem, allocation, random_orders(rng, allocation))
        uses = [line.uses[device] for device in sorted(line.uses)]
        results[str(seed)] = [line.time_per_global_batch_ns, line.fill_ns, line.drain_ns, uses]
    problem = to_problem(a_request())
    for name in PLANNERS:
        result = solve(problem, name, max_plans=PLANS)
        best = result.best
        stages = None if best is None else [[s.first, s.last, list(s.devices)] for s in best.allocation.stages]
        bounds = [bound.bound_ns for bound in result.bounds]
        results[name] = [result.status, None if best is None else best.value_ns, stages, bounds]
    plain: dict[str, Any] = json.loads(json.dumps(results, default=int))
    return plain


def main() -> None:
    """Print the answers of interpreted kernels."""
    from penstock.solvers.compiled.interpreted import interpret

    interpret()
    sys.stdout.write(json.dumps(answers()))


if __name__ == "__main__":
    main()
