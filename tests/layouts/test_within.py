"""Plans within a trainer's limits: the planner against every plan there is, and the limits against hand-made plans."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from problems import make_problem

import penstock
from penstock.convert.layer_roles import roles_of
from penstock.convert.trainers import MODULES, TRAINERS, within_of
from penstock.examples import catalogue
from penstock.layouts.limits import faults, order_name, recomputing_of
from penstock.planning.judge import judge
from penstock.questions.solve import solve
from penstock.schemas.errors import InvalidDocument, InvalidPlan, UnsupportedRequest
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.coverage import features_of_candidate
from penstock.solvers.bounds.trainer import within_bounds
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Module
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, JudgedPlan
from penstock.solvers.model.trainer_limits import Span, Within
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.trainer_orders import order_of
from penstock.solvers.solve import driver


def limits(trainer: str, layers: int) -> Within:
    """Return the limits of a trainer for a chain whose first and last layers are embedding and head."""
    one = TRAINERS[trainer]
    span = Span(1, layers - 2) if one.needs_roles else Span(0, layers - 1)
    return Within(trainer, tuple(one.orders), one.rounds, one.recompute, one.at_once, span, (True,) * (layers - 1))


def every_plan(problem: Problem, within: Within) -> Iterator[JudgedPlan]:
    """Yield all plans that fit and keep the limits, by plain enumeration."""
    layers, devices = problem.num_layers, range(problem.num_devices)
    for used in range(1, problem.num_devices + 1):
        for world in permutations(devices, used):
            for ranks in (r for r in range(1, used + 1) if used % r == 0):
                per = used // ranks
                for parts in (ranks * chunks for chunks in range(1, layers // ranks + 1)):
                    for cuts in combinations(range(1, layers), parts - 1):
                        for number in range(1, problem.global_batch_size + 1):
                            spans = list(pairwise([0, *cuts, layers]))
                            loop = [s % ranks for s in range(parts)]
                            ways = [loop, [*range(ranks), *reversed(range(ranks))]] if parts == 2 * ranks else [loop]
                            for rank_of in ways:
                                rank_devices = [world[r * per : (r + 1) * per] for r in rank_of]
                                plain = tuple(Stage(a, b - 1, d) for (a, b), d in zip(spans, rank_devices, strict=True))
                                yield from _plans(problem, within, plain, number)


def _plans(problem: Problem, within: Within, plain: tuple[Stage, ...], number: int) -> Iterator[JudgedPlan]:
    methods = {"never": ("none",), "always": ("uniform",)}.get(problem.recompute)
    ways = [how for how in within.ways(plain) if methods is None or how.method in methods]
    again = [tuple(replace(stage, recompute=within.segments(stage, how)) for stage in plain) for how in ways]
    again += [tuple(replace(stage, modules=modules) for stage in plain) for modules in problem.module_sets]
    for name in within.schedules:
        for stages in again:
            allocation = single_pipeline(stages, number)
            try:
                ranks = len({stage.devices for stage in plain})
                orders = order_of(problem, allocation, name, within.group(ranks, number))
            except (UnsupportedRequest, InvalidPlan):
                continue
            if faults(problem, allocation, orders, within):
                continue
            timeline = simulate(problem, allocation, orders)
            if largest_shortage(problem, allocation, timeline) is None:
                yield JudgedPlan.of("all", allocation, orders, timeline)


def with_modules(problem: Problem, names: Sequence[Module]) -> Problem:
    """Return the problem with modules, each of which frees some of each layer's stash for some of its forward."""
    kind, (point,) = next(iter(problem.measured.items()))
    modules = {
        name: (point.forward_ns // (4 - number), point.stash_bytes * (1 + number) // 3)
        for number, name in enumerate(names)
    }
    return replace(problem, measured={kind: (replace(point, modules=modules),)}, _costs={})


def test_a_plan_that_recomputes_modules_may_be_the_best_within_a_target() -> None:
    """Four layers keep 120 of 100 bytes: all of them again take 48 longer for a sample, their ``operators`` 12."""
    plain = make_problem([12] * 4, stash_bytes=30, nodes=(1,), global_batch_size=2, memory_bytes=100, recompute="auto")
    problem = replace(with_modules(plain, ["operators"]), within=limits("torchtitan", 4))
    best = driver.solve(problem, "auto", workers=1).best
    without = driver.solve(replace(plain, within=problem.within), "auto", workers=1).best
    assert best is not None
    assert without is not None
    assert best.allocation.stages[0].modules == ("operators",)
    assert best.value_ns == without.value_ns - 2 * (48 - 12)


@pytest.mark.cases(2)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@settings(max_examples=3, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_uniform_finds_the_best_of_all_plans_within(trainer: str, data: st.DataObject) -> None:
    times = data.draw(st.lists(st.integers(1, 50), min_size=3, max_size=4))
    problem = make_problem(
        times,
        boundary_bytes=data.draw(st.integers(0, 20)),
        parameter_bytes=data.draw(st.integers(0, 60)),
        stash_bytes=data.draw(st.integers(0, 40)),
        nodes=data.draw(st.sampled_from([(2,), (3,), (1, 2)])),
        global_batch_size=data.draw(st.sampled_from([2, 3, 4])),
        micro_batch_sizes=(),
        between_bytes_per_s=data.draw(st.sampled_from([10**8, 10**9])),
        memory_bytes=data.draw(st.sampled_from([250, 500, 2**40])),
        recompute=data.draw(st.sampled_from(["never", "auto", "always"])),
        shared=data.draw(st.booleans()),
    )
    if data.draw(st.booleans()):
        problem = with_modules(
            problem, [each for each in ("norm", "mlp", "operators") if each in MODULES.get(trainer, {})]
        )
    within = limits(trainer, len(times))
    plans = list(every_plan(problem, within))
    best = min((each.value_ns for each in plans), default=None)
    limited = replace(problem, within=within)
    for bound in within_bounds(limited):
        covered = [plan for plan in plans if features_of_candidate(limited, plan) <= bound.covers]
        assert all(bound.bound_ns <= plan.value_ns for plan in covered), bound
        assert bound.scope != REQUEST_SCOPE or covered == plans
    result = driver.solve(replace(problem, within=within), "uniform")
    assert (None if result.best is None else result.best.value_ns) == best
    if result.best is not None:
        assert faults(problem, result.best.allocation, result.best.schedule, within) == []
        assert all(bound.bound_ns <= result.best.value_ns for bound in result.bounds)


@pytest.mark.tier("ci")
def test_auto_with_a_target_is_never_better_than_without() -> None:
    problem = make_problem([3, 9, 4, 8, 2], boundary_bytes=2, parameter_bytes=9, nodes=(2, 1), micro_batch_sizes=())
    free = driver.solve(problem, "auto", workers=1)
    kept = driver.solve(replace(problem, within=limits("megatron", 5)), "auto", workers=1)
    assert free.best is not None
    assert kept.best is not None
    assert free.best.value_ns <= kept.best.value_ns
    assert kept.best.value_ns == driver.solve(replace(problem, within=limits("megatron", 5)), "uniform").best.value_ns  # type: ignore[union-attr]
    assert max(bound.bound_ns for bound in kept.bounds) <= kept.best.value_ns


def plan_of(*stages: tuple[int, int, tuple[int, ...]], number: int = 4, recompute: tuple = ()) -> Allocation:  # type: ignore[type-arg]
    plain = [Stage(first, last, devices) for first, last, devices in stages]
    for s, segments in enumerate(recompute):
        plain[s] = replace(plain[s], recompute=segments)
    return single_pipeline(tuple(plain), number)


PROBLEM = make_problem([1] * 6, nodes=(2, 2), global_batch_size=8, micro_batch_sizes=())


def test_a_plan_that_recomputes_modules_is_one_of_its_targets_plans() -> None:
    """What was proven of all plans within the target's limits is proven of it: it verifies."""
    options = {"target": "torchtitan", "planner": "uniform", "sharding": "parameters"}
    file = penstock.plan("llama-3-8b", "1x8xH100", global_batch_size=64, **options).file
    (stage,) = file.plan.pipelines[0].stages
    assert stage.recompute.modules == ("operators",)
    assert judge(file).faults == ()


@pytest.mark.parametrize(
    ("trainer", "allocation", "words"),
    [
        ("megatron", plan_of((0, 2, (0, 1)), (3, 5, (2, 3))), None),
        ("deepspeed", plan_of((0, 5, (0, 1, 2, 3)), number=2), None),
        ("megatron", plan_of((0, 2, (2, 3)), (3, 5, (0, 1))), None),
        ("megatron", plan_of((0, 2, (0, 1)), (3, 5, (2,))), r"stage 1 \(layers 3–5.* has 1 replica, stage 0 2"),
        ("megatron", plan_of((0, 2, (1, 0)), (3, 5, (2, 3))), "'n0' are not neighbours"),
        ("megatron", plan_of((0, 2, (0, 2)), (3, 5, (1, 3))), "'n0' are not neighbours"),
        ("megatron", plan_of((0, 2, (0,)), (3, 5, (2,)), number=3), "8 samples in 3 micro-batches .* not even"),
        ("deepspeed", plan_of((0, 1, (0,)), (2, 3, (1,)), (4, 4, (0,)), (5, 5, (1,))), "none of those"),
        ("megatron", plan_of((0, 1, (0,)), (2, 3, (1,)), (4, 4, (1,)), (5, 5, (0,))), "stage 2 is not on the devices"),
        ("megatron", plan_of((0, 2, (0, 1)), (3, 5, (2, 3)), recompute=(((1, 1),), ((3, 3),))), None),
        ("torchtitan", plan_of((0, 2, (0, 1)), (3, 5, (2, 3)), recompute=(((1, 1),), ((3, 3),))), "recomputes layers"),
        ("megatron", plan_of((0, 2, (0, 1)), (3, 5, (2, 3)), recompute=(((0, 2),),)), "recomputes layers 0–2"),
    ],
)  # fmt: skip
def test_limits_say_which_stage_and_why(trainer: str, allocation: Allocation, words: str | None) -> None:
    within = limits(trainer, 6)
    looped = len({stage.devices for stage in allocation.stages}) < len(allocation.stages)
    v_shaped = looped and allocation.stages[2].devices != allocation.stages[0].devices
    orders = order_of(PROBLEM, allocation, "interleaved") if looped and not v_shaped else None
    if orders is None:
        orders = order_of(PROBLEM, plan_of((0, 2, (0,)), (3, 5, (1,))) if v_shaped else allocation, "early-backward")
    sentences = faults(PROBLEM, allocation, orders, within)
    if words is None:
        assert sentences == []
    else:
        assert sentences
        assert re.search(words, sentences[0]), sentences


def test_other_warm_ups_are_not_the_trainers() -> None:
    within = limits("megatron", 6)
    allocation = plan_of((0, 2, (0, 1)), (3, 5, (2, 3)))
    eager = early_backward(PROBLEM, allocation, warmup=[3, 1])
    assert "none of those that megatron runs" in faults(PROBLEM, allocation, eager, within)[0]
    assert order_name(allocation, order_of(PROBLEM, allocation, "gpipe"), limits("torchtitan", 6)) == ("gpipe", 2)


def test_every_way_of_recomputing_is_read_back() -> None:
    allocation = plan_of((0, 2, (0,)), (3, 5, (1,)))
    for trainer in TRAINERS:
        within = limits(trainer, 6)
        for how in within.ways(allocation.stages):
            stages = tuple(replace(stage, recompute=within.segments(stage, how)) for stage in allocation.stages)
            read = recomputing_of(stages, within)
            assert read is not None
            assert [within.segments(stage, read) for stage in stages] == [stage.recompute for stage in stages]


def test_roles_come_from_names_or_are_told() -> None:
    llama = catalogue.profile("llama-3-8b")
    roles = roles_of(llama)
    assert roles is not None
    assert (roles.first, roles.last, roles.number) == (1, 32, 32)
    assert roles_of(catalogue.profile("resnet-50")) is None
    assert roles_of(catalogue.profile("resnet-50"), "1-30") is not None
    for wrong in ("0-3", "5-2", "1-33", "1", "a-b", "1-99999999999"):
        with pytest.raises(InvalidDocument, match="not a range of transformer layers"):
            roles_of(llama, wrong)
    with pytest.raises(UnsupportedRequest, match="do not say which"):
        within_of("megatron", catalogue.profile("resnet-50"))


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"planner": "dapple"}, "'dapple' cannot plan for the target megatron; 'auto' or 'uniform' can"),
        ({"schedule": "gpipe"}, "megatron has no schedule 'gpipe'; it runs early-backward"),
        ({"update_rules": ["weight_stashing"]}, "megatron updates synchronously"),
        ({"target": None, "options": {"transformer": "1-3"}}, "the request has no target"),
        ({"target": None, "planner": "uniform"}, "the request names no target"),
        ({"options": {"transformer": "0-3"}}, "not a range of transformer layers"),
    ],
)
def test_requests_beyond_the_limits_are_refused(changes: dict[str, object], words: str) -> None:
    fields: dict[str, object] = {
        "schema_version": 1,
        "profile": catalogue.profile("gpt").model_dump(mode="json"),
        "topology": catalogue.cluster("1x2xV100").model_dump(mode="json"),
        "global_batch_size": 4,
        "target": "megatron",
    }
    with pytest.raises((UnsupportedRequest, InvalidDocument), match=words):
        solve(PlanRequest.parse(fields | changes), workers=1)
