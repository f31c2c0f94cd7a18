"""The bound for many devices: never above a plan of stages apart, neither random ones nor any planner's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from drawn_problems import random_request
from lean_plans import Lean, lean_plans, unlike_plans
from problems import make_problem
from random_plans import random_allocation, random_orders, random_problem

from penstock.schemas.coverage import ranges_of
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.coverage import features_of_candidate, stages_apart
from penstock.solvers.bounds.device_count import count
from penstock.solvers.bounds.device_count.bound import bounds
from penstock.solvers.bounds.device_count.count import Count
from penstock.solvers.bounds.device_count.device_classes import MOST, DeviceClass, device_classes
from penstock.solvers.bounds.device_count.stage_runs import Runs, runs_within
from penstock.solvers.bounds.device_count.transfers import transfers_of
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.costs.memory import free_bytes, largest_shortage
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch, batch_of, candidates
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, JudgedPlan
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.judging import Judge

PLANNED = ("dapple", "spp", "spread", "gpipe")


def bound_of(problem: Problem) -> Bound:
    """Return the bound, without any earlier bound."""
    return bounds(problem, 1, lambda _: None)


def number_of(problem: Problem, allocation: Allocation) -> Batch:
    """Return the plan's number of micro-batches, in the form of the bound's candidates."""
    number = allocation.num_micro_batches
    batch = problem.global_batch_size
    return Batch(number, -(-batch // number), batch // number)


def apart(rng: random.Random, problem: Problem) -> Allocation:
    """Draw stages on separate devices that split micro-batches, each recomputing whole or not at all."""
    drawn = random_allocation(rng, problem)
    free = list(range(problem.num_devices))
    rng.shuffle(free)
    stages: list[Stage] = []
    for stage in drawn.stages:
        size = min(stage.replicas, len(free))
        if size == 0:
            stages[-1] = replace(stages[-1], last=stage.last, recompute=())
            continue
        devices, free = tuple(free[:size]), free[size:]
        again = ((stage.first, stage.last),) if rng.random() < 0.3 else ()
        stages.append(Stage(stage.first, stage.last, devices, "rows", again))
    return single_pipeline(tuple(stages), drawn.num_micro_batches)


@pytest.mark.cases(2)
@pytest.mark.parametrize("block", range(3))
def test_never_above_random_plans(block: int) -> None:
    """Plans in any order that runs, recomputing within the backwards or apart, with no more memory than they take."""
    seen = 0
    for seed in range(80 * block, 80 * block + 80):
        rng = random.Random(seed)
        drawn = random_problem(rng) if seed % 2 else random_request(seed, 6, 4)
        problem = replace(drawn, recompute="auto", min_slice=1, cuttable=np.ones(drawn.num_layers - 1, dtype=bool))
        for _ in range(2):
            allocation = apart(rng, problem)
            orders = random_orders(rng, allocation)
            timeline = simulate(problem, allocation, orders)
            plan = JudgedPlan.of("random", allocation, orders, timeline)
            numbers = ranges_of([allocation.num_micro_batches])
            if features_of_candidate(problem, plan) <= replace(stages_apart(problem), micro_batches=numbers):
                seen += 1
                most = max(use.memory.total for use in timeline.uses.values())
                full = tuple(replace(device, memory_bytes=most) for device in problem.devices)
                tight = replace(problem, devices=full, memory=replace(problem.memory, headroom_bytes=0))
                assert largest_shortage(tight, allocation, timeline) is None
                beaten = Count(tight, number_of(problem, allocation), plan.value_ns + 1)
                assert not beaten.refuted(), seed
    assert seen > 40


def proven(drawn: Callable[[int], Iterable[Lean]], seeds: range) -> tuple[int, int, int]:
    """Count the plans, the plans that are proven fastest, and the plans that are proven to a tenth.

    No bound is above its plan.
    """
    seen = equal = near = 0
    for seed in seeds:
        for plan in drawn(seed):
            batch = number_of(plan.problem, plan.allocation)
            assert not Count(plan.problem, batch, plan.value_ns + 1).refuted(), seed
            seen += 1
            equal += Count(plan.problem, batch, plan.value_ns).refuted()
            near += Count(plan.problem, batch, plan.value_ns * 9 // 10).refuted()
    return seen, equal, near


@pytest.mark.cases(1)
@pytest.mark.parametrize("block", range(4))
def test_never_above_the_quickest_orders_in_their_memory(block: int) -> None:
    """Stages of which some recompute, in exactly the memory and on exactly the devices that they take.

    The orders come near the bound: some are proven fastest.
    """
    seen, equal, near = proven(lean_plans, range(60 * block, 60 * block + 60))
    assert seen > 80
    assert near > seen // 8
    assert equal > 2


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("block", range(4))
def test_never_above_plans_on_unlike_devices(block: int) -> None:
    """Devices of two speeds with just the memory that each needs, and links as slow as layers in every mode."""
    seen, equal, near = proven(unlike_plans, range(50 * block, 50 * block + 50))
    assert seen > 70
    assert near > seen // 16
    assert equal > 0


@pytest.mark.parametrize("block", range(2))
def test_no_round_trip_between_stages_is_shorter(block: int) -> None:
    """The smaller micro-batch's round trip between any two stages of random plans, in all modes and networks."""
    seen = sharp = 0
    for seed in range(100 * block, 100 * block + 100):
        rng = random.Random(seed)
        drawn = random_problem(rng) if seed % 2 else random_request(seed, 6, 4)
        allocation = apart(rng, replace(drawn, cuttable=np.ones(drawn.num_layers - 1, dtype=bool)))
        batch = number_of(drawn, allocation)
        for s, stage in enumerate(allocation.stages[:-1]):
            least = transfers_of(drawn).round_trip_ns(batch, stage.replicas, stage.replicas)[stage.last + 1]
            out, back = (transfer(drawn, allocation, s + way, batch.least_rows, way) for way in (0, 1))
            round_trip_ns = sum(0 if each is None else each.duration_ns for each in (out, back))
            assert least <= round_trip_ns, seed
            seen += 1
            sharp += least > round_trip_ns // 2
    assert seen > 60
    assert sharp > seen // 4


