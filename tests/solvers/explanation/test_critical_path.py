"""The critical path and the split of the bubble: random plans of every kind, by hand, against a reference."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from problems import early_backward, gpipe, make_problem, straight
from random_plans import random_allocation, random_crossing_pipelines, random_orders, random_pattern, random_pipelines
from random_plans import random_problem as any_problem
from reference_simulator import Operation, Reference, _Run

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.explanation.critical_path import CriticalPath, critical_path
from penstock.solvers.explanation.idle import idle_split
from penstock.solvers.explanation.run import JudgedRun
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import micro_batch_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders, Pattern, PatternOperation, Schedule
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.advance_forward import advance_forward


def judged(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    overlap: bool = True,
    rule: UpdateRule = "synchronous",
) -> JudgedPlan:
    timeline = simulate(problem, allocation, schedule, overlap=overlap, update_rule=rule)
    return JudgedPlan.of("test", allocation, schedule, timeline, overlap, rule)


def random_flushed(rng: random.Random, several: bool) -> tuple[Problem, JudgedPlan]:
    problem = any_problem(rng)
    while several and min(problem.num_devices, problem.global_batch_size) < 2:
        problem = any_problem(rng)
    make = rng.choice([random_pipelines, random_crossing_pipelines]) if several else random_allocation
    allocation = make(rng, problem)
    return problem, judged(problem, allocation, random_orders(rng, allocation), rng.random() < 0.5)


def assert_joined(path: CriticalPath, length_ns: int) -> None:
    """Check that links have no hole between them, and that their shares and lengths add up to the time."""
    assert path.length_ns == length_ns
    assert all(a.end_ns == b.start_ns for a, b in pairwise(path.steps))
    assert sum(share.length_ns for share in path.shares()) == length_ns
    assert all(0 <= step.length_ns <= step.whole_ns for step in path.steps)
    assert all(step.because != "start" for step in path.steps[1:])


def assert_split(problem: Problem, plan: JudgedPlan) -> None:
    low, high = plan.timeline.window_ns
    for idle in idle_split(JudgedRun(problem, plan)):
        assert idle.busy_ns + idle.idle_ns == high - low
        assert min(idle[2:]) >= 0
        for device in idle.devices:
            assert idle.busy_ns // plan.timeline.window_rounds == plan.timeline.uses[device].busy_ns


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_flushed_plans(seed: int, several: bool) -> None:
    problem, plan = random_flushed(random.Random(seed), several)
    path = critical_path(problem, plan)
    assert (path.span, path.rounds, path.steps[0].because) == ("step", 1, "start")
    assert_joined(path, plan.value_ns)
    assert_split(problem, plan)


@pytest.mark.parametrize("seed", range(40))
def test_periodic_plans(seed: int) -> None:
    rng = random.Random(seed)
    problem = any_problem(rng)
    allocation, pattern, rule, _unrolled = random_pattern(rng, problem)
    try:
        plan = judged(problem, allocation, pattern, rng.random() < 0.5, rule)
    except InvalidPlan:  # a step that waits for ever
        return
    path = critical_path(problem, plan)
    low, high = plan.timeline.window_ns
    if path.span == "window":
        assert_joined(path, high - low)
        assert path.rounds == plan.timeline.window_rounds
    else:
        assert path.span == "cycle"
        assert_joined(path, path.length_ns)
        assert path.length_ns * plan.timeline.window_rounds == path.rounds * (high - low)
    assert_split(problem, plan)


@pytest.mark.parametrize("seed", range(20))
def test_pipelines_that_share_processors(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 4)
    problem = make_problem(
        [rng.randint(1, 9) for _ in range(layers)],
        boundary_bytes=[rng.randint(0, 5) for _ in range(layers - 1)],
        update_ns=3,
        nodes=(layers,),
        shared=rng.random() < 0.5,
        channel=rng.choice(["half", "full", "none"]),
        global_batch_size=rng.randint(1, 6),
    )
    stages = tuple(Stage(i, i, (i,)) for i in range(layers))
    number = rng.randint(1, problem.global_batch_size)
    allocation = parallel_pipelines(stages, rng.randint(1, 3), number)
    plan = judged(problem, allocation, advance_forward(problem, allocation), rule="elastic_averaging")
    path = critical_path(problem, plan)
    assert (path.span, path.rounds) == ("iteration", len(allocation.pipelines))
    assert_joined(path, plan.timeline.window_ns[1])
    assert_split(problem, plan)


@pytest.mark.parametrize("seed", range(30))
def test_a_longer_operation_lengthens_the_step_if_it_is_on_the_path(seed: int) -> None:
    """Without competition for channels, starts grow with durations, so one nanosecond more adds at most one."""
    rng = random.Random(seed)
    problem = any_problem(rng)
    problem = replace(problem, rules=replace(problem.rules, shared=False, channel="none"))
    allocation = random_allocation(rng, problem)
    plan = judged(problem, allocation, random_orders(rng, allocation), rng.random() < 0.5)
    path = critical_path(problem, plan)
    on_it = {(step.detail, step.stage, step.number, step.devices) for step in path.steps if step.what == "operation"}
    assert isinstance(plan.schedule, Orders)
    for lane, row in enumerate(plan.schedule.rows):
        for operation in map(tuple, row.operations.tolist()):
            longer = _time_with(problem, plan, lane, operation) - plan.value_ns
            if (*operation, row.devices) in on_it:
                assert longer == 1
            else:
                assert longer in (0, 1)


def _time_with(problem: Problem, plan: JudgedPlan, lane: int, operation: Operation) -> int:
    """Return the reference's makespan with one operation a nanosecond longer."""
    count = plan.allocation.num_micro_batches
    problem = replace(problem, rules=replace(problem.rules, overlap_all_reduce=plan.overlap_all_reduce))
    rows = [micro_batch_rows(problem.global_batch_size, count, m) for m in range(count)]
    assert isinstance(plan.schedule, Orders)
    reference = Reference(problem, plan.allocation, plan.schedule, rows)
    run = _Run(reference)
    plain = run.duration
    run.duration = lambda row, op: plain(row, op) + ((row, op) == (lane, operation))  # type: ignore[method-assign]
    run.run()
    return reference.makespan


