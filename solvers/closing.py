"""Closing one allocation: a better order of its operations, or the proof that there is none (ALGORITHMS 7.8).

First in the plain job shop, whose orders mostly run as fast under the judge; where they do not, and the model knows the
judge's rules, under these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.schemas.program import BACKWARD
from penstock.solvers import jobshop
from penstock.solvers.allocation import Allocation
from penstock.solvers.bounds import schedule_bound
from penstock.solvers.problem import Problem
from penstock.solvers.result import SCHEDULE_SCOPE, Bound
from penstock.solvers.schedule import Orders, Schedule
from penstock.solvers.simulate import makespan_ns, simulate
from penstock.solvers.stage_times import StageTimes
from penstock.solvers.update_rules import UpdateRule

WHOLE_BACKWARDS = Orders("any order of whole backwards", ())


class Closed(NamedTuple):
    """``schedule``: a better order that fits, None if none was found; ``value_ns``: its time, else the one given.

    ``bound`` of all schedules of the allocation with these operations; ``spent`` effort.
    """

    schedule: Orders | None
    value_ns: int
    bound: Bound
    spent: float


Listener = Callable[[Orders, int], None]


def close(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule | None,
    *,
    overlap: bool,
    value_ns: int,
    effort: float,
    update_rule: UpdateRule = "synchronous",
    stopped: Callable[[], bool] = lambda: False,
    on_better: Listener | None = None,
) -> Closed:
    """An order of the allocation that takes less than ``value_ns`` and fits, and what no order is below.

    ``schedule`` is the best judged order known, which takes ``value_ns`` (None: none is known, backwards are whole); it
    says which operations there are. ``effort`` is about in seconds of one core, but counted; ``stopped`` is asked
    between pieces of work. Patterns, and pipelines that average, get their analytic bound and nothing else.
    """
    if problem.rules.overlap_all_reduce != overlap:
        problem = replace(problem, rules=replace(problem.rules, overlap_all_reduce=overlap))
    known = WHOLE_BACKWARDS if schedule is None else schedule
    bound = schedule_bound(problem, allocation, known, update_rule)
    best = Closed(None, value_ns, bound, 0.0)
    if update_rule != "synchronous" or not isinstance(known, Orders) or not _takes(problem, allocation, known):
        return best
    for as_judged in (False, True):
        question = jobshop.Question(
            problem, allocation, best.value_ns - 1, best.bound.bound_ns, as_judged, effort - best.spent
        )
        if best.bound.bound_ns >= best.value_ns or best.spent >= effort or stopped():
            break
        if as_judged and not question.shop().judgeable:
            break
        answer = jobshop.solve(question)
        best = best._replace(bound=_raised(best.bound, answer.bound_ns), spent=best.spent + answer.spent)
        if answer.orders is None:
            continue
        found_ns = value_if_it_fits(problem, allocation, answer.orders, best.value_ns)
        if found_ns is not None:
            best = best._replace(schedule=answer.orders, value_ns=found_ns)
            if on_better is not None:
                on_better(answer.orders, found_ns)
    return best


def value_if_it_fits(problem: Problem, allocation: Allocation, orders: Orders, below_ns: int) -> int | None:
    """The judge's time of an order that takes less than ``below_ns`` and fits in memory."""
    value_ns = makespan_ns(problem, allocation, orders)
    if value_ns >= below_ns:
        return None
    uses = simulate(problem, allocation, orders).uses
    return value_ns if all(use.memory.total <= problem.capacity_bytes(d) for d, use in uses.items()) else None


def _takes(problem: Problem, allocation: Allocation, orders: Orders) -> bool:
    whole = all((row.operations[:, 0] <= BACKWARD).all() for row in orders.rows)
    return whole and StageTimes(problem, allocation, orders).stages_apart


def _raised(bound: Bound, bound_ns: int) -> Bound:
    if bound_ns <= bound.bound_ns:
        return bound
    return Bound(SCHEDULE_SCOPE, bound.model, bound_ns, "job shop by CP-SAT")
