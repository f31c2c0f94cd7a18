"""Limits of time hold whatever is compiled: without all kernels a solve runs in a separate process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.examples.tiny import tiny_request
from penstock.planning import judge
from penstock.planning.solve import solve_here
from penstock.questions import solve as solving
from penstock.questions.solve import solve
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.compiled.progress import listening
from penstock.solvers.model.result import Progress
from penstock.workers import apart, protocol, stand_in


@pytest.fixture(params=[True, False], ids=["forked", "launched"])
def begin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are still to compile; a process is forked, or launched as if there were threads."""
    monkeypatch.setattr(solving, "all_kept", lambda: False)
    monkeypatch.setattr(apart, "one_thread", lambda: request.param)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def limit_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have every limit be over once messages of these kinds have come from the processes, and not before."""
    awaited: set[str] = set()
    came: set[str] = set()
    received = protocol.received

    def watched(*arguments: Any) -> Iterator[protocol.Message]:
        for message in received(*arguments):
            came.add(message.kind)
            yield message

    def monotonic() -> float:
        return time.monotonic() + (7200.0 if awaited and awaited <= came else 0.0)

    monkeypatch.setattr(protocol, "received", watched)
    for module in (apart, protocol, stand_in):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))

    def begin(*kinds: str) -> None:
        awaited.clear()
        awaited.update(kinds)
        came.clear()

    return begin


def small_request(*, limited: bool = True) -> PlanRequest:
    """Return a small request, with a limit of an hour if ``limited``."""
    limits = {"termination": {"time_limit_ns": 3600 * 10**9}} if limited else {}
    return PlanRequest.parse(tiny_request() | {"planner": "gpipe"} | limits)


@pytest.mark.usefixtures("begin")
def test_the_answer_is_that_of_a_solve_in_this_process() -> None:
    plans: list[Plan] = []
    reports: list[Progress] = []
    answer, same = solve(small_request(), plans.append, reports.append), solve_here(small_request())
    assert answer.model_copy(update={"seconds": 0.0}) == same.model_copy(update={"seconds": 0.0})
    assert plans[-1].prediction is not None
    assert reports[-1].bound.bound_ns > 0


@pytest.mark.tier("nightly")
@pytest.mark.usefixtures("begin")
def test_at_the_limit_the_compiler_is_ended_and_the_best_plan_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, limit_after: Callable[..., None]
) -> None:
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:compile_for_ever")
    limit_after("incumbent", "compiling")
    compiled: list[str | None] = []
    with listening(compiled.append):
        answer = solve(small_request())
    assert answer.status == "feasible"
    assert answer.plan is not None
    assert "its limit of 3600 s was over, most of which went to compiling" in answer.sentence
    assert "a.kernel" in compiled


@pytest.mark.tier("nightly")
@pytest.mark.usefixtures("begin")
@pytest.mark.parametrize("judged", [True, False], ids=["from-the-first-kernel", "from-the-start"])
def test_while_the_compiler_is_at_work_interpreted_kernels_find_the_plan(
    monkeypatch: pytest.MonkeyPatch, limit_after: Callable[..., None], judged: bool
) -> None:
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:compile_alone")
    monkeypatch.setattr(apart, "is_compiled", lambda: judged)
    limit_after("compiling", "result")  # only the process that interprets sends a result
    plans: list[Plan] = []
    answer, same = solve(small_request(), plans.append), solve_here(small_request())
    assert answer.status == "feasible"
    assert "its limit of 3600 s was over, most of which went to compiling" in answer.sentence
    assert answer.plan is not None
    assert same.plan is not None
    assert (answer.plan.pipelines, answer.plan.prediction) == (same.plan.pipelines, same.plan.prediction)
    assert answer.plan.certificates, "the bounds of its answer, in half of the time"
    assert [plan.prediction for plan in plans][-1] == same.plan.prediction


@pytest.mark.tier("nightly")
@pytest.mark.usefixtures("begin")
def test_what_interpreted_kernels_found_is_verified_where_they_are(
    monkeypatch: pytest.MonkeyPatch, limit_after: Callable[..., None]
) -> None:
    """Here it might have to wait for the compiler; and a process that fails keeps no other one from its answer."""
    here, verify = os.getpid(), judge.refuse_unsound

    def verify_elsewhere(file: PlanFile) -> None:
        assert os.getpid() != here, "verified again"
        verify(file)

    monkeypatch.setattr(judge, "refuse_unsound", verify_elsewhere)
    monkeypatch.setattr(apart, "is_compiled", lambda: False)
    monkeypatch.setattr(stand_in, "ENTRY", "ending_entries:crash")
    assert solve(small_request()).plan is not None
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:compile_alone")
    for entry, end in (("crash", "crash"), ("find_unsound", "error")):
        monkeypatch.setattr(stand_in, "ENTRY", f"ending_entries:{entry}")
        limit_after("compiling", end)
        assert solve(small_request()).status == "time_limit"


@pytest.mark.cases(1)
@pytest.mark.usefixtures("begin")
def test_what_the_process_refuses_and_meets_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:refuse")
    with pytest.raises(UnsupportedRequest, match="such stages") as refused:
        solve(small_request())
    assert refused.value.remedy == "other stages"
    monkeypatch.setattr(apart, "ENTRY", "ending_entries:crash")
    with pytest.raises(RuntimeError, match="ZeroDivisionError: in the solver"):
        solve(small_request())


def test_without_a_limit_or_with_every_kernel_it_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "solve_apart", lambda *_: pytest.fail("a process of its own"))
    monkeypatch.setattr(solving, "all_kept", lambda: False)
    assert solve(small_request(limited=False)).plan is not None
    monkeypatch.setattr(solving, "all_kept", lambda: True)
    assert solve(small_request()).plan is not None