def test_what_has_slack_may_take_longer() -> None:
    """Stage 0 takes F 10, B 20, stage 1 F 1, B 2: of stage 1 only F2 and B0 hold stage 0 up, from 30 to 33."""
    problem = make_problem([10, 1], [20, 2], nodes=(2,), global_batch_size=3, channel="none")
    plan = judged(problem, straight(problem, 3), gpipe(straight(problem, 3)))
    path = critical_path(problem, plan)
    assert plan.value_ns == 93
    assert [(s.detail, s.stage, s.number) for s in path.steps if s.what == "operation"] == [
        (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 2), (1, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 2),
    ]  # fmt: skip
    assert _time_with(problem, plan, 1, (0, 1, 0)) == 93
    assert _time_with(problem, plan, 1, (0, 1, 2)) == 94


def test_by_hand_early_backward() -> None:
    """Two stages of F 10, B 20, transfers of 5, K = (2, 1), M = 2: F0 F1 | F0 B0 F1 B1 | B0 B1.

    Stage 1 begins at 15, B0 ends at 45, F1 at 55, B1 at 75; its gradient arrives at 80, stage 0 ends at 100.
    """
    problem = make_problem([10, 10], [20, 20], 5, nodes=(2,), global_batch_size=2, channel="full")
    plan = judged(problem, straight(problem, 2), early_backward(straight(problem, 2)))
    path = critical_path(problem, plan)
    assert plan.value_ns == path.length_ns == 100
    assert [(s.what, s.stage, s.detail, s.number, s.length_ns, s.because) for s in path.steps] == [
        ("operation", 0, 0, 0, 10, "start"),
        ("transfer", 0, 0, 0, 5, "input"),
        ("operation", 1, 0, 0, 10, "input"),
        ("operation", 1, 1, 0, 20, "device"),
        ("operation", 1, 0, 1, 10, "order"),
        ("operation", 1, 1, 1, 20, "device"),
        ("transfer", 1, 1, 1, 5, "input"),
        ("operation", 0, 1, 1, 20, "input"),
        ("update", 0, 0, -1, 0, "device"),
    ]
    assert [tuple(share) for share in path.shares()] == [
        ("operation", 1, 60), ("operation", 0, 30), ("transfer", 0, 10),
    ]  # fmt: skip
    first, second = idle_split(JudgedRun(problem, plan))
    assert (first.busy_ns, first.other_stages_ns, first.transfer_ns) == (60, 25 + 5, 5 + 5)
    assert (second.busy_ns, second.fill_ns, second.drain_ns) == (60, 15, 25)


def test_the_critical_cycle_of_a_periodic_plan() -> None:
    """F 10, B 20 and F 20, B 40: the second device is always busy, two micro-batches of 60 make a global batch."""
    problem = make_problem([10, 20], nodes=(2,), global_batch_size=2, channel="none")
    stages = straight(problem, 2)
    operations = (
        PatternOperation(FORWARD, 0, 0, 0),
        PatternOperation(BACKWARD, 0, 40, 1),
        PatternOperation(FORWARD, 1, 10, 0),
        PatternOperation(BACKWARD, 1, 30, 0),
    )
    plan = judged(problem, stages, Pattern("eager", 60, 1, operations), rule="weight_stashing")
    path = critical_path(problem, plan)
    assert (plan.value_ns, path.span, path.length_ns) == (120, "cycle", 120 * path.rounds)
    assert {(step.what, step.stage) for step in path.steps if step.length_ns} == {("operation", 1)}


@pytest.mark.parametrize(("memory_bytes", "part"), [(2**40, "order_ns"), (19, "memory_ns")])
def test_a_forward_that_could_run_is_held_back_by_the_order_or_by_memory(memory_bytes: int, part: str) -> None:
    """K = (1, 1): stage 0 idles while its second forward is ready; two stashes of 10 bytes exceed 19."""
    problem = make_problem([10, 10], stash_bytes=10, nodes=(2,), global_batch_size=2, memory_bytes=memory_bytes)
    allocation = straight(problem, 2)
    orders = early_backward(allocation)
    rows = (replace(orders.rows[0], operations=orders.rows[0].operations[[0, 2, 1, 3]]), orders.rows[1])
    plan = judged(problem, allocation, replace(orders, rows=rows))
    first, _second = idle_split(JudgedRun(problem, plan))
    assert (getattr(first, part), first.idle_ns) == (30, 60)
    assert first.other_stages_ns == 30
