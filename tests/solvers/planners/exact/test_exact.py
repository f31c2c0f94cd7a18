"""``exact`` against every configuration optimised by CP-SAT, its proofs, its refusals; and ``auto`` without it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from drawn_problems import instance
from problems import make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.shortages import surely_fits
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.improve.order import optimise_order
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Pin
from penstock.solvers.model.result import CLASS_SCOPE, Result, Status
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.exact import joint, planner
from penstock.solvers.planners.exact.joint import BestFirstSearch
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.support.fitting_orders import best_order
from penstock.solvers.solve.driver import solve

pytestmark = pytest.mark.tier("ci")

ONE_PIPELINE = "exact,chimera,even,hetpipe,interleaved,zero-bubble"
"""Planners that ``auto`` leaves out here, to look for plans of the kind that ``exact`` lists without its help."""


def proven(result: Result) -> bool:
    """Return whether no contiguous plan is better than the best plan of the result."""
    return result.best is not None and result.best.value_ns == result.bounds[-2].bound_ns


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_that_of_every_configuration(seed: int) -> None:
    """All 111 configurations of six reduced instances, each ordered by CP-SAT under the simulator's rules."""
    problem = instance(seed, 5, 2 + seed % 3)
    space = Space.of(problem)
    values = []
    for stages in range(1, space.most_stages + 1):
        for placement in space.placements(stages):
            for firsts in space.partitions(stages):
                plan = space.allocation(space.batches[0], firsts, placement)
                first = best_order(problem, plan, 2**60).plan
                assert first is not None
                optimised = optimise_order(
                    problem, plan, first.orders, overlap=False, value_ns=first.value_ns, effort=20.0
                )
                assert optimised.bound.bound_ns >= optimised.value_ns
                values.append(optimised.value_ns)
    assert len(values) == space.count() == 111
    result = solve(problem, "exact")
    assert result.best is not None
    assert result.best.value_ns == result.bounds[-2].bound_ns == min(values)


