"""Better warm-ups for one allocation: runs of neighbouring stages begin with a few micro-batches more, or fewer.

The usual warm-ups (``fitting.warmups``) fall evenly along the pipeline. Where transfers are long, or memory binds on
some stages only, uneven ones are often several percent quicker.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.support.fitting_orders import judged

CHANGES = (1, -1, 2, -2, 4, -4)


def climb(problem: Problem, start: JudgedPlan, good_ns: int, most: int) -> JudgedPlan:
    """Return the best plan of at most ``most`` judged ones, or the first that takes no more than ``good_ns``."""
    best, seen = start, {start.orders.warmup}
    fresh = _neighbours(best)
    while len(seen) <= most and best.value_ns > good_ns:
        warmup = next((each for each in fresh if each not in seen), None)
        if warmup is None:
            break
        seen.add(warmup)
        orders = early_backward(problem, best.allocation, warmup=warmup)
        trial = judged(problem, best.allocation, orders, best.value_ns).plan
        if trial is not None:
            best, fresh = trial, _neighbours(trial)
    return best


def _neighbours(plan: JudgedPlan) -> Iterator[tuple[int, ...]]:
    """Yield the warm-ups after each change to each run of stages.

    Warm-ups stay between 1 and the number of micro-batches, and do not grow along the pipeline.
    """
    stages, most = len(plan.orders.warmup), plan.allocation.num_micro_batches
    for low in range(stages):
        for high in range(low + 1, stages + 1):
            for change in CHANGES:
                wanted = (k + change * (low <= s < high) for s, k in enumerate(plan.orders.warmup))
                yield tuple(accumulate((max(1, min(k, most)) for k in wanted), min))
