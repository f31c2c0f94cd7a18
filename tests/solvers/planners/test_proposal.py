"""Bounds that rule a drafted plan out before it is simulated."""

from __future__ import annotations

import random

from random_plans import random_allocation, random_orders, random_pipelines, random_problem

from penstock.schemas.program import INPUT
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.planners.proposal import whole_backwards_bound_ns


def test_no_order_of_whole_backwards_is_below_its_bound() -> None:
    """Several stages on a device, replicas that take turns, recomputations as separate operations."""
    rng = random.Random(0)
    turns, checked = 0, 0
    while checked < 250:
        problem = random_problem(rng)
        allocation = random_allocation(rng, problem)
        orders = random_orders(rng, allocation)
        if any((row.operations[:, 0] == INPUT).any() for row in orders.rows):
            continue
        checked += 1
        turns += any(s.dispatch == "round_robin" and s.replicas > 1 for s in allocation.stages)
        assert whole_backwards_bound_ns(problem, allocation) <= makespan_ns(problem, allocation, orders)
    assert turns > 20


def test_of_several_pipelines_nothing_is_said() -> None:
    rng = random.Random(1)
    problem = random_problem(rng)
    while problem.num_devices < 4 or problem.global_batch_size < 4:
        problem = random_problem(rng)
    assert whole_backwards_bound_ns(problem, random_pipelines(rng, problem)) == 0
