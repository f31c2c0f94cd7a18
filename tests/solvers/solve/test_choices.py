"""A search over choices of degrees: statuses, refusals, effort, limits, and the claims of its certificate."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from problems import make_problem

from penstock.schemas.errors import UnknownMethod, UnsupportedRequest
from penstock.solvers.bounds.coverage import allowed
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.degrees.contract import Problems, contract
from penstock.solvers.improve import remedies
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.degrees import CellMeasured, Choice, Degrees, Sharding, Variant
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import CLASS_SCOPE, REQUEST_SCOPE, Result, Shortage, Status
from penstock.solvers.planners import effort
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve import choices, driver, tasks
from penstock.solvers.solve import eligible as who
from penstock.solvers.solve import searched as one_choice
from penstock.solvers.solve.eligible import NEAR, QUICK, Round, most_comparable

ONE, TWO, FOUR = Degrees(), Degrees(tensor=2), Degrees(tensor=4)
HOLDS_ALL, HOLDS_NONE = 2**40, 10
SHARDINGS: tuple[Sharding, ...] = ("gradients", "parameters", "parameters_kept")


def open_problem(open_choices: tuple[Choice, ...], factor: float = 1.0, seed: int = 0, **changes: Any) -> Problem:
    """Return four layers on two nodes of four GPUs.

    t GPUs take a t-th of the time and memory of one, times ``factor``.
    """
    rng = random.Random(seed)
    forward = [rng.randint(800, 1600) for _ in range(4)]
    settings = {"boundary_bytes": 40, "parameter_bytes": 400, "stash_bytes": 100, "nodes": (4, 4), "transfer": "nic"}
    settings |= {"global_batch_size": 8, "micro_batch_sizes": (1, 2, 4), "shared": True}
    problem = make_problem(forward, **(settings | changes))  # type: ignore[arg-type]
    variants = tuple(divided(problem, degrees, factor) for degrees in (TWO, FOUR))
    return replace(problem, variants=variants, choices=open_choices)


def divided(problem: Problem, degrees: Degrees, factor: float) -> Variant:
    """Return the variant of the model on the GPUs of a group."""
    (point,) = problem.measured["cpu"]

    def part(values: np.ndarray) -> np.ndarray:
        return np.ceil(values * factor / degrees.cell).astype(np.int64)

    times = part(point.forward_ns), part(point.backward_ns), part(point.weight_ns)
    sizes = part(point.stash_bytes), point.workspace_bytes
    return Variant(
        degrees=degrees,
        parameter_bytes=problem.parameter_bytes // degrees.cell,
        trainable_bytes=problem.trainable_bytes // degrees.cell,
        expert_bytes=0 * problem.trainable_bytes,
        update_ns=problem.update_ns,
        boundary_tensors=tuple((("x", 40 // degrees.cell, 40 // degrees.cell),) for _ in range(3)),
        shared_parameters=(),
        measured={"cpu": (CellMeasured(1, *times, *sizes, ((),) * 4),)},
    )


def choices_of(*degrees: Degrees, sharding: Sharding | None = None) -> tuple[Choice, ...]:
    return tuple(Choice(each, sharding) for each in degrees)


def certificate(result: Result) -> int:
    """Return the bound on all plans of the request; it is the only one and the first."""
    (bound,) = [each for each in result.bounds if each.scope == REQUEST_SCOPE]
    assert result.bounds[0] is bound
    return bound.bound_ns


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_the_best_choice_wins_and_the_certificate_covers_all() -> None:
    for factor, best in ((0.4, FOUR), (3.0, ONE)):
        problem = open_problem(choices_of(ONE, TWO, FOUR), factor)
        result = choices.solve(problem, "dapple", max_plans=6)
        assert result.choice is not None
        assert factor < 1 or result.choice.degrees == best
        alone = [driver.solve(contract(problem, each), "dapple", max_plans=6).best for each in problem.choices]
        assert result.best is not None
        assert result.best.value_ns == min(each.value_ns for each in alone if each is not None)
        bounds = [request_bound(contract(problem, each)).bound_ns for each in problem.choices]
        assert min(bounds) <= certificate(result) <= result.best.value_ns
        assert allowed(problem) <= result.bounds[0].covers
        assert result.bounds[0].covers.degrees == {"tensor 1", "tensor 2", "tensor 4"}
        assert all(str(result.choice) in (each.covers.degrees or ()) for each in result.bounds)


def test_a_planner_by_name_has_all_time_for_the_only_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_ns: list[int | None] = []
    search = choices.Search._search

    def watched(self: choices.Search, each: one_choice.Searched, limited: Setting) -> None:
        limits_ns.append(limited.deadline.share_ns(1))
        search(self, each, limited)

    monkeypatch.setattr(choices.Search, "_search", watched)
    choices.solve(open_problem(choices_of(TWO)), "dapple", time_limit_ns=100 * 10**9)
    (limit_ns,) = limits_ns
    assert limit_ns is not None
    assert limit_ns > 60 * 10**9


def test_a_bound_of_one_choice_is_not_one_of_the_request() -> None:
    """A bound on the best plan's choice alone keeps its class."""
    result = choices.solve(open_problem(choices_of(ONE, TWO, FOUR)), "dapple", max_plans=6)
    for bound in result.bounds[1:]:
        assert bound.scope != REQUEST_SCOPE
        if bound.scope == CLASS_SCOPE:
            assert bound.covers.degrees == {str(result.choice)}


