"""Plans of stages apart that are fast for the memory that they take: many orders of each, reduced to the fast ones.

No bound and no planner is used. An order is F and B in index order with any numbers in flight that do not grow along
the stages; where a stage recomputes, each R is right before its B or anywhere between its F and its B.
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
    """A plan, its time, and a request whose devices have just as much memory as the plan's fullest device needs."""

    problem: Problem
    allocation: Allocation
    orders: Orders
    value_ns: int


def lean_plans(seed: int, orders: int = 40) -> Iterator[Lean]:
    """Yield plans of one request and allocation that no plan with less memory beats; all devices are in use."""
    rng = random.Random(seed)
    for problem, allocation, order, value, peaks in _leanest(rng, *_drawn(rng), orders):
        full = tuple(replace(device, memory_bytes=max(peaks)) for device in problem.devices)
        yield Lean(replace(problem, devices=full), allocation, order, value)


def unlike_plans(seed: int, orders: int = 40) -> Iterator[Lean]:
    """Yield such plans on devices of two speeds with slow links; each device has just the memory that it needs."""
    rng = random.Random(seed)
    like, allocation = _drawn(rng)
    for problem, _, order, value, peaks in _leanest(rng, _unlike(rng, like), allocation, orders):
        devices = tuple(replace(device, memory_bytes=size) for device, size in zip(problem.devices, peaks, strict=True))
        yield Lean(replace(problem, devices=devices), allocation, order, value)


def _leanest(
    rng: random.Random, problem: Problem, allocation: Allocation, orders: int
) -> Iterator[tuple[Problem, Allocation, Orders, int, list[int]]]:
    """Yield each plan that is faster than all plans with less memory: its order, its time, the bytes on each device."""
    plans = []
    for _ in range(orders):
        order = _order(rng, problem, allocation)
        timeline = simulate(problem, allocation, order)
        peaks = [timeline.uses[d].memory.total for d in range(problem.num_devices)]
        plans.append((max(peaks), timeline.time_per_global_batch_ns, order, peaks))
    best = None
    for _most, value, order, peaks in sorted(plans, key=lambda each: each[:2]):
        if best is None or value < best:
            best = value
            yield problem, allocation, order, value, peaks


def _unlike(rng: random.Random, problem: Problem) -> Problem:
    """Return the problem with devices of two speeds in nodes of up to two, and links as slow as its layers."""
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
    node_of = [node for node, size in enumerate(nodes) for _ in range(size)]
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
    """Draw 1 to 4 stages of 1 or 2 layers on 1 or 2 devices each, some with recomputation, and 2 to 7 micro-batches."""
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
    for depth, width in zip(layers, replicas, strict=True):
        again = ((layer, layer + depth - 1),) if rng.random() < 0.5 else ()
        stages.append(Stage(layer, layer + depth - 1, tuple(range(device, device + width)), "rows", again))
        layer, device = layer + depth, device + width
    return problem, single_pipeline(tuple(stages), -(-problem.global_batch_size // problem.micro_batch_sizes[0]))


def _order(rng: random.Random, problem: Problem, allocation: Allocation) -> Orders:
    """Draw numbers in flight that do not grow along the stages, and recomputations before they are needed."""
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
