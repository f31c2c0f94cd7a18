"""Random plans that were lowered for NCCL: on simulated devices their ranks come to their end, and nothing races."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
from problems import as_operations, make_problem
from random_plans import (
    random_allocation,
    random_crossing_pipelines,
    random_orders,
    random_pipelines,
)
from simulated_cuda.engine import H100, run
from simulated_cuda.ranks import log_alone
from small_jobs import LENGTH, WIDTH, Regression
from torch import nn

from penstock.executor.run.job import LayerSpec
from penstock.schemas.errors import PenstockError
from penstock.schemas.program import BACKWARD, FORWARD, Program
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.periodic.eager import eager

PLANS = 500
MOST_MICRO_BATCHES = 24
BOUNDARY_BYTES = LENGTH * WIDTH * 4
WEIGHT_BYTES, BIAS_BYTES = WIDTH * WIDTH * 4, WIDTH * 4


class Linears(Regression):
    """Linear layers, some of which share a weight."""

    def __init__(self, count: int, batch_size: int, tied: Sequence[int]) -> None:
        layers = [LayerSpec(f"linear.{i}", partial(nn.Linear, WIDTH, WIDTH)) for i in range(count)]
        super().__init__("linears", lambda: layers, batch_size=batch_size)
        self.shared_parameters = [[f"linear.{i}.weight" for i in tied]] if tied else []


class Plan(NamedTuple):
    """Programs of all ranks, and what they train."""

    programs: list[Program]
    job: Linears
    kind: str


def drawn(seed: int) -> Plan:
    """Draw the first plan of a seed that has several ranks and that NCCL can carry."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(["pipeline", "pipeline", "pipelines", "crossing", "periodic", "periodic"])
        problem, job = drawn_problem(rng)
        try:
            programs = lowered(rng, problem, kind)
        except (PenstockError, ValueError):  # no such plan on so few devices, or none that NCCL can carry
            continue
        if len(programs) > 1 and programs[0].batches * programs[0].num_micro_batches <= MOST_MICRO_BATCHES:
            return Plan(programs, job, kind)


def drawn_problem(rng: random.Random) -> tuple[Problem, Linears]:
    """Draw up to six linear layers on up to six devices."""
    count, batch_size = rng.randint(1, 6), rng.randint(1, 12)
    tied = sorted(rng.sample(range(count), rng.randint(2, min(3, count)))) if count > 1 and rng.random() < 0.3 else []
    problem = make_problem(
        [rng.randint(1, 9) for _ in range(count)],
        boundary_bytes=BOUNDARY_BYTES,
        parameter_bytes=WEIGHT_BYTES + BIAS_BYTES,
        nodes=(rng.randint(2, 6),),
        global_batch_size=batch_size,
        bucket_bytes=rng.choice([100, 700, 10**6]),
        overlap_all_reduce=rng.random() < 0.7,
        shard_states=rng.random() < 0.3,
    )
    if tied:
        problem = replace(problem, shared_parameters=((f"linear.{tied[0]}.weight", tuple(tied), WEIGHT_BYTES),))
    return problem, Linears(count, batch_size, tied)


def lowered(rng: random.Random, problem: Problem, kind: str) -> list[Program]:
    """Lower a random plan. Raises PenstockError where there is no such plan."""
    if kind == "periodic":
        allocation = random_allocation(rng, problem)
        rules: list[UpdateRule] = ["weight_stashing", "double_buffered"]
        rule = rng.choice(rules)
        pattern = eager(problem, allocation, update_rule=rule)
        return lower(problem, allocation, pattern, update_rule=rule, batches=rng.randint(2, 6), transport="nccl")
    draw = {"pipeline": random_allocation, "pipelines": random_pipelines, "crossing": random_crossing_pipelines}[kind]
    allocation = draw(rng, problem)
    orders = random_orders(rng, allocation)
    return lower(problem, allocation, orders, norm=rng.random() < 0.3, transport="nccl")


@pytest.mark.parametrize("seed", range(PLANS))
def test_ranks_of_random_plans_come_to_their_end(seed: int) -> None:
    """As the product's ranks log them, alone, at two speeds of host, computation and messages.

    Two runs of plans that flush: what runs for the first time receives later, and loads its kernels.
    """
    plan = drawn(seed)
    batches = plan.programs[0].batches
    more = {"segments": [0]} if batches > 1 else {}
    logged = log_alone(plan.programs, plan.job, steps=batches if batches > 1 else 2, **more)
    rng = random.Random(seed)
    other = H100._replace(
        call_ns=rng.choice([1, 10_000]), operation_ns=rng.choice([10, 10**6]), message_ns=rng.choice([10, 10**6])
    )
    for device in (H100, other):
        outcome = run([one.log for one in logged], device)
        assert outcome.faults == ()
        assert all(moment >= 0 for done in outcome.done_ns for moment in done)
    assert [race for one in logged for race in one.races] == []


def test_replicas_whose_stages_are_cut_otherwise_agree_who_steps_what() -> None:
    """Two stages of one pipeline are one stage of the other: a rank's share of one is no load for another."""
    stages = Stage(0, 2, (0,)), Stage(0, 1, (1, 2)), Stage(2, 2, (1, 2))
    allocation = Allocation((Pipeline(stages[:1], (0, 0)), Pipeline(stages[1:], (1, 1))), 2)
    problem = make_problem(
        [1, 1, 1],
        boundary_bytes=BOUNDARY_BYTES,
        parameter_bytes=WEIGHT_BYTES + BIAS_BYTES,
        nodes=(3,),
        global_batch_size=4,
        shard_states=True,
    )
    cut = Row((1, 2), as_operations([(FORWARD, 1, 1), (FORWARD, 2, 1), (BACKWARD, 2, 1), (BACKWARD, 1, 1)]))
    orders = Orders("test", (Row((0,), as_operations([(FORWARD, 0, 0), (BACKWARD, 0, 0)])), cut))
    logged = log_alone(lower(problem, allocation, orders, transport="nccl"), Linears(3, 4, ()))
    assert run([one.log for one in logged]).faults == ()
