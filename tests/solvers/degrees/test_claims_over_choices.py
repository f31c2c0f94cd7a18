"""Claims of answers over choices of degrees, against lists of plans of every choice."""

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
"""Plans listed per choice."""
PLANNERS = {
    "synchronous": ("dp", "gpipe", "dapple", "spp"),
    "weight_stashing": ("pipedream",),
    "double_buffered": ("pipedream-2bw",),
    "double_grouped": ("wpipe",),
    "elastic_averaging": ("avgpipe",),
}
"""Planners that support every choice, by update rule."""
FLUSHED = len(PLANNERS["synchronous"])


@pytest.fixture(autouse=True)
def _short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten lists of plans: here many requests have few plans, while the audit lists many plans of few requests."""
    monkeypatch.setattr(plan_lists, "MISSES", 4)
    monkeypatch.setattr(plan_lists, "MOVES", 2)


@dataclass
class Listed:
    """A request, its answer, and plans of each choice that has GPU groups."""

    problem: Problem
    result: Result | None
    bounds: dict[Choice, int] = field(default_factory=dict)
    plans: list[tuple[Problem, JudgedPlan]] = field(default_factory=list)

    def below(self, limit_ns: int, choice: Choice | None = None) -> Iterator[str]:
        """Yield the plans, of a choice or of all, that take less time than the limit."""
        for cells, plan in self.plans:
            if choice in (None, cells.choice) and plan.value_ns < limit_ns and is_plan(cells, plan):
                yield f"{cells.choice}: {plan.value_ns} ns, below {limit_ns}"


def listed(seed: int, *, experts: bool = False, sharded: bool = False) -> Listed:
    """Return the request of a seed, its answer by a planner, and plans of every choice."""
    problem = open_request(seed, experts=experts, sharded=sharded)
    able = [name for rule in sorted(problem.update_rules) for name in PLANNERS[rule]]
    incumbents: list[PlanOfChoice] = []
    try:
        result = solve(problem, able[seed % len(able)], max_plans=3, workers=1, on_incumbent=incumbents.append)
    except UnsupportedRequest:
        result = None
    case = Listed(problem, result)
    case.plans += incumbents
    for choice in problem.choices:
        try:
            cells = contract(problem, choice)
        except UnsupportedRequest:
            continue
        case.bounds[choice] = request_bound(cells).bound_ns
        case.plans += [(cells, plan) for plan in plans_of(cells, seed, LISTED)]
    return case


def is_plan(cells: Problem, plan: JudgedPlan) -> bool:
    """Return whether a plan verifies and its time is measured in a repeating steady state."""
    if plan.update_rule in PERIODIC_RULES:
        run = unroll(cells, plan.allocation, plan.schedule, plan.update_rule)  # type: ignore[arg-type]
        if plan.timeline.window_rounds >= run.last - run.first:
            return False
    return not verified(cells, plan)


def contradictions(case: Listed) -> list[str]:
    """List the claims of a request's answer that plans refute."""
    wrong = [each for choice, bound_ns in case.bounds.items() for each in case.below(bound_ns, choice)]
    result = case.result
    if result is None:
        return wrong
    for bound in result.bounds:
        if bound.scope == REQUEST_SCOPE:
            wrong += case.below(bound.bound_ns)
        elif bound.scope != SCHEDULE_SCOPE:
            for cells, plan in case.plans:
                covered = cells.choice == result.choice and features_of_candidate(cells, plan) <= bound.covers
                if covered and plan.value_ns < bound.bound_ns and is_plan(cells, plan):
                    wrong.append(f"{bound.model}: {plan.value_ns} ns, below {bound.bound_ns}")
    if result.status is Status.INFEASIBLE:
        wrong += case.below(2**62)
    if result.best is not None:
        assert result.choice is not None
        wrong += verified(contract(case.problem, result.choice), result.best)
        if result.status is Status.OPTIMAL:
            tolerance = max(bound.tolerance_ns for bound in result.bounds)
            wrong += [f"not optimal: {each}" for each in case.below(result.best.value_ns - tolerance)]
    return wrong


@pytest.mark.parametrize("seed", range(REQUESTS))
def test_no_plan_of_any_choice_refutes_the_answer(seed: int) -> None:
    assert contradictions(listed(seed)) == []


@pytest.mark.cases(4)
@pytest.mark.parametrize("planner", range(FLUSHED))
@pytest.mark.parametrize("seed", range(WITH_EXPERTS // FLUSHED))
def test_no_plan_with_experts_refutes_the_answer(seed: int, planner: int) -> None:
    """GPU groups of several meshes, copies inside them, expert groups of every shape; each planner of flushed plans."""
    assert contradictions(listed(FLUSHED * seed + planner, experts=True)) == []


@pytest.mark.cases(4)
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("seed", range(SHARED))
def test_no_plan_with_sharded_gradients_or_parameters_refutes_the_answer(seed: int, experts: bool) -> None:
    """One stage that all GPUs share out, beside plans of several stages; GPU groups of several meshes as well."""
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
    """The lists have statuses of every kind, plans of several choices, and plans near the bounds."""
    met: Counter[str] = Counter()
    for seed in range(0, 160, 10):
        case = listed(seed)
        met["refused" if case.result is None else case.result.status.value] += 1
        met["choices with plans"] += len({cells.choice for cells, _plan in case.plans})
        met["plans"] += len(case.plans)
        met["no cells"] += len(case.problem.choices) - len(case.bounds)
        for choice, bound_ns in case.bounds.items():
            values = [plan.value_ns for cells, plan in case.plans if cells.choice == choice]
            met["near"] += bool(values) and min(values) <= 1.1 * bound_ns
    assert met["plans"] > 60
    assert met["choices with plans"] > 8
    assert met["no cells"] > 1
    assert met["near"] > 1
    assert min(met["optimal"], met["feasible"]) > 0


def test_false_claims_are_noticed() -> None:
    """A bound above the fastest plan of another choice, a status, and a choice's bound."""
    case = next(each for each in map(listed, range(40)) if len({cells.choice for cells, _plan in each.plans}) > 1)
    assert contradictions(case) == []
    result = case.result
    assert result is not None
    fastest = min(plan.value_ns for _cells, plan in case.plans)
    first, *others = result.bounds
    case.result = replace(result, bounds=(replace(first, bound_ns=fastest + 1), *others))
    assert contradictions(case)
    case.result = Result(Status.INFEASIBLE, "")
    assert contradictions(case)
    case.result = None
    case.bounds = dict.fromkeys(case.bounds, fastest + 1)
    assert contradictions(case)
