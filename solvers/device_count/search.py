"""The bound: the number of micro-batches whose proven time is least is looked into until it can be raised no more."""

from __future__ import annotations

from collections.abc import Callable

from penstock.solvers.batches import batches_tried
from penstock.solvers.coverage import class_bound, stages_apart
from penstock.solvers.device_count.count import Count
from penstock.solvers.problem import Problem
from penstock.solvers.result import Bound

FIRST, FINEST = 16, 512
"""Times are tried from a 16th above what is proven, then ever nearer, to a 512th."""


def bounds(problem: Problem, known_ns: int, on_better: Callable[[Bound], None]) -> Bound:
    """The largest proven time, ``known_ns`` at least; every better one is told as it is found.

    It covers the class ``coverage.stages_apart``: flushed plans of one pipeline, each stage on devices of its own,
    replicas by rows, whole backwards, each stage recomputing whole or not at all.
    """
    proven = dict.fromkeys(batches_tried(problem), known_ns)
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
            on_better(_bound(problem, best))
    return _bound(problem, best)


def _bound(problem: Problem, bound_ns: int) -> Bound:
    method = "count of devices by a micro-batch's way before each stage, transfers not counted"
    return class_bound(problem, stages_apart(problem), bound_ns, method)
