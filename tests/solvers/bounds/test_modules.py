"""Recomputed modules against bounds and proofs: every plan of tiny requests, every set of modules in every stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from brute_plans import drawn, has_plan, plans
from problems import make_problem, warmup_orders
from test_first_backward import least_ns, narrow

from penstock.solvers.bounds.feasibility import proof_of_infeasibility
from penstock.solvers.bounds.schedule_bound import MEMORY, one_pipeline_bound, request_bound
from penstock.solvers.costs.memory import fits
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Module, Modules, without_parts
from penstock.solvers.model.problem import Problem
from penstock.solvers.solve.driver import solve
from penstock.solvers.verify.verifier import verify

PARTS: tuple[Module, Module] = ("mlp", "norm")


def with_modules(problem: Problem, seed: int, parts: tuple[Module, ...] = PARTS) -> Problem:
    """Return the problem with modules that free some of each layer's stash for some of its forward."""
    draw = np.random.default_rng(seed)
    ((kind, (point,)),) = problem.measured.items()
    layers = problem.num_layers
    modules = {
        part: (
            (point.forward_ns * draw.uniform(0, 0.5, layers)).astype(np.int64),
            (point.stash_bytes * draw.uniform(0, 1 / len(parts), layers)).astype(np.int64),
        )
        for part in parts
    }
    return replace(problem, measured={kind: (replace(point, modules=modules),)}, _costs={})


def with_nested(problem: Problem, seed: int) -> Problem:
    """Return the problem with two further modules, parts of the feed-forward that can be recomputed by themselves."""
    problem = with_modules(problem, seed)
    draw = np.random.default_rng(seed + 1000)
    ((kind, (point,)),) = problem.measured.items()
    nested: dict[Module, tuple[np.ndarray, np.ndarray]] = {
        part: (
            (point.modules["mlp"][0] * draw.uniform(0, 0.5, problem.num_layers)).astype(np.int64),
            (point.modules["mlp"][1] * draw.uniform(0, 0.5, problem.num_layers)).astype(np.int64),
        )
        for part in ("moe_act", "shared_experts")
    }
    return replace(problem, measured={kind: (replace(point, modules={**point.modules, **nested}),)}, _costs={})


def best_without(problem: Problem) -> int | None:
    """Return the best time of all plans that recompute no single modules."""
    ((kind, (point,)),) = problem.measured.items()
    return least_ns(replace(problem, measured={kind: (replace(point, modules={}),)}, _costs={}))


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(("make", "step"), [(with_modules, 1), (with_nested, 2)])
def test_no_plan_with_modules_is_quicker_than_the_bounds(make: Callable[[Problem, int], Problem], step: int) -> None:
    binding = quicker = 0
    for seed in range(0, 90, step):
        problem = make(narrow(seed), seed)
        if problem.recompute != "auto":
            continue
        bound = request_bound(problem)
        if seed % 3 == 1 and bound.method != MEMORY:
            continue
        best = least_ns(problem)
        if best is None:
            continue
        assert bound.bound_ns <= best, seed
        assert one_pipeline_bound(problem).bound_ns <= best, seed
        binding += bound.method == MEMORY
        quicker += best < (best_without(problem) or best + 1)
    assert binding >= 4 // step - 1
    assert quicker >= 6 // step - 1


def test_a_part_is_not_recomputed_with_its_whole() -> None:
    problem = with_nested(replace(narrow(0), recompute="auto"), 0)
    sizes = range(1, len(problem.modules) + 1)
    sets = {each for size in sizes for each in combinations(problem.modules, size) if each == without_parts(each)}
    assert len(sets) == 2 * (1 + 4) - 1
    assert ("moe_act", "shared_experts") in sets
    assert not any("mlp" in each and len({"moe_act", "shared_experts"} & set(each)) for each in sets)
    assert sets >= set(problem.module_sets) > set()
    plan = single_pipeline((Stage(0, problem.num_layers - 1, (0,), modules=("mlp", "moe_act")),), 1)
    orders = warmup_orders(plan, [1])
    assert "of which one is a part of another" in verify(problem, plan, orders, simulate(problem, plan, orders))[0]