@pytest.mark.cases(2)
@pytest.mark.parametrize("number", [4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_twelve_layers_on_four_devices_are_proven(seed: int, number: int) -> None:
    result = solve(instance(seed, 12, number), "exact")
    assert result.best is not None
    bound = result.bounds[-2]
    assert bound.bound_ns == result.best.value_ns
    assert bound.scope == CLASS_SCOPE
    assert f"{number} micro-batches" in bound.model
    without = solve(instance(seed, 12, number), "auto", options={"exclude": ONE_PIPELINE})
    assert without.best is not None
    assert result.best.value_ns <= without.best.value_ns <= 1.03 * result.best.value_ns


CHANGES: list[dict[str, Any]] = [
    {"shared": True},
    {"shared": True, "transfer": "nic", "form": "bus", "full_duplex": False},
    {"channel": "full", "overlap_all_reduce": True, "bucket_bytes": 500_000},
    {"channel": "none", "micro_batch_sizes": (12, 8, 5)},
    {"recompute": "auto", "stash_bytes": 10**6, "memory_bytes": 32_000_000},
    {"recompute": "always", "stash_bytes": 10**6, "memory_bytes": 40_000_000},
    {"stash_bytes": 10**6, "memory_bytes": 80_000_000},
    {"kinds": ["fast", "fast", "cpu", "cpu"], "speed": {"fast": 2.0}},
    {"cuttable": [True, False, False, True, True, False, True]},
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: " ".join(changes))
@pytest.mark.parametrize("seed", [0, 1])
def test_proofs_hold_for_what_other_planners_find(seed: int, changes: dict[str, Any]) -> None:
    """No plan of one contiguous pipeline by rows, by any planner, is below the proven bound."""
    problem = instance(seed, 8, 4, **changes)
    result = solve(problem, "exact")
    bound = 2**62 if result.best is None else result.bounds[-2].bound_ns
    for name in ("dp", "gpipe", "dapple", "auto"):
        other = solve(problem, name, options={"exclude": ONE_PIPELINE} if name == "auto" else {}).best
        if other is not None and len(other.allocation.pipelines) == 1:
            assert other.value_ns >= bound, name
    if result.best is None:
        assert result.status in (Status.INFEASIBLE, Status.NONE_FOUND)
        return
    assert bound <= result.best.value_ns
    for device, use in result.best.timeline.uses.items():
        assert use.memory.total <= problem.capacity_bytes(device)


def test_every_improvement_comes_with_a_bound_that_rises() -> None:
    search = BestFirstSearch(Space.of(instance(1, 8)), 5.0)
    improvements = [each for each in search.run() if each is not None]
    assert [f.plan.value_ns for f in improvements] == sorted((f.plan.value_ns for f in improvements), reverse=True)
    assert all(f.bound_ns <= improvements[-1].plan.value_ns for f in improvements)
    assert improvements[-1].bound_ns == improvements[-1].plan.value_ns


def test_without_effort_the_bound_is_what_was_left_open() -> None:
    problem = next(
        problem
        for problem in (instance(seed, 12, 4) for seed in range(60))
        if not proven(solve(problem, "exact", options={"effort": 0.0}))
    )
    rough = solve(problem, "exact", options={"effort": 0.0})
    best = solve(problem, "exact")
    assert rough.best is not None
    assert best.best is not None
    assert rough.bounds[-2].bound_ns <= best.best.value_ns <= rough.best.value_ns
    assert proven(best)


@pytest.mark.tier("nightly")
def test_too_many_plans_are_refused_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MOST_PLANS", 100)
    with pytest.raises(UnsupportedRequest, match=r"1,105 partitions and placements.*at most 100") as refused:
        solve(instance(0), "exact")
    assert "auto" in str(refused.value.remedy)
    assert solve(instance(0, 12, nodes=(4, 4), micro_batch_sizes=()), "auto").best is not None


def test_what_does_not_fit_is_infeasible_with_the_stage_that_lacks() -> None:
    result = solve(instance(0, 6, memory_bytes=1000), "exact")
    assert result.status is Status.INFEASIBLE
    assert result.shortage is not None
    assert result.shortage.available_bytes == 1000


def test_pins_are_kept_and_proven() -> None:
    problem = replace(instance(2, 6), pins=(Pin(0, 0, frozenset({3})), Pin(5, 5, frozenset({0, 1}))))
    result = solve(problem, "exact")
    assert result.best is not None
    assert broken_pin(problem, result.best.allocation) is None
    assert proven(result)
    free = solve(replace(problem, pins=()), "exact").best
    assert free is not None
    assert free.value_ns <= result.best.value_ns


def test_the_same_request_has_the_same_plan() -> None:
    one, two = (solve(instance(5, 12, 8), "exact") for _ in range(2))
    assert one.best is not None
    assert two.best is not None
    assert one.best.allocation == two.best.allocation
    for first, second in zip(one.best.schedule.rows, two.best.schedule.rows, strict=True):  # type: ignore[union-attr]
        assert (first.operations == second.operations).all()
    assert one.bounds == two.bounds


@pytest.mark.tier("quick")
@pytest.mark.parametrize("seed", range(10))
def test_a_stage_that_surely_fits_fits_in_every_order(seed: int) -> None:
    """The memory that ``surely_fits`` requires is at least the peak of an order that holds all micro-batches."""
    problem = instance(seed, 6, 4, stash_bytes=10**6, recompute="auto")
    space = Space.of(problem)
    placement = list(space.placements(2))[seed % 5]
    plan = space.allocation(space.batches[0], space.partitions(2)[seed % 4], placement)
    flood = next(t for t in [best_order(problem, plan, 2**60).plan] if t is not None)
    timeline = simulate(problem, plan, flood.orders)
    for stage in plan.stages:
        peak = max(timeline.uses[d].memory.total for d in stage.devices)
        less = replace(problem, devices=tuple(replace(d, memory_bytes=peak - 1) for d in problem.devices))
        assert not surely_fits(less, plan, stage)


def test_it_comes_up_for_air_between_pieces_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It proposes the best plan again, so that a session notices a limit that passes."""
    monkeypatch.setattr(joint, "PIECE", 1)
    problem = instance(1, 5, 2)
    proposals = PLANNERS["exact"].proposals
    assert proposals is not None
    schedules = [each.fixed for each in proposals(Setting(problem), {"effort": 5.0})]
    assert len(schedules) == 3
    assert len(set(schedules)) == 1


def test_recomputing_need_not_leave_more_room() -> None:
    """Where inputs are larger than stashes and buffers do not count, no plan beats its bound in the tables."""
    seen = 0
    for seed in range(12):
        rng = random.Random(seed)
        times = [rng.randint(5, 30) for _ in range(4)]
        problem = make_problem(
            times, boundary_bytes=1_000, stash_bytes=300, count_buffers=False, recompute="auto",
            memory_bytes=rng.choice([700, 1_000, 1_300]), nodes=(2,), global_batch_size=4, micro_batch_sizes=(1,),
        )  # fmt: skip
        search = BestFirstSearch(Space.of(problem), 5.0)
        bounds, blocks = search._bounds()
        for number, bound in enumerate(bounds.tolist()):
            for plan in search._variants(search._allocation(number, blocks)):
                trial = best_order(problem, plan, 2**60).plan
                if trial is not None:
                    seen += 1
                    assert bound <= trial.value_ns, plan
    assert seen > 20
