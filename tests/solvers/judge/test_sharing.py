"""The simulator of pipelines that share devices: by hand, and against a reference that counts every nanosecond."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import as_operations, make_problem
from random_plans import measured_run, random_averaging

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, WEIGHT
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.judge.clocks.shared_processor import SPEED
from penstock.solvers.judge.shared_processor import parallel_pipelines, sharing_makespan_ns, simulate_sharing
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Pattern, Row
from penstock.solvers.schedules.advance_forward import advance_forward


def straight_pipelines(problem: Problem, num_pipelines: int, num_micro_batches: int, **how: object) -> Allocation:
    stages = tuple(Stage(i, i, (i,), **how) for i in range(problem.num_layers))  # type: ignore[arg-type]
    return parallel_pipelines(stages, num_pipelines, num_micro_batches)


def test_two_pipelines_on_one_device_take_turns_of_half_a_processor() -> None:
    """F 10, B 20, step 4, alone and twice: both run at half speed all the time, so an iteration is twice as long."""
    problem = make_problem([10], update_ns=4, nodes=(1,), global_batch_size=1)
    for pipelines, iteration in ((1, 34), (2, 68), (3, 102)):
        allocation = straight_pipelines(problem, pipelines, 1)
        timeline = simulate_sharing(problem, allocation, advance_forward(problem, allocation))
        assert timeline.window_ns == (0, iteration)
        assert (timeline.rounds, timeline.window_rounds) == (pipelines, pipelines)
        assert timeline.time_per_global_batch_ns == 34


def test_what_uses_less_than_half_of_a_processor_shares_it_for_nothing() -> None:
    """φ = 0.4: two run at full speed, three at 1 / 1.2 (rounded down to 720720ths); the steps use all of it."""
    problem = replace(make_problem([10], update_ns=4, nodes=(1,), global_batch_size=1))
    problem = replace(problem, pipeline_run=measured_run(1, [(500_000, 300_000)]))
    ends = []
    for pipelines in (1, 2, 3):
        allocation = straight_pipelines(problem, pipelines, 1)
        timeline = simulate_sharing(problem, allocation, advance_forward(problem, allocation))
        ends.append([int(timeline.tracks[0].end_ns[0]), int(timeline.tracks[0].end_ns[1]), timeline.window_ns[1]])
    assert ends == [[10, 30, 34], [10, 30, 38], [12, 36, 48]]


def test_utilisation_follows_the_size_of_the_micro_batches() -> None:
    """φ = 0.3 for micro-batches of 1 sample; of 2 samples 0.6, so that two pipelines run at 1 / 1.2."""
    problem = make_problem([10], nodes=(1,), global_batch_size=4)
    problem = replace(problem, pipeline_run=measured_run(4, [(300_000,)]))
    allocation = straight_pipelines(problem, 2, 2)
    orders = advance_forward(problem, allocation)
    timeline = simulate_sharing(problem, allocation, orders)
    assert timeline.tracks[0].end_ns[0] == 24
    fuller = replace(problem, pipeline_run=measured_run(4, [(300_000,)], num_pipelines=2))
    assert simulate_sharing(fuller, allocation, orders).tracks[0].end_ns[0] == 20


def test_pipelines_share_the_channel_between_two_devices() -> None:
    """Both forwards end at 20 and send 5 ns each over one channel: pipeline 1's second stage starts 5 ns later."""
    problem = make_problem([10, 10], boundary_bytes=5, nodes=(2,), global_batch_size=1)
    allocation = straight_pipelines(problem, 2, 1)
    timeline = simulate_sharing(problem, allocation, advance_forward(problem, allocation))
    assert [int(track.start_ns[0]) for track in timeline.tracks] == [0, 25, 0, 30]
    forward = timeline.transfers.direction == 0
    assert timeline.transfers.stage[forward].tolist() == [0, 2]
    assert timeline.transfers.start_ns[forward].tolist() == [20, 25]