def test_a_plan_with_modules_refutes_every_proof_that_there_is_none() -> None:
    proven = 0
    for seed in range(0, 300, 5):
        problem = with_modules(drawn(seed), seed)
        if problem.recompute == "auto" and proof_of_infeasibility(problem) is not None:
            assert not has_plan(problem), seed
            proven += 1
    assert proven >= 5


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(8))
def test_the_search_meets_the_bounds_and_its_plans_verify(seed: int) -> None:
    problem = with_modules(narrow(2 * seed), seed)
    result = solve(replace(problem, recompute="auto"), max_plans=4, workers=1)
    if result.best is not None:
        assert all(bound.bound_ns <= result.best.value_ns for bound in result.bounds)
        again = result.best
        assert verify(problem, again.allocation, again.schedule, again.timeline, overlap=again.overlap_all_reduce) == []


def test_a_stage_with_modules_by_hand() -> None:
    """Layers of forward 10 and backward 20 keep 40 bytes; the norm takes 1 and frees 10, the mlp 4 and 20 or 25."""
    problem = make_problem(
        [10, 10], parameter_bytes=[0, 0], stash_bytes=[40, 40], workspace_bytes=[3, 5], nodes=(1,), recompute="auto"
    )
    ((kind, (point,)),) = problem.measured.items()
    modules: dict[Module, tuple[np.ndarray, np.ndarray]] = {
        "norm": (np.array([1, 1]), np.array([10, 10])),
        "mlp": (np.array([4, 4]), np.array([20, 25])),
    }
    problem = replace(problem, measured={kind: (replace(point, modules=modules),)}, _costs={})
    assert problem.module_sets == (("mlp",), ("norm",), ("mlp", "norm"))
    costs = stage_costs(problem, Stage(0, 1, (0,), modules=("mlp", "norm")), 1)
    assert (costs.forward_ns, costs.backward_ns, costs.recompute_ns) == (20, 40, 10)
    assert (costs.kept_bytes, costs.workspace_bytes) == (80 - 30 - 35, 5 + 35)
    plan = single_pipeline((Stage(0, 1, (0,), modules=("mlp", "norm")),), 4)
    orders = warmup_orders(plan, [2])
    timeline = simulate(problem, plan, orders)
    assert timeline.time_per_global_batch_ns == 4 * (20 + 40 + 10)
    # Two micro-batches are in flight when a backward begins.
    assert timeline.peak_memory_bytes == 2 * 15 + 40
    assert verify(problem, plan, orders, timeline) == []
    assert "has no such costs of" in verify(problem, _with(plan, ("attention",)), orders, timeline)[0]


def _with(plan: Allocation, modules: Modules) -> Allocation:
    stages = tuple(replace(stage, modules=modules) for stage in plan.stages)
    return single_pipeline(stages, plan.num_micro_batches)


def test_every_kind_of_listed_plan_fits_somewhere() -> None:
    """The lists of plans have plans with modules, and some of them fit where plans without recomputation do not."""
    problem = with_modules(narrow(0), 0)
    problem = replace(problem, recompute="auto")
    ways = {stage.modules for plan in plans(problem, "synchronous") for stage in plan.stages}
    assert ways == {(), *problem.module_sets}
    assert any(
        fits(problem, simulate(problem, plan, warmup_orders(plan, [1] * len(plan.stages))))
        for plan in plans(problem, "synchronous")
        if any(stage.modules for stage in plan.stages)
    )


def test_what_spares_no_work_takes_no_room() -> None:
    """A layer without a forward keeps 1,000 bytes, one of forward 10 keeps 10; two samples one after the other."""
    problem = make_problem(
        [0, 10],
        backward_ns=[20, 20],
        parameter_bytes=[0, 0],
        stash_bytes=[1000, 10],
        nodes=(1,),
        memory_bytes=1015,
        global_batch_size=2,
        recompute="auto",
    )
    plan = single_pipeline((Stage(0, 1, (0,)),), 2)
    timeline = simulate(problem, plan, warmup_orders(plan, [1]))
    assert fits(problem, timeline)
    assert request_bound(problem).bound_ns <= timeline.time_per_global_batch_ns == 100
