"""Small requests with weight gradients of any length, their plans, and the optimum of each by CP-SAT."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from drawn_problems import random_request
from problems import make_problem

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, WEIGHT
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.costs.shortages import shortage_of
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.improve.job_shop import Question, solve, whole_backwards
from penstock.solvers.model.allocation import Allocation, single_pipeline
from penstock.solvers.model.problem import Measured, Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.planners.proposal import unreachable


def with_weights(problem: Problem, rng: random.Random) -> Problem:
    """Draw for each layer a weight gradient that takes any part of its backward, from none to all."""

    def drawn(point: Measured) -> Measured:
        part = [rng.choice([0, b // 2, b, rng.randint(0, b)]) for b in point.backward_ns.tolist()]
        return replace(point, weight_ns=np.asarray(part, dtype=np.int64))

    return replace(problem, measured={kind: tuple(map(drawn, points)) for kind, points in problem.measured.items()})


def split_request(seed: int, layers: int = 4, devices: int = 3) -> Problem:
    """Return a ``random_request`` with weight gradients of any length."""
    return with_weights(random_request(seed, layers, devices), random.Random(seed))


def cabled_request(seed: int) -> Problem:
    """Draw three or four layers on three nodes of one device, in a shared network that is slow for the traffic."""
    rng = random.Random(seed)
    count = rng.randint(3, 4)
    problem = make_problem(
        [rng.randint(5, 30) for _ in range(count)],
        [rng.randint(10, 50) for _ in range(count)],
        [rng.randint(20, 60) for _ in range(count - 1)],
        [rng.choice([50, 1000]) for _ in range(count)],
        backward_bytes=[rng.randint(20, 60) for _ in range(count - 1)],
        update_ns=rng.randint(0, 5),
        nodes=(1,) * 3,
        latency_ns=rng.choice([0, 0, 3]),
        full_duplex=rng.random() < 0.6,
        global_batch_size=rng.randint(4, 8),
        micro_batch_sizes=rng.choice([(1,), (2,)]),
        shared=True,
        transfer="nic",
        all_reduce=rng.choice(["flat", "hierarchical"]),
        bucket_bytes=rng.choice([1, 60, 10**6]),
        overlap_all_reduce=rng.random() < 0.7,
    )
    return with_weights(problem, rng)


def split_backwards(allocation: Allocation) -> Orders:
    """Split each backward in the rows of ``whole_backwards`` in two parts."""
    rows = []
    for row in whole_backwards(allocation).rows:
        operations = row.operations
        parts = [operations[operations[:, 0] == FORWARD]]
        for kind in (INPUT, WEIGHT):
            part = operations[operations[:, 0] == BACKWARD].copy()
            part[:, 0] = kind
            parts.append(part)
        rows.append(Row(row.devices, np.concatenate(parts)))
    return Orders("split", tuple(rows))


def optima(problem: Problem, plans: Iterator[Allocation], effort: float = 5.0) -> Iterator[tuple[Allocation, int]]:
    """Yield each plan that has an order, with the least time of any order with split backwards."""
    for plan in plans:
        orders = split_backwards(plan)
        times = StageTimes(problem, plan, orders)
        work = sum(cost.forward_ns + cost.backward_ns + cost.recompute_ns for costs in times.costs for cost in costs)
        moved = sum(sum(use.load_ns for use in uses) for uses in times.resources.values())
        hops = plan.num_micro_batches * 2 * (sum(times.out) + sum(times.back))
        longest = plan.num_micro_batches * work + moved + hops + sum(times.exposed) + sum(times.update_ns) + 1
        answer = solve(Question(problem, plan, longest, schedule=orders, effort=effort))
        if answer.proven and answer.orders is not None:
            yield plan, answer.bound_ns


def variants(problem: Problem, plan: Allocation) -> Iterator[Allocation]:
    """Yield the plan with every allowed set of recomputing stages, where one micro-batch fits into memory."""
    if unreachable(problem, plan) is not None:
        return
    choices = {"never": (False,), "always": (True,), "auto": (False, True)}[problem.recompute]
    for chosen in product(choices, repeat=len(plan.stages)):
        stages = tuple(
            replace(stage, recompute=((stage.first, stage.last),)) if again else stage
            for stage, again in zip(plan.stages, chosen, strict=True)
        )
        variant = single_pipeline(stages, plan.num_micro_batches)
        if shortage_of(problem, variant, (1,) * len(stages)) is None:
            yield variant


def every_plan(space: Space) -> Iterator[Allocation]:
    """Yield every plan with stages apart whose memory holds one micro-batch."""
    for batch in space.batches:
        for stages in range(1, space.most_stages + 1):
            for placement in space.placements(stages):
                if max(map(len, placement)) <= batch.replicas_fed(space.problem.min_slice):
                    for firsts in space.partitions(stages):
                        yield from variants(space.problem, space.allocation(batch, firsts, placement))
