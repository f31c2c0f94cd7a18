"""Efforts: planners end after a number of plans that are no better, and the answer names skipped planners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

import pytest
from drawn_problems import instance

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.request import Effort as Word
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Result
from penstock.solvers.planners.catalogue import PLANNERS, Planner
from penstock.solvers.planners.effort import EFFORTS, QUICK, effort_of
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.judging import Judge


@pytest.mark.tier("quick")
def test_documents_and_solvers_know_the_same_words() -> None:
    assert tuple(EFFORTS) == get_args(Word)
    with pytest.raises(UnsupportedRequest, match="quick, normal, thorough"):
        effort_of("fast")


@pytest.mark.parametrize("patience", [1, 3])
def test_a_planner_ends_after_as_many_plans_that_are_no_better(patience: int) -> None:
    """Plans of the same stages, on devices in turn and under two orders: few of them are better than the first."""
    problem = instance(1, 8)
    alone = [proposal for proposal in _proposals(problem) if len(proposal.allocation.stages) > 1][:1]
    numbers: list[int] = []

    def proposals() -> Iterator[Proposal]:
        for number in range(20):
            numbers.append(number)
            yield _slower(alone[0], number)

    judge = Judge(Setting(problem), patience=patience)
    judge.judge_all("dapple", proposals())
    assert judge.out_of_patience
    assert not judge.unfinished
    assert judge.outcome().out_of_patience
    assert len(numbers) < 20
    patient = Judge(Setting(problem))
    patient.judge_all("dapple", (_slower(alone[0], number) for number in range(20)))
    assert not patient.out_of_patience
    assert judge.judged < patient.judged
    assert judge.best is not None
    assert patient.best is not None
    assert judge.best.value_ns == patient.best.value_ns


def test_the_first_plan_is_waited_for() -> None:
    """Plans that do not fit are no reason to stop."""
    problem = instance(1, 8)
    judge = Judge(Setting(replace(problem, memory=replace(problem.memory, headroom_bytes=2**60))), patience=1)
    judge.judge_all("dapple", _proposals(problem))
    assert judge.best is None
    assert not judge.out_of_patience


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("effort", ["quick", "normal"])
def test_the_answer_depends_on_no_number_of_workers(effort: str) -> None:
    problem = instance(2, 7)
    here, there = (_sizeless(solve(problem, "auto", effort=effort, workers=workers)) for workers in (0, 2))
    assert here == there


@pytest.mark.tier("nightly")
def test_more_effort_is_never_worse_and_quick_judges_less(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: dict[str, int] = {}
    values: dict[str, int] = {}
    for effort in EFFORTS:
        judges: list[Judge] = []
        first = Judge.__init__

        def proposed(
            self: Judge, *arguments: object, _first: object = first, _to: list[Judge] = judges, **more: object
        ) -> None:
            _to.append(self)
            _first(self, *arguments, **more)  # type: ignore[operator]

        with monkeypatch.context() as patched:
            patched.setattr(Judge, "__init__", proposed)
            best = solve(instance(3, 8), "auto", effort=effort).best
        assert best is not None
        values[effort], judged[effort] = best.value_ns, sum(judge.judged for judge in judges)
    assert values["quick"] >= values["normal"] >= values["thorough"]
    assert judged["quick"] < min(judged["normal"], judged["thorough"])


def test_the_answer_says_who_ended_early_and_who_was_not_asked() -> None:
    quick = solve(instance(3, 8), "auto", effort="quick")
    assert f"ended after {QUICK.patience} plans in a row that were no better" in quick.sentence
    assert "with effort quick" in quick.sentence
    certain = solve(instance(0, 4), "auto", gap=10.0)
    assert "not asked, as their plans are no better by more than the gap than the bound on" in certain.sentence
    (spared,) = [clause for clause in certain.why if "than the bound on" in clause]
    assert spared.split(": ")[1].count(",") > 3


def _proposals(problem: Problem) -> Iterator[Proposal]:
    row = PLANNERS["dapple"]
    assert row.proposals is not None
    return row.proposals(Setting(problem), row.check(problem.update_rules, "auto", {}))


def _slower(proposal: Proposal, number: int) -> Proposal:
    """Return the same plan on devices in another order, so that each is simulated; of alike devices none is faster."""
    stages = proposal.allocation.stages
    turned = tuple(replace(stage, devices=stage.devices[::-1] if number % 2 else stage.devices) for stage in stages)
    changed = _with_stages(proposal, turned)
    return changed._replace(schedules=("early-backward",) if number % 3 else ("gpipe",), overlaps=(number % 5 > 2,))


def _with_stages(proposal: Proposal, stages: tuple[Stage, ...]) -> Proposal:
    allocation = proposal.allocation
    return proposal._replace(
        allocation=replace(allocation, pipelines=(replace(allocation.pipelines[0], stages=stages),))
    )


def _sizeless(result: Result) -> tuple[object, ...]:
    best = result.best
    assert best is not None
    return best.planner, best.allocation, best.value_ns, result.sentence, [each.bound_ns for each in result.bounds]


def test_a_search_of_more_plans_goes_on_where_one_of_fewer_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second search has the results that it has alone, and requests only the later proposals of the planner."""
    proposed: list[object] = []

    def counted(row: Planner) -> Planner:
        proposals = row.proposals
        assert proposals is not None

        def each(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
            for proposal in proposals(setting, options):
                proposed.append(proposal)
                yield proposal

        return replace(row, proposals=each)

    for name in ("even", "relax", "zero-bubble", "pipedream"):
        monkeypatch.setitem(PLANNERS, name, counted(PLANNERS[name]))
        alone = solve(instance(3, 6), name, max_plans=9)
        in_one, proposed[:] = len(proposed), []
        problem = instance(3, 6)
        solve(problem, name, max_plans=1)
        first, proposed[:] = len(proposed), []
        again = solve(problem, name, max_plans=9)
        assert again.best is not None
        assert alone.best is not None
        assert again.best.value_ns == alone.best.value_ns
        assert again.bounds == alone.bounds
        assert first > 0
        assert first + len(proposed) == in_one
        assert not any(key[0] == "proposals" for key in replace(problem).results), "another problem has its own"
        proposed.clear()
