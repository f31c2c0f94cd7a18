"""``auto`` on narrow cables: its plan is as good as the plan of every planner that is requested by name."""

from __future__ import annotations

import pytest
from drawn_problems import narrow_request
from problems import OF_ANY_TRAINER

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.model.problem import Problem
from penstock.solvers.solve.driver import solve

SLOWER = 1.005
"""The factor by which a planner that a rule on the request skips may be better."""


@pytest.mark.cases(8)
@pytest.mark.parametrize("number", range(300))
def test_auto_is_never_worse_than_a_planner_that_is_asked_by_name(number: int) -> None:
    problem = narrow_request(number, most_layers=6, most_devices=4, global_batch_size=8)
    best_ns = value_ns(problem, "auto")
    names = [row.name for row in OF_ANY_TRAINER.values() if row.supports & problem.update_rules]
    worse = {name: value for name in names if best_ns > SLOWER * (value := value_ns(problem, name))}
    assert not worse, best_ns


def value_ns(problem: Problem, planner: str) -> int:
    """Return the time of the planner's best plan; NEVER_NS where it has none, or refuses the request."""
    try:
        best = solve(problem, planner, workers=0).best
    except UnsupportedRequest:
        return NEVER_NS
    return NEVER_NS if best is None else best.value_ns