def test_numbers_of_a_device_add_up() -> None:
    problem = make_problem([10, 7], boundary_bytes=5, update_ns=3, nodes=(2,), global_batch_size=6)
    allocation = straight_pipelines(problem, 3, 4)
    timeline = simulate_sharing(problem, allocation, advance_forward(problem, allocation, delta=1))
    for use in timeline.uses.values():
        assert sum(use[:3]) == timeline.time_per_global_batch_ns
    assert timeline.uses[0].busy_ns * 3 <= 3 * (6 * 30 + 3)
    assert -(-timeline.window_ns[1] // 3) == timeline.time_per_global_batch_ns


def test_memory_holds_every_pipeline_and_the_reference_once() -> None:
    """One stage, one micro-batch: 2 pipelines of weights 100, momentum 100, gradients 100, stash 7, update 100.

    The reference has 100; each step has, at the same time, the part of it that the step has pulled, and 3 bytes more.
    """
    problem = make_problem(
        [10],
        parameter_bytes=100,
        stash_bytes=7,
        state_factor=1,
        update_ns=5,
        update_workspace_bytes=3,
        nodes=(1,),
        global_batch_size=1,
        context_bytes=1000,
    )
    allocation = straight_pipelines(problem, 2, 1)
    timeline = simulate_sharing(problem, allocation, advance_forward(problem, allocation))
    memory = timeline.uses[0].memory
    assert (memory.parameters, memory.optimizer, memory.gradients) == (200, 200, 200)
    assert (memory.versions, memory.activations, memory.workspace, memory.context) == (300, 0, 206, 1000)
    times, size = timeline.memory_curve(0)
    curve = dict(zip(times.tolist(), size.tolist(), strict=True))
    assert curve == {0: 1714, 20: 1914, 60: 1900 + 206, 70: 1700}


def test_one_pipeline_is_judged_as_by_the_judge_of_one() -> None:
    """A single pipeline follows the rules of ``simulate``: same times, but for the memory of averaging."""
    from penstock.solvers.judge.simulate import simulate

    for seed in range(40):
        problem, allocation, orders = random_averaging(seed)
        number = len(allocation.pipelines[0].stages)
        alone = Allocation(allocation.pipelines[:1], allocation.num_micro_batches)
        rows = tuple(row for row in orders.rows if row.operations[0, 1] < number)
        orders = Orders(orders.name, rows)
        pulled = np.diff(problem.trainable_bytes)
        stepped = pulled if problem.update_workspace_bytes is None else pulled + problem.update_workspace_bytes
        pulling = replace(problem, update_workspace_bytes=stepped)
        shared, plain = simulate_sharing(problem, alone, orders), simulate(pulling, alone, orders)
        assert shared.time_per_global_batch_ns == plain.time_per_global_batch_ns
        assert (shared.fill_ns, shared.drain_ns) == (plain.fill_ns, plain.drain_ns)
        for device, use in plain.uses.items():
            memory = shared.uses[device].memory
            assert shared.uses[device][:3] == use[:3]
            assert memory.total - memory.versions == use.memory.total


def test_time_of_one_batch_and_of_all_scale_with_the_times() -> None:
    for seed in range(30):
        problem, allocation, orders = random_averaging(seed)
        if problem.rules.shared or problem.pipeline_run is not None:
            continue
        slower = make_times(problem, 1000)
        assert slower.update_ns[-1] == 1000 * problem.update_ns[-1]
        iteration = simulate_sharing(problem, allocation, orders).window_ns[1]
        assert simulate_sharing(slower, allocation, orders).window_ns[1] == pytest.approx(1000 * iteration, rel=0.02)


def make_times(problem: Problem, factor: int) -> Problem:
    measured = {
        kind: tuple(replace(p, forward_ns=p.forward_ns * factor, backward_ns=p.backward_ns * factor) for p in points)
        for kind, points in problem.measured.items()
    }
    return replace(
        problem,
        measured=measured,
        update_ns=problem.update_ns * factor,
        forward_bytes=problem.forward_bytes * factor,
        backward_bytes=problem.backward_bytes * factor,
        _costs={},
    )


def test_makespan_is_the_time_of_the_timeline() -> None:
    for seed in range(20):
        problem, allocation, orders = random_averaging(seed)
        expected = simulate_sharing(problem, allocation, orders).time_per_global_batch_ns
        assert sharing_makespan_ns(problem, allocation, orders) == expected


def a_plan() -> tuple[Problem, Allocation, Orders]:
    problem = make_problem([10, 10], boundary_bytes=5, nodes=(2,), global_batch_size=2)
    allocation = straight_pipelines(problem, 2, 2)
    return problem, allocation, advance_forward(problem, allocation)


def test_refuses_pipelines_that_differ() -> None:
    problem, allocation, orders = a_plan()
    first = allocation.pipelines[0]
    other = Pipeline((Stage(0, 0, (1,)), Stage(1, 1, (0,))), first.micro_batches)
    with pytest.raises(InvalidPlan, match="than pipeline 0"):
        simulate_sharing(problem, Allocation((first, other), 2), orders)
    late = Allocation((first, Pipeline(first.stages, (2, 3))), 2)
    with pytest.raises(InvalidPlan, match="a whole global batch"):
        simulate_sharing(problem, late, orders)
    both = parallel_pipelines((Stage(0, 1, (0, 1)),), 2, 2)
    with pytest.raises(UnsupportedRequest, match="one device per stage"):
        simulate_sharing(problem, both, orders)


def test_refuses_rows_that_do_not_fit() -> None:
    problem, allocation, orders = a_plan()
    with pytest.raises(InvalidPlan, match="periodic"):
        simulate_sharing(problem, allocation, Pattern("p", 1, 1, ()))
    with pytest.raises(InvalidPlan, match="one row for each of 4 stages"):
        simulate_sharing(problem, allocation, replace(orders, rows=orders.rows[:3]))
    joined = np.concatenate((orders.rows[0].operations, orders.rows[2].operations))
    with pytest.raises(InvalidPlan, match=r"holds stages \[0, 2\] instead of one"):
        simulate_sharing(problem, allocation, replace(orders, rows=(Row((0,), joined), *orders.rows[1:])))
    moved = Row((1,), orders.rows[0].operations)
    with pytest.raises(InvalidPlan, match="which other devices hold"):
        simulate_sharing(problem, allocation, replace(orders, rows=(moved, *orders.rows[1:])))


@pytest.mark.parametrize(
    ("operations", "sentence"),
    [
        ([(FORWARD, 0, 0), (BACKWARD, 0, 0), (FORWARD, 0, 1)], "does not run B once"),
        ([(FORWARD, 0, 0), (BACKWARD, 0, 1), (FORWARD, 0, 1), (BACKWARD, 0, 0)], "runs B1 before F1"),
        ([(FORWARD, 0, 0), (INPUT, 0, 0), (WEIGHT, 0, 0)], "backwards that are not split"),
    ],
)
def test_refuses_operations_that_do_not_fit(operations: list[tuple[int, int, int]], sentence: str) -> None:
    problem, allocation, orders = a_plan()
    row = Row((0,), as_operations(operations))
    with pytest.raises((InvalidPlan, UnsupportedRequest), match=sentence):
        simulate_sharing(problem, allocation, replace(orders, rows=(row, *orders.rows[1:])))


def test_names_a_deadlock() -> None:
    """Stage 1 needs micro-batch 1 first, which stage 0 forwards only after micro-batch 0 has come back."""
    problem, allocation, orders = a_plan()
    early = Row((0,), as_operations([(FORWARD, 0, 0), (BACKWARD, 0, 0), (FORWARD, 0, 1), (BACKWARD, 0, 1)]))
    late = Row((1,), as_operations([(FORWARD, 1, 1), (BACKWARD, 1, 1), (FORWARD, 1, 0), (BACKWARD, 1, 0)]))
    with pytest.raises(InvalidPlan, match="deadlocks: B0 of stage 0"):
        simulate_sharing(problem, allocation, replace(orders, rows=(early, late, *orders.rows[2:])))


def test_refuses_what_cannot_be_counted_or_connected() -> None:
    problem = make_problem([2**40], nodes=(1,), global_batch_size=8)
    allocation = straight_pipelines(problem, 1, 8)
    assert 2**62 // SPEED < 8 * 3 * 2**40
    with pytest.raises(UnsupportedRequest, match="a device that pipelines share allows less than"):
        simulate_sharing(problem, allocation, advance_forward(problem, allocation))
    network = replace(make_problem([1, 1], nodes=(1, 1)).network, cables=())
    apart = make_problem([1, 1], boundary_bytes=1, network=network, shared=True, global_batch_size=1)
    allocation = straight_pipelines(apart, 2, 1)
    orders = advance_forward(apart, allocation)
    assert sharing_makespan_ns(apart, allocation, orders) == NEVER_NS
    with pytest.raises(InvalidPlan, match="Nothing connects the devices of stage 0 with those of stage 1"):
        simulate_sharing(apart, allocation, orders)


def test_the_profile_has_to_have_a_rank_for_each_stage() -> None:
    problem, allocation, orders = a_plan()
    with pytest.raises(InvalidPlan, match="has 3 ranks, but the plan's pipelines have 2 stages"):
        simulate_sharing(replace(problem, pipeline_run=measured_run(1, [(1,)] * 3)), allocation, orders)
