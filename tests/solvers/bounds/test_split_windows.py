"""Idle time of split stages and of devices with several stages: never above a proven optimum, tight where due."""

from __future__ import annotations

import random

import pytest
from problems import as_operations, chain, make_problem, straight

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, WEIGHT
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.bounds.split_windows import shared_device_ns, split_bound_ns
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import window_bound_ns
from penstock.solvers.improve.job_shop import Question, solve, whole_backwards
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row


def split(plan: Allocation) -> Orders:
    """Return any order with backwards in two parts."""
    batches = range(plan.num_micro_batches)
    rows = [[(kind, s, m) for kind in (FORWARD, INPUT, WEIGHT) for m in batches] for s in range(len(plan.stages))]
    return Orders("split", tuple(Row(plan.stages[s].devices, as_operations(row)) for s, row in enumerate(rows)))


def random_split(seed: int) -> tuple[Problem, Allocation]:
    """Draw 2 to 4 stages, 3 to 8 micro-batches, also of two sizes, and memory for some (BOUNDS Part II, section 2)."""
    rng = random.Random(seed)
    stages, batches = rng.randint(2, 4), rng.randint(3, 8)
    backward = [rng.randint(2, 60) for _ in range(stages)]
    problem = make_problem(
        [rng.randint(1, 30) for _ in range(stages)],
        backward,
        [rng.choice([0, rng.randint(1, 40)]) for _ in range(stages - 1)],
        rng.choice([0, 20]),
        weight_ns=[rng.randint(0, b) for b in backward],
        backward_bytes=[rng.randint(0, 40) for _ in range(stages - 1)],
        stash_bytes=10,
        update_ns=rng.randint(0, 5),
        nodes=(8,),
        memory_bytes=[rng.choice([10 * rng.randint(2, 2 * stages) + 80, 2**40]) for _ in range(8)],
        count_buffers=False,
        channel=rng.choice(["half", "full", "none"]),
        global_batch_size=rng.choice([2 * batches, 2 * batches - 1]),
    )
    shares = [(1, [s] if rng.random() < 0.7 else [s, stages + s]) for s in range(stages)]
    return problem, chain(shares, batches)


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(80))
def test_a_split_bound_is_at_most_the_optimum(seed: int) -> None:
    problem, plan = random_split(seed)
    orders = split(plan)
    times = StageTimes(problem, plan, orders)
    longest = 10 * sum(map(max, ((c.forward_ns + c.backward_ns for c in each) for each in times.costs))) * 20
    answer = solve(Question(problem, plan, longest, schedule=orders, effort=5.0))
    assert answer.proven
    assert split_bound_ns(times) <= answer.bound_ns
    assert window_bound_ns(times) <= answer.bound_ns
    assert schedule_bound(problem, plan, orders).bound_ns <= answer.bound_ns


@pytest.mark.parametrize("stages", [4, 8])
def test_uniform_times_have_only_the_head(stages: int) -> None:
    """Uniform times at the memory of 1F1B: head and work, which orders reach (SOLVERS C: 5500 for 8 stages, M 16)."""
    problem = make_problem(
        [100] * stages,
        [200] * stages,
        weight_ns=[100] * stages,
        stash_bytes=10,
        nodes=(stages,),
        memory_bytes=10 * stages,
        count_buffers=False,
        global_batch_size=2 * stages,
    )
    plan = straight(problem, 2 * stages)
    bound = schedule_bound(problem, plan, split(plan))
    assert bound.bound_ns == 100 * (stages - 1) + 2 * stages * 300


@pytest.mark.tier("ci")
def test_little_memory_lets_a_split_stage_idle() -> None:
    """Two stages, F = I = W = 10, one micro-batch held: each of 4 goes round, 10 + 10 + 10 + 10, and its W, 10."""
    problem = make_problem(
        [10, 10],
        [20, 20],
        weight_ns=[10, 10],
        stash_bytes=10,
        nodes=(2,),
        memory_bytes=10,
        count_buffers=False,
        global_batch_size=4,
    )
    plan = straight(problem, 4)
    times = StageTimes(problem, plan, split(plan))
    assert split_bound_ns(times) == 4 * 50
    assert solve(Question(problem, plan, 1000, schedule=split(plan))).bound_ns == 4 * 50


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(30))
def test_a_device_with_several_stages_idles_until_a_backward_can_come(seed: int) -> None:
    rng = random.Random(seed)
    batches = rng.randint(2, 4)
    problem = make_problem(
        [rng.randint(1, 20) for _ in range(4)],
        [rng.randint(1, 30) for _ in range(4)],
        [rng.randint(0, 30) for _ in range(3)],
        stash_bytes=10,
        nodes=(2,),
        memory_bytes=10 * rng.randint(2, 5),
        count_buffers=False,
        global_batch_size=batches,
        channel=rng.choice(["half", "none"]),
    )
    plan = chain([(1, [0]), (1, [1]), (1, [1]), (1, [0])], batches)
    times = StageTimes(problem, plan, whole_backwards(plan))
    answer = solve(Question(problem, plan, 10**4, effort=5.0))
    assert answer.proven
    for device in (0, 1):
        assert times.device_ns(device) <= shared_device_ns(times, device) <= answer.bound_ns
    assert schedule_bound(problem, plan, whole_backwards(plan)).bound_ns <= answer.bound_ns


def test_a_v_with_room_for_one_micro_batch_idles_on_both_devices() -> None:
    """F = 10, B = 20 on four stages in a V, a stash of each stage fits once: the way down and up is idle time."""
    problem = make_problem(
        [10] * 4, [20] * 4, stash_bytes=10, nodes=(2,), memory_bytes=20, count_buffers=False, global_batch_size=3
    )
    plan = chain([(1, [0]), (1, [1]), (1, [1]), (1, [0])], 3)
    times = StageTimes(problem, plan, whole_backwards(plan))
    assert shared_device_ns(times, 0) == 40 - 2 * 10 + times.device_ns(0)
    assert whole_backwards(plan).rows[0].operations[:, 0].tolist().count(BACKWARD) == 6


def test_a_stage_of_one_nanosecond_is_a_stage_of_its_device() -> None:
    """Stages of 1 + 0, 10 + 20 and 10 + 20 ns in a V: forwards of 11 ns, the first backward after 1 + 10 + 10."""
    problem = make_problem([1, 10, 10], [0, 20, 20], nodes=(2,), global_batch_size=1)
    plan = chain([(1, [0]), (1, [1]), (1, [0])], 1)
    times = StageTimes(problem, plan, whole_backwards(plan))
    assert times.device_ns(0) == 1 + 30
    assert shared_device_ns(times, 0) == 1 + 30 + (21 - 11)
