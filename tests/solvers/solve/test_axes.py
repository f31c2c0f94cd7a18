"""Further axes of a choice: one row is what a search, bounds, explanations and plan files need to have a new one.

The new axis of these tests is a clock with two values, at one of which layers take two thirds of their time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from paper_models import profile

from penstock.cli.main import main
from penstock.convert import to_problem
from penstock.convert.answers import to_result
from penstock.convert.plans import from_plan
from penstock.convert.requested_degrees import at_choice_of
from penstock.errors import InvalidDocument
from penstock.examples import catalogue
from penstock.planning.why_not import other_choices
from penstock.schemas.api.words import alternative_words
from penstock.schemas.plan import Prediction
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.coverage import allowed
from penstock.solvers.degrees import axes
from penstock.solvers.degrees.axes import AXES, Axis
from penstock.solvers.degrees.contract import contract
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.problem import Problem
from penstock.solvers.solve import choices, driver


def at_clock(problem: Problem, share: float) -> Problem:
    """Return the problem with passes of layers that take a share of their time."""
    measured = {
        kind: tuple(
            replace(each, **{name: (getattr(each, name) * share).astype("int64") for name in PASSES}) for each in points
        )
        for kind, points in problem.measured.items()
    }
    return replace(problem, measured=measured)


ROOM = 15_000_000_000
"""Left free of the GPUs' 16 GiB, so that no GPU holds the states of Adam."""
PASSES = ("forward_ns", "backward_ns", "weight_ns")
CLOCK = Axis("clock", {"slow": partial(at_clock, share=1.0), "fast": partial(at_clock, share=2 / 3)})


@pytest.fixture
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the row to the table."""
    monkeypatch.setitem(AXES, CLOCK.name, CLOCK)


def vgg_request(**more: Any) -> PlanRequest:
    return PlanRequest(
        profile=profile("vgg-19"),
        topology=catalogue.cluster("1x4xV100"),
        global_batch_size=8,
        **more,
    )


@pytest.mark.usefixtures("_row")
def test_a_row_is_what_a_new_axis_needs() -> None:
    request = vgg_request(choose={"clock": ["slow", "fast"]})
    problem = to_problem(request)
    slow, fast = (Choice(values=(("clock", value),)) for value in CLOCK.values)
    assert problem.choices == (slow, fast)

    result = choices.solve(problem, "auto", effort="quick", workers=1)
    alone = driver.solve(contract(problem, fast), "auto", effort="quick", workers=1)
    assert result.best is not None
    assert alone.best is not None
    assert result.choice == fast
    assert result.best.value_ns == alone.best.value_ns

    bound = result.bounds[0]
    assert bound.covers == allowed(problem), "the bound is on plans at both values"
    assert {"clock slow", "clock fast"} <= {word for name in bound.covers.degrees for word in name.split(", ")}
    assert bound.bound_ns <= alone.bounds[0].bound_ns < driver.solve(contract(problem, slow), "even").bounds[0].bound_ns

    shown = to_result(problem, request, result)
    assert {alternative_words(row) for row in shown.alternatives} == {"clock fast", "clock slow"}
    assert shown.plan is not None
    assert shown.plan.chosen == {"clock": "fast"}
    again = at_choice_of(to_problem(request), shown.plan)
    assert simulate(again, *from_plan(shown.plan, again)).time_per_global_batch_ns == result.best.value_ns

    ((_text, other),) = other_choices(request, result.choice, ["clock=slow"], None, 2)
    assert other.choice == slow._replace(sharding="none")
    assert other.planned is not None
    assert other.planned.plan.value_ns > result.best.value_ns


@pytest.mark.usefixtures("_row")
def test_axes_are_open_together_and_a_value_counts_once() -> None:
    problem = to_problem(vgg_request(choose={"clock": ["fast", "slow"], "optimizer": ["sgd", "adam"]}))
    assert len(problem.choices) == 4
    for choice in problem.choices:
        cells = contract(problem, choice)
        values = dict(choice.values)
        assert cells.memory.states == axes.STATES[values["optimizer"]]
        assert contract(cells, choice).measured == cells.measured, "a changed request is not changed again"
        quicker = values["clock"] == "fast"
        for kind, points in problem.measured.items():
            for each, mine in zip(points, cells.measured[kind], strict=True):
                assert (int(mine.forward_ns.sum()) < int(each.forward_ns.sum())) is quicker


def optimizers(*values: str, **more: Any) -> tuple[dict[str, str] | None, tuple[str, ...], Prediction | None]:
    """Return the chosen optimizer where the states of Adam do not fit, the reasons, and the prediction."""
    request = vgg_request(choose={"optimizer": values} if values else None, memory={"headroom_bytes": ROOM, **more})
    problem = to_problem(request)
    solve = choices.solve if problem.choices else driver.solve
    shown = to_result(problem, request, solve(problem, "dp", workers=1))
    return (None, shown.why, None) if shown.plan is None else (shown.plan.chosen, shown.why, shown.plan.prediction)


def test_the_optimizer_that_memory_holds_is_chosen_and_no_training_called_the_better_one() -> None:
    assert optimizers(optimizer="adam")[0] is optimizers("adam")[0] is None, "it does not fit"
    chosen, why, prediction = optimizers("adam", "sgd")
    assert chosen == {"optimizer": "sgd"}
    assert "optimizer adam and sgd train differently, and only their times are compared" in why
    chosen, why, alone = optimizers("sgd")
    assert chosen == {"optimizer": "sgd"}
    assert not any("train differently" in clause for clause in why), "one value is asked for, not open"
    assert alone == prediction
    assert optimizers(optimizer="sgd") == (None, *optimizers(optimizer="sgd")[1:2], prediction)


def test_what_is_no_axis_or_no_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for choose, words, remedy in (
        ({"optim": "sgd"}, "the unknown axis 'optim'", "one of optimizer"),
        ({"optimizer": ["sgd", "muon"]}, "optimizer 'muon' is unknown", "one of sgd, momentum, adam"),
    ):
        with pytest.raises(InvalidDocument, match=words) as refused:
            to_problem(vgg_request(choose=choose))
        assert refused.value.remedy == remedy
    assert main(["plan", "--example", "resnet-50", "--cluster", "1x4xV100", "-b", "8", "--degrees", "optimizer"]) == 64
    assert "is not AXIS=VALUES" in capsys.readouterr().err
