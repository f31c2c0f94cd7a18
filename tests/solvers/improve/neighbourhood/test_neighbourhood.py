"""The neighbourhood search: legal moves and repairs, simulated times, improvements only, the same every time."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from drawn_problems import instance
from problems import GIGABYTE_PER_S, chain, make_problem

from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.improve.job_shop import never
from penstock.solvers.improve.neighbourhood import moves
from penstock.solvers.improve.neighbourhood.flushed import SECOND, LargeNeighbourhoodSearch, search
from penstock.solvers.improve.neighbourhood.moves import Stages, even_stages, moved
from penstock.solvers.improve.neighbourhood.recut import recuts
from penstock.solvers.improve.neighbourhood.repair import Repairs
from penstock.solvers.improve.neighbourhood.scores import Scores
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, single_pipeline
from penstock.solvers.model.options import checked
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.support.fitting_orders import best_order
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.judging import Judge

NEVER = 2**60


def check(problem: Problem, stages: Stages) -> None:
    """Check that stages hold all layers once, in order, cut where that is allowed, and no device twice."""
    assert stages[0].first == 0
    assert stages[-1].last == problem.num_layers - 1
    for one, two in pairwise(stages):
        assert one.last + 1 == two.first
        assert problem.cuttable[one.last]
    devices = [d for stage in stages for d in stage.devices]
    assert len(set(devices)) == len(devices)
    assert all(stage.devices == tuple(sorted(stage.devices)) and stage.replicas for stage in stages)
    for stage in stages:
        assert stage.recompute in ((), ((stage.first, stage.last),))


@pytest.mark.parametrize("recompute", ["never", "auto", "always"])
def test_moves_are_legal_and_all_different_ones_occur(recompute: str) -> None:
    problem = instance(0, 8, recompute=recompute, cuttable=[True, True, False, True, True, True, True])
    start = chain([(2, [0]), (3, [1, 2]), (3, [3])], 4).stages
    if recompute == "always":
        start = tuple(replace(s, recompute=((s.first, s.last),)) for s in start)
    plans = list(moved(problem, start))
    for stages in plans:
        check(problem, stages)
        for stage in stages:
            assert recompute != "never" or not stage.recompute
            assert recompute != "always" or stage.recompute
    assert {len(stages) for stages in plans} == {2, 3, 4}
    assert any({d for s in stages for d in s.devices} != {0, 1, 2, 3} for stages in plans)
    shapes = {tuple((s.first, s.last) for s in stages) for stages in plans}
    assert ((0, 1), (2, 5), (6, 7)) in shapes
    assert ((0, 0), (1, 3), (4, 7)) in shapes
    assert ((0, 2), (3, 4), (5, 7)) not in shapes


@pytest.mark.parametrize("replicas", [(8, 8), (6, 4, 4), (3, 12), (2, 2, 5)])
def test_two_of_the_nodes_that_nothing_tells_apart_are_enough(
    replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A move between other nodes takes as long as a kept move, where it does not matter which slices meet."""
    problem = make_problem(
        [5, 7, 6, 8, 5, 9],
        boundary_bytes=3,
        parameter_bytes=11,
        nodes=(2,) * 8,
        inside_bytes_per_s=5 * GIGABYTE_PER_S,
        global_batch_size=32,
        micro_batch_sizes=(16,),
        transfer="madpipe",
        all_reduce="hierarchical",
    )
    stops = list(accumulate(replicas))
    layers = 6 // len(replicas)
    plan = chain([(layers, range(at - size, at)) for at, size in zip(stops, replicas, strict=True)], 2).stages

    def times() -> list[int]:
        plans = (single_pipeline(stages, 2) for stages in moved(problem, plan))
        return [makespan_ns(problem, each, early_backward(problem, each)) for each in plans]

    every = times()
    monkeypatch.setattr(moves, "MANY_DEVICES", 1)
    kept = times()
    assert set(kept) == set(every)
    assert len(kept) < len(every)


def test_even_stages_share_layers_and_devices() -> None:
    problem = instance(0, 12)
    shapes = list(even_stages(problem))
    assert [len(stages) for stages in shapes] == [1, 2, 3, 4]
    for stages in shapes:
        check(problem, stages)
    assert [stage.last - stage.first + 1 for stage in shapes[1]] == [6, 6]


