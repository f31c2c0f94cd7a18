"""Modules instead of whole layers, on a pipeline that lacks memory: the step after the planners, planner ``even``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from problems import make_problem, warmup_orders

from penstock.solvers.costs.memory import fits
from penstock.solvers.improve.selective import lighter
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Module
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.chunked.planner import interleaved_proposals, zero_bubble_proposals
from penstock.solvers.planners.even.planner import proposals
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.support.recomputed import recomputed
from penstock.solvers.verify.verifier import verify


def four_layers(memory_bytes: int, recompute: str = "auto") -> Problem:
    """Build four alike layers on two devices, 8 samples one by one; a layer keeps 100 bytes, 12 of them its norms'."""
    problem = make_problem(
        [100] * 4,
        parameter_bytes=[0] * 4,
        boundary_bytes=[5] * 3,
        stash_bytes=[100] * 4,
        nodes=(2,),
        memory_bytes=memory_bytes,
        global_batch_size=8,
        recompute=recompute,  # type: ignore[arg-type]
    )
    ((kind, (point,)),) = problem.measured.items()
    modules: dict[Module, tuple[np.ndarray, np.ndarray]] = {
        "norm": (np.array([1] * 4), np.array([12] * 4)),
        "mlp": (np.array([70] * 4), np.array([60] * 4)),
    }
    return replace(problem, measured={kind: (replace(point, modules=modules),)}, _costs={})


def recomputing() -> Allocation:
    """Return two stages that recompute whole."""
    return single_pipeline(tuple(Stage(s, s + 1, (s // 2,), recompute=((s, s + 1),)) for s in (0, 2)), 8)


def test_each_stage_recomputes_what_it_lacks_memory_for() -> None:
    """The first stage has two micro-batches in flight, the last stage one."""
    for memory_bytes, wanted in ((450, [(), ()]), (400, [("norm",), ()]), (330, [("mlp",), ()]), (250, None)):
        problem, plan = four_layers(memory_bytes), recomputing()
        orders = recomputed(plan, warmup_orders(plan, [2, 1]))
        assert fits(problem, simulate(problem, plan, orders))
        lighter_plan = lighter(problem, plan, orders, True, lambda: False)
        if wanted is None:
            assert lighter_plan is None or makespan_ns(problem, *lighter_plan) <= makespan_ns(problem, plan, orders)
            continue
        assert lighter_plan is not None
        assert [stage.modules for stage in lighter_plan[0].stages] == wanted
        timeline = simulate(problem, *lighter_plan)
        assert verify(problem, *lighter_plan, timeline) == []
        assert timeline.time_per_global_batch_ns < makespan_ns(problem, plan, orders)


def test_nothing_is_found_where_modules_are_not_allowed_or_time_is_up() -> None:
    plan = recomputing()
    orders = recomputed(plan, warmup_orders(plan, [2, 1]))
    assert lighter(four_layers(400), plan, orders, True, lambda: True) is None
    always = four_layers(400, "always")
    assert always.module_sets == ()


def test_even_recomputes_modules_where_that_is_enough() -> None:
    all_proposals = [next(iter(proposals(Setting(four_layers(memory)), {}))) for memory in (460, 410, 290)]
    ways = [{(stage.modules, bool(stage.recompute)) for stage in each.allocation.stages} for each in all_proposals]
    assert ways[0] == {((), False)}
    assert ways[1] == {(("norm",), False)}
    assert ways[2] != ways[1]
    for each, memory in zip(all_proposals, (460, 410, 290), strict=True):
        assert each.fixed is not None
        assert fits(four_layers(memory), simulate(four_layers(memory), each.allocation, each.fixed))


def test_chunked_planners_propose_what_fits_first_and_recompute_modules() -> None:
    """Above 330 bytes the mlp is enough, which takes less time than whole layers."""
    for memory in (450, 400, 330, 250):
        problem = four_layers(memory)
        for propose, options in (
            (interleaved_proposals, {"depth": 0, "chunks": 0}),
            (zero_bubble_proposals, {"depth": 0, "shape": "all"}),
        ):
            all_proposals = list(propose(Setting(problem), options))
            plans = [(each.allocation, each.fixed) for each in all_proposals if isinstance(each.fixed, Orders)]
            assert len(plans) == len(all_proposals)
            fit = [fits(problem, simulate(problem, *plan)) for plan in plans]
            assert fit[0], f"{propose.__name__} at {memory}"
            assert not all(fit) or memory == 450
            ways = {stage.modules for stage in plans[0][0].stages}
            assert (("mlp",) in ways) == (propose is interleaved_proposals and memory >= 400)
