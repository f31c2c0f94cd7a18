"""Kernels against the plain Python twin, to the unit, on random plans of every shape; the verifier agrees too."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from judge_twin import run_twin, twin_communication, twin_curve
from problems import as_operations, make_problem

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders, Row
from penstock.solvers.simulate import makespan_ns, simulate
from penstock.solvers.verify import verify


def random_problem(rng: random.Random) -> Problem:
    """Up to six layers on up to six devices in up to three nodes, everything drawn."""
    layers = rng.randint(1, 6)
    nodes = rng.choice([(1,) * 3, (2, 2), (4,), (3, 1, 2), (1,), (2, 1)])
    low = rng.choice([0, 1, 1])

    def draw(count: int, high: int, zero: float = 0.2) -> list[int]:
        return [0 if rng.random() < zero else rng.randint(low, high) for _ in range(count)]

    forward = [rng.randint(low, 9) for _ in range(layers)]
    backward = [rng.randint(max(f, low), 18) for f in forward]
    return make_problem(
        forward,
        backward,
        draw(layers - 1, 6),
        draw(layers, 40),
        weight_ns=[rng.randint(0, b) for b in backward],
        backward_bytes=draw(layers - 1, 6),
        stash_bytes=draw(layers, 50),
        workspace_bytes=draw(layers, 20),
        update_ns=draw(layers, 5),
        nodes=nodes,
        context_bytes=rng.randint(0, 10),
        latency_ns=rng.choice([0, 0, 3]),
        form=rng.choice(["pairs", "ports", "bus"]),
        full_duplex=rng.random() < 0.5,
        global_batch_size=rng.randint(1, 14),
        shared=rng.random() < 0.5,
        channel=rng.choice(["half", "full", "none"]),
        transfer=rng.choice(["nic", "spp", "dapple", "madpipe"]),
        all_reduce=rng.choice(["flat", "hierarchical"]),
        bucket_bytes=rng.choice([10, 60, 1000]),
        overlap_all_reduce=rng.random() < 0.7,
        gradient_factor=rng.randint(0, 2),
        state_factor=rng.randint(0, 2),
        shard_states=rng.random() < 0.3,
        count_buffers=rng.random() < 0.8,
    )


def random_allocation(rng: random.Random, problem: Problem) -> Allocation:
    """Random cuts; replicated, round-robin and recomputing stages; devices may hold several stages."""
    cuts = [i for i in range(1, problem.num_layers) if rng.random() < 0.6]
    bounds = [0, *cuts, problem.num_layers]
    groups: list[tuple[int, ...]] = []
    free = list(range(problem.num_devices))
    rng.shuffle(free)
    stages = []
    for first, stop in pairwise(bounds):
        if groups and (not free or rng.random() < 0.25):
            devices = rng.choice(groups)
        else:
            size = rng.randint(1, min(3, len(free)))
            devices, free = tuple(free[:size]), free[size:]
            groups.append(devices)
        dispatch = rng.choice(["rows", "rows", "round_robin"])
        segments = ()
        if rng.random() < 0.3:
            start = rng.randint(first, stop - 1)
            segments = ((start, rng.randint(start, stop - 1)),)
        stages.append(Stage(first, stop - 1, devices, dispatch, segments))
    return single_pipeline(tuple(stages), rng.randint(1, min(8, problem.global_batch_size)))


def random_orders(rng: random.Random, allocation: Allocation) -> Orders:
    """Any order that can run: operations drawn one by one from those whose inputs exist."""
    lanes: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    stages = allocation.stages
    groups = {}
    for devices in {stage.devices for stage in stages}:
        apart = any(stage.dispatch == "round_robin" for stage in stages if stage.devices == devices)
        groups[devices] = [(d,) for d in devices] if apart or rng.random() < 0.2 else [devices]
        for lane in groups[devices]:
            lanes[lane] = []
    waiting: dict[tuple[int, ...], list[tuple[int, int, int]]] = {lane: [] for lane in lanes}
    for s, stage in enumerate(stages):
        split, again = rng.random() < 0.3, bool(stage.recompute) and rng.random() < 0.5
        kinds = [FORWARD, *((INPUT, WEIGHT) if split else (BACKWARD,)), *((RECOMPUTE,) if again else ())]
        for m in range(allocation.num_micro_batches):
            for lane in groups[stage.devices]:
                if stage.dispatch == "rows" or stage.devices.index(lane[0]) == m % stage.replicas:
                    waiting[lane] += [(kind, s, m) for kind in kinds]
    eager = rng.random()
    while any(waiting.values()):
        choices = [
            (lane, op) for lane in waiting for op in waiting[lane] if _possible(allocation, lanes, waiting, lane, op)
        ]
        if rng.random() < eager:
            first = min(choices, key=lambda c: (c[1][0] == FORWARD, c[1][2], c[1][1], c[1][0], c[0]))
            choices = [first]
        lane, op = rng.choice(choices)
        waiting[lane].remove(op)
        lanes[lane].append(op)
    return Orders("random", tuple(Row(lane, as_operations(ops)) for lane, ops in lanes.items()))


def _possible(allocation, lanes, waiting, lane, op) -> bool:
    kind, s, m = op
    own = lanes[lane]
    if kind == FORWARD:
        source = allocation.previous(s)
        return source is None or not any((FORWARD, source, m) in ops for ops in waiting.values())
    if kind == WEIGHT:
        return (INPUT, s, m) in own
    if (FORWARD, s, m) not in own:
        return False
    if kind == RECOMPUTE:
        return True
    if (RECOMPUTE, s, m) in waiting[lane]:
        return False
    source = allocation.next(s)
    return source is None or not any((k, source, m) in ops for k in (BACKWARD, INPUT) for ops in waiting.values())


@pytest.mark.parametrize("seed", range(300))
def test_kernels_equal_the_twin(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    allocation = random_allocation(rng, problem)
    orders = random_orders(rng, allocation)
    overlap = rng.choice([None, True, False])
    twin = run_twin(problem, allocation, orders, overlap)
    timeline = simulate(problem, allocation, orders, overlap=overlap)
    assert not twin.deadlock
    for lane, track in enumerate(timeline.tracks):
        operations = [tuple(map(int, op)) for op in track.operations]
        assert track.start_ns.tolist() == [twin.start[lane, op] for op in operations]
        assert track.end_ns.tolist() == [twin.end[lane, op] for op in operations]
    sent = timeline.transfers
    columns = (sent.stage, sent.direction, sent.micro_batch, sent.start_ns, sent.end_ns)
    found = {(s, way, m): (start, end) for s, way, m, start, end in zip(*(c.tolist() for c in columns), strict=True)}
    assert found == twin.transfers
    assert {(r.stage, r.bucket): (r.start_ns, r.end_ns) for r in timeline.reductions} == twin.reductions
    steps = [twin.updates[key] for key in sorted(twin.updates)]
    assert [(u.start_ns, u.end_ns) for u in timeline.updates] == steps
    assert timeline.time_per_global_batch_ns == twin.makespan
    assert makespan_ns(problem, allocation, orders, overlap=overlap) == twin.makespan
    for lane, row in enumerate(orders.rows):
        for device in row.devices:
            use = timeline.uses[device]
            assert use.communication_ns == twin_communication(twin, lane)
            curve = twin_curve(twin, device)
            times, sizes = timeline.memory_curve(device)
            assert use.memory.total == max(curve.values()) == sizes.max()
            points = np.asarray(sorted(curve))
            at = np.searchsorted(times, points, side="right") - 1
            assert sizes[at].tolist() == [curve[t] for t in points.tolist()]
    assert verify(problem, allocation, orders, timeline, overlap=overlap) == []


@pytest.mark.parametrize("seed", range(60))
def test_the_twin_and_the_kernels_block_alike(seed: int) -> None:
    rng = random.Random(1000 + seed)
    problem = random_problem(rng)
    allocation = random_allocation(rng, problem)
    orders = random_orders(rng, allocation)
    rows = []
    for row in orders.rows:
        operations = row.operations.tolist()
        i, j = rng.randrange(max(1, len(operations))), rng.randrange(max(1, len(operations)))
        if operations:
            operations[i], operations[j] = operations[j], operations[i]
        rows.append(replace(row, operations=as_operations(operations)))
    orders = Orders("swapped", tuple(rows))
    twin = run_twin(problem, allocation, orders)
    if twin.deadlock:
        with pytest.raises(InvalidPlan, match=r"deadlock|out of order"):
            simulate(problem, allocation, orders)
    else:
        assert simulate(problem, allocation, orders).time_per_global_batch_ns == twin.makespan
