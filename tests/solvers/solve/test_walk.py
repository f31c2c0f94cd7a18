"""How many modules a request passes on its way to a plan, and that the best plan is simulated once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from problems import make_problem

from penstock.planning.documents import find_profile, find_topology
from penstock.planning.solve import solve as answer
from penstock.schemas.request import PlanRequest
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.solve import incumbent, judging
from penstock.solvers.solve.driver import solve

WALKS = (("gpipe", "simple"), ("dapple", "dapple"))
"""A planner and its package."""
MOST_MODULES = 14


def entered(call: Callable[[], object]) -> set[str]:
    """The modules with a function that ran, without the code that dataclasses generate."""
    found: set[str] = set()

    def look(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and not code.co_filename.startswith("<"):
            found.add(frame.f_globals.get("__name__", ""))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


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


@pytest.mark.parametrize("planner", ["dp", "gpipe"])
def test_the_best_plan_is_simulated_once(planner: str) -> None:
    """Its timeline is kept from the judge to the answer."""
    problem = make_problem([3, 5, 4, 6, 2, 4], boundary_bytes=1, nodes=(2, 2))
    simulated: list[object] = []

    def counted(*arguments: Any, **more: Any) -> object:
        simulated.append(simulate(*arguments, **more))
        return simulated[-1]

    announced: list[JudgedPlan] = []
    with mock.patch.object(judging, "simulate", counted), mock.patch.object(incumbent, "simulate", counted):
        best = solve(problem, planner, on_incumbent=announced.append).best
    assert best is not None
    assert announced[-1].timeline is best.timeline
    assert [each for each in simulated if each is best.timeline] == [best.timeline]
    assert len(simulated) == len(announced)
