"""The bound: repeatedly try to raise the proven time of the number of micro-batches for which it is least."""

from __future__ import annotations

from collections.abc import Callable

from penstock.solvers.bounds.coverage import class_bound, stages_apart
from penstock.solvers.bounds.device_count.count import Count, Ended
from penstock.solvers.bounds.device_count.device_classes import device_classes
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.model.micro_batches import Batch, batches_tried
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound

FIRST, FINEST = 16, 512
"""Reciprocals of the first and of the smallest step above the proven time at which a proof is tried.

With n classes of devices a proof takes n times as long, and the smallest step is n 512ths.
"""
DOUBTED = 4
"""A factor on the initial bound: a number of micro-batches that reaches it is tested once for having any plan."""


def bounds(problem: Problem, known_ns: int, on_better: Callable[[Bound], None]) -> Bound:
    """Return the largest proven time, at least ``known_ns``; ``on_better`` is called with every better time.

    It covers the class ``coverage.stages_apart``: flushed plans of one pipeline whose stages share no devices, replicas
    by rows, whole backwards, each stage recomputing whole or not at all. If there is no such plan, the result is the
    largest time that was known or proven before that was certain.
    """
    proven = dict.fromkeys(batches_tried(problem), known_ns)
    steps = dict.fromkeys(proven, FIRST)
    best, doubted = known_ns, set[Batch]()
    last: dict[Batch, Ended] = {}
    finest = FINEST // len(device_classes(problem))
    while proven:
        lowest = min(proven, key=lambda batch: proven[batch])
        if proven[lowest] >= FAR_NS:
            break
        if proven[lowest] > best:
            best = proven[lowest]
            on_better(_bound(problem, best))
        if steps[lowest] > finest:
            break
        if proven[lowest] > DOUBTED * known_ns and lowest not in doubted:
            doubted.add(lowest)
            time_ns = FAR_NS
        else:
            time_ns = proven[lowest] + proven[lowest] // steps[lowest] + 1
        counted = Count(problem, lowest, time_ns, last.get(lowest))
        refuted = counted.refuted()
        last[lowest] = counted.ended
        if refuted:
            proven[lowest] = time_ns
        elif time_ns < FAR_NS:
            steps[lowest] *= 2
    return _bound(problem, best)


def _bound(problem: Problem, bound_ns: int) -> Bound:
    method = "count of devices by a micro-batch's way before each stage, all-reduces not counted"
    return class_bound(problem, stages_apart(problem), bound_ns, method)
