"""Allocations of every shape for small requests, by plain combinatorics.

Every draw is of one kind. It respects pins, cuts, numbers of micro-batches and ``min_slice``; the simulator checks
memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Literal

from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import Problem

Draw = Callable[[random.Random, Problem], Allocation | None]
"""A random allocation of one kind, or None where this draw yields no allocation."""


def numbers_allowed(problem: Problem) -> list[int]:
    """Return the allowed numbers of micro-batches: given by the request's micro-batch sizes, or else all.

    Each micro-batch has at least ``min_slice`` samples.
    """
    whole = problem.global_batch_size
    if not problem.micro_batch_sizes:
        return list(range(1, whole // problem.min_slice + 1))
    named = sorted({-(-whole // size) for size in problem.micro_batch_sizes})
    return [number for number in named if whole // number >= problem.min_slice]


def partitions(problem: Problem) -> list[list[tuple[int, int]]]:
    """List every way to cut the layers, as (first, last) layer of each stage."""
    places = [i + 1 for i in range(problem.num_layers - 1) if problem.cuttable[i]]
    cuts = [cut for number in range(len(places) + 1) for cut in combinations(places, number)]
    return [[(a, b - 1) for a, b in pairwise([0, *cut, problem.num_layers])] for cut in cuts]


def subsets(devices: Sequence[int]) -> list[tuple[int, ...]]:
    """List all subsets but the empty one, smallest first."""
    return [chosen for size in range(1, len(devices) + 1) for chosen in combinations(devices, size)]


def fed(problem: Problem, number: int) -> int:
    """Return how many replicas get ``min_slice`` rows each of the smallest micro-batch."""
    return max(1, problem.global_batch_size // number // problem.min_slice)


def _stages(
    rng: random.Random, problem: Problem, number: int, free: Sequence[int], apart: bool, turns: bool
) -> tuple[Stage, ...] | None:
    """Draw stages on some of the devices; None where too few devices are left for them."""
    most, left = fed(problem, number), list(free)
    rng.shuffle(left)
    stages = []
    for first, last in rng.choice(partitions(problem)):
        allowed = [d for d in (left if apart else free) if _may_hold(problem, d, first, last)]
        if not allowed:
            return None
        in_turn = turns and rng.random() < 0.6
        size = rng.choice([1, rng.randint(1, len(allowed)), len(allowed)])
        size = min(size, number if in_turn else most)
        devices = tuple(rng.sample(allowed, size) if rng.random() < 0.3 else sorted(rng.sample(allowed, size)))
        left = [d for d in left if d not in devices]
        stages.append(Stage(first, last, devices, "round_robin" if in_turn and size > 1 else "rows"))
    return tuple(stages)


def _may_hold(problem: Problem, device: int, first: int, last: int) -> bool:
    return all(device in pin.devices for pin in problem.pins if pin.first <= last and first <= pin.last)


def _one(apart: bool, turns: bool) -> Draw:
    def draw(rng: random.Random, problem: Problem) -> Allocation | None:
        number = rng.choice(numbers_allowed(problem))
        stages = _stages(rng, problem, number, range(problem.num_devices), apart, turns)
        return None if stages is None else single_pipeline(stages, number)

    return draw


def drawn_looped(rng: random.Random, problem: Problem) -> Allocation | None:
    """Draw stages in a loop or in a V over single devices."""
    number = rng.choice(numbers_allowed(problem))
    ranks = rng.sample(range(problem.num_devices), rng.randint(1, problem.num_devices))
    turn = ranks + ranks[::-1] if rng.random() < 0.5 else ranks
    parts = rng.choice(partitions(problem))
    stages = tuple(Stage(a, b, (turn[i % len(turn)],)) for i, (a, b) in enumerate(parts))
    return single_pipeline(stages, number)


def _several(crossing: bool) -> Draw:
    def draw(rng: random.Random, problem: Problem) -> Allocation | None:
        number = rng.choice(numbers_allowed(problem))
        if number < 2 or (problem.num_devices < 2 and not crossing):
            return None
        count = rng.randint(2, min(3, number, number if crossing else problem.num_devices))
        starts = [0, *sorted(rng.sample(range(1, number), count - 1)), number]
        devices = rng.sample(range(problem.num_devices), problem.num_devices)
        pipelines = []
        for p, (low, high) in enumerate(pairwise(starts)):
            stage_devices = devices if crossing else devices[p::count]
            stages = _stages(rng, problem, number, stage_devices, apart=rng.random() < 0.7, turns=False)
            if stages is None:
                return None
            pipelines.append(Pipeline(stages, (low, high - 1)))
        return Allocation(tuple(pipelines), number)

    return draw


def _opposite(rng: random.Random, problem: Problem) -> Allocation | None:
    """Draw two pipelines of the same stages over the same devices, in opposite directions (Chimera's shape)."""
    number = rng.choice(numbers_allowed(problem))
    parts = [p for p in partitions(problem) if 2 <= len(p) <= problem.num_devices]
    if number < 2 or not parts:
        return None
    spans = rng.choice(parts)
    devices = rng.sample(range(problem.num_devices), len(spans))
    lines = [tuple(Stage(a, b, (d,)) for (a, b), d in zip(spans, way, strict=True)) for way in (devices, devices[::-1])]
    half = number // 2
    return Allocation((Pipeline(lines[0], (0, half - 1)), Pipeline(lines[1], (half, number - 1))), number)


def _balanced(rng: random.Random, problem: Problem) -> Allocation | None:
    """Draw some allocations of stages apart and return the one with the smallest maximum of work per device."""
    work = problem.costs(problem.devices[0].kind, 1)
    total = (work.forward_ns + work.backward_ns).tolist()
    drawn = [drawn_apart(rng, problem) for _ in range(6)]
    allocations = [a for a in drawn if a is not None]
    return min(
        allocations,
        key=lambda a: max((total[s.last + 1] - total[s.first]) / s.replicas for s in a.stages),
        default=None,
    )


def _everywhere(rng: random.Random, problem: Problem) -> Allocation | None:
    """Return one stage on all devices that may hold it, by rows or in turn."""
    last = problem.num_layers - 1
    allowed = [d for d in range(problem.num_devices) if _may_hold(problem, d, 0, last)]
    number, in_turn = rng.choice(numbers_allowed(problem)), rng.random() < 0.5
    devices = tuple(allowed[: number if in_turn else fed(problem, number)])
    if not devices:
        return None
    dispatch: Literal["rows", "round_robin"] = "round_robin" if in_turn and len(devices) > 1 else "rows"
    return single_pipeline((Stage(0, last, devices, dispatch),), number)


drawn_apart = _one(apart=True, turns=False)
drawn_in_turn = _one(apart=True, turns=True)
drawn_together = _one(apart=False, turns=False)
FLUSHED: tuple[Draw, ...] = (
    _everywhere,
    _balanced,
    drawn_apart,
    drawn_in_turn,
    drawn_together,
    drawn_looped,
    _several(crossing=False),
    _several(crossing=True),
    _opposite,
)
"""Draws of allocations with a flush."""
