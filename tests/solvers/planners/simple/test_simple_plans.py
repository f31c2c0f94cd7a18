"""No planner's answer is slower than the simplest plans of its update rule, and pins get plans made for them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from problems import early_backward, make_problem

from penstock.schemas.errors import PenstockError
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.schedule import Schedule
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.simple.lines import kept_lines, simple_lines
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.solve.driver import solve
from penstock.solvers.verify.verifier import verify

pytestmark = pytest.mark.tier("ci")


def drawn(seed: int, rule: UpdateRule) -> Problem:
    """Draw 3 to 7 layers on 2 to 5 devices in one node or several, transfers and all-reduces light or heavy."""
    draw = np.random.default_rng(seed)
    layers, devices = int(draw.integers(3, 8)), int(draw.integers(2, 6))
    problem = make_problem(
        draw.integers(20, 100, layers).tolist(),
        boundary_bytes=draw.integers(1, 200, layers - 1).tolist(),
        parameter_bytes=(draw.integers(1, 30, layers) * int(draw.choice([1, 5, 20]))).tolist(),
        nodes=(devices,) if draw.random() < 0.5 else (1,) * devices,
        global_batch_size=int(draw.integers(6, 20)),
        micro_batch_sizes=(int(draw.integers(1, 4)),),
        shared=bool(draw.random() < 0.3),
    )
    return replace(problem, update_rules=frozenset({rule}))


def one_stage(problem: Problem, rule: UpdateRule, turns: bool) -> Iterator[int]:
    """Yield the times of one stage on any number of the first devices that verify, by rows and in turn."""
    (size,) = problem.micro_batch_sizes
    number = -(-problem.global_batch_size // size)
    for width in range(1, problem.num_devices + 1):
        for dispatch in ("rows", "round_robin") if turns and width > 1 else ("rows",):
            if dispatch == "rows" and problem.global_batch_size // number < width:
                continue
            stage = Stage(0, problem.num_layers - 1, tuple(range(width)), dispatch)  # type: ignore[arg-type]
            plan = single_pipeline((stage,), number)
            value = judged(problem, plan, rule, width if dispatch == "round_robin" else 1)
            if value is not None:
                yield value


def judged(problem: Problem, plan: Allocation, rule: UpdateRule, depth: int) -> int | None:
    """Return the plan's time if it verifies, else None."""
    try:
        orders: Schedule = early_backward(plan)
        if rule != "synchronous":
            orders = eager(problem, plan, update_rule=rule, depth=[depth] * len(plan.stages))
        timeline = simulate(problem, plan, orders, update_rule=rule)
    except PenstockError:
        return None
    faults = verify(problem, plan, orders, timeline, update_rule=rule)
    return None if faults else timeline.time_per_global_batch_ns


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "rule", "turns"),
    [
        ("pipedream", "weight_stashing", True),
        ("pipedream-2bw", "double_buffered", True),
        ("madpipe", "double_buffered", False),
        ("dapple", "synchronous", False),
        ("spp", "synchronous", False),
        ("relax", "synchronous", False),
        ("pipedream", "synchronous", False),
    ],
)
def test_one_stage_everywhere_is_a_candidate(name: str, rule: UpdateRule, turns: bool) -> None:
    """The plan of one stage is faster on no request, and on some it is the answer."""
    reached = 0
    for seed in range(10):
        problem = drawn(seed, rule)
        plan, least = solve(problem, name).best, min(one_stage(problem, rule, turns))
        assert plan is not None
        assert plan.value_ns <= least, seed
        reached += plan.value_ns == least
    assert reached > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["dapple", "spp", "relax", "pipedream"])
def test_even_stages_are_candidates(name: str) -> None:
    """Stages of even time on the first devices, one device each, under 1F1B."""
    seen = 0
    for seed in range(20, 28):
        problem = drawn(seed, "synchronous")
        plan = solve(problem, name).best
        assert plan is not None
        for batch in candidates(problem):
            for line in simple_lines(problem, batch, 1):
                value = judged(problem, single_pipeline(line, batch.num_micro_batches), "synchronous", 1)
                assert value is None or plan.value_ns <= value
                seen += 1
    assert seen > 15


@pytest.mark.tier("quick")
def test_simple_lines_of_four_devices() -> None:
    """One stage on 1 to 4, two stages straight and on pairs, three and four straight: one device to a layer at last."""
    problem = make_problem([10] * 4, nodes=(2, 2), global_batch_size=8, micro_batch_sizes=(8,))
    (batch,) = candidates(problem)
    shapes = [tuple(stage.replicas for stage in line) for line in simple_lines(problem, batch, 4)]
    assert shapes == [(1,), (2,), (3,), (4,), (1, 1), (2, 2), (1, 1, 1), (1, 1, 1, 1)]
    assert all(max(stage.replicas for stage in line) == 1 for line in simple_lines(problem, batch, 1))


@pytest.mark.tier("quick")
@pytest.mark.parametrize("listed", [0, 10**9])
def test_lines_are_made_for_the_pins(listed: int) -> None:
    """Listed or dealt out, each keeps the pins; one stage per pinned half on all of its devices is among them."""
    problem = make_problem([10] * 6, nodes=(4,), global_batch_size=8, micro_batch_sizes=(4,))
    problem = replace(problem, pins=(Pin(0, 2, frozenset({1, 3})), Pin(3, 5, frozenset({0, 2}))))
    (batch,) = candidates(problem)
    lines = kept_lines(problem, batch, 4, listed)
    assert len(lines) > 3
    assert all(broken_pin(problem, single_pipeline(line, batch.num_micro_batches)) is None for line in lines)
    assert [(0, 2, (1, 3)), (3, 5, (0, 2))] in [[(s.first, s.last, s.devices) for s in line] for line in lines]
    tight = replace(problem, pins=(*problem.pins, Pin(1, 4, frozenset({0, 1}))))
    assert all(broken_pin(tight, single_pipeline(line, 2)) is None for line in kept_lines(tight, batch, 4, listed))


@pytest.mark.parametrize(
    ("rule", "planner"),
    [("synchronous", "dapple"), ("synchronous", "relax"), ("weight_stashing", "pipedream")],
)
def test_a_larger_request_keeps_its_pins(rule: UpdateRule, planner: str) -> None:
    """16 devices in four nodes, three pins across nodes: too many lines to list."""
    sixteen = make_problem([10, 20] * 6, parameter_bytes=10, nodes=(4,) * 4, global_batch_size=16, boundary_bytes=1)
    pins = (Pin(0, 4, frozenset({0, 5, 9})), Pin(5, 5, frozenset({2})), Pin(8, 11, frozenset({3, 4, 12, 13})))
    problem = replace(sixteen, pins=pins, update_rules=frozenset({rule}), micro_batch_sizes=(4,))
    plan = solve(problem, planner).best
    assert plan is not None
    assert broken_pin(problem, plan.allocation) is None


def test_how_planners_run_simple_plans_travels_to_workers() -> None:
    simple = [each for planner in PLANNERS.values() for each in planner.simple]
    assert len(simple) > 9
    assert len(pickle.loads(pickle.dumps(simple))) == len(simple)
