"""What an answer over choices of degrees claims, against lists of plans of every choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import plan_lists
import pytest
from open_requests import open_request
from plan_lists import plans_of, verified

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.coverage import features_of_candidate
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, SCHEDULE_SCOPE, JudgedPlan, Result, Status
from penstock.solvers.model.unroll import unroll
from penstock.solvers.model.update_rules import PERIODIC_RULES
from penstock.solvers.solve.choices import PlanOfChoice, solve

pytestmark = pytest.mark.tier("ci")

REQUESTS = 2000
WITH_EXPERTS = 1000
SHARED = 500
LISTED = 6
"""Plans of each choice."""
PLANNERS = {
    "synchronous": ("dp", "gpipe", "dapple", "spp"),
    "weight_stashing": ("pipedream",),
    "double_buffered": ("pipedream-2bw",),
    "double_grouped": ("wpipe",),
    "elastic_averaging": ("avgpipe",),
}
"""That take every choice, by update rule."""
FLUSHED = len(PLANNERS["synchronous"])


@pytest.fixture(autouse=True)
def _short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests with few plans each: the audit of claims lists many plans of few."""
    monkeypatch.setattr(plan_lists, "MISSES", 4)
    monkeypatch.setattr(plan_lists, "MOVES", 2)


@dataclass
class Listed:
    """A request, its answer, and plans of each choice that has cells."""

    problem: Problem
    result: Result | None
    bounds: dict[Choice, int] = field(default_factory=dict)
    plans: list[tuple[Problem, JudgedPlan]] = field(default_factory=list)

    def below(self, limit_ns: int, choice: Choice | None = None) -> Iterator[str]:
        """Plans, of a choice or of all, that take less."""
        for cells, plan in self.plans:
            if choice in (None, cells.choice) and plan.value_ns < limit_ns and is_plan(cells, plan):
                yield f"{cells.choice}: {plan.value_ns} ns, below {limit_ns}"


def listed(seed: int, *, experts: bool = False, sharded: bool = False) -> Listed:
    """The request of a seed, its answer by a planner, and what there is."""
    problem = open_request(seed, experts=experts, sharded=sharded)
    able = [name for rule in sorted(problem.update_rules) for name in PLANNERS[rule]]
    told: list[PlanOfChoice] = []
    try:
        result = solve(problem, able[seed % len(able)], max_plans=3, workers=1, on_incumbent=told.append)
    except UnsupportedRequest:
        result = None
    found = Listed(problem, result)
    found.plans += told
    for choice in problem.choices:
        try:
            cells = contract(problem, choice)
        except UnsupportedRequest:
            continue
        found.bounds[choice] = request_bound(cells).bound_ns
        found.plans += [(cells, plan) for plan in plans_of(cells, seed, LISTED)]
    return found


def is_plan(cells: Problem, plan: JudgedPlan) -> bool:
    """Whether it verifies, and its time is that of a steady state."""
    if plan.update_rule in PERIODIC_RULES:
        run = unroll(cells, plan.allocation, plan.schedule, plan.update_rule)  # type: ignore[arg-type]
        if plan.timeline.window_rounds >= run.last - run.first:
            return False
    return not verified(cells, plan)


def contradictions(found: Listed) -> list[str]:
    """What plans refute of a request's claims."""
    wrong = [each for choice, bound_ns in found.bounds.items() for each in found.below(bound_ns, choice)]
    result = found.result
    if result is None:
        return wrong
    for bound in result.bounds:
        if bound.scope == REQUEST_SCOPE:
            wrong += found.below(bound.bound_ns)
        elif bound.scope != SCHEDULE_SCOPE:
            for cells, plan in found.plans:
                covered = cells.choice == result.choice and features_of_candidate(cells, plan) <= bound.covers
                if covered and plan.value_ns < bound.bound_ns and is_plan(cells, plan):
                    wrong.append(f"{bound.model}: {plan.value_ns} ns, below {bound.bound_ns}")
    if result.status is Status.INFEASIBLE:
        wrong += found.below(2**62)
    if result.best is not None:
        assert result.choice is not None
        wrong += verified(contract(found.problem, result.choice), result.best)
        if result.status is Status.OPTIMAL:
            tolerance = max(bound.tolerance_ns for bound in result.bounds)
            wrong += [f"not optimal: {each}" for each in found.below(result.best.value_ns - tolerance)]
    return wrong


@pytest.mark.parametrize("seed", range(REQUESTS))
def test_no_plan_of_any_choice_refutes_the_answer(seed: int) -> None:
    assert contradictions(listed(seed)) == []


@pytest.mark.cases(4)
@pytest.mark.parametrize("planner", range(FLUSHED))
@pytest.mark.parametrize("seed", range(WITH_EXPERTS // FLUSHED))
def test_no_plan_with_experts_refutes_the_answer(seed: int, planner: int) -> None:
    """Cells of several meshes, copies inside cells, expert groups of every shape; by each planner of flushed plans."""
    assert contradictions(listed(FLUSHED * seed + planner, experts=True)) == []


@pytest.mark.cases(4)
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("seed", range(SHARED))
def test_no_plan_with_sharded_gradients_or_parameters_refutes_the_answer(seed: int, experts: bool) -> None:
    """One stage that all GPUs share out, beside plans of several; with cells of several meshes as well."""
    assert contradictions(listed(seed, experts=experts, sharded=True)) == []


@pytest.mark.tier("nightly")
def test_shared_stages_are_among_the_plans() -> None:
    met: Counter[str] = Counter()
    for seed in range(40):
        for cells, plan in listed(seed, sharded=True).plans:
            assert cells.choice is not None
            if cells.choice.in_one_stage:
                met[f"{cells.choice.sharding}, {len(cells.cells[0]) > 1}"] += is_plan(cells, plan)
    assert min(met["gradients, True"], met["parameters, True"]) > 20


def test_the_lists_see_something() -> None:
    """Statuses of every kind, plans of several choices, and plans next to the bounds."""
    met: Counter[str] = Counter()
    for seed in range(0, 160, 10):
        found = listed(seed)
        met["refused" if found.result is None else found.result.status.value] += 1
        met["choices with plans"] += len({cells.choice for cells, _plan in found.plans})
        met["plans"] += len(found.plans)
        met["no cells"] += len(found.problem.choices) - len(found.bounds)
        for choice, bound_ns in found.bounds.items():
            own = [plan.value_ns for cells, plan in found.plans if cells.choice == choice]
            met["near"] += bool(own) and min(own) <= 1.1 * bound_ns
    assert met["plans"] > 60
    assert met["choices with plans"] > 8
    assert met["no cells"] > 1
    assert met["near"] > 1
    assert min(met["optimal"], met["feasible"]) > 0


def test_false_claims_are_noticed() -> None:
    """A certificate above the fastest plan of another choice, a status, and a choice's bound."""
    found = next(each for each in map(listed, range(40)) if len({cells.choice for cells, _plan in each.plans}) > 1)
    assert contradictions(found) == []
    result = found.result
    assert result is not None
    fastest = min(plan.value_ns for _cells, plan in found.plans)
    first, *others = result.bounds
    found.result = replace(result, bounds=(replace(first, bound_ns=fastest + 1), *others))
    assert contradictions(found)
    found.result = Result(Status.INFEASIBLE, "")
    assert contradictions(found)
    found.result = None
    found.bounds = dict.fromkeys(found.bounds, fastest + 1)
    assert contradictions(found)