def test_repairs_of_a_small_window_are_all_ways_to_cut_it() -> None:
    problem = instance(0, 8, cuttable=[True, True, False, True, True, True, True])
    start = chain([(2, [0]), (3, [1, 2]), (3, [3])], 4).stages
    neighbours = list(Repairs(problem, 1000).of(start, 1, 3, random.Random(0)))
    for stages in neighbours:
        check(problem, stages)
        assert stages[0] == start[0]
    rows = ((1, 2, 3), (3, 2, 1))
    wanted = {
        (cuts, tuple(tuple(sorted(row[i:j])) for i, j in pairwise((0, *places, 3))))
        for count in range(3)
        for cuts in combinations((3, 4, 5, 6), count)
        for places in combinations((1, 2), count)
        for row in rows
    }
    assert {(tuple(s.last for s in each[1:-1]), tuple(s.devices for s in each[1:])) for each in neighbours} == wanted


@pytest.mark.parametrize("seed", range(3))
def test_drawn_repairs_are_legal_and_follow_the_seed(seed: int) -> None:
    problem = instance(seed, 20, cuttable=[i % 3 != 1 for i in range(19)], nodes=(4, 4))
    start = chain([(6, [0, 1]), (6, [2, 3, 4]), (8, [5, 6, 7])], 4).stages
    repairs = Repairs(problem, 40)
    neighbours = list(repairs.of(start, 0, 3, random.Random(seed)))
    assert neighbours == list(repairs.of(start, 0, 3, random.Random(seed)))
    assert len(set(neighbours)) > 30
    for stages in neighbours:
        check(problem, stages)


@pytest.mark.parametrize("shared", [False, True])
def test_scores_are_the_judges(shared: bool) -> None:
    """Each small move's time is the simulator's, the least of them is the value, and the bound is below it."""
    problem = instance(2, 9, 4, shared=shared, stash_bytes=10**6, memory_bytes=150_000_000)
    start = chain([(5, [0, 1]), (4, [2, 3])], 4).stages
    scores = Scores(problem)
    ranking = scores.fresh([(4, stages) for stages in moved(problem, start)], NEVER)
    assert ranking == sorted(ranking, key=lambda score: score.value_ns)
    assert not scores.fresh([score.plan for score in ranking], NEVER)
    for score in ranking[::4]:
        plan = single_pipeline(score.plan[1], 4)
        for value, vector in score.warmups:
            assert makespan_ns(problem, plan, early_backward(problem, plan, warmup=vector)) == value
        assert score.value_ns == min(value for value, _vector in score.warmups)
        assert score.bound_ns <= score.value_ns
        trial = scores.fitting(score, NEVER)
        if trial is not None:
            uses = simulate(problem, plan, trial.orders).uses
            assert all(use.memory.total <= problem.capacity_bytes(d) for d, use in uses.items())
            usual = best_order(problem, plan, NEVER).plan
            assert usual is not None
            assert trial.value_ns <= usual.value_ns


def searched(problem: Problem, start: JudgedPlan | None, effort: float = 1.0) -> list[JudgedPlan]:
    value_ns = NEVER if start is None else start.value_ns
    search = LargeNeighbourhoodSearch(problem, value_ns, int(effort * SECOND))
    return list(search.run(None, None) if start is None else search.run(start.allocation, start.orders))


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(4))
def test_a_search_only_improves_and_is_repeatable(seed: int) -> None:
    problem = instance(seed, 10, 4, recompute="auto", stash_bytes=10**6, memory_bytes=150_000_000)
    first = best_order(problem, chain([(5, [0, 1]), (5, [2, 3])], 4), NEVER).plan
    assert first is not None
    runs = [searched(problem, first) for _ in range(2)]
    values = [trial.value_ns for trial in runs[0]]
    assert values == sorted(set(values), reverse=True)
    assert all(value < first.value_ns for value in values)
    assert [(t.value_ns, t.allocation) for t in runs[0]] == [(t.value_ns, t.allocation) for t in runs[1]]
    for trial in runs[0]:
        assert makespan_ns(problem, trial.allocation, trial.orders) == trial.value_ns


@pytest.mark.cases(3)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shared", [False, True])
def test_from_nothing_it_finds_the_joint_optimum(seed: int, shared: bool) -> None:
    """Nine layers on two nodes of two devices, whole backwards: the plan that ``exact`` finds by listing all plans."""
    problem = instance(seed, 9, 8, shared=shared)
    exact = solve(problem, "exact").best
    assert exact is not None
    value_ns = searched(problem, None)[-1].value_ns
    if shared:  # a job shop's order is reached by no warm-up now and then
        assert value_ns <= exact.value_ns * 1.01
    else:
        assert value_ns == exact.value_ns


