"""The neighbourhood search: legal neighbours, improvements only, the same every time; and what ``auto`` makes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from problems import chain
from test_exact import instance

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.allocation import Allocation, Stage
from penstock.solvers.pins import broken_pin
from penstock.solvers.planners.auto import RANKS_CANNOT_RUN
from penstock.solvers.planners.moves import even_stages, neighbours
from penstock.solvers.planners.polish import Walk
from penstock.solvers.planners.session import Deadline, Session
from penstock.solvers.planners.trial import best_order
from penstock.solvers.problem import Pin, Problem
from penstock.solvers.registry import PLANNERS
from penstock.solvers.result import Candidate, Status
from penstock.solvers.schedule import Orders
from penstock.solvers.simulate import makespan_ns


def check(problem: Problem, stages: tuple[Stage, ...]) -> None:
    """All layers once, in order, cut where that is allowed; no device twice."""
    assert stages[0].first == 0
    assert stages[-1].last == problem.num_layers - 1
    for one, two in pairwise(stages):
        assert one.last + 1 == two.first
        assert problem.cuttable[one.last]
    devices = [d for stage in stages for d in stage.devices]
    assert len(set(devices)) == len(devices)
    assert all(stage.devices == tuple(sorted(stage.devices)) and stage.replicas for stage in stages)
    for stage in stages:
        assert stage.recompute in ((), ((stage.first, stage.last),))


@pytest.mark.parametrize("recompute", ["never", "auto", "always"])
def test_neighbours_are_legal_and_all_different_moves_occur(recompute: str) -> None:
    problem = instance(0, 8, recompute=recompute, cuttable=[True, True, False, True, True, True, True])
    start = chain([(2, [0]), (3, [1, 2]), (3, [3])], 4)
    if recompute == "always":
        again = tuple(replace(s, recompute=((s.first, s.last),)) for s in start.stages)
        start = Allocation((replace(start.pipelines[0], stages=again),), 4)
    found = list(neighbours(problem, start, (2, 4, 8)))
    for plan in found:
        check(problem, plan.stages)
        for stage in plan.stages:
            assert recompute != "never" or not stage.recompute
            assert recompute != "always" or stage.recompute
    assert {len(plan.stages) for plan in found} == {2, 3, 4}
    assert {plan.num_micro_batches for plan in found} == {2, 4, 8}
    assert any({d for s in plan.stages for d in s.devices} != {0, 1, 2, 3} for plan in found)
    shapes = {tuple((s.first, s.last) for s in plan.stages) for plan in found}
    assert ((0, 1), (2, 5), (6, 7)) in shapes
    assert ((0, 2), (3, 4), (5, 7)) not in shapes


def test_even_stages_share_layers_and_devices() -> None:
    problem = instance(0, 12)
    shapes = list(even_stages(problem))
    assert [len(stages) for stages in shapes] == [1, 2, 3, 4]
    for stages in shapes:
        check(problem, stages)
    assert [stage.last - stage.first + 1 for stage in shapes[1]] == [6, 6]


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_only_improves_and_is_repeatable(seed: int) -> None:
    problem = instance(seed, 10, 4, recompute="auto", stash_bytes=10**6, memory_bytes=150_000_000)
    start = chain([(5, [0, 1]), (5, [2, 3])], 4)
    first = best_order(problem, start, 2**60).trial
    assert first is not None
    walks = [list(Walk(problem, first.value_ns).run(start, first.orders)) for _ in range(2)]
    values = [trial.value_ns for trial in walks[0]]
    assert values == sorted(set(values), reverse=True)
    assert all(value < first.value_ns for value in values)
    assert [(t.value_ns, t.allocation) for t in walks[0]] == [(t.value_ns, t.allocation) for t in walks[1]]
    for trial in walks[0]:
        assert makespan_ns(problem, trial.allocation, trial.orders) == trial.value_ns


def test_a_plan_that_is_nearly_best_is_mended() -> None:
    """One cut off the optimum: the walk finds it back."""
    problem = instance(14, 12, 8)
    best = PLANNERS["exact"].solve(problem).best
    assert best is not None
    stages = best.allocation.stages
    assert len(stages) == 2
    shifted = (replace(stages[0], last=stages[0].last - 1), replace(stages[1], first=stages[1].first - 1))
    start = replace_stages(best.allocation, shifted)
    first = best_order(problem, start, 2**60).trial
    assert first is not None
    assert first.value_ns > best.value_ns
    found = list(Walk(problem, first.value_ns).run(start, first.orders))
    assert found[-1].value_ns == best.value_ns


def replace_stages(plan: Allocation, stages: tuple[Stage, ...]) -> Allocation:
    return Allocation((replace(plan.pipelines[0], stages=stages),), plan.num_micro_batches)


def test_pins_min_slice_and_memory_are_kept() -> None:
    problem = instance(3, 10, 4, min_slice=4, stash_bytes=10**6, memory_bytes=120_000_000, recompute="auto")
    problem = replace(problem, pins=(Pin(0, 1, frozenset({2, 3})),))
    result = PLANNERS["auto"].solve(problem, options={"exclude": f"exact,{RANKS_CANNOT_RUN}"})
    assert result.best is not None
    assert broken_pin(problem, result.best.allocation) is None
    assert all(4 * stage.replicas <= 12 for stage in result.best.allocation.stages)
    for device, use in result.best.timeline.uses.items():
        assert use.memory.total <= problem.capacity_bytes(device)


@pytest.mark.parametrize("seed", range(4))
def test_auto_is_proven_where_exact_is_contained_and_no_worse_without_exclusions(seed: int) -> None:
    problem = instance(seed, 9)
    heard: list[Candidate] = []
    full = PLANNERS["auto"].solve(problem, on_incumbent=heard.append)
    bare = PLANNERS["auto"].solve(problem, options={"exclude": f"exact,polish,{RANKS_CANNOT_RUN}"})
    assert full.best is not None
    assert bare.best is not None
    assert full.best.value_ns <= bare.best.value_ns
    assert heard[-1].value_ns == full.best.value_ns
    exact = PLANNERS["exact"].solve(problem)
    assert exact.best is not None
    assert full.best.value_ns <= exact.best.value_ns
    if full.best.value_ns == exact.best.value_ns:
        assert full.status is Status.OPTIMAL


@pytest.mark.parametrize("schedule", ["gpipe", "early-backward"])
def test_a_schedule_that_is_asked_for_is_kept(schedule: str) -> None:
    found: Any = PLANNERS["auto"].solve(instance(1, 8), schedule=schedule).best
    assert found is not None
    assert isinstance(found.schedule, Orders)
    assert found.schedule.name == schedule


def test_exclusions_have_to_exist() -> None:
    with pytest.raises(UnsupportedRequest, match="contains no 'dappel'") as refused:
        PLANNERS["auto"].solve(instance(0, 4), options={"exclude": "dappel"})
    assert "dapple" in str(refused.value.remedy)


def test_a_session_keeps_the_stronger_proof_until_a_plan_outside_it_is_better() -> None:
    problem = instance(0, 6)
    exact = PLANNERS["exact"].solve(problem)
    assert exact.best is not None
    session = Session(problem, Deadline(None))
    base = session.bound
    session.prove(exact.bounds[0])
    assert session.bound == exact.bounds[0]
    session.prove(base)
    assert session.bound == exact.bounds[0]
    session.prove(replace(base, bound_ns=exact.best.value_ns + 1))
    session.best = exact.best
    assert session.bound == base
