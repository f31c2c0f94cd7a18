"""Planner ``even`` against all plain layouts, listed and simulated one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from problems import make_problem

from penstock.solvers.costs.memory import activation_bytes, fits, free_bytes, static_bytes
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Status
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.even.planner import _every
from penstock.solvers.planners.proposal import whole_backwards_bound_ns
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.trainer_orders import order_of
from penstock.solvers.solve.driver import solve

pytestmark = pytest.mark.tier("ci")


def drawn(seed: int) -> Problem:
    """Draw layers that are alike between a first and a last one, as a transformer's, with memory that may be short."""
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
    """Yield the times of all layouts that fit, by loops over all their settings."""
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
    first = next(iter(row.proposals(Setting(problem), {})))
    assert first.fixed is not None
    timeline = simulate(problem, first.allocation, first.fixed)
    assert fits(problem, timeline)
    assert timeline.time_per_global_batch_ns == best_ns


def test_it_is_a_planner_like_others() -> None:
    result = solve(drawn(3), "even")
    assert result.best is not None
    assert result.best.planner == "even"


def test_what_the_nearest_layout_lacks_is_said() -> None:
    result = solve(make_problem([10] * 8, parameter_bytes=100, memory_bytes=450, stash_bytes=60), "even")
    assert result.status in (Status.NONE_FOUND, Status.INFEASIBLE)
    assert result.shortage is not None


@pytest.mark.tier("quick")
def test_what_may_fit_is_what_ranks_hold_stage_by_stage() -> None:
    """Stages that keep alike are checked once; here each is added up separately, however it recomputes."""
    answers: dict[bool, int] = {True: 0, False: 0}
    for problem in (*map(drawn, range(12)), *map(with_modules, range(12))):
        for even in _every(problem):
            for way in even.ways:
                fits_so = holds(problem, even.plan(way), even.cut.parts)
                assert even._may_fit(way) == fits_so
                answers[fits_so] += 1
    assert min(answers.values()) > 100


@pytest.mark.tier("quick")
def test_the_bound_is_what_stages_take_added_up_one_by_one() -> None:
    """Stages that cost alike are costed once; here each is costed separately, however it recomputes."""
    checked = 0
    for problem in (*map(drawn, range(12)), *map(with_modules, range(12))):
        for even in _every(problem):
            for way in even.ways:
                plan = even.plan(way)
                busiest = max(work_ns(problem, plan).values())
                assert even.bound_ns(way) == max(busiest, whole_backwards_bound_ns(problem, plan))
                checked += 1
    assert checked > 200


def work_ns(problem: Problem, plan: Allocation) -> dict[tuple[int, ...], int]:
    """Return the time in which the stages of each rank compute in a step."""
    load: dict[tuple[int, ...], int] = {}
    for stage in plan.stages:
        cost = stage_costs(problem, stage, most_rows(problem, plan))
        each = cost.forward_ns + cost.backward_ns + cost.recompute_ns
        load[stage.devices] = load.get(stage.devices, 0) + plan.num_micro_batches * each
    return load


def with_modules(seed: int) -> Problem:
    """Draw layers that differ in kept and freed bytes only, boundaries that differ, and two kinds of devices."""
    rng = random.Random(seed)
    layers, share = rng.choice((6, 8)), rng.choice((0.0, 0.3))
    problem = make_problem(
        [60] * layers,
        kinds=("cpu", "cpu", "slow", "slow") if rng.random() < 0.5 else None,
        speed={"slow": 0.5},
        boundary_bytes=[rng.choice((5, 20)) for _ in range(layers - 1)],
        parameter_bytes=[rng.choice((30, 40)) for _ in range(layers)],
        stash_bytes=[rng.choice((80, 100)) for _ in range(layers)],
        nodes=(4,),
        memory_bytes=rng.choice((700, 1000, 1400)),
        global_batch_size=8,
        micro_batch_sizes=(),
        shard_states=rng.random() < 0.5,
        state_factor=2,
        shared_parameters=(("tied", (0, layers - 1), 10),),
        recompute="auto",
    )
    measured = {}
    for kind, (point,) in problem.measured.items():
        freed = np.array([int(share * rng.choice((50, 80))) for _ in range(layers)])
        modules = {"norm": (np.ones(layers, np.int64), freed), "mlp": (np.full(layers, 20), point.stash_bytes // 2)}
        measured[kind] = (replace(point, modules=modules),)
    return replace(problem, measured=measured, _costs={})


def holds(problem: Problem, plan: Allocation, parts: int) -> bool:
    """Return whether each rank's memory holds its states and the micro-batches in flight at its first backward."""
    ranks = len(plan.stages) // parts
    for rank in range(ranks):
        rank_stages = plan.stages[rank::ranks]
        ahead = ranks - rank - 1 if parts == 1 else 2 * (ranks - rank - 1) + (parts - 1) * ranks
        static = sum(static_bytes(problem, stage).total for stage in rank_stages)
        kept = min(activation_bytes(problem, stage, most_rows(problem, plan)) for stage in rank_stages)
        if static + min(ahead + 1, plan.num_micro_batches * parts) * kept > free_bytes(problem, rank_stages[0].devices):
            return False
    return True
