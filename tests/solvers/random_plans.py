"""Random small problems, allocations of every shape, orders that can run, and periodic patterns of every rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from problems import as_operations, make_problem

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.ties import tied_sums
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import PipelineRun, Problem, RankRun
from penstock.solvers.model.schedule import STEP, Orders, Pattern, PatternOperation, Row
from penstock.solvers.model.unroll import Unrolled, unroll
from penstock.solvers.model.update_rules import PERIODIC_RULES, UpdateRule
from penstock.solvers.schedules.advance_forward import advance_forward


def random_problem(rng: random.Random) -> Problem:
    """Draw up to six layers on up to six devices in up to three nodes; all settings are random."""
    layers = rng.randint(1, 6)
    nodes = rng.choice([(1,) * 3, (2, 2), (4,), (3, 1, 2), (1,), (2, 1)])
    low = rng.choice([0, 1, 1])

    def draw(count: int, high: int, zero: float = 0.2) -> list[int]:
        return [0 if rng.random() < zero else rng.randint(low, high) for _ in range(count)]

    forward = [rng.randint(low, 9) for _ in range(layers)]
    backward = [rng.randint(max(f, low), 18) for f in forward]
    return with_step_workspace(
        make_problem(
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
            gradient_factor=rng.randint(1, 2),
            state_factor=rng.randint(0, 2),
            shard_states=rng.random() < 0.3,
            count_buffers=rng.random() < 0.8,
            lanes=rng.choice([1, 1, 2]),
        )
    )


def with_step_workspace(problem: Problem) -> Problem:
    """Add to two of three problems layers whose steps need up to 200 bytes of workspace, at once or in turn.

    The draw is seeded by the problem itself, so that later draws do not depend on it.
    """
    rng = random.Random(repr((problem.layer_names, problem.parameter_bytes, problem.update_ns)))
    sizes = [rng.choice([0, rng.randint(0, 200)]) for _ in problem.layer_names]
    workspace = None if rng.random() < 1 / 3 else np.asarray(sizes, dtype=np.int64)
    return replace(problem, update_workspace_bytes=workspace, update_in_turn=rng.random() < 1 / 3)


def with_ties(rng: random.Random, problem: Problem) -> Problem:
    """Add up to three parameters that some of the problem's layers have in common; a few are frozen."""
    ties = []
    for number in range(rng.randint(1, 3) if problem.num_layers > 1 else 0):
        layers = rng.sample(range(problem.num_layers), rng.randint(2, min(3, problem.num_layers)))
        layers = sorted(layers) if rng.random() < 0.7 else layers
        size = int(problem.trainable_bytes[layers[0] + 1] - problem.trainable_bytes[layers[0]])
        ties.append((f"tie{number}", tuple(layers), rng.choice([size, rng.randint(0, size), rng.randint(1, 60)])))
    return replace(problem, shared_parameters=tuple(ties))


def random_allocation(rng: random.Random, problem: Problem) -> Allocation:
    """Draw random cuts with replicated, round-robin and recomputing stages; devices may hold several stages."""
    stages = _random_stages(rng, problem, list(range(problem.num_devices)))
    return single_pipeline(stages, rng.randint(1, min(8, problem.global_batch_size)))


def random_pipelines(rng: random.Random, problem: Problem) -> Allocation:
    """Draw two or three pipelines on separate devices, each with separate cuts and a share of the micro-batches."""
    count = rng.randint(2, min(3, problem.num_devices, problem.global_batch_size))
    batches = rng.randint(count, min(8, problem.global_batch_size))
    free = list(range(problem.num_devices))
    rng.shuffle(free)
    places = sorted(rng.sample(range(1, len(free)), count - 1))
    starts = [0, *sorted(rng.sample(range(1, batches), count - 1)), batches]
    parts = [free[low:high] for low, high in pairwise([0, *places, len(free)])]
    pipelines = [
        Pipeline(_random_stages(rng, problem, part), (low, high - 1))
        for part, (low, high) in zip(parts, pairwise(starts), strict=True)
    ]
    return Allocation(tuple(pipelines), batches)


