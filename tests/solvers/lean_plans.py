"""Plans of stages apart that are quick for the memory that they take: many orders of each, the quick ones kept.

Nothing of a bound or a planner is asked. An order is F and B in index order with any numbers in flight that do not
grow along the stages; where a stage recomputes, each R is right before its B or anywhere between the two others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from problems import make_network, make_problem

from penstock.schemas.program import BACKWARD, FORWARD, RECOMPUTE
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.schedules.early_backward import early_backward


class Lean(NamedTuple):
    """A plan, what it takes, and the request whose devices have just the memory that its busiest one needs."""

    problem: Problem
    allocation: Allocation
    orders: Orders
    value_ns: int


def lean_plans(seed: int, orders: int = 40) -> Iterator[Lean]:
    """The plans of one request and allocation of which none is quicker in less memory, all devices in use."""
    rng = random.Random(seed)
    for problem, allocation, order, value, held in _leanest(rng, *_drawn(rng), orders):
        full = tuple(replace(device, memory_bytes=max(held)) for device in problem.devices)
        yield Lean(replace(problem, devices=full), allocation, order, value)


def unlike_plans(seed: int, orders: int = 40) -> Iterator[Lean]:
    """The same on devices of two speeds with slow links; each device has just the memory that it needs itself."""
    rng = random.Random(seed)
    like, allocation = _drawn(rng)
    for problem, _, order, value, held in _leanest(rng, _unlike(rng, like), allocation, orders):
        own = tuple(replace(device, memory_bytes=own) for device, own in zip(problem.devices, held, strict=True))
        yield Lean(replace(problem, devices=own), allocation, order, value)


def _leanest(
    rng: random.Random, problem: Problem, allocation: Allocation, orders: int
) -> Iterator[tuple[Problem, Allocation, Orders, int, list[int]]]:
    """Each plan that is quicker than all in less memory: its orders, what it takes, and what each device holds."""
    found = []
    for _ in range(orders):
        order = _order(rng, problem, allocation)
        timeline = simulate(problem, allocation, order)
        held = [timeline.uses[d].memory.total for d in range(problem.num_devices)]
        found.append((max(held), timeline.time_per_global_batch_ns, order, held))
    best = None
    for _most, value, order, held in sorted(found, key=lambda each: each[:2]):
        if best is None or value < best:
            best = value
            yield problem, allocation, order, value, held


def _unlike(rng: random.Random, problem: Problem) -> Problem:
    """The problem with devices of two speeds in nodes of up to two, and links as slow as its layers."""
    count, inside = problem.num_devices, rng.choice((1, 2, 2))
    nodes = (inside,) * (count // inside) + (1,) * (count % inside)
    network = make_network(
        nodes,
        inside_bytes_per_s=rng.choice((10**7, 10**8, 10**9)),
        between_bytes_per_s=rng.choice((10**7, 10**8)),
        latency_ns=rng.choice((0, 7)),
        form=rng.choice(("pairs", "ports", "bus")),
        full_duplex=rng.random() < 0.5,
        lanes=rng.choice((1, 2)),
    )
    node_of = [node for node, held in enumerate(nodes) for _ in range(held)]
    speeds = [rng.choice((1.0, 1.0, 0.4)) for _ in range(count)]
    names = {1.0: "cpu", 0.4: "slow"}
    devices = tuple(
        replace(device, node=node, kind=names[speed], context_bytes=rng.choice((0, 3)))
        for device, node, speed in zip(problem.devices, node_of, speeds, strict=True)
    )
    mode = rng.choice(("nic", "nic", "spp", "dapple", "madpipe"))
    sources = {"cpu": ("cpu", 1.0), "slow": ("cpu", 0.4)}
    return replace(
        problem,
        network=network,
        devices=devices,
        kind_source=sources,
        rules=replace(problem.rules, transfer=mode, shared=rng.random() < 0.3),
        update_ns=np.cumsum([0, *(rng.randint(0, 40) for _ in range(problem.num_layers))]),
    )


def _drawn(rng: random.Random) -> tuple[Problem, Allocation]:
    """1 to 4 stages of 1 or 2 layers on 1 or 2 devices each, some of which recompute; 2 to 7 micro-batches."""
    layers = [rng.randint(1, 2) for _ in range(rng.randint(1, 4))]
    replicas = [rng.choice((1, 1, 2)) for _ in layers]
    count, number, rows = sum(layers), rng.randint(2, 7), rng.choice((1, 2, 2, 3))
    problem = make_problem(
        [rng.randint(1, 60) * 10 for _ in range(count)],
        [rng.randint(1, 90) * 10 for _ in range(count)],
        boundary_bytes=[rng.randint(1, 8) for _ in range(count - 1)],
        parameter_bytes=rng.choice((0, 40)),
        stash_bytes=[rng.randint(1, 60) for _ in range(count)],
        workspace_bytes=rng.choice((0, 0, 5)),
        nodes=(1,) * sum(replicas),
        between_bytes_per_s=10**12,
        channel=rng.choice(("none", "full", "half")),
        global_batch_size=number * max(rows, 2 if 2 in replicas else 1) - rng.choice((0, 0, 1)) * (rows > 2),
        micro_batch_sizes=(max(rows, 2 if 2 in replicas else 1),),
        recompute="auto",
        count_buffers=rng.random() < 0.5,
    )
    stages, layer, device = [], 0, 0
    for own, held in zip(layers, replicas, strict=True):
        again = ((layer, layer + own - 1),) if rng.random() < 0.5 else ()
        stages.append(Stage(layer, layer + own - 1, tuple(range(device, device + held)), "rows", again))
        layer, device = layer + own, device + held
    return problem, single_pipeline(tuple(stages), -(-problem.global_batch_size // problem.micro_batch_sizes[0]))


def _order(rng: random.Random, problem: Problem, allocation: Allocation) -> Orders:
    """Numbers in flight that do not grow, and recomputations ahead of their time."""
    number = allocation.num_micro_batches
    flying = sorted((rng.randint(1, number) for _ in allocation.stages), reverse=True)
    plain = early_backward(problem, allocation, warmup=flying)
    early = rng.random()
    rows = []
    for row in plain.rows:
        operations = [tuple(op) for op in row.operations.tolist()]
        if allocation.stages[operations[0][1]].recompute and rng.random() < 0.9:
            for batch in range(number):
                stage = operations[0][1]
                last = operations.index((BACKWARD, stage, batch))
                first = operations.index((FORWARD, stage, batch)) + 1
                at = rng.randint(first, last) if rng.random() < early else last
                operations.insert(at, (RECOMPUTE, stage, batch))
        rows.append(Row(row.devices, np.asarray(operations, dtype=np.int32)))
    return replace(plain, name="random", rows=tuple(rows))
