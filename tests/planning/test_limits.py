"""Limits of time hold whatever is compiled: without all kernels a solve has a process of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.planning import solve as solving
from penstock.planning.solve import solve
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.service.http.samples import tiny_request
from penstock.solvers.compiled.progress import listening
from penstock.solvers.model.result import Progress
from penstock.workers import apart, cut_off, stand_in

PATIENCE_S = 60.0
"""Far less than the solve would take."""


@pytest.fixture(params=[True, False], ids=["forked", "launched"])
def begin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are kernels to compile; a process is forked, or launched as where there are threads."""
    monkeypatch.setattr(solving, "all_kept", lambda: False)
    monkeypatch.setattr(apart, "one_thread", lambda: request.param)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def asked(seconds: float | None = 60.0) -> PlanRequest:
    """A small request with a limit."""
    limits = {} if seconds is None else {"termination": {"time_limit_ns": int(seconds * 1e9)}}
    return PlanRequest.parse(tiny_request() | {"planner": "gpipe"} | limits)


@pytest.mark.usefixtures("begin")
def test_the_answer_is_that_of_a_solve_in_this_process() -> None:
    found: list[Plan] = []
    told: list[Progress] = []
    answer, same = solve(asked(), found.append, told.append), solving.solve_here(asked())
    assert answer.model_copy(update={"seconds": 0.0}) == same.model_copy(update={"seconds": 0.0})
    assert found[-1].prediction is not None
    assert told[-1].bound.bound_ns > 0


@pytest.mark.tier("nightly")
@pytest.mark.usefixtures("begin")
def test_at_the_limit_the_compiler_is_ended_and_the_best_plan_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:compile_for_ever")
    compiled: list[str | None] = []
    began = time.monotonic()
    with listening(compiled.append):
        answer = solve(asked(15.0))
    assert time.monotonic() - began < PATIENCE_S
    assert answer.status == "feasible"
    assert answer.plan is not None
    assert "its limit of 15 s was over, most of which went to compiling" in answer.why
    assert "a.kernel" in compiled


@pytest.mark.tier("nightly")
@pytest.mark.usefixtures("begin")
@pytest.mark.parametrize("judged", [True, False], ids=["from-the-first-kernel", "from-the-start"])
def test_while_the_compiler_is_at_work_interpreted_kernels_find_the_plan(
    monkeypatch: pytest.MonkeyPatch, judged: bool
) -> None:
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:compile_alone")
    monkeypatch.setattr(apart, "is_compiled", lambda: judged)
    found: list[Plan] = []
    answer, same = solve(asked(15.0), found.append), solving.solve_here(asked())
    assert answer.status == "feasible"
    assert "its limit of 15 s was over, most of which went to compiling" in answer.why
    assert answer.plan is not None
    assert same.plan is not None
    assert (answer.plan.pipelines, answer.plan.prediction) == (same.plan.pipelines, same.plan.prediction)
    assert answer.plan.certificates, "the bounds of its answer, in half of the time"
    assert [plan.prediction for plan in found][-1] == same.plan.prediction


@pytest.mark.tier("nightly")
@pytest.mark.usefixtures("begin")
def test_what_interpreted_kernels_found_is_verified_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it might have to wait for the compiler; and a process that fails keeps no other one from its answer."""
    monkeypatch.setattr(cut_off, "refuse_unsound", lambda _file: pytest.fail("verified again"))
    monkeypatch.setattr(apart, "is_compiled", lambda: False)
    monkeypatch.setattr(stand_in, "ENTRY", "ending_entries:crash")
    assert solve(asked()).plan is not None
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:compile_alone")
    assert solve(asked(5.0)).status == "time_limit"
    monkeypatch.setattr(stand_in, "ENTRY", "ending_entries:find_unsound")
    assert solve(asked(5.0)).status == "time_limit"


@pytest.mark.cases(1)
@pytest.mark.usefixtures("begin")
def test_what_the_process_refuses_and_meets_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:refuse")
    with pytest.raises(UnsupportedRequest, match="such stages") as refused:
        solve(asked())
    assert refused.value.remedy == "other stages"
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:crash")
    with pytest.raises(RuntimeError, match="ZeroDivisionError: in the solver"):
        solve(asked())


def test_without_a_limit_or_with_every_kernel_it_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "solve_apart", lambda *_: pytest.fail("a process of its own"))
    monkeypatch.setattr(solving, "all_kept", lambda: False)
    assert solve(asked(None)).plan is not None
    monkeypatch.setattr(solving, "all_kept", lambda: True)
    assert solve(asked()).plan is not None
