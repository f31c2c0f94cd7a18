"""Mistakes that the windows of a chain must not make: BOUNDS section 7, each with the plan that refutes it."""

from __future__ import annotations

import pytest
from problems import chain, gpipe, make_problem, straight
from reference_windows import Step, idle, span_ns

from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import channel_kinds, window_bound_ns
from penstock.solvers.bounds.windows_kernel import SERIAL
from penstock.solvers.improve.job_shop import Question, solve
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.schedule import Orders

WHOLE = Orders("any order", ())


def test_two_windows_add_only_where_they_cannot_overlap() -> None:
    """One micro-batch: no backward before it came round, no forward after it left; both are the same idle time."""
    problem = make_problem([10, 10], [20, 20], [5], nodes=(1, 1), global_batch_size=1)
    plan = straight(problem, 1)
    times = StageTimes(problem, plan, WHOLE)
    forward, around, backward = times.forward[0], times.rounds[0], times.backward[0]
    first = idle(forward + around, forward, forward, 1)
    last = idle(around + backward, backward, backward, 1)
    time_ns = makespan_ns(problem, plan, gpipe(plan))
    assert forward + backward + first + last > time_ns
    assert window_bound_ns(times) == time_ns


@pytest.mark.parametrize(("batches", "expected"), [(5, 3 * 15), (6, 3 * 15 + 2)])
def test_micro_batches_beyond_the_limit_wait_for_a_way_round(batches: int, expected: int) -> None:
    """By hand: two may be in flight, so 0, 2 and 4 follow each other, 2 + 10 + 3 each; 5 begins a forward after 4."""
    assert span_ns(Step(2, 3, 10, 2), 2, 3, batches) == expected


def test_backwards_before_a_stage_do_not_slow_its_all_reduce() -> None:
    """A first stage with slow backwards delays its own end, not the end of the second one's last backward."""
    problem = make_problem(
        [10, 10],
        [100, 10],
        [5],
        [0, 10_000],
        nodes=(3,),
        global_batch_size=8,
        micro_batch_sizes=(2,),
        transfer="spp",
        overlap_all_reduce=False,
    )
    plan = chain([(1, [0]), (1, [1, 2])], 4)
    times = StageTimes(problem, plan, WHOLE)
    assert channel_kinds(times) == [SERIAL]
    step = Step(times.forward[1], times.backward[1], times.rounds[1], 4)
    behind = times.heads[1] + times.exposed[1]
    time_ns = makespan_ns(problem, plan, gpipe(plan))
    assert behind + span_ns(step, times.forward[0], times.backward[0], 4) > time_ns
    assert behind + span_ns(step, times.forward[0], 0, 4) <= window_bound_ns(times) <= time_ns


@pytest.mark.tier("ci")
def test_the_job_shop_of_a_single_stage_has_a_horizon() -> None:
    problem = make_problem([10], [20], nodes=(1,), global_batch_size=3)
    plan = straight(problem, 3)
    answer = solve(Question(problem, plan, 10**6))
    assert answer.proven
    assert answer.bound_ns == 3 * (10 + 20)
    assert answer.orders is not None
    assert makespan_ns(problem, plan, answer.orders) == answer.bound_ns
