"""Bounds of periodic plans, of several pipelines and of pipelines that average: never above the simulated times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from problems import chain, gpipe, make_problem, straight

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.bounds.steady_state import SteadyTimes
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import PipelineRun, Problem, RankRun
from penstock.solvers.model.schedule import Orders, Pattern, PatternOperation
from penstock.solvers.model.unroll import unroll


def eager(stages: int, depth: int) -> Pattern:
    """Build one forward and one backward in turn, ``depth`` micro-batches in flight on the first stage."""
    operations = []
    for s in range(stages):
        operations.append(PatternOperation(FORWARD, s, s, 0))
        operations.append(PatternOperation(BACKWARD, s, 2 * stages - s, max(0, depth - s - 1)))
    return Pattern("eager", 2 * stages + 1, 1, tuple(operations))


@pytest.mark.parametrize("seed", range(100))
def test_bounds_stay_below_steady_states_that_repeat(seed: int) -> None:
    """Straight pipelines of very unlike stages. Without a detected cycle, the simulated mean may be slightly off."""
    rng = random.Random(seed)
    stages, batches = rng.randint(2, 8), rng.randint(1, 8)
    problem = make_problem(
        [rng.choice([1, 5, 50, rng.randint(1, 1000)]) for _ in range(stages)],
        boundary_bytes=[rng.randint(0, 600) for _ in range(stages - 1)],
        parameter_bytes=rng.choice([0, 300]),
        update_ns=rng.choice([0, 20]),
        nodes=rng.choice([(stages,), (1,) * stages]),
        global_batch_size=batches,
        shared=rng.random() < 0.5,
        channel=rng.choice(["half", "full", "none"]),
        full_duplex=rng.random() < 0.5,
    )
    allocation = straight(problem, batches)
    pattern = eager(stages, rng.randint(1, 2 * stages))
    timeline = simulate(problem, allocation, pattern, update_rule="weight_stashing")
    run = unroll(problem, allocation, pattern, "weight_stashing")
    bound = schedule_bound(problem, allocation, pattern, "weight_stashing").bound_ns
    repeats = 2 * timeline.window_rounds <= run.last - run.first
    assert bound <= timeline.time_per_global_batch_ns * (1 if repeats else 1.01)


@pytest.mark.parametrize("seed", range(60))
def test_bounds_stay_below_pipelines_that_average(seed: int) -> None:
    """Each of N pipelines takes a global batch through K devices; measured shares of the processor are drawn."""
    rng = random.Random(seed)
    stages, batches, pipelines = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 4)
    problem = make_problem(
        [rng.randint(1, 20) for _ in range(stages)],
        boundary_bytes=rng.randint(0, 9),
        update_ns=rng.randint(0, 6),
        nodes=(stages,),
        global_batch_size=batches,
    )
    ranks = tuple(RankRun(1, 1, (rng.randint(1, 10**6), rng.randint(1, 10**6)), 1, 1, 1) for _ in range(stages))
    run = None if rng.random() < 0.3 else PipelineRun(rng.randint(1, 4), 1, ranks)
    problem = replace(problem, update_rules=frozenset({"elastic_averaging"}), pipeline_run=run)
    allocation = parallel_pipelines(straight(problem, batches).stages, pipelines, batches)
    orders = gpipe(allocation)
    time_ns = simulate(problem, allocation, orders, update_rule="elastic_averaging").time_per_global_batch_ns
    bound = schedule_bound(problem, allocation, orders, "elastic_averaging").bound_ns
    assert 0 < bound <= time_ns
    assert 0 < request_bound(problem).bound_ns <= time_ns
    if stages == 1 and run is None:
        assert bound == time_ns == request_bound(problem).bound_ns


def _two_stages() -> tuple[Problem, Allocation]:
    problem = make_problem([3, 4], boundary_bytes=20, update_ns=2, nodes=(2,), global_batch_size=4, channel="full")
    return problem, straight(problem, 4)


@pytest.mark.parametrize(
    ("depth", "expected", "method"),
    [
        pytest.param(1, 4 * (9 + 20 + 12 + 20), "way round", id="one in flight goes round alone"),
        pytest.param(2, 4 * (9 + 20 + 12 + 20) // 2, "way round", id="two share the way"),
        pytest.param(5, 4 * 20, "load of a link", id="enough in flight leave the channel"),
    ],
)
def test_what_bounds_two_stages_by_hand(depth: int, expected: int, method: str) -> None:
    """Stage 0 computes 9, stage 1 12 ns per micro-batch, transfers take 20 each way on separate channels."""
    problem, allocation = _two_stages()
    bound = schedule_bound(problem, allocation, eager(2, depth), "double_buffered")
    assert (bound.bound_ns, bound.method.startswith(method)) == (expected, True)
    time_ns = simulate(problem, allocation, eager(2, depth), update_rule="double_buffered").time_per_global_batch_ns
    assert time_ns >= expected


def test_updates_count_as_often_as_the_rule_has_them() -> None:
    problem = make_problem([3, 4], update_ns=10, nodes=(2,), global_batch_size=4)
    allocation = straight(problem, 4)
    works = {
        rule: SteadyTimes(problem, allocation, eager(2, 2), rule).work_ns(1)
        for rule in ("weight_stashing", "double_buffered")
    }
    assert works == {"weight_stashing": 4 * 12 + 4 * 10, "double_buffered": 4 * 12 + 10}


def test_replicas_in_turn_share_micro_batches_and_updates() -> None:
    """Three micro-batches on two replicas: one and a half each, as many updates as rounds of two."""
    problem = make_problem([4], update_ns=10, nodes=(2,), global_batch_size=3)
    allocation = chain([(1, [0, 1])], 3, dispatch="round_robin")
    steady = SteadyTimes(problem, allocation, eager(1, 1), "weight_stashing")
    assert steady.work_ns(0) == steady.work_ns(1) == (3 * 12 + 3 * 10) / 2


def test_fill_bounds_flushed_plans_only() -> None:
    problem = make_problem([30, 10], nodes=(4,), global_batch_size=1)
    assert request_bound(problem).method.startswith("fill")
    both = replace(problem, update_rules=frozenset({"synchronous", "double_buffered"}))
    assert request_bound(both).method.startswith("load")
    assert request_bound(both).bound_ns == 3 * 40 // 4


def test_shared_processors_count_with_the_smallest_measured_share() -> None:
    """A quarter of the processor at 4 samples in a micro-batch is a sixteenth at one sample."""
    problem = make_problem([16, 16], update_ns=1, nodes=(2,), global_batch_size=4)
    rank = RankRun(1, 1, (250_000,), 1, 1, 1)
    measured = replace(problem, pipeline_run=PipelineRun(1, 1, (rank, rank)))
    elastic = frozenset({"elastic_averaging"})
    assert request_bound(replace(problem, update_rules=elastic)).bound_ns == (4 * 96 + 2) // 2
    assert request_bound(replace(measured, update_rules=elastic)).bound_ns == (4 * 96 // 16 + 2) // 2
    assert request_bound(replace(measured, update_rules=frozenset({"double_buffered"}))).bound_ns == (4 * 96 + 2) // 2


def test_reductions_between_pipelines_are_in_the_tail() -> None:
    """Two pipelines of one stage each on shared links: 10 ns of work, then 40 bytes around a ring of two, then 3."""
    problem = make_problem([3], [7], parameter_bytes=40, update_ns=3, nodes=(2,), global_batch_size=2, shared=True)
    allocation = Allocation(tuple(Pipeline((Stage(0, 0, (d,)),), (d, d)) for d in (0, 1)), 2)
    orders = Orders("one", tuple(gpipe(allocation).rows))
    time_ns = simulate(problem, allocation, orders).time_per_global_batch_ns
    assert time_ns == 10 + 40 + 3
    assert schedule_bound(problem, allocation, orders).bound_ns == time_ns