def _too_high(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Insert a fault into the costs of stages, or into the devices."""

    def faulty(problem: Problem, batch: Batch, time_ns: int, classes: list[DeviceClass]) -> Runs:
        runs = runs_within(problem, batch, time_ns, classes)
        if fault == "rebuilt too large":
            return runs._replace(rebuilt=4 * runs.rebuilt)
        if fault == "one less in flight":
            return runs._replace(limit=np.maximum(1, runs.limit - 1))
        if fault == "transfers twice":
            return runs._replace(sent_ns=2 * runs.sent_ns)
        return runs._replace(work_ns=runs.work_ns + runs.again_ns * (fault == "recomputed twice"))

    def classes(problem: Problem) -> list[DeviceClass]:
        groups = device_classes(problem)
        if fault == "slowest kind" and problem.num_devices > 1:
            kinds = [each.kinds for each in groups if "slow" in each.kinds] or [groups[0].kinds]
            return [each._replace(kinds=kinds[0]) for each in groups]
        if fault == "one device missing":
            return [*groups[:-1], groups[-1]._replace(devices=groups[-1].devices - 1)]
        return groups

    monkeypatch.setattr(count, "runs_within", faulty)
    monkeypatch.setattr(count, "device_classes", classes)


@pytest.mark.cases(2)
@pytest.mark.parametrize("fault", ["slowest kind", "one device missing", "transfers twice"])
def test_a_fault_in_unlike_devices_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests notice where a fast device counts as slow, a class has too few devices, or bytes travel twice."""
    _too_high(monkeypatch, fault)
    assert any(
        Count(plan.problem, number_of(plan.problem, plan.allocation), plan.value_ns + 1).refuted()
        for seed in range(50)
        for plan in unlike_plans(seed)
    )


@pytest.mark.parametrize(
    ("fault", "seeds"),
    [("rebuilt too large", range(226, 232)), ("one less in flight", range(8, 16)), ("recomputed twice", range(56, 64))],
)
def test_a_seeded_fault_is_found(fault: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above notice where a stage may hold less, rebuild less ahead or has to work longer."""
    _too_high(monkeypatch, fault)
    refutation = any(
        Count(plan.problem, number_of(plan.problem, plan.allocation), plan.value_ns + 1).refuted()
        for seed in seeds
        for plan in lean_plans(seed)
    )
    assert refutation


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(70_000, 70_012))
def test_never_above_planners_plans(seed: int) -> None:
    """Small requests with every kind of memory, network and batch."""
    problem = random_request(seed, 6, 4)
    proven = bound_of(problem)
    compared = 0
    for name in PLANNED:
        judge = Judge(Setting(problem, max_plans=12))
        entry = PLANNERS[name]
        assert entry.proposals is not None
        try:
            judge.judge_all(name, entry.proposals(judge.setting, entry.check(problem.update_rules, "auto", {})))
        except UnsupportedRequest:
            continue
        if judge.best is not None and features_of_candidate(problem, judge.best) <= proven.covers:
            assert proven.bound_ns <= judge.best.value_ns, name
            compared += 1
    assert compared >= 2


def test_even_stages_reach_it() -> None:
    """Eight equal layers on eight devices without transfers: one stage each takes (M + S - 1) (F + B)."""
    plain = make_problem([10] * 8, [20] * 8, [0] * 7, [0] * 8, global_batch_size=4, micro_batch_sizes=(1,))
    plain = replace(plain, devices=tuple(replace(plain.devices[0], name=f"d{i}", node=i) for i in range(8)))
    assert bound_of(plain).bound_ns >= request_bound(plain).bound_ns
    assert Count(plain, batch_of(plain, 1), (4 + 7) * 30).refuted()
    assert not Count(plain, batch_of(plain, 1), (4 + 7) * 30 + 1).refuted()


def test_every_better_bound_is_told_in_order() -> None:
    """The reported bounds rise to the returned one."""
    problem = random_request(3, 6, 4)
    reports: list[int] = []
    result = bounds(problem, 1, lambda bound: reports.append(bound.bound_ns))
    assert reports == sorted(reports)
    assert reports[-1] == result.bound_ns
    assert all(str(batch.num_micro_batches) in result.model for batch in candidates(problem))


def test_where_no_plan_is_possible_it_ends() -> None:
    """No micro-batch feeds a replica, or nothing fits: the result is the earlier bound, or more."""
    unfed = make_problem([1] * 3, nodes=(8,), global_batch_size=3, micro_batch_sizes=(1,), min_slice=2)
    assert bound_of(unfed).bound_ns == 1
    poor = make_problem([1] * 3, nodes=(8,), global_batch_size=3, parameter_bytes=1000, memory_bytes=10)
    assert 1 <= bound_of(poor).bound_ns < 100
    # One number of micro-batches fits and the other does not: the bound belongs to the one that fits.
    mixed = make_problem([4], [8], nodes=(1,), stash_bytes=10, global_batch_size=4, memory_bytes=15)
    both, one = replace(mixed, micro_batch_sizes=(1, 4)), replace(mixed, micro_batch_sizes=(1,))
    assert bound_of(both).bound_ns == bound_of(one).bound_ns > 40


def _halves(kinds: tuple[str, str] = ("cpu", "cpu"), memory: tuple[int, int] = (10**6, 10**6)) -> Problem:
    """Build twelve equal layers on six devices of each of two halves, whose links take no time."""
    return make_problem(
        [10] * 12,
        [20] * 12,
        parameter_bytes=100,
        stash_bytes=10,
        nodes=(1,) * 12,
        kinds=[kinds[0]] * 6 + [kinds[1]] * 6,
        speed={"slow": 0.25},
        memory_bytes=[memory[0]] * 6 + [memory[1]] * 6,
        global_batch_size=40,
        micro_batch_sizes=(1,),
    )


def test_what_small_devices_cannot_hold_the_others_must() -> None:
    """Half of the devices hold no layer; a time that the other half alone cannot reach is refuted."""
    halves = _halves(memory=(10**6, 150))
    assert bound_of(halves).bound_ns > 1.7 * bound_of(_halves()).bound_ns
    alone = make_problem([10] * 12, [20] * 12, nodes=(1,) * 6, global_batch_size=40)
    assert Count(halves, batch_of(halves, 1), bound_of(alone).bound_ns).refuted()


def test_slow_devices_count_for_what_they_do() -> None:
    """Six devices at a fourth of the speed are worth a device and a half, not six."""
    quick, mixed = bound_of(_halves()).bound_ns, bound_of(_halves(kinds=("cpu", "slow"))).bound_ns
    slow = bound_of(_halves(kinds=("slow", "slow"))).bound_ns
    assert 1.3 * quick < mixed < slow


def test_many_classes_are_joined_to_no_plans_harm() -> None:
    """A few of twelve sizes of memory remain, none with less than any of its devices; each device is in one."""
    problem = _halves()
    unlike = tuple(replace(device, memory_bytes=1000 * (1 + d)) for d, device in enumerate(problem.devices))
    groups = device_classes(replace(problem, devices=unlike))
    assert len(groups) == MOST
    assert sum(each.devices for each in groups) == 12
    largest = sorted((free_bytes(replace(problem, devices=unlike), (d,)) for d in range(12)), reverse=True)
    sizes = [size for each in groups for size in [each.free_bytes] * each.devices]
    assert all(size >= need for size, need in zip(sorted(sizes, reverse=True), largest, strict=True))
