"""Parameters tied across stages: the simulated time of their sums, by hand and against the plain reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from bulk_times import makespans_ns
from problems import make_problem
from random_plans import (
    random_allocation,
    random_orders,
    random_pipelines,
    tied_plan,
    with_ties,
)

from penstock.report.chrome_trace import chrome_events
from penstock.report.drawing.picture import picture_of_timeline
from penstock.report.traffic import traffic
from penstock.schemas.errors import InvalidPlan
from penstock.solvers.bounds.schedule_bound import one_pipeline_bound, request_bound, schedule_bound
from penstock.solvers.costs.buckets import buckets
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.ties import bytes_of_spans, tied_sums
from penstock.solvers.explanation.critical_path import critical_path
from penstock.solvers.improve.job_shop.solve import Question, solve
from penstock.solvers.improve.tabu import improve
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Pattern, PatternOperation
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.solve.judging import Judge
from penstock.solvers.verify.verifier import verify

Make = Callable[[random.Random, Problem], Allocation]


def _two_stages(**changes: object) -> tuple[Problem, Allocation]:
    """Return two layers, each 10 ns forwards and 20 back, on devices that 2 bytes per ns connect; 40 bytes tied."""
    values = {"parameter_bytes": [40, 8], "boundary_bytes": 0, "between_bytes_per_s": 2_000_000_000, **changes}
    problem = make_problem(
        [10, 10],
        nodes=(1, 1),
        global_batch_size=1,
        update_ns=[3, 5],
        shared_parameters=(("wte", (0, 1), 40),),
        channel="none",
        **values,
    )
    return problem, single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1,))), 1)


def test_a_tie_costs_its_all_reduce_after_the_last_backward() -> None:
    problem, plan = _two_stages()
    timeline = simulate(problem, plan, early_backward(problem, plan))
    # forwards 0-20, backwards 20-60; a ring of two moves 40 bytes each way at 2 bytes per ns
    assert [(each.start_ns, each.end_ns) for each in timeline.ties] == [(60, 80)]
    assert sorted((each.stage, each.start_ns, each.end_ns) for each in timeline.updates) == [(0, 80, 83), (1, 80, 85)]
    assert timeline.time_per_global_batch_ns == 85
    untied = replace(problem, shared_parameters=())
    assert makespan_ns(untied, plan, early_backward(untied, plan)) == 63
    assert schedule_bound(problem, plan, early_backward(problem, plan)).bound_ns == 83


@pytest.mark.parametrize(
    ("ties", "rows", "time"),
    [
        ((("a", (0, 1), 40), ("b", (0, 1), 10)), [(60, 80), (80, 85)], 90),
        ((("frozen", (0, 1), 0),), [], 63),
    ],
)
def test_ties_are_summed_one_after_the_other(
    ties: tuple[tuple[str, tuple[int, ...], int], ...], rows: list[tuple[int, int]], time: int
) -> None:
    problem, plan = _two_stages()
    problem = replace(problem, shared_parameters=ties)
    timeline = simulate(problem, plan, early_backward(problem, plan))
    assert [(each.start_ns, each.end_ns) for each in timeline.ties] == rows
    assert timeline.time_per_global_batch_ns == time


def test_a_parameter_tied_within_a_stage_is_in_its_bucket_and_one_tied_across_is_not() -> None:
    problem = make_problem(
        [1] * 3, parameter_bytes=[50, 6, 7], nodes=(4,), shared_parameters=(("wte", (0, 2), 30),), bucket_bytes=1000
    )
    whole, low, high = Stage(0, 2, (0, 1)), Stage(0, 1, (0, 1)), Stage(2, 2, (2, 3))
    assert [[each.bytes for each in buckets(problem, stage)] for stage in (whole, low, high)] == [[63], [26], [7]]
    for spans, sums in bytes_of_spans(problem):
        for i in range(3):
            for j in range(i + 1, 4):
                if spans[i, j]:
                    all_buckets = buckets(problem, Stage(i, j - 1, (0, 1)))
                    assert int(sums[j] - sums[i]) == sum(each.bytes for each in all_buckets)
    assert sum(int(spans.sum()) for spans, _sums in bytes_of_spans(problem)) == 16


def test_copies_on_one_device_are_summed_for_nothing() -> None:
    problem, _plan = _two_stages()
    plan = single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (0,))), 1)
    (tie,) = tied_sums(problem, plan)
    assert (tie.devices, tie.duration_ns) == ((0,), 0)


def test_three_copies_in_two_pipelines_are_one_group() -> None:
    problem = make_problem(
        [1] * 4, parameter_bytes=16, nodes=(6,), global_batch_size=2, shared_parameters=(("w", (0, 1, 3), 16),)
    )
    cut = [Pipeline((Stage(0, 0, (0,)), Stage(1, 2, (1,)), Stage(3, 3, (2,))), (0, 0))]
    cut += [Pipeline((Stage(0, 1, (3,)), Stage(2, 2, (4,)), Stage(3, 3, (5,))), (1, 1))]
    (tie,) = tied_sums(problem, Allocation(tuple(cut), 2))
    assert (tie.stages, tie.devices) == ((0, 1, 2, 3, 5), (0, 1, 2, 3, 5))


def test_copies_that_nothing_connects_are_refused() -> None:
    problem, plan = _two_stages(between_bytes_per_s=0)
    orders = early_backward(problem, plan)
    with pytest.raises(InvalidPlan, match="copies of the tied parameter 'wte'"):
        simulate(problem, plan, orders)
    assert makespan_ns(problem, plan, orders) == NEVER_NS


@pytest.mark.parametrize("channel", ["none", "full", "half"])
def test_bulk_times_of_tied_plans_are_the_judges(channel: str) -> None:
    seen = 0
    for seed in range(40):
        rng = random.Random(seed)
        count = rng.randint(2, 5)
        problem = make_problem(
            [rng.randint(1, 9) for _ in range(count)],
            boundary_bytes=rng.randint(0, 4),
            parameter_bytes=[rng.randint(0, 30) for _ in range(count)],
            update_ns=[rng.randint(0, 5) for _ in range(count)],
            nodes=(count,),
            global_batch_size=4,
            channel=channel,
            bucket_bytes=20,
        )
        problem = with_ties(rng, problem)
        plan = single_pipeline(tuple(Stage(i, i, (i,)) for i in range(count)), 4)
        vectors = np.asarray([sorted((rng.randint(1, 4) for _ in range(count)), reverse=True) for _ in range(3)])
        judged = [makespan_ns(problem, plan, early_backward(problem, plan, warmup=v.tolist())) for v in vectors]
        assert makespans_ns(problem, plan, vectors).tolist() == judged
        seen += bool(tied_sums(problem, plan))
    assert seen > 25


@pytest.mark.tier("ci")
@pytest.mark.parametrize("shared", [False, True])
def test_tabu_times_tied_orders_as_the_judge_does(shared: bool) -> None:
    better = 0
    for seed in range(12):
        rng = random.Random(seed)
        problem = make_problem(
            [rng.randint(1, 9) for _ in range(4)],
            boundary_bytes=4,
            parameter_bytes=20,
            nodes=(4,),
            global_batch_size=6,
            shared=shared,
            channel="half",
            shared_parameters=(("wte", (0, 3), 20), ("w", (1, 2), 9)),
        )
        plan = single_pipeline(tuple(Stage(i, i, (i,)) for i in range(4)), 6)
        orders = random_orders(rng, plan)
        result = improve(problem, plan, orders, steps=300, seed=seed)
        assert result.value_ns == makespan_ns(problem, plan, result.orders)
        assert result.value_ns >= schedule_bound(problem, plan, result.orders).bound_ns
        better += result.value_ns < makespan_ns(problem, plan, orders)
    assert better > 6


@pytest.mark.parametrize("seed", range(60))
def test_the_critical_path_adds_up_with_ties(seed: int) -> None:
    make = (random_allocation, random_pipelines)[seed % 2]
    rng = random.Random(1000 + seed)
    problem, allocation = tied_plan(rng, make)
    orders = random_orders(rng, allocation)
    timeline = simulate(problem, allocation, orders)
    plan = JudgedPlan.of("test", allocation, orders, timeline, problem.rules.overlap_all_reduce)
    path = critical_path(problem, plan)
    assert path.length_ns == timeline.time_per_global_batch_ns
    assert all(step.length_ns >= 0 for step in path.steps)


@pytest.mark.parametrize("fault", ["early", "short", "missing", "step"])
def test_verify_notices_a_wrong_tie(fault: str) -> None:
    problem, plan = _two_stages()
    orders = early_backward(problem, plan)
    timeline = simulate(problem, plan, orders)
    (tie,) = timeline.ties
    wrong = {
        "early": {"ties": (tie._replace(start_ns=59, end_ns=79),)},
        "short": {"ties": (tie._replace(end_ns=79),)},
        "missing": {"ties": ()},
        "step": {"updates": tuple(each._replace(start_ns=each.start_ns - 1) for each in timeline.updates)},
    }[fault]
    assert verify(problem, plan, orders, timeline) == []
    assert verify(problem, plan, orders, replace(timeline, **wrong)) != []


def test_the_sum_of_a_tied_parameter_is_an_event_of_all_its_stages() -> None:
    problem = make_problem(
        [10, 10, 10], parameter_bytes=40, boundary_bytes=0, nodes=(3,), shared_parameters=(("wte", (0, 2), 40),)
    )
    plan = single_pipeline(tuple(Stage(s, s, (s,)) for s in range(3)), 1)
    timeline = simulate(problem, plan, early_backward(problem, plan))
    events = list(chrome_events(picture_of_timeline(problem, timeline, plan)))
    summed = [(each["pid"], each["ts"], each["dur"]) for each in events if each["name"] == "tied sum"]
    ((_stage, _tie, start, end),) = timeline.ties
    assert summed == [(pid, start / 1000, (end - start) / 1000) for pid in (0, 2)]


def test_traffic_has_the_ring_of_a_tie() -> None:
    problem, plan = _two_stages()
    flows = {(flow.source, flow.target): flow.sizes for flow in traffic(problem, plan, 100)}
    assert flows == {(0, 1): (0, 0, 40), (1, 0): (0, 0, 40)}


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(12))
def test_no_bound_is_above_a_tied_plan(seed: int) -> None:
    """Bounds of the request and of the job shop, which count ties in part or not at all."""
    rng = random.Random(seed)
    count = rng.randint(2, 4)
    problem = make_problem(
        [rng.randint(1, 9) for _ in range(count)],
        boundary_bytes=rng.randint(0, 4),
        parameter_bytes=[rng.randint(0, 60) for _ in range(count)],
        update_ns=[rng.randint(0, 5) for _ in range(count)],
        nodes=rng.choice([(2, 2), (4,), (1, 1, 1)]),
        global_batch_size=4,
        shared=rng.random() < 0.5,
        bucket_bytes=rng.choice([10, 1000]),
        overlap_all_reduce=rng.random() < 0.7,
    )
    problem = with_ties(rng, problem)
    whole, alone = request_bound(problem).bound_ns, one_pipeline_bound(problem).bound_ns
    for number in (1, 2, 4):
        for cut in range(1, count):
            devices = list(range(problem.num_devices))
            rng.shuffle(devices)
            replicas = rng.randint(1, 2) if number < 4 else 1
            low, high = devices[:replicas], devices[replicas : replicas + 1]
            plan = single_pipeline((Stage(0, cut - 1, tuple(low)), Stage(cut, count - 1, tuple(high))), number)
            orders = early_backward(problem, plan)
            time = makespan_ns(problem, plan, orders)
            assert max(whole, alone) <= time
            answer = solve(Question(problem, plan, time, effort=0.2))
            assert answer.bound_ns <= time
            assert answer.orders is not None


@pytest.mark.tier("ci")
def test_a_job_shop_knows_that_a_rows_step_follows_its_tie() -> None:
    problem, plan = _two_stages()
    answer = solve(Question(problem, plan, 100))
    assert (answer.bound_ns, answer.proven) == (83, True)


def _turned() -> tuple[Allocation, Pattern]:
    """Return stages 0 and 3 on device 1, 1 on 0 and 2 on 2, and a pattern with a period of 563 ns."""
    placed = zip([(0, 1), (2, 3), (4, 6), (7, 7)], (1, 0, 2, 1), strict=True)
    allocation = single_pipeline(tuple(Stage(first, last, (device,)) for (first, last), device in placed), 4)
    begins = [(1, 3, 0, 2), (1, 0, 89, 3), (1, 2, 123, 2), (0, 1, 255, 1)]
    begins += [(0, 2, 395, 1), (1, 1, 425, 2), (0, 0, 444, 0), (0, 3, 556, 1)]
    operations = tuple(PatternOperation(kind, stage, start, shift) for kind, stage, start, shift in begins)
    return allocation, Pattern("inside-out", 563, 1, operations)


@pytest.mark.parametrize("tied", [False, True])
def test_a_planners_plan_whose_ranks_would_wait_for_each_others_sums_is_passed_over(tied: bool) -> None:
    """Device 2 waits for the sum of stage 0 before it sends device 1's input; the next proposal is chosen."""
    ties = (("tied", (1, 6), 20),) if tied else ()
    problem = make_problem(
        [1] * 8, boundary_bytes=1, parameter_bytes=30, nodes=(3,), shared_parameters=ties, global_batch_size=4
    )
    problem = replace(problem, update_rules=frozenset({"double_buffered"}))
    allocation, pattern = _turned()
    proposal = Proposal(allocation, (pattern.name,), overlaps=(False,), update_rule="double_buffered", fixed=pattern)
    whole = single_pipeline((Stage(0, 7, (0,)),), 4)
    alone = Pattern("eager", 50, 1, (PatternOperation(0, 0, 0, 0), PatternOperation(1, 0, 10, 0)))
    judge = Judge(Setting(problem))
    judge.judge_all("test", [proposal])
    assert (judge.best is None) == tied
    assert ("deadlocks" in (judge.obstacles.disconnected or "")) == tied
    judge.judge_all("test", [proposal._replace(allocation=whole, schedules=(alone.name,), fixed=alone)])
    assert judge.best is not None
    assert judge.judged == 2
    assert judge.best.allocation == (whole if tied else allocation)


def test_a_planners_plan_that_cannot_run_is_an_error_where_nothing_is_tied() -> None:
    problem = make_problem([1] * 8, boundary_bytes=1, parameter_bytes=30, nodes=(3,), global_batch_size=4)
    allocation = _turned()[0]
    broken = Pattern("eager", 50, 1, (PatternOperation(0, 0, 0, 0), PatternOperation(1, 0, 10, 0)))
    problem = replace(problem, update_rules=frozenset({"double_buffered"}))
    proposal = Proposal(allocation, ("eager",), overlaps=(False,), update_rule="double_buffered", fixed=broken)
    with pytest.raises(InvalidPlan):
        Judge(Setting(problem)).judge_all("test", [proposal])