def random_crossing_pipelines(rng: random.Random, problem: Problem) -> Allocation:
    """Draw two or three pipelines over the same groups of devices, as Chimera's directions are."""
    count = rng.randint(2, min(3, problem.global_batch_size))
    batches = rng.randint(count, min(8, problem.global_batch_size))
    starts = [0, *sorted(rng.sample(range(1, batches), count - 1)), batches]
    groups: list[tuple[int, ...]] = []
    free = list(range(problem.num_devices))
    pipelines = []
    for low, high in pairwise(starts):
        stages = _random_stages(rng, problem, free, groups)
        groups += [stage.devices for stage in stages if stage.devices not in groups]
        free = [d for d in free if all(d not in devices for devices in groups)]
        pipelines.append(Pipeline(stages, (low, high - 1)))
    return Allocation(tuple(pipelines), batches)


def _random_stages(
    rng: random.Random, problem: Problem, free: list[int], existing: Sequence[tuple[int, ...]] = ()
) -> tuple[Stage, ...]:
    cuts = [i for i in range(1, problem.num_layers) if rng.random() < 0.6]
    bounds = [0, *cuts, problem.num_layers]
    groups = list(existing)
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
    return tuple(stages)


def random_orders(rng: random.Random, allocation: Allocation) -> Orders:
    """Draw any order that can run: one operation after another whose inputs exist."""
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
        split, again = rng.random() < 0.3, stage.recomputes and rng.random() < 0.5
        kinds = [FORWARD, *((INPUT, WEIGHT) if split else (BACKWARD,)), *((RECOMPUTE,) if again else ())]
        for m in allocation.micro_batches(s):
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


def random_pattern(rng: random.Random, problem: Problem) -> tuple[Allocation, Pattern, UpdateRule, Unrolled]:
    """Draw a periodic plan that can run: operations start after their inputs, and rounds stay apart."""
    while True:
        allocation = random_allocation(rng, problem)
        rule = rng.choice(sorted(PERIODIC_RULES))
        pattern = _pattern(rng, allocation, rng.randint(1, 3))
        if not _turns_suffice(allocation, rule):
            continue
        run = unroll(problem, allocation, pattern, rule)
        if all(_rounds_apart(run, row) for row in run.orders.rows):
            return allocation, pattern, rule, run


