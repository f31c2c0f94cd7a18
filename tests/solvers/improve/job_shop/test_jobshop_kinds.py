"""The job shop for every kind of flushed plan: as good as every order of tiny plans; simulated steps are solutions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count, product
from typing import Any

import pytest
from ortools.sat.python import cp_model
from problems import as_operations, chain, make_problem, straight
from random_plans import random_allocation, random_orders, random_pipelines, random_problem

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.improve.job_shop import Question, solve, whole_backwards
from penstock.solvers.improve.job_shop.hint import give_hint
from penstock.solvers.improve.job_shop.model import Model
from penstock.solvers.improve.order import optimise_order
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Pattern, PatternOperation, Row

pytestmark = pytest.mark.tier("ci")

SPLIT = (FORWARD, INPUT, WEIGHT)


def random_plan(seed: int) -> tuple[Problem, Allocation, Orders]:
    """Draw any plan that can run, on devices with exactly the memory that it needs."""
    rng = random.Random(seed)
    while True:
        problem = random_problem(rng)
        several = rng.random() < 0.4 and problem.num_devices > 1 and problem.global_batch_size > 1
        plan = random_pipelines(rng, problem) if several else random_allocation(rng, problem)
        orders = random_orders(rng, plan)
        with suppress(InvalidPlan):  # nothing connects its devices
            uses = simulate(problem, plan, orders).uses
            needed = {d: use.memory.total for d, use in uses.items()}
            devices = [replace(d, memory_bytes=needed.get(i, 2**40)) for i, d in enumerate(problem.devices)]
            return replace(problem, devices=tuple(devices)), plan, orders


@pytest.mark.parametrize("seed", range(60))
def test_a_judged_step_is_a_solution_above_the_optimum_and_the_bounds(seed: int) -> None:
    """Whole units of 1 and of 3 ns, with a hint that names every variable."""
    problem, plan, orders = random_plan(seed)
    step = simulate(problem, plan, orders)
    value = step.time_per_global_batch_ns
    for unit in (1, 3):
        model = Model(Question(problem, plan, value, schedule=orders).shop(), value // unit, unit)
        model.build()
        give_hint(model, step)
        assert len(model.cp.proto.solution_hint.vars) == len(model.cp.proto.variables)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.fix_variables_to_their_hinted_value = True
        assert solver.solve(model.cp) == cp_model.OPTIMAL
    answer = solve(Question(problem, plan, value, schedule=orders, effort=0.5), step)
    assert answer.orders is not None
    assert schedule_bound(problem, plan, orders).bound_ns <= answer.bound_ns <= value
    assert makespan_ns(problem, plan, answer.orders) >= answer.bound_ns


def test_without_effort_the_hint_is_the_answer() -> None:
    problem, plan, orders = random_plan(7)
    step = simulate(problem, plan, orders)
    answer = solve(Question(problem, plan, step.time_per_global_batch_ns, schedule=orders, effort=0.0), step)
    assert answer.orders is not None
    assert makespan_ns(problem, plan, answer.orders) == step.time_per_global_batch_ns


def tiny(kind: str, seed: int) -> tuple[Problem, Allocation, tuple[int, ...]]:
    """Draw a plan of few orders, without channels; return it with its kinds of operations."""
    rng = random.Random(seed)
    layers = 4 if kind == "v" else 2
    backward = [rng.randint(2, 12) for _ in range(layers)]
    settings: dict[str, Any] = {
        "weight_ns": [rng.randint(1, b) for b in backward],
        "nodes": (4,),
        "channel": "none",
        "global_batch_size": 2,
        "stash_bytes": 10,
        "count_buffers": False,
    }
    batches = 2
    if kind in ("pipelines", "both ways"):
        settings |= {"parameter_bytes": 5, "gradient_factor": 0, "global_batch_size": 3, "bucket_bytes": 5}
        batches = 3
    if kind in ("pipelines", "split"):
        settings |= {"update_ns": rng.randint(0, 4)}
    if kind == "split in little memory":
        settings |= {"global_batch_size": 3, "memory_bytes": 20}
        batches = 3
    times = [rng.randint(1, 9) for _ in range(layers)]
    problem = make_problem(times, backward, [rng.randint(0, 9) for _ in range(layers - 1)], **settings)
    if kind == "v":
        return problem, chain([(1, [0]), (1, [1]), (1, [1]), (1, [0])], batches), (FORWARD, BACKWARD)
    if kind in ("pipelines", "both ways"):
        other = (2, 3) if kind == "pipelines" else (1, 0)
        lines = [tuple(Stage(i, i, (d,)) for i, d in enumerate(devices)) for devices in ((0, 1), other)]
        pipelines = Pipeline(lines[0], (0, 1)), Pipeline(lines[1], (2, 2))
        return problem, Allocation(pipelines, batches), (FORWARD, BACKWARD)
    if kind == "recomputation":
        stages = tuple(replace(stage, recompute=((i, i),)) for i, stage in enumerate(straight(problem, 2).stages))
        return problem, Allocation((Pipeline(stages, (0, 1)),), 2), (FORWARD, RECOMPUTE, BACKWARD)
    return problem, straight(problem, batches), SPLIT


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["split", "split in little memory", "v", "pipelines", "both ways", "recomputation"])
@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_the_best_of_every_order(kind: str, seed: int) -> None:
    problem, plan, kinds = tiny(kind, seed)
    every = list(_every_order(plan, kinds))
    values = []
    for orders in every:
        with suppress(InvalidPlan):  # rows that wait for each other in a circle
            step = simulate(problem, plan, orders)
            if all(use.memory.total <= problem.capacity_bytes(d) for d, use in step.uses.items()):
                values.append(step.time_per_global_batch_ns)
    answer = solve(Question(problem, plan, 10**6, schedule=every[0]))
    assert len(set(values)) > 1
    assert answer.proven
    assert answer.orders is not None
    assert answer.bound_ns == min(values) == makespan_ns(problem, plan, answer.orders)
    assert schedule_bound(problem, plan, every[0]).bound_ns <= min(values)


def _every_order(plan: Allocation, kinds: tuple[int, ...]) -> Iterator[Orders]:
    """Yield all rows in which alike operations run in index order."""
    rows = whole_backwards(plan).rows
    each = []
    for row in rows:
        stages = sorted({int(s) for s in row.operations[:, 1]})
        lists = [[(kinds[0], s, m) for m in plan.micro_batches(s)] for s in stages]
        lists += [[(kind, s, m) for m in plan.micro_batches(s)] for s in reversed(stages) for kind in kinds[1:]]
        each.append([as_operations(order) for order in _merged(lists, plan)])
    for chosen in product(*each):
        yield Orders("any", tuple(Row(row.devices, order) for row, order in zip(rows, chosen, strict=True)))


def _merged(lists: list[list[tuple[int, int, int]]], plan: Allocation) -> Iterator[list[tuple[int, int, int]]]:
    """Yield all merges in which a micro-batch's operations keep the order of the lists, pipeline by pipeline."""
    if not any(lists):
        yield []
    seen: set[tuple[int, int]] = set()
    for i, first in enumerate(lists):
        if first and (first[0][2], plan.pipeline_of[first[0][1]]) not in seen:
            rest = [each[1:] if k == i else each for k, each in enumerate(lists)]
            for order in _merged(rest, plan):
                yield [first[0], *order]
        seen.update((m, plan.pipeline_of[s]) for _kind, s, m in first)


