"""The bound: the number of micro-batches whose proven time is least is looked into until it can be raised no more."""

from __future__ import annotations

from collections.abc import Callable

from penstock.solvers.bounds.coverage import class_bound, stages_apart
from penstock.solvers.bounds.device_count.count import Count
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.model.micro_batches import Batch, batches_tried
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound

FIRST, FINEST = 16, 512
"""Times are tried from a 16th above what is proven, then ever nearer, to a 512th."""
"""Ten hours: where no plan with such micro-batches takes less, it is as if there were none."""
DOUBTED = 4
"""Times what was known at first: a number of micro-batches that gets there is asked once whether it has any plan."""


def bounds(problem: Problem, known_ns: int, on_better: Callable[[Bound], None]) -> Bound:
    """The largest proven time, ``known_ns`` at least; every better one is told as it is found.

    It covers the class ``coverage.stages_apart``: flushed plans of one pipeline, each stage on devices of its own,
    replicas by rows, whole backwards, each stage recomputing whole or not at all. Where there is no such plan, nothing
    is proven but what was known and what was found until then.
    """
    proven = dict.fromkeys(batches_tried(problem), known_ns)
    steps = dict.fromkeys(proven, FIRST)
    best, doubted = known_ns, set[Batch]()
    while proven:
        lowest = min(proven, key=lambda batch: proven[batch])
        if proven[lowest] >= FAR_NS:
            break
        if proven[lowest] > best:
            best = proven[lowest]
            on_better(_bound(problem, best))
        if steps[lowest] > FINEST:
            break
        if proven[lowest] > DOUBTED * known_ns and lowest not in doubted:
            doubted.add(lowest)
            time_ns = FAR_NS
        else:
            time_ns = proven[lowest] + proven[lowest] // steps[lowest] + 1
        if Count(problem, lowest, time_ns).refuted():
            proven[lowest] = time_ns
        elif time_ns < FAR_NS:
            steps[lowest] *= 2
    return _bound(problem, best)


def _bound(problem: Problem, bound_ns: int) -> Bound:
    method = "count of devices by a micro-batch's way before each stage, transfers not counted"
    return class_bound(problem, stages_apart(problem), bound_ns, method)
