"""The local search over plans without a flush: against lists of all lines, from poor plans, and legal proposals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from list_allocations import numbers_allowed, partitions
from plan_lists import judged, verified
from problems import make_problem

from penstock.schemas.errors import PenstockError
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.periodic.eager import eager, noam
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.judging import Judge
from penstock.solvers.solve.tasks import LocalSearch

pytestmark = pytest.mark.tier("ci")

RULES: tuple[UpdateRule, ...] = ("weight_stashing", "double_buffered", "double_grouped")


def drawn(seed: int, rule: UpdateRule) -> Problem:
    """Draw 2 to 4 layers on 2 devices or 2 to 3 on 3, often of two kinds, in one node or several."""
    draw = np.random.default_rng(seed)
    devices = int(draw.integers(2, 4))
    layers = int(draw.integers(2, 7 - devices))
    mixed = draw.random() < 0.5
    problem = make_problem(
        draw.integers(20, 100, layers).tolist(),
        boundary_bytes=draw.integers(1, 100, layers - 1).tolist(),
        parameter_bytes=(draw.integers(1, 30, layers) * int(draw.choice([1, 5]))).tolist(),
        nodes=(devices,) if draw.random() < 0.5 else (1,) * devices,
        kinds=["cpu", "quick", "cpu"][:devices] if mixed else None,
        speed={"quick": 2.0} if mixed else None,
        global_batch_size=int(draw.integers(4, 9)),
        micro_batch_sizes=(int(draw.integers(1, 3)),),
        shared=bool(draw.random() < 0.3),
    )
    return replace(problem, update_rules=frozenset({rule}))


def placements(devices: tuple[int, ...], count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield separate devices for so many stages, in every way."""
    if count == 0:
        yield ()
        return
    for size in range(1, len(devices) - count + 2):
        for group in combinations(devices, size):
            rest = tuple(d for d in devices if d not in group)
            yield from ((group, *others) for others in placements(rest, count - 1))


def lines(problem: Problem) -> Iterator[Allocation]:
    """Yield every line of stages on separate devices, with replicas by rows and in turn."""
    (number,) = numbers_allowed(problem)
    for cut in partitions(problem):
        for groups in placements(tuple(range(problem.num_devices)), len(cut)):
            for ways in product(*(("rows", "round_robin") if len(group) > 1 else ("rows",) for group in groups)):
                parts = zip(cut, groups, ways, strict=True)
                yield single_pipeline(tuple(Stage(a, b, group, way) for (a, b), group, way in parts), number)  # type: ignore[arg-type]


def under_eager(problem: Problem, plan: Allocation, rule: UpdateRule) -> Iterator[JudgedPlan]:
    """Yield the line with NOAM's micro-batches in flight, twice as many, and one."""
    base = noam(plan)
    for depth in ([1] * len(base), base, [2 * each for each in base]):
        try:
            pattern = eager(problem, plan, update_rule=rule, depth=depth)
        except PenstockError:
            continue
        candidate = judged(problem, plan, pattern, problem.rules.overlap_all_reduce, rule)
        if candidate is not None:
            yield candidate


def least_ns(problem: Problem, rule: UpdateRule) -> int:
    """Return the time of the fastest line that verifies."""
    every = [each for plan in lines(problem) for each in under_eager(problem, plan, rule)]
    ranked = sorted(every, key=lambda each: each.value_ns)
    return next(each.value_ns for each in ranked if not verified(problem, each))


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("rule", RULES)
def test_no_line_is_much_faster_than_the_answer(rule: UpdateRule) -> None:
    """``auto`` against all lines on all devices, unlike ones among them: within 3 %, and mostly as fast."""
    equal = seen = 0
    for seed in range(8):
        problem = drawn(seed, rule)
        plan = solve(problem, "auto").best
        least = least_ns(problem, rule)
        assert plan is not None
        assert plan.value_ns <= 1.03 * least, (seed, plan.value_ns, least)
        equal += plan.value_ns <= least
        seen += 1
    assert seen == 8
    assert equal >= 6