def test_closing_tells_of_every_better_order_and_proves_the_last() -> None:
    forward, gradient, weight = [60, 81, 74, 93], [70, 90, 75, 99], [48, 70, 71, 60]
    backward = [i + w for i, w in zip(gradient, weight, strict=True)]
    problem = make_problem(forward, backward, weight_ns=weight, nodes=(4,), global_batch_size=6)
    plan = straight(problem, 6)
    slow = _one_at_a_time(plan)
    value = makespan_ns(problem, plan, slow)
    heard: list[int] = []

    def listen(orders: Orders, value_ns: int) -> None:
        assert makespan_ns(problem, plan, orders) == value_ns
        heard.append(value_ns)

    optimised = optimise_order(problem, plan, slow, overlap=True, value_ns=value, effort=5.0, on_better=listen)
    assert heard == sorted(heard, reverse=True)
    assert optimised.schedule is not None
    assert optimised.value_ns == heard[-1] == optimised.bound.bound_ns < value
    again = optimise_order(problem, plan, optimised.schedule, overlap=True, value_ns=optimised.value_ns, effort=5.0)
    assert again.schedule is None
    assert again.value_ns == again.bound.bound_ns == optimised.value_ns


def _one_at_a_time(plan: Allocation) -> Orders:
    rows = [[(kind, s, m) for m in range(plan.num_micro_batches) for kind in SPLIT] for s in range(len(plan.stages))]
    return Orders("slow", tuple(Row((s,), as_operations(row)) for s, row in enumerate(rows)))