def _pattern(rng: random.Random, allocation: Allocation, per_period: int) -> Pattern:
    """Draw operations at random distances along the chain of each micro-batch of a period."""
    count = len(allocation.stages)
    split = [rng.random() < 0.2 for _ in range(count)]
    again = [bool(stage.recompute) and rng.random() < 0.5 for stage in allocation.stages]
    each, most = rng.randint(1, 6 * count), rng.randint(1, 5)
    starts = []
    for j in range(per_period):
        t = j * each
        for s in range(count):
            starts.append((FORWARD, s, t, j))
            t += rng.randint(1, most)
        for s in reversed(range(count)):
            if again[s]:
                starts.append((RECOMPUTE, s, t, j))
                t += rng.randint(1, most)
            starts.append((INPUT if split[s] else BACKWARD, s, t, j))
            if split[s]:
                starts.append((WEIGHT, s, t + rng.randint(1, most), j))
            t += rng.randint(1, most)
    period = per_period * each
    operations = [PatternOperation(kind, s, t % period, t // period, j) for kind, s, t, j in starts]
    return Pattern("random", period, per_period, tuple(operations))


def _turns_suffice(allocation: Allocation, rule: UpdateRule) -> bool:
    """Return whether every round-robin replica has a micro-batch in each round."""
    most = max((stage.replicas for stage in allocation.stages if stage.dispatch == "round_robin"), default=1)
    return rule == "weight_stashing" or most <= allocation.num_micro_batches


def _rounds_apart(run: Unrolled, row: Row) -> bool:
    """Return whether, in a row, every complete round of a stage steps before the next round's gradients."""
    every = run.orders.update_every
    for s, stage in enumerate(run.allocation.stages):
        if row.devices[0] not in stage.devices:
            continue
        rounds = [(k, m // every[s]) for k, other, m in row.operations.tolist() if other == s]
        seen = [number for k, number in rounds if k not in (FORWARD, RECOMPUTE)]
        steps = [number for k, number in rounds if k == STEP]
        if seen != sorted(seen) or steps != list(range(run.allocation.num_micro_batches // every[s])):
            return False
    return True


def _possible(allocation, lanes, waiting, lane, op) -> bool:
    kind, s, m = op
    placed = lanes[lane]
    if kind == FORWARD:
        source = allocation.previous(s)
        return source is None or not any((FORWARD, source, m) in ops for ops in waiting.values())
    if kind == WEIGHT:
        return (INPUT, s, m) in placed
    if (FORWARD, s, m) not in placed:
        return False
    if kind == RECOMPUTE:
        return True
    if (RECOMPUTE, s, m) in waiting[lane]:
        return False
    source = allocation.next(s)
    return source is None or not any((k, source, m) in ops for k in (BACKWARD, INPUT) for ops in waiting.values())


def random_averaging(seed: int) -> tuple[Problem, Allocation, Orders]:
    """Draw averaging pipelines.

    The network, micro-batches, durations (some zero), recomputation, δ, order of rows and utilisation are random.
    """
    draw = random.Random(seed)
    layers, pipelines = draw.randint(1, 4), draw.randint(1, 4)
    batch = draw.randint(1, 9)
    problem = make_problem(
        [draw.randint(0 if layers > 1 else 1, 9) for _ in range(layers)],
        [draw.randint(1, 15) for _ in range(layers)],
        [draw.randint(0, 6) for _ in range(layers - 1)],
        [draw.randint(0, 50) for _ in range(layers)],
        stash_bytes=[draw.randint(0, 20) for _ in range(layers)],
        workspace_bytes=draw.randint(0, 30),
        update_ns=draw.randint(0, 5),
        nodes=draw.choice([(layers,), (1,) * layers]),
        global_batch_size=batch,
        shared=draw.random() < 0.5,
        channel=draw.choice(["half", "full", "none"]),
        full_duplex=draw.random() < 0.5,
        latency_ns=draw.randint(0, 2),
        form=draw.choice(["pairs", "ports", "bus"]),
        context_bytes=draw.randint(0, 9),
        state_factor=draw.randint(0, 2),
        count_buffers=draw.random() < 0.8,
    )
    problem = with_step_workspace(problem)
    if draw.random() < 0.6:
        curves = [tuple(draw.randint(0, 1_000_000) for _ in range(draw.randint(1, 3))) for _ in range(layers)]
        problem = replace(problem, pipeline_run=measured_run(draw.randint(1, batch), curves, draw.randint(1, 2)))
    again = draw.random() < 0.3
    stages = tuple(Stage(i, i, (i,), recompute=((i, i),) if again else ()) for i in range(layers))
    allocation = parallel_pipelines(stages, pipelines, draw.randint(1, batch))
    orders = advance_forward(problem, allocation, delta=draw.randint(0, 4), afab=draw.random() < 0.2)
    rows = list(orders.rows)
    draw.shuffle(rows)
    return problem, allocation, replace(orders, rows=tuple(rows))


def measured_run(num_micro_batches: int, curves: list[tuple[int, ...]], num_pipelines: int = 1) -> PipelineRun:
    """Build a measured run; the utilisation of each rank is one of ``curves``, in millionths."""
    ranks = tuple(RankRun(100, 10, curve, 1, 1, 1) for curve in curves)
    return PipelineRun(num_micro_batches, num_pipelines, ranks)


def tied_plan(rng: random.Random, make: Callable[[random.Random, Problem], Allocation]) -> tuple[Problem, Allocation]:
    """Draw an allocation with a parameter tied across its stages."""
    while True:
        problem = with_ties(rng, random_problem(rng))
        if make is not random_allocation and min(problem.num_devices, problem.global_batch_size) < 2:
            continue
        allocation = make(rng, problem)
        if tied_sums(problem, allocation):
            return problem, allocation


def encoded(rng: random.Random, allocation: Allocation) -> Allocation:
    """Return the allocation with some of its edges encoded."""
    pipelines = []
    for pipeline in allocation.pipelines:
        edges = [False, *(rng.random() < 0.3 for _ in pipeline.stages[1:]), False]
        stages = [replace(stage, coded=(edges[k], edges[k + 1])) for k, stage in enumerate(pipeline.stages)]
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(allocation, pipelines=tuple(pipelines))
