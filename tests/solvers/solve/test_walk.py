"""Modules that a request passes on its way to a plan, and that the best plan is timed and simulated once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from problems import make_problem

from penstock.convert.trainers import within_of
from penstock.planning.inputs import find_profile, find_topology
from penstock.questions.solve import solve as answer
from penstock.schemas.request import PlanRequest
from penstock.solvers.improve.neighbourhood import recut
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.trainer_limits import Span
from penstock.solvers.schedules.support import fitting_orders
from penstock.solvers.solve import incumbent, judging
from penstock.solvers.solve.driver import solve

WALKS = (("gpipe", "simple"), ("dapple", "dapple"))
"""A planner and its package."""
MOST_MODULES = 15


def entered(call: Callable[[], object]) -> set[str]:
    """Return the modules with a function that ran, without the code that dataclasses generate."""
    modules: set[str] = set()

    def look(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and not code.co_filename.startswith("<"):
            modules.add(frame.f_globals.get("__name__", ""))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return modules


@pytest.mark.tier("quick")
@pytest.mark.parametrize(("planner", "package"), WALKS, ids=[planner for planner, _package in WALKS])
def test_a_request_passes_few_modules(planner: str, package: str) -> None:
    request = PlanRequest.parse(
        {
            "profile": find_profile("gpt2-small"),
            "topology": find_topology("1x4xV100"),
            "global_batch_size": 32,
            "micro_batch_sizes": [2],
            "planner": planner,
        }
    )
    answer(request)  # what is found once in a process is not part of the walk
    rooms = ("planning", "solvers.solve", "solvers.judge", f"solvers.planners.{package}")
    walked = sorted(
        name
        for name in entered(lambda: answer(request))
        if name.startswith(tuple(f"penstock.{room}." for room in rooms))
    )
    sys.stdout.write(f"{planner}: {len(walked)} modules\n  " + "\n  ".join(walked) + "\n")
    assert "penstock.solvers.solve.driver" in walked
    assert len(walked) <= MOST_MODULES


class Counting:
    """A counter of the plans that are simulated, by allocation and schedule, for all callers."""

    ROOMS = (judging, incumbent, fitting_orders, recut)

    def __init__(self, call: Callable[..., Any], name: str) -> None:
        self.call, self.name, self.plans = call, name, list[tuple[object, object]]()

    def __call__(self, problem: Problem, allocation: Allocation, schedule: object, *more: Any, **how: Any) -> Any:
        self.plans.append((allocation, schedule))
        return self.call(problem, allocation, schedule, *more, **how)

    def of(self, plan: JudgedPlan) -> int:
        """Return how often the plan was simulated."""
        return sum(allocation == plan.allocation and schedule is plan.schedule for allocation, schedule in self.plans)


@pytest.mark.parametrize("planner", ["dp", "gpipe", "even", "relax", "exact", "uniform", "auto"])
def test_the_best_plan_is_timed_once_and_simulated_once(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's timeline is kept up to the answer; with ``auto`` the planner is local search."""
    problem = make_problem([3, 5, 4, 6, 2, 4], boundary_bytes=1, nodes=(2, 2), recompute="auto")
    if planner == "uniform":
        problem = replace(problem, within=within_of("deepspeed", find_profile("gpt2-small")))
        problem = replace(problem, within=replace(problem.within, span=Span(0, 5), cuts=(True,) * 5))
    timed, simulated = Counting(makespan_ns, "makespan_ns"), Counting(simulate, "simulate")
    for each in (timed, simulated):
        for room in Counting.ROOMS:
            if hasattr(room, each.name):
                monkeypatch.setattr(room, each.name, each)
    announced: list[JudgedPlan] = []
    best = solve(problem, planner, workers=1, on_incumbent=announced.append).best
    assert best is not None
    assert announced[-1].timeline is best.timeline
    assert (timed.of(best), simulated.of(best)) == (1, 1)
