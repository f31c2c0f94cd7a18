"""Planner ``pipedream``: with a flush, without one, in little memory, on devices of two kinds, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from problems import make_problem, straight

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.micro_batches import batch_of, candidates
from penstock.solvers.model.options import checked
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.result import JudgedPlan, Status
from penstock.solvers.model.schedule import Orders, Pattern
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.pipedream.hierarchy import Rules, allocated
from penstock.solvers.planners.pipedream.planner import _Partitions
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.early_backward import early_backward, policy_a
from penstock.solvers.solve.driver import judged, solve

pytestmark = pytest.mark.tier("ci")

PLANNER = PLANNERS["pipedream"]
STASHING: frozenset[UpdateRule] = frozenset({"weight_stashing"})
BOTH: frozenset[UpdateRule] = frozenset({"weight_stashing", "synchronous"})
MIXED: dict[str, Any] = {"kinds": ["fast", "fast", "cpu", "cpu"], "speed": {"fast": 2.0}}


def drawn(seed: int, rules: frozenset[UpdateRule] = frozenset({"synchronous"}), **changes: Any) -> Problem:
    draw = np.random.default_rng(seed)
    count = 7
    settings: dict[str, Any] = {
        "boundary_bytes": draw.integers(0, 900_000, count - 1).tolist(),
        "parameter_bytes": draw.integers(0, 9_000_000, count).tolist(),
        "stash_bytes": draw.integers(0, 1_000_000, count).tolist(),
        "update_ns": 10_000,
        "nodes": (2, 2),
        "inside_bytes_per_s": 8 * 10**9,
        "between_bytes_per_s": 10**9,
        "global_batch_size": 16,
        "micro_batch_sizes": (),
        "recompute": "auto",
        "state_factor": 1,
        "shared": bool(seed % 2),
        "transfer": "nic",
    }
    problem = make_problem(draw.integers(100_000, 3_000_000, count).tolist(), **(settings | changes))
    return replace(problem, update_rules=rules)


def solved(problem: Problem, **options: object) -> JudgedPlan:
    best = solve(problem, PLANNER.name, options=options).best
    assert best is not None
    timeline = simulate(problem, best.allocation, best.schedule, update_rule=best.update_rule)
    assert timeline.time_per_global_batch_ns == best.value_ns
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_best_is_never_worse_than_the_papers_or_the_released_partition(seed: int) -> None:
    problem = drawn(seed)
    best = solved(problem)
    printed = solved(problem, paper=True)
    assert best.value_ns <= printed.value_ns
    assert isinstance(printed.schedule, Orders)
    depth = len(printed.allocation.stages)
    assert all(k <= depth - s for s, k in enumerate(printed.schedule.warmup))
    for batch in candidates(problem):
        released = allocated(problem, batch, Rules(released=True))
        if released is not None and max(s.replicas for s in released.allocation.stages) <= batch.least_rows:
            plan = released.allocation
            orders = early_backward(problem, plan, warmup=policy_a(problem, plan))
            assert best.value_ns <= makespan_ns(problem, plan, orders)


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_the_rules_that_are_allowed_are_used(seed: int) -> None:
    stashing = solved(drawn(seed, STASHING))
    assert isinstance(stashing.schedule, Pattern)
    assert stashing.update_rule == "weight_stashing"
    flushed = solved(drawn(seed))
    assert flushed.update_rule == "synchronous"
    assert solved(drawn(seed, BOTH)).value_ns == min(stashing.value_ns, flushed.value_ns)


def test_replicas_of_the_paper_take_micro_batches_in_turn() -> None:
    """Heavy boundaries, no parameters: replicas are worth having."""
    problem = drawn(0, STASHING, parameter_bytes=0, boundary_bytes=5_000_000)
    printed = solved(problem, paper=True)
    assert {stage.dispatch for stage in printed.allocation.stages if stage.replicas > 1} == {"round_robin"}
    assert solved(problem).value_ns <= printed.value_ns


@pytest.mark.cases(1)
@pytest.mark.parametrize("rules", [STASHING, BOTH - STASHING])
@pytest.mark.parametrize("again", ["never", "auto", "always"])
def test_plans_fit_in_less_and_less_memory(rules: frozenset[UpdateRule], again: str) -> None:
    """Versions and stashes give way before the plan does; then the answer states the shortage."""
    has_plan = []
    for memory in (2**40, 120_000_000, 60_000_000, 45_000_000, 35_000_000, 5_000_000):
        problem = drawn(3, rules, memory_bytes=memory, recompute=again)
        result = solve(problem, PLANNER.name)
        has_plan.append(result.best is not None)
        if result.best is None:
            assert result.status in (Status.INFEASIBLE, Status.NONE_FOUND)
            assert result.shortage is not None
            continue
        assert all(use.memory.total <= memory for use in result.best.timeline.uses.values())
        if again == "always":
            assert all(stage.recompute for stage in result.best.allocation.stages)
    assert has_plan[:3] == [True] * 3
    assert not has_plan[-1]
    assert has_plan == sorted(has_plan, reverse=True)


def test_less_memory_keeps_fewer_weight_versions() -> None:
    """Straight, four layers of 10 MB: version and gradient 20, each further version 10."""
    versions = {}
    for memory in (70_000_000, 45_000_000):
        problem = make_problem(
            [1_000_000] * 4,
            parameter_bytes=10_000_000,
            nodes=(4,),
            global_batch_size=8,
            memory_bytes=memory,
        )
        problem = replace(problem, update_rules=STASHING)
        plans = _Partitions(problem, {"paper": False})._stashing(straight(problem, 8))
        best = judged(problem, PLANNER.name, [plan.proposal for plan in plans]).best
        assert best is not None
        versions[memory] = max(use.memory.versions for use in best.timeline.uses.values())
    assert versions == {70_000_000: 30_000_000, 45_000_000: 20_000_000}


@pytest.mark.parametrize("rules", [STASHING, BOTH - STASHING])
def test_devices_of_two_kinds_have_stages_by_their_speed(rules: frozenset[UpdateRule]) -> None:
    best = solved(drawn(2, rules, **MIXED))
    assert {d for stage in best.allocation.stages for d in stage.devices} == {0, 1, 2, 3}
    with pytest.raises(UnsupportedRequest, match="the cluster has cpu, fast"):
        solve(drawn(2, rules, **MIXED), PLANNER.name, options={"paper": True})


def test_compression_makes_the_released_optimizer_count_boundaries() -> None:
    """Boundaries are so large that a straight-looking chain becomes a single stage once they are counted."""
    problem = drawn(0, parameter_bytes=20_000_000, boundary_bytes=900_000_000, micro_batch_sizes=(4,), nodes=(4,))
    plans = [allocated(problem, batch_of(problem, 4), Rules(True, ratio)) for ratio in (0.0, 1.0, 10_000.0)]
    blind, seeing, squeezed = (len(each.allocation.stages) for each in plans if each is not None)
    assert seeing < blind == squeezed


@pytest.mark.tier("quick")
@pytest.mark.parametrize("seed", range(3))
def test_every_replica_that_shares_rows_gets_the_least_slice(seed: int) -> None:
    """Two replicas get 2 or more of a micro-batch's 5 samples each, three do not."""
    problem = replace(drawn(seed, micro_batch_sizes=(5,), global_batch_size=20, nodes=(4,)), min_slice=2)
    for proposal in PLANNER.proposals(Setting(problem), checked("pipedream", PLANNER.options, {})):
        assert all(stage.replicas <= 2 for stage in proposal.allocation.stages)


@pytest.mark.tier("nightly")
def test_many_small_micro_batches_are_planned() -> None:
    """3,000 micro-batches of one sample, flushed and not."""
    for rules in (STASHING, BOTH - STASHING):
        problem = drawn(0, rules, micro_batch_sizes=(1,), global_batch_size=3_000)
        best = solved(problem, paper=True)
        assert best.allocation.num_micro_batches == 3_000


@pytest.mark.cases(1)
@pytest.mark.parametrize("rules", [STASHING, BOTH - STASHING])
def test_pins_to_one_device_are_kept(rules: frozenset[UpdateRule]) -> None:
    """A first stage with replicas could not keep this pin."""
    for seed in range(3):
        problem = replace(drawn(seed, rules), pins=(Pin(0, 1, frozenset({3})),))
        best = solved(problem)
        assert all(stage.devices == (3,) for stage in best.allocation.stages if stage.first <= 1)
