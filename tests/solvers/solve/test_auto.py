"""``auto`` as a whole: pins and memory are kept, its parts prove, requested schedules and exclusions count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from drawn_problems import instance

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Pin
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.incumbent import Proofs

OTHER_KINDS = "hetpipe,zero-bubble,chimera"
"""Planners of several pipelines or split backwards, which neither ``min_slice`` nor ``exact`` covers."""


def test_pins_min_slice_and_memory_are_kept() -> None:
    problem = instance(3, 10, 4, min_slice=4, stash_bytes=10**6, memory_bytes=120_000_000, recompute="auto")
    problem = replace(problem, pins=(Pin(0, 1, frozenset({2, 3})),))
    result = solve(problem, "auto", options={"exclude": f"exact,{OTHER_KINDS}"})
    assert result.best is not None
    assert broken_pin(problem, result.best.allocation) is None
    assert all(4 * stage.replicas <= 12 for stage in result.best.allocation.stages)
    for device, use in result.best.timeline.uses.items():
        assert use.memory.total <= problem.capacity_bytes(device)


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_auto_is_proven_where_exact_is_contained_and_no_worse_without_exclusions(seed: int) -> None:
    problem = instance(seed, 9)
    heard: list[JudgedPlan] = []
    full = solve(problem, "auto", on_incumbent=heard.append)
    bare = solve(problem, "auto", options={"exclude": f"exact,polish,{OTHER_KINDS}"})
    assert full.best is not None
    assert bare.best is not None
    assert full.best.value_ns <= bare.best.value_ns
    assert heard[-1].value_ns == full.best.value_ns
    exact = solve(problem, "exact")
    assert exact.best is not None
    assert full.best.value_ns <= exact.best.value_ns
    if full.best.value_ns == exact.best.value_ns:
        assert full.bounds[-2].bound_ns == full.best.value_ns


@pytest.mark.parametrize("schedule", ["gpipe", "early-backward"])
def test_a_schedule_that_is_asked_for_is_kept(schedule: str) -> None:
    plan: Any = solve(instance(1, 8), "auto", schedule=schedule).best
    assert plan is not None
    assert isinstance(plan.schedule, Orders)
    assert plan.schedule.name == schedule


def test_exclusions_have_to_exist() -> None:
    with pytest.raises(UnsupportedRequest, match="contains no 'dappel'") as refused:
        solve(instance(0, 4), "auto", options={"exclude": "dappel"})
    assert "dapple" in str(refused.value.remedy)


def test_the_stronger_proof_is_kept_until_a_plan_outside_it_is_better() -> None:
    problem = instance(0, 6)
    exact = solve(problem, "exact")
    assert exact.best is not None
    proofs = Proofs(Setting(problem))
    base, narrow = proofs.on_every_plan(), exact.bounds[-2]
    assert proofs.add(narrow)
    assert not proofs.add(replace(narrow, bound_ns=narrow.bound_ns - 1))
    assert proofs.on_every_plan() == base, "what covers some plans only is no bound on the request"
    assert proofs.shown(exact.best) == (base, narrow)
    assert proofs.add(replace(narrow, bound_ns=exact.best.value_ns + 1))
    assert proofs.shown(exact.best) == (base,), "what the plan refutes is not used"
