"""Planner ``even`` against all plain layouts, listed and simulated one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
from problems import make_problem

from penstock.solvers.costs.memory import fits
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Status
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.schedules.trainer_orders import order_of
from penstock.solvers.solve.driver import solve


def drawn(seed: int) -> Problem:
    """Layers that are alike between a first and a last one, as a transformer's, with memory that may be short."""
    rng = random.Random(seed)
    blocks = rng.choice((4, 6, 8))
    forward, first, last = rng.randint(50, 90), rng.randint(1, 20), rng.randint(20, 80)
    stash = rng.randint(50, 100)
    return make_problem(
        [first, *[forward] * blocks, last],
        boundary_bytes=rng.randint(0, 30),
        parameter_bytes=[10, *[40] * blocks, 20],
        stash_bytes=[1, *[stash] * blocks, 10],
        nodes=rng.choice([(4,), (2, 2)]),
        memory_bytes=rng.choice((600, 1000, 1600, 2**40)),
        global_batch_size=rng.choice((4, 8, 12)),
        micro_batch_sizes=(),
        shared=rng.random() < 0.5,
        recompute=rng.choice(("never", "auto")),
        update_ns=3,
    )


def every_time_ns(problem: Problem) -> Iterator[int]:
    """The times of all layouts that fit, by loops over everything that they may have."""
    devices, layers, batch = problem.num_devices, problem.num_layers, problem.global_batch_size
    blocks = layers - 2
    again = range(layers + 1) if problem.recompute == "auto" else range(1)
    for ranks, parts, rows, recomputing in product((1, 2, 4), range(1, layers + 1), range(1, batch + 1), again):
        width, number = devices // ranks, batch // rows
        if rows * number != batch or rows % width or (ranks == 1 and parts > 1 and number > 1):
            continue
        count = ranks * parts
        if blocks % count == 0:
            sizes = [blocks // count] * count
        elif (blocks + 2) % count == 0:
            sizes = [(blocks + 2) // count] * count
            sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
        else:
            sizes = [blocks // count + (part < blocks % count) for part in range(count)]
        if parts > 1 and (number % ranks or (blocks % count and (blocks + 2) % count)):
            continue
        if 0 in sizes[1:-1] or count > blocks + 2:
            continue
        stages, at = [], 1
        for part, size in enumerate(sizes):
            low, stop = (0 if part == 0 else at), (layers if part == count - 1 else at + size)
            kept = tuple((layer, layer) for layer in range(at, at + min(size, recomputing)))
            place = tuple(range(part % ranks * width, (part % ranks + 1) * width))
            stages.append(Stage(low, stop - 1, place, recompute=kept))
            at += size
        plan = single_pipeline(tuple(stages), number)
        orders = order_of(problem, plan, "early-backward" if parts == 1 else "interleaved", ranks)
        timeline = simulate(problem, plan, orders)
        if fits(problem, timeline):
            yield timeline.time_per_global_batch_ns


@pytest.mark.parametrize("seed", range(24))
def test_no_even_layout_is_quicker(seed: int) -> None:
    problem = drawn(seed)
    best_ns = min(every_time_ns(problem), default=None)
    row = PLANNERS["even"]
    assert row.proposals is not None
    if best_ns is None:
        assert solve(problem, "even").status in (Status.NONE_FOUND, Status.INFEASIBLE)
        return
    first = next(iter(row.proposals(problem, {})))
    assert first.fixed is not None
    found = simulate(problem, first.allocation, first.fixed)
    assert fits(problem, found)
    assert found.time_per_global_batch_ns == best_ns


def test_it_is_a_planner_like_others() -> None:
    found = solve(drawn(3), "even")
    assert found.best is not None
    assert found.best.planner == "even"


def test_what_the_nearest_layout_lacks_is_said() -> None:
    found = solve(make_problem([10] * 8, parameter_bytes=100, memory_bytes=450, stash_bytes=60), "even")
    assert found.status in (Status.NONE_FOUND, Status.INFEASIBLE)
    assert found.shortage is not None
