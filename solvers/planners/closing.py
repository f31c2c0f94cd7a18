"""A better order for a given plan by CP-SAT, or the proof that there is none (ALGORITHMS 7.8)."""

from __future__ import annotations

from typing import NamedTuple

from penstock.solvers import jobshop
from penstock.solvers.allocation import Allocation
from penstock.solvers.planners.trial import Trial, judged
from penstock.solvers.problem import Problem


class Closed(NamedTuple):
    """The best order found below the limit, what no order of the plan is below, and deterministic time spent."""

    trial: Trial | None
    bound_ns: int
    spent: float


def close(problem: Problem, allocation: Allocation, bound_ns: int, below_ns: int, effort: float) -> Closed:
    """An order that takes less than ``below_ns``, when none takes less than ``bound_ns``.

    First in the plain job shop, whose orders mostly run as fast under the judge; where they do not, and the model
    knows the judge's rules, under these.
    """
    best: Trial | None = None
    spent = 0.0
    for as_judged in (False, True):
        question = jobshop.Question(problem, allocation, below_ns - 1, bound_ns, as_judged, effort - spent)
        if bound_ns >= below_ns or spent >= effort or (as_judged and not question.judgeable):
            break
        answer = jobshop.solve(question)
        spent += answer.spent
        bound_ns = max(bound_ns, answer.bound_ns)
        if answer.orders is None:
            continue
        trial = judged(problem, allocation, answer.orders, below_ns).trial
        if trial is not None:
            best, below_ns = trial, trial.value_ns
    return Closed(best, bound_ns, spent)
