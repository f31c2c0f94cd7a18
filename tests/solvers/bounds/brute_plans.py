"""Every plan of one pipeline of a tiny request, listed without any enumeration, allocator or planner of the package.

Stages are on separate devices; double grouped updates have two stages on each place. The list has every cut, every
choice of devices, replicas that split micro-batches or take turns, and every choice of recomputing stages, with one
micro-batch in flight. The simulator checks that a plan fits, and the verifier that it is valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
from problems import make_problem, warmup_orders

from penstock.schemas.errors import PenstockError
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Modules
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.schedule import Schedule
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.schedules.periodic.wpipe import wpipe
from penstock.solvers.verify.verifier import verify

RULES: tuple[UpdateRule, ...] = (
    "synchronous",
    "weight_stashing",
    "double_buffered",
    "double_grouped",
    "elastic_averaging",
)


def has_plan(problem: Problem) -> bool:
    """Return whether one of the listed plans fits."""
    return any(fits(problem, plan, rule) for rule in sorted(problem.update_rules) for plan in plans(problem, rule))


def fits(problem: Problem, allocation: Allocation, rule: UpdateRule) -> bool:
    """Return whether the plan can run with one micro-batch in flight, and the verifier finds nothing wrong."""
    try:
        schedule = leanest(problem, allocation, rule)
        timeline = simulate(problem, allocation, schedule, update_rule=rule)
    except PenstockError:
        return False
    return not verify(problem, allocation, schedule, timeline, update_rule=rule)


def leanest(problem: Problem, allocation: Allocation, rule: UpdateRule) -> Schedule:
    """Return the schedule with one micro-batch in flight on each device."""
    stages = allocation.stages
    if rule in ("synchronous", "elastic_averaging"):
        return warmup_orders(allocation, [1] * len(stages))
    if rule == "double_grouped":
        return wpipe(problem, allocation)
    depth = [stage.replicas if stage.dispatch == "round_robin" else 1 for stage in stages]
    return eager(problem, allocation, update_rule=rule, depth=depth)


def plans(problem: Problem, rule: UpdateRule) -> Iterator[Allocation]:
    """Yield all allocations that keep the pins."""
    folds = 2 if rule == "double_grouped" else 1
    for number, places in product(_numbers(problem), range(1, problem.num_devices + 1)):
        for groups, dispatch in product(_placements(problem.num_devices, places), _dispatches(rule)):
            if not _fed(problem, rule, number, max(map(len, groups)), dispatch):
                continue
            for spans in _cuts(problem, folds * places):
                for again in _recomputing(problem, len(spans)):
                    stages = tuple(
                        _stage(first, last, group, dispatch if len(group) > 1 else "rows", way)
                        for (first, last), group, way in zip(spans, groups * folds, again, strict=True)
                    )
                    if all(_keeps(stage, pin) for stage in stages for pin in problem.pins):
                        yield single_pipeline(stages, number)


def _numbers(problem: Problem) -> list[int]:
    batch = problem.global_batch_size
    sizes = problem.micro_batch_sizes or range(1, batch + 1)
    return sorted({-(-batch // size) for size in sizes if batch // -(-batch // size) >= problem.min_slice})


def _placements(devices: int, places: int) -> Iterator[list[tuple[int, ...]]]:
    for owner in product(range(places + 1), repeat=devices):
        groups = [tuple(d for d in range(devices) if owner[d] == place) for place in range(places)]
        if all(groups):
            yield groups


def _dispatches(rule: UpdateRule) -> tuple[str, ...]:
    return ("rows", "round_robin") if rule in ("weight_stashing", "double_buffered") else ("rows",)


def _fed(problem: Problem, rule: UpdateRule, number: int, widest: int, dispatch: str) -> bool:
    if rule == "elastic_averaging" or dispatch == "round_robin":
        return (widest == 1) == (rule == "elastic_averaging")
    return problem.global_batch_size // number // widest >= problem.min_slice


def _cuts(problem: Problem, stages: int) -> Iterator[list[tuple[int, int]]]:
    places = [layer for layer in range(problem.num_layers - 1) if problem.cuttable[layer]]
    for chosen in combinations(places, stages - 1):
        edges = [0, *(layer + 1 for layer in chosen), problem.num_layers]
        yield [(edges[s], edges[s + 1] - 1) for s in range(stages)]


Way = bool | Modules
"""Recomputation of a stage: whether it recomputes whole, or the modules of its layers that it recomputes."""


def _stage(first: int, last: int, devices: tuple[int, ...], dispatch: str, way: Way) -> Stage:
    again, modules = (((first, last),) if way else (), ()) if isinstance(way, bool) else ((), way)
    return Stage(first, last, devices, dispatch, again, modules=modules)  # type: ignore[arg-type]


def _recomputing(problem: Problem, stages: int) -> list[tuple[Way, ...]]:
    every: dict[str, list[Way]] = {"never": [False], "always": [True], "auto": [False, True, *problem.module_sets]}
    return list(product(every[problem.recompute], repeat=stages))


def _keeps(stage: Stage, pin: Pin) -> bool:
    return set(stage.devices) <= pin.devices or stage.last < pin.first or pin.last < stage.first


def drawn(seed: int) -> Problem:
    """Draw 2 to 4 layers on 2 or 3 devices, with pins and each update rule in turn.

    Memory is about as much as the plans take, less or more.
    """
    draw = np.random.default_rng(seed)
    layers, devices = int(draw.integers(2, 5)), int(draw.integers(2, 4))
    parameters = draw.integers(1, 30, layers) * 10
    stash = draw.integers(0, 20, layers) * 5
    factor = int(draw.integers(0, 3))
    whole = int(parameters.sum() * (2 + factor) + stash.max())
    tight = draw.choice([1, devices], devices)
    problem = make_problem(
        draw.integers(20, 100, layers).tolist(),
        boundary_bytes=draw.integers(1, 12, layers - 1).tolist(),
        parameter_bytes=parameters.tolist(),
        stash_bytes=stash.tolist(),
        workspace_bytes=draw.integers(0, 10, layers).tolist(),
        nodes=(devices,) if draw.random() < 0.5 else (1,) * devices,
        memory_bytes=(whole * draw.uniform(0.3, 2.2, devices) / tight).astype(int).tolist(),
        context_bytes=int(draw.integers(0, 10)),
        global_batch_size=int(draw.integers(2, 7)),
        micro_batch_sizes=() if draw.random() < 0.3 else (int(draw.integers(1, 4)),),
        min_slice=1 if draw.random() < 0.8 else 2,
        shared=bool(draw.random() < 0.3),
        state_factor=factor,
        shard_states=bool(draw.random() < 0.3),
        count_buffers=bool(draw.random() < 0.7),
        recompute=str(draw.choice(["never", "auto", "always"])),  # type: ignore[arg-type]
        cuttable=(draw.random(layers - 1) < 0.7).tolist() if draw.random() < 0.25 else None,
    )
    pins = []
    for _ in range(int(draw.integers(0, 3))):
        first = int(draw.integers(0, layers))
        holders = draw.choice(devices, int(draw.integers(1, devices + 1)), replace=False)
        pins.append(Pin(first, int(draw.integers(first, layers)), frozenset(int(d) for d in holders)))
    return replace(problem, pins=tuple(pins), update_rules=frozenset({RULES[seed % len(RULES)]}))
