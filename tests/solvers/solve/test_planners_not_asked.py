"""Planners that ``auto`` skips: each reason appears in an answer, with the values that decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn_problems import instance
from problems import make_problem
from test_choices import FOUR, ONE, TWO, choices_of, open_problem

from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Reason, Status
from penstock.solvers.model.trainer_limits import Span, Within
from penstock.solvers.planners import effort
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.effort import NORMAL
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve import choices, driver, eligible
from penstock.solvers.solve.eligible import chosen, not_asked

EVERY = {row.name for row in PLANNERS.values() if row.proposals is not None}


def devices(number: int, layers: int = 4) -> Problem:
    return make_problem([100] * layers, nodes=(8,) * (number // 8), global_batch_size=8)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("number", [8, 256, 264, 2048, 2056])
def test_every_planner_is_asked_or_has_a_reason(number: int) -> None:
    rows, reasons = chosen(Setting(devices(number)), set())
    assert {row.name for row in rows} | set(reasons) == EVERY
    assert not {row.name for row in rows} & set(reasons)


def test_update_rules_targets_and_fewer_devices_are_said() -> None:
    why = driver.solve(devices(8), "auto", effort="quick").sentence
    assert "; not asked, as the request names no target: uniform" in why
    rule = "; not asked, as the request allows only update rule synchronous: pipedream-2bw, wpipe, avgpipe, madpipe"
    assert rule in why
    assert "; not asked, as 8 devices are fewer than the 257 from which on it is asked: spread" in why
    allowed = driver.solve(
        replace(devices(8), update_rules=frozenset({"double_buffered"})), "auto", max_plans=1
    ).sentence
    assert "; not asked, as the request allows only update rule double_buffered: dp, gpipe" in allowed
    assert "madpipe" not in allowed.partition("not asked")[2]


@pytest.mark.tier("nightly")
def test_more_devices_than_a_planner_takes_are_said() -> None:
    words = "; not asked, as 264 devices are more than the 256 up to which they are asked: relax"
    assert words in driver.solve(devices(264), "auto", effort="quick", max_plans=1).sentence
    many = driver.solve(devices(2056, 2), "auto", effort="quick", max_plans=1).sentence
    assert "; not asked, as 2,056 devices are more than the 2,048 up to which they are asked: dp, gpipe" in many
    assert "; not asked, as 2,056 devices are more than the 2,048 up to which it follows: polish, closing" in many


def test_many_cells_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligible, "MOST_CELLS", 2)
    cells = contract(open_problem(choices_of(TWO)), Choice(TWO))
    reasons = chosen(Setting(cells), set()).left_out
    assert str(reasons["spread"]) == "4 GPU groups are fewer than the 257 from which on it is asked"
    one = chosen(Setting(replace(cells, devices=cells.devices[:1])), set()).left_out
    assert str(one["spread"]) == "1 GPU group is fewer than the 257 from which on it is asked"
    wide = {**PLANNERS, "spread": replace(PLANNERS["spread"], least_devices=3)}
    monkeypatch.setattr(eligible, "PLANNERS", wide)
    rows, reasons = chosen(Setting(cells), set())
    assert [row.name for row in rows] == ["spread"]
    assert str(reasons["dapple"]) == "4 GPU groups are more than the 2 up to which they are asked"


def test_the_schedule_and_the_exclusions_are_said() -> None:
    why = driver.solve(
        devices(8), "auto", schedule="gpipe", effort="quick", options={"exclude": "dapple,polish"}
    ).sentence
    assert "; not asked, as they do not make schedule 'gpipe': model-parallel, even, " in why
    assert "; not asked, as option exclude names them: dapple, polish" in why


def test_a_planner_that_cannot_take_the_request_is_named_with_its_own_words() -> None:
    one_node = make_problem([100] * 4, nodes=(4,), global_batch_size=8)
    why = driver.solve(one_node, "auto", max_plans=1).sentence
    reason = "HetPipe needs two nodes or more for its virtual workers; there is one node, with 4 devices: hetpipe"
    assert f"; not asked, as {reason}" in why
    alone = driver.solve(one_node, "dapple").sentence
    assert "not asked" not in alone, "a planner that is asked by name asks no others"


def test_bounds_that_spare_planners_are_said() -> None:
    why = driver.solve(instance(0, 4), "auto", gap=10.0).sentence
    assert "; not asked, as their plans are no better by more than the gap than the bound on every plan" in why


def test_what_takes_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligible, "LARGE", 10)
    why = driver.solve(devices(8), "auto", effort="quick").sentence
    large = "layers × devices × numbers of micro-batches are 32, above the 10 up to which they are asked"
    assert f"; not asked, as {large}: relax, exact" in why
    assert "; not asked, as effort quick has none of it: polish, closing" in why
    thorough = chosen(Setting(devices(8)), set()).left_out
    assert "relax" not in thorough
    assert str(chosen(Setting(devices(8), effort=NORMAL), set()).left_out["relax"]) == large


def test_with_a_target_all_others_are_said() -> None:
    within = Within("megatron", ("early-backward",), True, (), True, Span(0, 3), (True,) * 3)
    limited = replace(devices(8), within=within)
    why = driver.solve(limited, "auto", max_plans=1).sentence
    assert "; not asked, as their plans are not kept within what target megatron can express: dp, gpipe" in why
    assert "; not asked, as it makes plans beyond target megatron: polish, closing" in why
    open_degrees = replace(open_problem(choices_of(ONE, TWO)), within=within)
    among = choices.solve(open_degrees, "auto", max_plans=1).sentence
    assert "; planner uniform alone was asked, as others' plans are not kept within megatron's" in among
    assert "alone was asked" not in choices.solve(open_degrees, "uniform", max_plans=1).sentence


def test_over_choices_each_reason_is_said_once_with_its_count() -> None:
    problem = open_problem(choices_of(ONE, TWO, FOUR), 1.0)
    result = choices.solve(problem, "auto", max_plans=2)
    assert result.sentence.count("the request names no target: uniform") == 1
    clauses = result.why
    (few,) = [each for each in clauses if "from which on it is asked: spread" in each]
    assert few.startswith("not asked, as 2 to 8 GPU groups are fewer than the 257"), (
        "the least and the most of all choices"
    )
    assert len(clauses) == len(set(clauses))


@pytest.mark.tier("nightly")
def test_choices_that_are_not_searched_are_counted_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = choices.solve(open_problem(choices_of(ONE, TWO, FOUR), 0.05), "auto").sentence
    assert "the rest spared: " in bounded
    assert "as bounds show that none of their plans is better" in bounded
    monkeypatch.setitem(effort.EFFORTS, "quick", effort.QUICK._replace(comparing=1))
    quick = choices.solve(open_problem(choices_of(ONE, TWO, FOUR)), "auto", effort="quick").sentence
    assert "all planners were asked at 1 of 3 choices of degrees, the rest spared: " in quick
    assert (
        "the rest spared"
        not in choices.solve(open_problem(choices_of(ONE, TWO, FOUR), 3.0), "dapple", max_plans=2).sentence
    )


@pytest.mark.tier("nightly")
def test_efforts_that_are_spent_on_better_choices_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(effort.EFFORTS, effort.THOROUGH.name, effort.THOROUGH._replace(comparing=1))
    why = choices.solve(open_problem(choices_of(ONE, TWO, FOUR)), "auto").sentence
    assert "as the sizes of better ones add up to 1 already" in why


def test_no_plan_says_who_was_not_asked_unless_it_is_proven() -> None:
    none = choices.solve(open_problem(choices_of(ONE, FOUR), memory_bytes=10), "auto")
    assert none.status is Status.INFEASIBLE
    assert "not asked" not in none.sentence


@pytest.mark.tier("nightly")
def test_reasons_that_differ_in_numbers_are_one() -> None:
    kind = "{} devices are more than the {} that gpu-1 takes in 0.5 s"
    searches = [{"relax": Reason(kind, (number, 256))} for number in (512, 4096, 1024)]
    assert list(not_asked([*searches, {}], 4)) == [
        "not asked at 3 of 4 choices, as 512 to 4,096 devices are more than the 256 that gpu-1 takes in 0.5 s: relax"
    ]
    alone = Reason("so")
    assert list(not_asked([{"a": alone}, {"a": alone, "b": alone}], 2)) == [
        "not asked, as so: a",
        "not asked at 1 of 2 choices, as so: b",
    ]