def test_a_certificate_covers_choices_that_the_planner_refuses() -> None:
    """Planner ``interleaved`` needs two devices; a plan on one group of four GPUs is faster than any of its plans."""
    problem = open_problem(choices_of(ONE, FOUR), 0.2, nodes=(4,))
    result = choices.solve(problem, "interleaved", max_plans=4)
    cells = contract(problem, Choice(FOUR))
    other = driver.solve(cells, "dp").best
    assert result.choice == Choice(ONE)
    assert other is not None
    assert certificate(result) <= other.value_ns


def test_what_the_planner_refuses_is_not_infeasible() -> None:
    """No layer fits on a GPU; a quarter of the model does, and planner ``interleaved`` does not support one group."""
    problem = open_problem(choices_of(ONE, FOUR), nodes=(4,), memory_bytes=790)
    light = replace(problem.variants[1], parameter_bytes=problem.parameter_bytes // 8)
    problem = replace(problem, variants=(replace(light, trainable_bytes=light.parameter_bytes),))
    assert driver.solve(contract(problem, Choice(ONE)), "interleaved").status is Status.INFEASIBLE
    assert driver.solve(contract(problem, Choice(FOUR)), "dp").best is not None
    assert choices.solve(problem, "interleaved", max_plans=4).status is Status.NONE_FOUND


def test_every_choice_is_a_row_with_its_plan_and_its_bound() -> None:
    """Two groups of four GPUs cannot be made of a node with two."""
    asked_for = choices_of(ONE, TWO, FOUR)
    result = choices.solve(open_problem(asked_for, nodes=(2, 2, 2, 2)), "dapple", max_plans=4)
    rows = result.alternatives
    assert {row.choice for row in rows} == set(asked_for)
    assert result.best is not None
    assert (rows[0].choice, rows[0].value_ns, rows[0].why) == (result.choice, result.best.value_ns, "")
    assert rows[0].peak_bytes == result.best.timeline.peak_memory_bytes
    times = [row.value_ns for row in rows if row.value_ns is not None]
    assert times == sorted(times)
    assert all(row.bound_ns is None or row.value_ns is None or row.bound_ns <= row.value_ns for row in rows)
    assert all(row.why for row in rows[1:])
    assert [row.choice for row in rows if row.bound_ns is None] == [Choice(FOUR)]


def test_a_choice_that_a_named_planner_was_not_asked_at_says_so() -> None:
    """GPU groups take three times their share of the time, so planner ``even`` leaves them out."""
    problem = open_problem(choices_of(ONE, TWO, FOUR), 3.0)
    rows = choices.solve(problem, "dapple", max_plans=2).alternatives
    gate = "planner even has no plan there within 1.12 times its best"
    assert [row.why for row in rows] == ["", gate, gate]
    assert choices.quick(problem).alternatives == (), "nobody sees them, and their bounds take time"


# ---- no plan ---------------------------------------------------------------------------------------------------------


def test_infeasible_is_said_only_where_every_choice_is() -> None:
    none = choices.solve(open_problem(choices_of(ONE, TWO), memory_bytes=HOLDS_NONE), "dapple", max_plans=4)
    assert (none.status, none.best) == (Status.INFEASIBLE, None)
    assert "tensor 1: " in none.sentence
    assert "tensor 2: " in none.sentence
    one = open_problem(choices_of(ONE, FOUR), memory_bytes=790)
    assert driver.solve(contract(one, Choice(ONE)), "dapple", max_plans=4).status is Status.INFEASIBLE
    some = choices.solve(one, "dapple", max_plans=4)
    assert some.choice == Choice(FOUR)
    assert some.best is not None


def test_a_remedy_is_looked_for_of_the_choice_that_lacks_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other choices get no remedies; eight samples are too few for groups of two more nodes in one stage."""
    tried: list[Choice | None] = []
    look = remedies.find_remedy

    def counted(problem: Problem, feasible: Callable[[Problem], bool]) -> str | None:
        tried.append(problem.choice)
        return look(problem, feasible)

    monkeypatch.setattr(tasks, "find_remedy", counted)
    shared = (Choice(ONE, "parameters"), Choice(ONE, "gradients"), Choice(TWO, "gradients"))
    problem = open_problem(shared, memory_bytes=300, micro_batch_sizes=())
    assert not any(each.sentence.startswith("more stages") for each in remedies.remedies(contract(problem, shared[0])))
    none = choices.solve(problem, "auto", effort="quick")
    assert none.status is Status.INFEASIBLE
    assert none.choice is not None
    assert tried == [none.choice]
    nearest, *others = none.sentence.split("tensor ")[1:]
    assert "this works: " in nearest or "no remedy tried here works" in nearest
    assert others
    assert not any("works" in each for each in others)


def test_what_a_search_does_not_find_is_not_infeasible() -> None:
    """Planner ``dp`` holds all layers on each device; the request could be planned in stages."""
    problem = open_problem(choices_of(ONE, TWO), memory_bytes=1500)
    result = choices.solve(problem, "dp", max_plans=4)
    assert result.status is Status.NONE_FOUND
    assert result.shortage is not None
    assert choices.solve(problem, "dapple", max_plans=20).best is not None


def test_a_limit_that_has_passed_ends_the_search() -> None:
    result = choices.solve(open_problem(choices_of(ONE, TWO)), "dapple", time_limit_ns=0)
    assert (result.status, result.best) == (Status.TIME_LIMIT, None)


@pytest.mark.parametrize("limit_s", [0.3, 1.0])
def test_limits_are_kept(limit_s: float) -> None:
    """The search ends within the time of one plan of the current planner."""
    problem = open_problem(
        tuple(Choice(*each) for each in ((d, s) for d in (ONE, TWO, FOUR) for s in ("none", "optimizer"))),  # type: ignore[arg-type]
        nodes=(4, 4, 4, 4),
    )
    incumbents: list[choices.PlanOfChoice] = []
    result = choices.solve(
        problem, "auto", time_limit_ns=int(limit_s * 1e9), on_incumbent=incumbents.append, workers=0, options={}
    )
    assert result.seconds < limit_s + 8
    assert result.best is None or certificate(result) <= result.best.value_ns


@pytest.mark.parametrize(
    ("planner", "more"),
    [("auto", {"options": {"foo": 1}}), ("even", {"options": {"foo": 1}}), ("auto", {"schedule": "1f1b"})],
)
def test_unknown_options_and_schedules_are_refused_whatever_the_choices(planner: str, more: dict[str, Any]) -> None:
    """Each choice once refused them, and other planners' first plans were the answer."""
    problem = open_problem((Choice(ONE, "none"), Choice(TWO, "optimizer")), nodes=(4,))
    with pytest.raises(UnknownMethod, match=r"has no option 'foo'|no schedule '1f1b'"):
        choices.solve(problem, planner, workers=0, **more)


def test_a_limit_compares_as_many_choices_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round is in this process, with all its time for each choice; the rest is for the best choice."""
    rounds: list[tuple[str, object, int | None]] = []
    solve = driver.search

    def noted(setting: Setting, *others: Any) -> Result:
        rounds.append((setting.planner, setting.workers, setting.deadline.share_ns()))
        return solve(replace(setting, workers=0, effort=effort.QUICK, max_plans=1), *others)

    monkeypatch.setattr(choices.driver, "search", noted)
    monkeypatch.setattr(who, "LEAST_S", 3000.0)
    limit_ns = int(9000e9)
    result = choices.solve(open_problem(choices_of(ONE, TWO)), "auto", time_limit_ns=limit_ns, options={})
    quick = [(workers, ns) for planner, workers, ns in rounds if planner == "even"]
    assert len(quick) == 2
    assert all(workers == 0 and ns is not None and 0.49 * limit_ns < ns for workers, ns in quick)
    whole = [ns for planner, _workers, ns in rounds if planner == "auto"]
    assert len(whole) == 1
    assert whole[0] is not None
    assert whole[0] > 0.98 * limit_ns, "the best one has the rest"
    assert "the limit left no time to compare them" in result.sentence
    assert most_comparable(Deadline(None)) == inf
    assert most_comparable(Deadline(int(12e12), clock=lambda: 0)) == 2.0


def test_a_choice_for_which_no_effort_is_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(effort.EFFORTS, "normal", effort.EFFORTS["normal"]._replace(comparing=1))
    result = choices.solve(open_problem(choices_of(ONE, TWO, FOUR)), "auto", effort="normal")
    assert "the sizes of better ones add up to 1 already" in result.sentence


# ---- refused choices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_each_sharding_has_a_plan_and_its_bound(sharding: Sharding) -> None:
    result = choices.solve(open_problem(choices_of(ONE, TWO, sharding=sharding)), "dapple", max_plans=2)
    assert result.best is not None
    assert result.choice is not None
    assert result.choice.sharding == sharding
    assert certificate(result) <= result.best.value_ns


@pytest.mark.parametrize("sharding", ["gradients", "parameters"])
def test_what_all_gpus_cannot_share_out_is_refused_by_name_or_left_out(sharding: Sharding) -> None:
    rules = frozenset({"weight_stashing"})
    with pytest.raises(UnsupportedRequest, match=f"{sharding} sharded all GPUs hold parts of one version"):
        choices.solve(replace(open_problem(choices_of(ONE, TWO, sharding=sharding)), update_rules=rules), "pipedream")
    mixed = replace(open_problem((Choice(TWO, sharding), Choice(TWO, "optimizer"))), update_rules=rules)
    result = choices.solve(mixed, "pipedream", max_plans=2)
    assert result.choice == Choice(TWO, "optimizer")
    assert f"left out: {mixed.choices[0]} (at {mixed.choices[0]} all GPUs hold parts of one version" in result.sentence


def test_choices_without_cells_are_left_out() -> None:
    problem = open_problem(choices_of(ONE, FOUR), nodes=(2, 2))
    result = choices.solve(problem, "dapple", max_plans=2)
    assert result.choice == Choice(ONE)
    assert "left out: tensor 4 (tensor 4 needs 4 GPUs in one node, but the largest node has 2)" in result.sentence
    with pytest.raises(UnsupportedRequest, match="tensor 4 needs 4 GPUs in one node"):
        choices.solve(replace(problem, choices=choices_of(FOUR)), "dapple")


def test_of_choices_that_are_all_refused_the_reason_of_most_is_told() -> None:
    problem = open_problem(choices_of(FOUR, ONE, TWO), nodes=(2, 2))
    with pytest.raises(UnsupportedRequest, match="the request names no target"):
        choices.solve(problem, "uniform")


def test_codecs_go_with_degrees_of_1_only() -> None:
    problem = replace(open_problem(choices_of(ONE, TWO)), codec=True, encodable=((0, 0),) * 3)
    result = choices.solve(problem, "dapple", max_plans=2)
    assert result.choice == Choice(ONE)
    assert "left out: tensor 2 (codec auto cannot be combined with degrees of parallelism above 1)" in result.sentence
    with pytest.raises(UnsupportedRequest, match="codec auto"):
        choices.solve(replace(problem, choices=choices_of(TWO)), "dapple", max_plans=2)


# ---- effort ----------------------------------------------------------------------------------------------------------


def outline(result: Result) -> tuple[object, ...]:
    """Return the whole answer but its duration."""
    assert result.best is not None
    rows = [(row.devices, row.operations.tolist()) for row in result.best.schedule.rows]  # type: ignore[union-attr]
    return result.status, result.choice, result.sentence, result.bounds, result.best.allocation, rows


def test_a_number_of_plans_gives_the_same_answer_every_time() -> None:
    problem = open_problem(choices_of(ONE, TWO, FOUR), 1.3, seed=3)
    first, again = (outline(choices.solve(problem, "dapple", max_plans=3)) for _ in range(2))
    assert first == again


def test_the_answer_does_not_depend_on_the_processes_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no request is too small for worker processes."""
    monkeypatch.setattr("penstock.solvers.solve.workers.SMALL", 0)
    problem = open_problem(choices_of(ONE, FOUR), 1.2)
    few = [outline(choices.solve(problem, "dapple", max_plans=1, workers=number)) for number in (0, 1)]
    assert few[0] == few[1]


def searches(monkeypatch: pytest.MonkeyPatch, gap: float) -> int:
    """Count how many searches of its planner a solve makes."""
    choices_of_searches: list[object] = []
    solve = driver.search

    def counted(setting: Setting, *others: Any) -> Result:
        if setting.planner == "dapple":
            choices_of_searches.append(setting.problem.choice)
        return solve(setting, *others)

    with monkeypatch.context() as patched:
        patched.setattr(driver, "search", counted)
        result = choices.solve(open_problem(choices_of(ONE, TWO, FOUR), 1.1, seed=1), "dapple", max_plans=4, gap=gap)
    assert result.best is not None
    assert len(set(choices_of_searches)) == len(choices_of_searches)
    return len(choices_of_searches)


def test_a_gap_ends_the_search_early(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searches(monkeypatch, 100.0) == 1
    assert searches(monkeypatch, 0.0) > 1


@pytest.mark.tier("nightly")
def test_a_planner_has_its_whole_effort_where_plain_layouts_are_quick() -> None:
    for seed in range(8):
        problem = open_problem(choices_of(ONE, TWO, FOUR), 1.1, seed=seed)
        at = [contract(problem, each) for each in problem.choices]
        even = [driver.solve(each, QUICK).best for each in at]
        quick = [NEVER_NS if each is None else each.value_ns for each in even]
        near = [each for each, ns in zip(at, quick, strict=True) if ns <= NEAR * min(quick)]
        best = [plan.value_ns for each in near if (plan := driver.solve(each, "dapple").best) is not None]
        result = choices.solve(problem, "dapple")
        assert result.best is not None
        assert result.best.value_ns == min(best)


@pytest.mark.tier("nightly")
def test_degrees_of_1_go_on_however_slow_their_plain_layouts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the other choices only the best goes on here; all planners' plans at 1 count unless the bound is above."""
    monkeypatch.setattr(choices, "ROUNDS", (Round(None, 1.0, (QUICK,)), Round(1, 1.0)))
    solve, met = driver.search, set()
    for factor in (0.5, 0.8, 0.95):
        counts: dict[object, int] = {}

        def counted(setting: Setting, *others: Any, counts: dict[object, int] = counts) -> Result:
            if setting.planner == "auto":
                counts[setting.problem.choice] = counts.get(setting.problem.choice, 0) + 1
            return solve(setting, *others)

        monkeypatch.setattr(driver, "search", counted)
        problem = open_problem(choices_of(ONE, TWO, FOUR), factor, seed=1)
        size = sum(each.size for each in one_choice.choices_of(problem)[0])
        monkeypatch.setitem(
            effort.EFFORTS, effort.THOROUGH.name, effort.THOROUGH._replace(comparing=size - 1)
        )  # or all would go on
        result = choices.solve(problem, "auto", max_plans=2)
        assert result.best is not None
        open_still = request_bound(contract(problem, Choice(ONE))).bound_ns < result.best.value_ns
        if result.choice != Choice(ONE):
            assert (counts.get(Choice(ONE), 0) > 0) == open_still
            met.add(open_still)
    assert met == {False, True}


@pytest.mark.tier("nightly")
def test_choices_without_a_plain_layout_near_the_best_plan_are_bounded_and_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound of a choice that is left out still counts; planners run where no layout may fit at all.

    Choices of few GPU groups come first, so that here a plan at tensor 4 exists before tensor 2 is tried. All choices
    of a request are searched where its effort is enough for that.
    """
    monkeypatch.setitem(effort.EFFORTS, effort.THOROUGH.name, effort.THOROUGH._replace(comparing=1))
    problem = open_problem(choices_of(TWO, FOUR), 0.95)
    solve, layouts = driver.search, choices.Layouts
    plan = driver.solve(contract(problem, Choice(FOUR)), "even").best
    assert plan is not None
    near_ns = choices.ROUNDS[0].near * plan.value_ns

    def search(least_ns: int) -> tuple[Result, set[Choice | None]]:
        searched: set[Choice | None] = set()

        def noted(setting: Setting, *others: Any) -> Result:
            searched.add(setting.problem.choice)
            return solve(setting, *others)

        class Bounded(layouts):
            """Layouts whose times at tensor 2 have a stated minimum."""

            def __init__(self, problem: Problem) -> None:
                super().__init__(problem)
                self.choice = problem.choice

            def least_ns(self, below_ns: float = NEVER_NS) -> int:
                return least_ns if self.choice == Choice(TWO) else super().least_ns(below_ns)

        monkeypatch.setattr(driver, "search", noted)
        monkeypatch.setattr(choices, "Layouts", Bounded)
        return choices.solve(problem, "auto", max_plans=2), searched

    result, searched = search(int(near_ns) + 1)
    assert searched == {Choice(FOUR)}
    assert result.choice == Choice(FOUR)
    bounds = [request_bound(contract(problem, each)).bound_ns for each in problem.choices]
    assert min(bounds) <= certificate(result)
    assert result.best is not None
    assert request_bound(contract(problem, Choice(TWO))).bound_ns < result.best.value_ns  # or it would be ruled out
    other = driver.solve(contract(problem, Choice(TWO)), "even").best
    assert other is not None
    assert certificate(result) <= other.value_ns
    for least_ns in (int(near_ns) - 1, NEVER_NS):
        assert search(least_ns)[1] == {Choice(TWO), Choice(FOUR)}


def test_what_lacks_much_memory_does_not_go_on_where_others_have_plans() -> None:
    """At tensor 1 a device holds no layer, at 4 there are plans; the missing memory decides which choices go on.

    This holds for a request that is too large for comparing all choices; of a smaller one all go on.
    """
    problem = open_problem(choices_of(ONE, FOUR))
    search = choices.Search(Setting(problem))
    search._compares_all = False
    one, four = (next(each for each in search.choices if each.choice.degrees == degrees) for degrees in (ONE, FOUR))
    four.take(driver.solve(four.problem, "even"))
    search.best = four
    for missing, goes_on in ((9, True), (11, False)):
        shortage = Shortage(0, 0, 0, needed_bytes=100 + missing, available_bytes=100)
        one.result = Result(Status.NONE_FOUND, "", shortage=shortage)
        assert one.lacks_much is not goes_on
        left = search._nearest(search.choices, 1.4, untried=True)
        assert (one in left) is goes_on
        assert four in left
    search._compares_all = True
    assert one in search._nearest(search.choices, 1.4, untried=True)


def test_incumbents_get_better_and_say_their_choice() -> None:
    problem = open_problem(choices_of(ONE, TWO, FOUR), 1.1, seed=2)
    incumbents: list[choices.PlanOfChoice] = []
    reports = []
    result = choices.solve(problem, "dapple", max_plans=4, on_incumbent=incumbents.append, on_progress=reports.append)
    values = [each.plan.value_ns for each in incumbents]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    assert result.best is not None
    assert values[-1] == result.best.value_ns
    assert incumbents[-1].problem.choice == result.choice
    assert reports
    lowest = [each.bound.bound_ns for each in reports]
    assert max(lowest) <= result.best.value_ns
    assert all(each.bound.scope == REQUEST_SCOPE for each in reports)


def test_choices_whose_load_takes_longer_than_the_best_plan_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Choice] = []

    def counted(problem: Problem, choice: Choice, problems: Problems | None) -> Problem:
        calls.append(choice)
        return contract(problem, choice, problems)

    monkeypatch.setattr(one_choice, "contract", counted)
    problem = open_problem(choices_of(TWO, FOUR))
    slow = replace(problem, variants=(divided(problem, TWO, 50.0), divided(problem, FOUR, 1.0)))
    assert choices.solve(slow, "dapple").choice == Choice(FOUR)
    assert calls == [Choice(FOUR)]
