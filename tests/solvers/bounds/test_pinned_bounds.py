"""Bounds that pins raise: never above the best of all plans of a tiny request, listed by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from brute_plans import RULES, drawn, leanest, plans
from problems import gpipe, make_problem

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import InvalidPlan, PenstockError
from penstock.solvers.bounds.coverage import allowed, features_of, scope_of, whatever_is_pinned
from penstock.solvers.bounds.one_pipeline.confined import MOST_SETS, confined
from penstock.solvers.bounds.schedule_bound import one_pipeline_bound, request_bound
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.result import REQUEST_SCOPE, Status
from penstock.solvers.model.schedule import Schedule
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.contiguous_bound.planner import Relaxation
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.solve.driver import solve

SEEDS = range(90)
EFFORT = 2_000_000


def pinned(seed: int) -> Problem:
    """Draw 2 to 4 layers on 2 or 3 devices, half of them of two kinds, with more memory than any plan needs."""
    problem = drawn(seed)
    devices = tuple(
        replace(device, memory_bytes=10**9, kind="quick" if seed % 2 and d % 2 else device.kind)
        for d, device in enumerate(problem.devices)
    )
    source, _speed = problem.kind_source[problem.devices[0].kind]
    kinds = problem.kind_source | {"quick": (source, 1.7)}
    rules = frozenset({"synchronous"} if seed % 3 else {RULES[seed % len(RULES)]})
    return replace(problem, devices=devices, kind_source=kinds, update_rules=rules, recompute="never", _costs={})


def times(problem: Problem, rule: UpdateRule) -> Iterator[int]:
    """Yield the times of every allocation that keeps the pins, with one, some and all micro-batches in flight."""
    for allocation in plans(problem, rule):
        for schedule in _schedules(problem, allocation, rule):
            with suppress(InvalidPlan):  # more replicas in turn than micro-batches of an update
                yield makespan_ns(problem, allocation, schedule, update_rule=rule)


def _schedules(problem: Problem, allocation: Allocation, rule: UpdateRule) -> Iterator[Schedule]:
    try:
        yield leanest(problem, allocation, rule)
    except PenstockError:  # fewer micro-batches than places
        return
    if rule == "synchronous":
        count, number = len(allocation.stages), allocation.num_micro_batches
        yield gpipe(allocation)
        yield early_backward(problem, allocation, warmup=tuple(min(number, count - s) for s in range(count)))


@pytest.mark.tier("nightly")
def test_no_plan_that_keeps_the_pins_is_below_a_bound() -> None:
    seen = higher = narrower = relaxed = 0
    for seed in SEEDS:
        problem = pinned(seed)
        rule = next(iter(problem.update_rules))
        best = min(times(problem, rule), default=None) if problem.pins else None
        if best is None:
            continue
        seen += 1
        free = replace(problem, pins=())
        bound = request_bound(problem).bound_ns
        assert request_bound(free).bound_ns <= bound <= best, seed
        higher += request_bound(free).bound_ns < bound
        if rule == "synchronous":
            assert bound <= one_pipeline_bound(problem).bound_ns <= best, seed
            narrower += one_pipeline_bound(free).bound_ns < one_pipeline_bound(problem).bound_ns
            if seed % 6 == 2:
                pinned_search, loose = Relaxation(problem, EFFORT), Relaxation(free, EFFORT)
                list(pinned_search.run()), list(loose.run())
                assert pinned_search.bound_ns <= best, seed
                relaxed += loose.bound_ns < pinned_search.bound_ns
    assert seen > 45
    assert higher > 20
    assert narrower > 15
    assert relaxed > 3


def test_what_pinned_devices_have_to_do() -> None:
    """Layers 1 and 2 on devices 1 and 2 alone: (20 + 30) × 4 on two devices, behind layer 0 and before it."""
    problem = make_problem([5, 10, 15, 5], [5, 10, 15, 5], boundary_bytes=0, nodes=(4,), global_batch_size=4)
    problem = replace(problem, pins=(Pin(1, 2, frozenset({1, 2})),))
    assert request_bound(replace(problem, pins=())).bound_ns == 4 * 70 // 4
    assert request_bound(problem).bound_ns == 5 + 4 * 50 // 2
    assert one_pipeline_bound(problem).bound_ns >= 5 + 4 * 50 // 2 + 5
    without_flush = replace(problem, update_rules=frozenset({"weight_stashing"}))
    assert request_bound(without_flush).bound_ns == 4 * 50 // 2


def test_a_block_that_cannot_be_cut_is_confined_as_a_whole() -> None:
    problem = make_problem([10] * 4, boundary_bytes=0, nodes=(4,), cuttable=[True, False, True])
    problem = replace(problem, pins=(Pin(1, 1, frozenset({0, 1})), Pin(3, 3, frozenset({1, 2}))))
    assert [(sorted(each.devices), each.layers) for each in confined(problem)] == [
        ([0, 1, 2, 3], (0, 1, 2, 3)),
        ([0, 1], (1, 2)),
        ([1, 2], (3,)),
        ([0, 1, 2], (1, 2, 3)),
    ]


def test_many_pins_make_few_sets() -> None:
    problem = make_problem([10] * 30, boundary_bytes=0, nodes=(30,))
    problem = replace(problem, pins=tuple(Pin(at, at, frozenset({at, (at + 7) % 30})) for at in range(30)))
    assert len(confined(problem)) <= MOST_SETS + 1
    assert request_bound(problem).bound_ns >= request_bound(replace(problem, pins=())).bound_ns


@pytest.mark.tier("ci")
@pytest.mark.parametrize("rule", ["synchronous", "weight_stashing"])
def test_one_pinned_device_is_the_bound_of_every_plan(rule: UpdateRule) -> None:
    """All layers on one of two devices: its plan is optimal, and the bound covers all plans that the request allows."""
    problem = make_problem([10, 10], boundary_bytes=0, nodes=(1, 1), global_batch_size=4)
    problem = replace(problem, pins=(Pin(0, 1, frozenset({1})),), update_rules=frozenset({rule}))
    planner = "relax" if rule == "synchronous" else "pipedream"
    result = solve(problem, planner)
    assert result.best is not None
    assert result.status is Status.OPTIMAL
    assert {stage.devices for stage in result.best.allocation.stages} == {(1,)}
    assert result.bounds[0].scope == REQUEST_SCOPE
    assert result.bounds[0].method.startswith("load: layers at their cheapest")


def test_a_pinned_bound_does_not_cover_plans_that_break_the_pins() -> None:
    problem = make_problem([10, 10], boundary_bytes=0, nodes=(2,), global_batch_size=4)
    problem = replace(problem, pins=(Pin(0, 0, frozenset({1})),))
    bound = request_bound(problem)
    kept = single_pipeline((Stage(0, 0, (1,)), Stage(1, 1, (0,))), 4)
    broken = single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1,))), 4)
    features = [features_of(problem, plan, gpipe(plan)) for plan in (kept, broken)]
    assert [each <= bound.covers for each in features] == [True, False]
    assert [each <= whatever_is_pinned(bound).covers for each in features] == [True, True]
    assert features[0] <= allowed(problem) <= bound.covers
    assert not features[1] <= allowed(problem)
    assert scope_of(problem, bound.covers) == REQUEST_SCOPE
    assert Covers(pins=frozenset({"kept"})) == Covers()