@pytest.mark.parametrize("layers", [[5], [0, 0], [0, 7, 0]])
@pytest.mark.parametrize("number", [1, 3])
def test_one_stage_one_micro_batch_and_operations_without_duration(layers: list[int], number: int) -> None:
    problem = make_problem(layers, [2 * f for f in layers], weight_ns=layers, nodes=(3,), global_batch_size=number)
    plan = straight(problem, number)
    for orders in (whole_backwards(plan), _one_at_a_time(plan)):
        value = makespan_ns(problem, plan, orders)
        optimised = optimise_order(problem, plan, orders, overlap=True, value_ns=value, effort=5.0)
        assert optimised.bound.bound_ns == optimised.value_ns
        assert optimised.value_ns == max(3 * number * max(layers), 3 * sum(layers) if number == 1 else 0)


def test_nothing_fits_below_one_micro_batch() -> None:
    problem = make_problem([5, 5], stash_bytes=100, memory_bytes=99, nodes=(2,), global_batch_size=2)
    plan = straight(problem, 2)
    assert solve(Question(problem, plan, 10**6)).orders is None
    optimised = optimise_order(problem, plan, None, overlap=True, value_ns=10**6, effort=1.0)
    assert optimised.schedule is None
    assert optimised.value_ns == 10**6


@pytest.mark.parametrize("patience", [0, 2])
def test_whoever_says_stop_is_heard_in_the_middle_of_the_work(patience: int) -> None:
    """Without a stop the search would go on for hours; that a short horizon has no step proves nothing of the last."""
    draw = random.Random(1016)
    forward = [draw.randint(60, 140) for _ in range(16)]
    problem = make_problem(
        forward,
        boundary_bytes=[draw.randint(20, 120) for _ in range(15)],
        stash_bytes=10,
        count_buffers=False,
        nodes=(16,),
        memory_bytes=[10 * (16 - s) for s in range(16)],
        global_batch_size=48,
    )
    plan, calls = straight(problem, 48), count()
    bound = schedule_bound(problem, plan, whole_backwards(plan)).bound_ns
    answer = solve(Question(problem, plan, 2 * bound, bound, effort=1e6), stopped=lambda: next(calls) >= patience)
    assert not answer.proven
    assert answer.bound_ns >= bound


def test_patterns_and_averaging_pipelines_have_their_bound_and_no_order() -> None:
    problem = make_problem([5], [7], nodes=(1,), global_batch_size=2)
    plan = straight(problem, 2)
    operations = PatternOperation(FORWARD, 0, 0, 0), PatternOperation(BACKWARD, 0, 5, 0)
    pattern = Pattern("eager", 12, 1, operations)
    optimised = optimise_order(
        problem, plan, pattern, overlap=True, value_ns=30, effort=1.0, update_rule="double_buffered"
    )
    assert optimised == (None, 30, schedule_bound(problem, plan, pattern, "double_buffered"), 0.0)