def begun(problem: Problem, rule: UpdateRule, plan: Allocation) -> Judge:
    """Return a judge that has only the plan with one micro-batch in flight."""
    judge = Judge(Setting(problem))
    pattern = eager(problem, plan, update_rule=rule, depth=[1] * len(plan.stages))
    start = judged(problem, plan, pattern, problem.rules.overlap_all_reduce, rule)
    assert start is not None
    judge.offer(start)
    return judge


def proposals(judge: Judge, rule: UpdateRule, effort: float) -> Iterator[Proposal]:
    """Yield the search's plans, as a task proposes them."""
    start = judge.best
    assert start is not None
    yield from LocalSearch(start, (), effort)._proposals(judge)


def searched(problem: Problem, rule: UpdateRule, plan: Allocation, effort: float = 0.5) -> JudgedPlan:
    """Return the best plan of the search from this plan."""
    judge = begun(problem, rule, plan)
    judge.judge_all("polish", proposals(judge, rule, effort))
    assert judge.best is not None
    return judge.best


def long_chain(rule: UpdateRule) -> Problem:
    """Return twelve unlike layers on six devices in two nodes, heavy where they are cut evenly."""
    problem = make_problem(
        [10, 60, 20, 80, 30, 30, 90, 10, 40, 20, 70, 15],
        boundary_bytes=[5, 40, 5, 60, 5, 30, 5, 50, 5, 20, 5],
        parameter_bytes=8,
        nodes=(3, 3),
        global_batch_size=12,
        micro_batch_sizes=(1,),
    )
    return replace(problem, update_rules=frozenset({rule}))


@pytest.mark.parametrize("rule", RULES)
def test_from_a_poor_plan_to_one_that_ranks_can_run(rule: UpdateRule) -> None:
    """One stage on one device of six: the search is at least three times as fast, verifies, and repeats itself."""
    problem = long_chain(rule)
    poor = single_pipeline((Stage(0, 11, (0,)),), 12)
    before = begun(problem, rule, poor).best
    best = searched(problem, rule, poor)
    assert before is not None
    assert 3 * best.value_ns < before.value_ns
    assert verified(problem, best) == []
    again = searched(problem, rule, poor)
    assert (again.allocation, again.value_ns) == (best.allocation, best.value_ns)
    assert best.value_ns <= searched(problem, rule, poor, effort=0.02).value_ns


@pytest.mark.tier("quick")
def test_what_is_proposed_keeps_pins_and_slices() -> None:
    """Layer 0 stays on device 5, and a slice has two samples at least: micro-batches of three feed one replica."""
    problem = replace(long_chain("weight_stashing"), pins=(Pin(0, 0, frozenset({5})),), min_slice=2)
    problem = replace(problem, micro_batch_sizes=(3,))
    start = single_pipeline((Stage(0, 0, (5,)), Stage(1, 11, (0, 1, 2), "round_robin")), 4)
    judge, seen = begun(problem, "weight_stashing", start), 0

    def watched() -> Iterator[Proposal]:
        nonlocal seen
        for proposal in proposals(judge, "weight_stashing", 0.3):
            seen += 1
            for stage in proposal.allocation.stages:
                assert stage.first > 0 or stage.devices == (5,)
                assert stage.dispatch == "round_robin" or stage.replicas == 1
            yield proposal

    judge.judge_all("polish", watched())
    assert seen > 20


@pytest.mark.tier("nightly")
def test_auto_polishes_what_has_no_flush_unless_it_is_left_out() -> None:
    """The planners' best line for a chain of this unevenness is not the best one."""
    problem = long_chain("weight_stashing")
    with_search = solve(problem, "auto").best
    without = solve(problem, "auto", options={"exclude": "polish"}).best
    assert with_search is not None
    assert without is not None
    assert with_search.planner == "polish"
    assert with_search.value_ns < without.value_ns
