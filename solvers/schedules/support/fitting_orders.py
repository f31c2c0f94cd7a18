"""Candidate schedules of one allocation, timed by simulation: which of them fit in memory, and the best of them.

Where a schedule does not fit, it is tried with one micro-batch less in flight on the stage that lacks most memory
(``lowered``). Planners, the neighbourhood search, the driver and explanations all simulate this way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.costs.shortages import shortage_of, surely_fits
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan, Shortage
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.early_backward import depths, fitted
from penstock.solvers.schedules.support.candidates import CandidateSchedule, candidate_schedules

Vector = tuple[int, ...]
"""The micro-batches in flight on each stage."""


class Judged(NamedTuple):
    """A candidate schedule's simulated time, and the plan, if it is quick enough and fits.

    ``short``: what it lacks, where it is quick enough but does not fit.
    """

    value_ns: int
    plan: JudgedPlan | None = None
    short: Shortage | None = None


def judged(problem: Problem, allocation: Allocation, orders: Orders, below_ns: int) -> Judged:
    """Simulate an order; it is quick enough if it takes less than ``below_ns``."""
    value = makespan_ns(problem, allocation, orders)
    if value >= below_ns:
        return Judged(value)
    timeline = simulate(problem, allocation, orders)
    if (short := largest_shortage(problem, allocation, timeline)) is not None:
        return Judged(value, short=short)
    return Judged(value, JudgedPlan.of("", allocation, orders, timeline, problem.rules.overlap_all_reduce))


def best_order(problem: Problem, allocation: Allocation, below_ns: int) -> Judged:
    """Return the best early-backward order with one of the usual warm-ups."""
    return best_of(problem, allocation, warmups(problem, allocation), below_ns)


def best_of(problem: Problem, allocation: Allocation, vectors: Iterable[Vector], below_ns: int) -> Judged:
    """Return the best early-backward order with one of these warm-ups, each lowered where memory is short."""
    best: JudgedPlan | None = None
    least, seen = NEVER_NS, set[Vector]()

    def attempt(warmup: Vector) -> Shortage | None:
        nonlocal best, least
        if warmup in seen:
            return None
        seen.add(warmup)
        short = shortage_of(problem, allocation, warmup)
        if short is not None:
            return short
        orders = CandidateSchedule("early-backward", warmup).orders(problem, allocation)
        outcome = judged(problem, allocation, orders, below_ns if best is None else best.value_ns)
        best, least = outcome.plan or best, min(least, outcome.value_ns)
        return outcome.short

    for vector in vectors:
        lowered(problem, allocation, vector, attempt)
    return Judged(least if best is None else best.value_ns, best)


def warmups(problem: Problem, allocation: Allocation) -> Iterator[Vector]:
    """Yield P_A, P_B, two between them, SPP's PE (ALGORITHMS 3.3: K = 4 (S - n) + 1), and as many as memory holds."""
    yield from (candidate.warmup for candidate in candidate_schedules(problem, allocation, "early-backward", "best"))
    yield fitted(problem, allocation, tuple(4 * depth - 3 for depth in depths(allocation)))


def lowered(
    problem: Problem,
    allocation: Allocation,
    warmup: Vector,
    attempt: Callable[[Vector], Shortage | None],
    patience: int = sys.maxsize,
) -> Shortage | None:
    """Attempt a warm-up, then ever lower ones, until nothing is lacking; return what the last attempt lacked.

    Each next warm-up has one micro-batch less in flight on the stage that lacks memory, and no more on the stages after
    it. ``attempt`` returns the shortage, or None to end. After ``patience`` attempts in a row that saved no memory,
    something else needs it, and the lowering ends; with 0 only the first is attempted.
    """
    futile, least = 0, sys.maxsize
    while (short := attempt(warmup)) is not None:
        futile = 0 if short.missing_bytes < least else futile + 1
        least = min(least, short.missing_bytes)
        stage = next(s for s, each in enumerate(allocation.stages) if each.first == short.first_layer)
        if futile >= patience or warmup[stage] <= 1:
            break
        wanted = [min(k, warmup[stage] - 1) if s >= stage else k for s, k in enumerate(warmup)]
        warmup = fitted(problem, allocation, wanted)
    return short


def may_lack(problem: Problem, allocation: Allocation, candidate: CandidateSchedule) -> bool:
    """Return whether a candidate schedule may turn out to need fewer micro-batches in flight."""
    if not candidate.row.fewer or max(candidate.warmup) <= 1:
        return False
    return not all(surely_fits(problem, allocation, stage) for stage in allocation.stages)
