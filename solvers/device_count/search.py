"""The bound: the number of micro-batches whose proven time is least is looked into until it can be raised no more."""

from __future__ import annotations

from collections.abc import Callable

from penstock.solvers.all_plans.kinds import STAGES_APART
from penstock.solvers.batches import Batch, candidates, dapple_replicas
from penstock.solvers.device_count.count import Count
from penstock.solvers.problem import Problem
from penstock.solvers.result import REQUEST_SCOPE, Bound

FIRST, FINEST = 16, 512
"""Times are tried from a 16th above what is proven, then ever nearer, to a 512th."""


def bounds(problem: Problem, known_ns: int, on_better: Callable[[Bound], None]) -> Bound:
    """The largest proven time, ``known_ns`` at least; every better one is told as it is found.

    It speaks of flushed plans of one pipeline, stages on devices of their own, replicas by rows, whole backwards, each
    stage recomputing whole or not at all, with one of the numbers of micro-batches that the planners try.
    """
    proven = dict.fromkeys(_batches(problem), known_ns)
    steps = dict.fromkeys(proven, FIRST)
    best = known_ns
    while steps[lowest := min(proven, key=lambda batch: proven[batch])] <= FINEST:
        time_ns = proven[lowest] + proven[lowest] // steps[lowest] + 1
        if Count(problem, lowest, time_ns).refuted():
            proven[lowest] = time_ns
        else:
            steps[lowest] *= 2
        if min(proven.values()) > best:
            best = min(proven.values())
            on_better(_bound(problem, proven, best))
    return _bound(problem, proven, best)


def _batches(problem: Problem) -> list[Batch]:
    found = {*candidates(problem), *candidates(problem, dapple_replicas(problem))}
    found.update(candidates(problem, (1, problem.num_devices)))
    return sorted(found)


def _bound(problem: Problem, proven: dict[Batch, int], bound_ns: int) -> Bound:
    numbers = ", ".join(str(batch.num_micro_batches) for batch in proven)
    model = (
        f"{STAGES_APART}, replicas by rows, whole backwards in any order, each stage recomputing whole or not at all, "
        f"{numbers} micro-batches, any partition and placement; transfers not counted"
    )
    return Bound(REQUEST_SCOPE, model, bound_ns, "count of devices by a micro-batch's way before each stage")