@pytest.mark.tier("ci")
def test_a_plan_that_is_nearly_best_is_mended() -> None:
    """The plan is one cut away from the optimum, and the search reaches the optimum."""
    problem = instance(14, 12, 8)
    best = solve(problem, "exact").best
    assert best is not None
    stages = best.allocation.stages
    assert len(stages) == 2
    shifted = (replace(stages[0], last=stages[0].last - 1), replace(stages[1], first=stages[1].first - 1))
    first = best_order(problem, single_pipeline(shifted, best.allocation.num_micro_batches), NEVER).plan
    assert first is not None
    assert first.value_ns > best.value_ns
    assert searched(problem, first)[-1].value_ns == best.value_ns


@pytest.mark.tier("ci")
def test_recuts_of_parts_keep_the_order_and_only_improve() -> None:
    """Interleaved parts, one of whose cuts is misplaced: the search moves cuts, and never the order."""
    problem = make_problem([30, 10, 20, 30, 10, 20, 20, 20], None, 1, 8, nodes=(2,), global_batch_size=8)
    judge = Judge(Setting(problem))
    planner = PLANNERS["interleaved"]
    assert planner.proposals is not None
    judge.judge_all(
        "interleaved", planner.proposals(judge.setting, checked("interleaved", planner.options, {"chunks": 2}))
    )
    best: Any = judge.best
    stages = list(best.allocation.stages)
    k = next(s for s, stage in enumerate(stages[:-1]) if stage.last > stage.first)
    stages[k : k + 2] = [
        replace(stages[k], last=stages[k].last - 1),
        replace(stages[k + 1], first=stages[k + 1].first - 1),
    ]
    worse = Allocation(
        (replace(best.allocation.pipelines[0], stages=tuple(stages)),), best.allocation.num_micro_batches
    )
    value = makespan_ns(problem, worse, best.schedule)
    assert value > best.value_ns
    plans = list(recuts(problem, worse, best.schedule, True, value))
    values = [plan.value_ns for plan in plans]
    assert values == sorted(set(values), reverse=True)
    assert values[-1] <= best.value_ns
    for plan in plans:
        assert makespan_ns(problem, plan.allocation, best.schedule) == plan.value_ns
        assert [s.devices for s in plan.allocation.stages] == [s.devices for s in stages]


@pytest.mark.cases(2)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("planner", ["interleaved", "zero-bubble", "gpipe"])
def test_a_search_yields_ever_better_plans(planner: str) -> None:
    problem = instance(1, 8, 4)
    judge = Judge(Setting(problem))
    entry = PLANNERS[planner]
    assert entry.proposals is not None
    judge.judge_all(planner, entry.proposals(judge.setting, checked(planner, entry.options, {})))
    assert judge.best is not None
    before = judge.best.value_ns
    values = []
    for plan in search(problem, judge.best, 0.5, never):
        values.append(makespan_ns(problem, plan.allocation, plan.orders))
        assert plan.value_ns == values[-1]
        bound = schedule_bound(problem, plan.allocation, plan.orders)
        assert values[-1] >= bound.bound_ns
    assert values == sorted(set(values), reverse=True)
    assert all(value < before for value in values)


def test_a_stopped_search_ends() -> None:
    problem = instance(1, 12, 8)
    first = best_order(problem, chain([(6, [0]), (6, [1])], 8), NEVER).plan
    assert first is not None
    search = LargeNeighbourhoodSearch(problem, first.value_ns, SECOND, stopped=lambda: True)
    assert list(search.run(first.allocation, first.orders)) == []


@pytest.mark.tier("ci")
def test_pins_are_kept() -> None:
    problem = replace(instance(3, 10, 4, min_slice=4), pins=(Pin(0, 1, frozenset({2, 3})),))
    first = best_order(problem, chain([(5, [2, 3]), (5, [0, 1])], 4), NEVER).plan
    assert first is not None
    for trial in searched(problem, first):
        assert broken_pin(problem, trial.allocation) is None
        assert all(4 * stage.replicas <= 12 for stage in trial.allocation.stages)
