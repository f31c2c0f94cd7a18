"""The tables of algorithms: what they say of themselves, and how they refuse what they do not have."""

from __future__ import annotations

from typing import get_args

import pytest
from problems import make_problem

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.planners.options import Option, checked
from penstock.solvers.registry import PLANNERS, SCHEDULES, resolve
from penstock.solvers.update_rules import UpdateRule

OPTIONS = (
    Option("by", "time", "help", choices=("time", "layers")),
    Option("stages", 0, "help", low=0, high=9),
    Option("slack", 0.5, "help"),
    Option("strict", False, "help"),
)


def test_tables_describe_themselves() -> None:
    assert next(iter(PLANNERS)) == "auto"
    for name, planner in PLANNERS.items():
        assert planner.name == name
        assert planner.cites
        assert planner.help
        assert planner.supports & set(get_args(UpdateRule))
        assert set(planner.accepts) <= set(SCHEDULES)
        assert all(SCHEDULES[schedule].supports & planner.supports for schedule in planner.accepts)
    for entry in SCHEDULES.values():
        assert entry.cites
        assert entry.help
        assert callable(entry.build)
    settings = (
        *(row.parameters for row in SCHEDULES.values()),
        *(planner.options for planner in PLANNERS.values()),
    )
    for options in settings:
        assert len({option.name for option in options}) == len(options)
        assert all(option.help and option.fault(option.default) is None for option in options)


def test_every_update_rule_has_a_planner_and_every_schedule_too() -> None:
    assert {rule for planner in PLANNERS.values() for rule in planner.supports} >= set(get_args(UpdateRule))
    alone = {schedule for name, planner in PLANNERS.items() if name != "auto" for schedule in planner.accepts}
    assert alone == set(SCHEDULES)


def test_what_needs_another_update_rule_is_refused() -> None:
    problem = make_problem([1, 1])
    with pytest.raises(UnsupportedRequest, match="double_buffered only; the request allows synchronous") as refused:
        PLANNERS["madpipe"].solve(problem)
    assert "--update-rule double_buffered" in (refused.value.remedy or "")
    with pytest.raises(UnsupportedRequest, match="'eager' is for the update rule weight_stashing") as refused:
        PLANNERS["pipedream"].solve(problem, schedule="eager")
    assert "--update-rule weight_stashing" in (refused.value.remedy or "")


def test_unknown_planners_name_the_near_ones() -> None:
    assert resolve("dapple") is PLANNERS["dapple"]
    with pytest.raises(UnsupportedRequest, match="no planner 'dapples'; there are auto, dp") as refused:
        resolve("dapples")
    assert refused.value.remedy == "did you mean 'dapple'?"
    with pytest.raises(UnsupportedRequest) as refused:
        resolve("zzz")
    assert refused.value.remedy is None


def test_option_types() -> None:
    assert [option.type for option in OPTIONS] == ["string", "integer", "number", "boolean"]
    assert checked("x", OPTIONS, {"stages": 3, "slack": 1}) == {"by": "time", "stages": 3, "slack": 1, "strict": False}


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"by": "size"}, "'size' is none of 'time', 'layers'"),
        ({"by": 1}, "1 is no string"),
        ({"stages": True}, "True is no integer"),
        ({"stages": 2.5}, "2.5 is no integer"),
        ({"stages": -1}, "-1 is below 0"),
        ({"stages": 10}, "10 is above 9"),
        ({"slack": "much"}, "'much' is no number"),
        ({"strict": 1}, "1 is no boolean"),
    ],
)
def test_wrong_values_are_refused_with_their_place(given: dict[str, object], fault: str) -> None:
    with pytest.raises(InvalidDocument) as refused:
        checked("x", OPTIONS, given)
    (found,) = refused.value.faults
    assert (found.pointer, found.detail) == (f"/options/{next(iter(given))}", fault)


def test_unknown_options_are_refused_before_anything_is_solved() -> None:
    problem = make_problem([1, 1])
    with pytest.raises(UnsupportedRequest, match="'dp' has no option 'overlp'; it has overlap") as refused:
        PLANNERS["dp"].solve(problem, options={"overlp": "yes"})
    assert refused.value.remedy == "did you mean 'overlap'?"
    with pytest.raises(InvalidDocument):
        PLANNERS["dapple"].solve(problem, options={"beam": 0})


@pytest.mark.parametrize("name", ["A", "B", "acr", "best"])
@pytest.mark.parametrize("pivot", ["max", "formula"])
def test_dapple_takes_all_its_options(name: str, pivot: str) -> None:
    problem = make_problem([5, 5, 5, 5], boundary_bytes=1, parameter_bytes=3, nodes=(2, 2), micro_batch_sizes=())
    options: dict[str, object] = {"policy": name, "pivot": pivot, "beam": 2, "max_stages": 2}
    for placement in ("all", "fresh", "append", "scatter"):
        for rank in ("bound", "latency"):
            more: dict[str, object] = {"placement": placement, "strict": placement != "append", "rank": rank}
            more |= {"formula": "paper_literal", "allow_unused": False}
            best = PLANNERS["dapple"].solve(problem, options=options | more).best
            assert best is not None
            assert len(best.allocation.stages) <= 2
            assert sum(stage.replicas for stage in best.allocation.stages) == 4


def test_a_strict_policy_that_cannot_start_is_said() -> None:
    with pytest.raises(UnsupportedRequest, match="strict placement by append has no servers for the first stage"):
        PLANNERS["dapple"].solve(make_problem([5, 5]), options={"placement": "append", "strict": True})
