"""The suffix search: the CP-SAT optimum, a plain twin, bounds that hold whenever it is cut short; what is refuted."""

from __future__ import annotations

import pytest
from line_cases import random_line

from penstock.solvers.allocation import Allocation
from penstock.solvers.jobshop import Question, solve
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders
from penstock.solvers.simulate import makespan_ns
from penstock.solvers.stage_times import StageTimes
from penstock.solvers.suffix import prove
from penstock.solvers.suffix.line import line_of
from penstock.solvers.suffix.search import Search

FAR = 10**7


def optimum(problem: Problem, plan: Allocation) -> int:
    """CP-SAT's, with channels in any order."""
    answer = solve(Question(problem, plan, FAR))
    assert answer.proven
    return answer.bound_ns


def search_of(problem: Problem, plan: Allocation, effort: int = 10**6) -> Search:
    return Search(line_of(StageTimes(problem, plan, Orders("any", ()))), effort)


@pytest.mark.parametrize("seed", range(120))
def test_the_search_finds_the_cp_sat_optimum(seed: int) -> None:
    problem, plan = random_line(seed)
    best = optimum(problem, plan)
    answer = prove(problem, plan, FAR, 10**6)
    assert answer.proven
    assert answer.bound_ns == best
    assert answer.orders is not None
    assert makespan_ns(problem, plan, answer.orders) >= best
    none = prove(problem, plan, best - 1, 10**6)
    assert (none.bound_ns, none.orders, none.proven) == (best, None, True)
