"""Audit of a sample of random requests: every planner's claims against every plan that any planner or list has.

``benchmarks/audit_requests.py`` does the same for thousands of requests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from claims import Audit, Effort, Tally, audit
from list_orders import Style, list_order
from plan_lists import judged, plans_of, verified
from problems import chain, make_problem
from random_requests import RULES, is_small, request_of

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, WEIGHT
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import SCHEDULE_SCOPE, Status

pytestmark = pytest.mark.tier("ci")

SEEDS = (0, 4, 8, 12, 28, 36, 40, 52, 60, 140, 10, 18)
"""Small requests, whose plans are listed, and two larger ones; together they have every kind of plan and bound."""
MORE_SEEDS = (16, 20, 24, 32, 44, 48, 56, 1, 5, 13, 21)
"""Seeds that the tier "everything" adds."""
EFFORT = Effort(max_plans=6, listed=120, orders=6)
SIMPLE = Effort(max_plans=4, listed=60, planners=("dp", "gpipe"))


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Tally:
    """Return the sums over the sample."""
    total = Tally()
    for seed in SEEDS + (MORE_SEEDS if request.config.getoption("--tier") == "everything" else ()):
        total.add(audit(seed, EFFORT))
    return total


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "check",
    [
        "wrong plan",
        "not allowed",
        "exception",
        "bound",
        "order",
        "optimal",
        "infeasible",
        "sentence",
    ],
)
def test_no_claim_is_contradicted(tally: Tally, check: str) -> None:
    assert [each for each in tally.contradictions if each.check == check] == []


def test_the_sample_sees_something(tally: Tally) -> None:
    """The sample has requests, plans of every kind, bounds of every method, and most of the possible statuses."""
    assert tally.requests >= len(SEEDS)
    assert tally.small >= 10
    assert tally.listed > 600
    assert tally.plans > tally.listed + 100
    assert tally.bounds > 80
    assert tally.comparisons > 10_000
    assert tally.sentences > 50
    assert tally.unsettled < 10
    assert tally.matched > tally.rivalled // 2 > 3
    assert len(tally.methods) >= 6
    statuses = {status for _planner, status in tally.statuses}
    assert {"optimal", "feasible", "refused"} <= statuses
    for kind in KINDS:
        assert tally.kinds[kind] > 0, kind


KINDS = (
    "one stage",
    "one pipeline, stages apart",
    "several stages on a device",
    "several pipelines",
    "several pipelines on a device",
    "replicas by rows",
    "replicas in turn",
    "split backwards",
    "whole backwards",
    "recomputation",
    "recomputation of parts",
    "recomputation apart",
    "all-reduce after the backwards",
    "codecs",
    *RULES,
)


@pytest.mark.tier("quick")
def test_requests_have_every_feature() -> None:
    """Some hundred seeds draw every feature; a seed gives the same request every time."""
    features: dict[str, Callable[[Problem], bool]] = {
        "ties": lambda p: bool(p.shared_parameters),
        "tables": lambda p: bool(p.collectives),
        "pins": lambda p: bool(p.pins),
        "codecs": lambda p: p.codec,
        "targets": lambda p: p.within is not None,
        "kinds": lambda p: len({d.kind for d in p.devices}) > 1,
        "uncuttable": lambda p: not p.cuttable.all(),
        "shared": lambda p: p.rules.shared,
        "half": lambda p: not p.rules.shared and p.rules.channel == "half",
        "full": lambda p: not p.rules.shared and p.rules.channel == "full",
        "none": lambda p: not p.rules.shared and p.rules.channel == "none",
        "tight": lambda p: max(d.memory_bytes for d in p.devices) < 2**30,
        "unequal": lambda p: len({d.memory_bytes for d in p.devices}) > 1,
        "never": lambda p: p.recompute == "never",
        "auto": lambda p: p.recompute == "auto",
        "always": lambda p: p.recompute == "always",
        "sizes": lambda p: bool(p.micro_batch_sizes),
        "uneven": lambda p: any(p.global_batch_size % size for size in p.micro_batch_sizes),
        **{rule: lambda p, rule=rule: rule in p.update_rules for rule in RULES},  # type: ignore[misc]
    }
    seen: Counter[str] = Counter()
    for seed in range(300):
        problem = request_of(seed)
        assert (problem.num_layers <= 4 and problem.num_devices <= 3) or not is_small(seed)
        seen.update(name for name, holds in features.items() if holds(problem))
    assert [name for name in features if seen[name] < 15] == []
    again = request_of(7)
    assert again.layer_names == request_of(7).layer_names
    assert (again.devices, again.pins, again.rules) == (request_of(7).devices, request_of(7).pins, request_of(7).rules)


@pytest.mark.tier("quick")
def test_listed_plans_are_plans() -> None:
    """Listed plans verify, fit, and are allowed by the request, also where they contradict no claim."""
    number = 0
    for seed in (0, 8, 20, 40, 56, 60):
        problem = request_of(seed)
        for plan in plans_of(problem, seed, 40):
            assert verified(problem, plan) == []
            number += 1
    assert number > 150


@pytest.mark.tier("quick")
def test_listed_orders_by_hand() -> None:
    """Two stages of F 1, B 2: with one micro-batch in flight they take turns; with two, F0 F1 come first."""
    problem = make_problem([1, 1], [2, 2], nodes=(2,), global_batch_size=2)
    plan = chain([(1, [0]), (1, [1])], 2)
    rows = list_order(problem, plan, Style(most=1), random.Random(0)).rows
    f, b, i, w = FORWARD, BACKWARD, INPUT, WEIGHT
    assert rows[0].operations.tolist() == [[f, 0, 0], [b, 0, 0], [f, 0, 1], [b, 0, 1]]
    rows = list_order(problem, plan, Style(most=2), random.Random(0)).rows
    assert rows[0].operations.tolist() == [[f, 0, 0], [f, 0, 1], [b, 0, 0], [b, 0, 1]]
    assert rows[1].operations.tolist() == [[f, 1, 0], [b, 1, 0], [f, 1, 1], [b, 1, 1]]
    rows = list_order(problem, plan, Style(most=2, split=frozenset({1})), random.Random(0)).rows
    assert rows[1].operations.tolist() == [[f, 1, 0], [i, 1, 0], [f, 1, 1], [i, 1, 1], [w, 1, 0], [w, 1, 1]]


# ---- the audit notices what is false ---------------------------------------------------------------------------------


def audited(seed: int = 0) -> Audit:
    """Return the audit of a small request by two simple planners; all its claims are true."""
    one = Audit(seed, SIMPLE)
    one.run()
    assert one.tally.contradictions == []
    assert one.results["dp"].best is not None
    return one


def test_a_bound_above_a_plan_is_noticed() -> None:
    one = audited()
    key, claim = next(iter(one.claims.items()))
    fastest = min(each.plan.value_ns for each in one.plans)
    one.claims = {key: claim._replace(bound=replace(claim.bound, bound_ns=fastest))}
    one._check_bounds()
    assert one.tally.contradictions == []
    one.claims = {key: claim._replace(bound=replace(claim.bound, bound_ns=fastest + 1))}
    one._check_bounds()
    assert [each.check for each in one.tally.contradictions] == ["bound"]


def test_a_false_status_is_noticed() -> None:
    one = audited()
    slowest = max(one.plans, key=lambda each: each.plan.value_ns).plan
    one.results = {"dp": replace(one.results["dp"], status=Status.OPTIMAL, best=slowest)}
    one._check_statuses()
    one.results = {"dp": replace(one.results["dp"], status=Status.INFEASIBLE, best=None)}
    one._check_statuses()
    assert [each.check for each in one.tally.contradictions] == ["optimal", "infeasible"]


def test_a_bound_above_an_order_is_noticed() -> None:
    one = audited()
    result = one.results["gpipe"]
    assert result.best is not None
    higher = [replace(b, bound_ns=result.best.value_ns + 1) for b in result.bounds if b.scope == SCHEDULE_SCOPE]
    one.results = {"gpipe": replace(result, bounds=tuple(higher))}
    one._check_orders()
    assert [each.check for each in one.tally.contradictions] == ["order"]


def test_a_plan_that_is_none_is_noticed() -> None:
    """A plan that the simulator accepts is not valid if it needs too much memory or is not allowed by the request."""
    one = audited()
    plan = one.plans[0].plan
    how = plan.allocation, plan.schedule, plan.overlap_all_reduce
    assert judged(one.problem, *how) is not None
    poor = replace(one.problem, devices=tuple(replace(d, memory_bytes=1) for d in one.problem.devices))
    assert judged(poor, *how) is None
    assert any("too little memory" in fault for fault in verified(poor, plan))
    other = replace(one.problem, update_rules=frozenset({"weight_stashing"}))
    assert verified(other, plan) == ["update rule synchronous"]
