"""The tabu search: the simulator's values, never worse, within memory, and exact on tiny plans."""

from __future__ import annotations

import random

import numpy as np
import pytest
from every_order import times_of_every_order
from line_cases import random_line
from problems import gpipe, warmup_orders, with_just_enough_memory
from random_plans import random_allocation, random_orders, random_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import effective_limits
from penstock.solvers.improve.tabu import improve
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.schedule import Orders

pytestmark = pytest.mark.tier("ci")


@pytest.mark.parametrize("seed", range(60))
def test_any_orders_get_no_worse_and_still_fit(seed: int) -> None:
    """Split backwards, recomputations, several stages on a device, replicas in turn, several pipelines, any network."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    allocation = random_allocation(rng, problem)
    orders = random_orders(rng, allocation)
    timeline = simulate(problem, allocation, orders)
    tight = with_just_enough_memory(problem, timeline)
    for variant in (problem, tight):
        result = improve(variant, allocation, orders, steps=300, seed=seed)
        after = simulate(variant, allocation, result.orders)
        assert result.value_ns == after.time_per_global_batch_ns <= timeline.time_per_global_batch_ns
        assert result.steps >= 300
        for device, use in after.uses.items():
            assert variant is problem or use.memory.total <= variant.capacity_bytes(device)


@pytest.mark.parametrize("seed", range(30))
def test_tiny_plans_reach_the_best_of_all_orders(seed: int) -> None:
    problem, plan = random_line(1000 + seed, most_batches=3)
    best = min(times_of_every_order(problem, plan))
    start = warmup_orders(plan, effective_limits(StageTimes(problem, plan, gpipe(plan))))
    result = improve(problem, plan, start, steps=4000, seed=seed)
    assert result.value_ns == best


def test_the_same_seed_gives_the_same_order() -> None:
    problem, plan = random_line(7)
    first, second = (improve(problem, plan, gpipe(plan), steps=500, seed=3) for _ in range(2))
    assert first.value_ns == second.value_ns
    for one, two in zip(first.orders.rows, second.orders.rows, strict=True):
        assert np.array_equal(one.operations, two.operations)


def test_it_stops_when_told_to() -> None:
    problem, plan = random_line(7)
    assert improve(problem, plan, gpipe(plan), steps=10**9, stopped=lambda: True).steps == 0


def test_rows_with_steps_are_refused() -> None:
    problem, plan = random_line(7)
    stepping = Orders("stepping", gpipe(plan).rows, update_every=(1,) * len(plan.stages))
    with pytest.raises(UnsupportedRequest, match="optimizer steps"):
        improve(problem, plan, stepping, steps=1)
