"""Audit of one request: check every claim of every answer against plans, and sum the counts over many requests.

A claim is a bound on a class of plans, the status ``optimal`` or ``infeasible``, or a sentence that people read. The
plans come from the planners' searches and, for small requests, from lists of plans of every kind (``plan_lists``). A
contradicted claim is kept with the request's seed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from covering import Claim, features, is_allowed, of_class, overheard, sentences_of
from plan_lists import orders_of, plans_of, verified
from plan_words import describe, kinds_of, same_operations
from random_requests import is_small, request_of

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.bounds.device_count import bound as device_count
from penstock.solvers.bounds.schedule_bound import one_pipeline_bound, request_bound
from penstock.solvers.bounds.trainer import within_bounds
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import SCHEDULE_SCOPE, Bound, JudgedPlan, Result, Status
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.unroll import unroll
from penstock.solvers.model.update_rules import PERIODIC_RULES
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.solve.driver import solve

OPTIONS: dict[str, dict[str, object]] = {"exact": {"effort": 0.3}, "relax": {"effort": 2}, "auto": {"exclude": "exact"}}
"""Options that shorten planners which would search longer than a small request is worth."""
WHOLE = 8
"""One seed in this many lets ``auto`` run every planner."""


class Effort(NamedTuple):
    """Work per request: plans that planners simulate, plans that are listed, orders tried per answer, planners."""

    max_plans: int = 8
    listed: int = 200
    orders: int = 8
    planners: tuple[str, ...] = tuple(PLANNERS)


class Contradiction(NamedTuple):
    """A claim that a plan refutes, or an answer that is wrong in itself."""

    seed: int
    check: str
    planner: str
    detail: str


class PlanOfChoice(NamedTuple):
    """A plan and the planner that proposed it."""

    planner: str
    plan: JudgedPlan


@dataclass
class Tally:
    """Sums over requests.

    ``rivalled``: small requests with both listed plans and planners' plans. ``matched``: requests among these whose
    fastest listed plan is as fast as the best plan of all planners. ``unsettled``: plans below a bound whose time is an
    average (``Audit._settled``). ``statuses`` counts by planner and status, ``kinds`` counts kinds of plans, and
    ``methods`` counts methods of bounds.
    """

    requests: int = 0
    small: int = 0
    plans: int = 0
    listed: int = 0
    bounds: int = 0
    comparisons: int = 0
    sentences: int = 0
    rivalled: int = 0
    matched: int = 0
    unsettled: int = 0
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    contradictions: list[Contradiction] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the sums of another tally."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def audit(seed: int, effort: Effort = Effort()) -> Tally:
    """Run all checks of one request."""
    return Audit(seed, effort).run()


class Audit:
    """One request: the claims of its answers, and the plans that exist."""

    def __init__(self, seed: int, effort: Effort) -> None:
        self.seed, self.effort = seed, effort
        self.problem: Problem = request_of(seed)
        self.tally = Tally(requests=1, small=int(is_small(seed)))
        self.results: dict[str, Result] = {}
        self.plans: list[PlanOfChoice] = []
        self.claims: dict[str, Claim] = {}
        self._features: dict[int, Covers] = {}

    def run(self) -> Tally:
        """Run the planners, list plans, then check every claim against every plan."""
        for name in self.effort.planners:
            if self.problem.within is None or PLANNERS[name].target:
                self._ask(name)
        self._prove()
        self._check_plans()
        if is_small(self.seed):
            for plan in plans_of(self.problem, self.seed, self.effort.listed):
                self.tally.listed += 1
                self.plans.append(PlanOfChoice("listed", plan))
        self.tally.plans = len(self.plans)
        self._match()
        for each in self.plans:
            self.tally.kinds.update(kinds_of(each.plan))
        self._check_allowed()
        self._check_bounds()
        self._check_statuses()
        self._check_sentences()
        self._check_orders()
        return self.tally

    # ---- claims ------------------------------------------------------------------------------------------------------

    def _ask(self, name: str) -> None:
        """Run one planner; collect its answer, the plans that its search reports, and every bound that it proves."""
        incumbents: list[JudgedPlan] = []
        try:
            with overheard(lambda bound: self._claim(name, bound)):
                result = solve(
                    self.problem,
                    name,
                    max_plans=self.effort.max_plans,
                    options={} if name == "auto" and self.seed % WHOLE == 0 else OPTIONS.get(name, {}),
                    on_incumbent=incumbents.append,
                    on_progress=lambda progress: self._claim(name, progress.bound),
                    workers=1,
                )
        except (UnsupportedRequest, InvalidDocument):
            self.tally.statuses[name, "refused"] += 1
            return
        except Exception as error:  # every other exception is a fault
            self._contradict("exception", name, f"{type(error).__name__}: {str(error)[:200]}")
            return
        self.tally.statuses[name, result.status.value] += 1
        self.results[name] = result
        if result.best is not None:
            incumbents.append(result.best)
        self.plans += [PlanOfChoice(name, plan) for plan in incumbents]
        for bound in result.bounds:
            self._claim(name, bound)

    def _prove(self) -> None:
        """Claim the bounds that need no planner, also where no planner of the request computes them."""
        problem = self.problem
        self._claim("request", request_bound(problem))
        self._claim("one pipeline", one_pipeline_bound(problem))
        request_bound_ns = request_bound(problem).bound_ns
        try:
            self._claim("device count", device_count.bounds(problem, request_bound_ns, lambda bound: None))
        except Exception as error:
            self._contradict("exception", "device count", f"{type(error).__name__}: {str(error)[:200]}")
        for bound in within_bounds(problem) if problem.within is not None else ():
            self._claim("target", bound)

    def _claim(self, source: str, bound: Bound) -> None:
        """Record a bound on all plans of a class, once per sentence."""
        if bound.scope == SCHEDULE_SCOPE:
            return
        claim = of_class(source, bound)
        self.claims.setdefault(claim.sentence, claim)

    # ---- plans -------------------------------------------------------------------------------------------------------

    def _check_plans(self) -> None:
        """Check that the planners' plans verify, fit into memory, and are allowed by the request."""
        for planner, plan in self.plans:
            faults = verified(self.problem, plan)
            if faults:
                self._contradict("wrong plan", planner, f"{describe(plan)}: {faults[0]}")

    def _check_allowed(self) -> None:
        """Check that every valid plan is in the class of plans that the request allows."""
        for planner, plan in self.plans:
            if not is_allowed(self.problem, plan) and not verified(self.problem, plan):
                self._contradict("not allowed", planner, describe(plan))
                return

    def _match(self) -> None:
        """Count whether the fastest listed plan is as fast as the planners' best."""
        listed = [each.plan.value_ns for each in self.plans if each.planner == "listed"]
        others = [each.plan.value_ns for each in self.plans if each.planner != "listed"]
        if listed and others:
            self.tally.rivalled += 1
            self.tally.matched += min(listed) <= min(others)

    def _check_bounds(self) -> None:
        self.tally.bounds = len(self.claims)
        for claim in self.claims.values():
            self.tally.methods[claim.bound.method.split(":")[0]] += 1
            self._hold(claim, "bound")

    def _check_sentences(self) -> None:
        """Check that the sentences of each answer are true of all plans that they cover."""
        for planner, result in self.results.items():
            for claim in sentences_of(planner, result):
                self.tally.sentences += 1
                self._hold(claim, "sentence")

    def _hold(self, claim: Claim, check: str) -> None:
        """Check that no plan that a claim covers takes less time; report the fastest plan that does."""
        below = []
        for each in self.plans:
            if claim.plans is not None and not self._features_of(each.plan) <= claim.plans:
                continue
            self.tally.comparisons += 1
            if each.plan.value_ns < claim.bound.bound_ns:
                below.append(each)
        for each in sorted(below, key=lambda choice: choice.plan.value_ns):
            if self._is_plan(each):
                self._contradict(check, claim.source, f"{claim.sentence}; {each.planner} has {describe(each.plan)}")
                return

    def _features_of(self, plan: JudgedPlan) -> Covers:
        if id(plan) not in self._features:
            self._features[id(plan)] = features(self.problem, plan)
        return self._features[id(plan)]

    def _check_statuses(self) -> None:
        """Check that no plan beats an ``optimal`` answer, and that no plan exists where an answer is ``infeasible``."""
        there = sorted(self.plans, key=lambda choice: choice.plan.value_ns)
        for planner, result in self.results.items():
            if result.status is Status.INFEASIBLE:
                real = next((each for each in there if self._is_plan(each)), None)
                if real is not None:
                    self._contradict(
                        "infeasible", planner, f"{real.planner} has {describe(real.plan)}; {result.sentence}"
                    )
            if result.status is Status.OPTIMAL and result.best is not None:
                tolerance = max((bound.tolerance_ns for bound in result.bounds), default=0)
                limit = result.best.value_ns - tolerance
                faster = (each for each in there if each.plan.value_ns < limit)
                real = next((each for each in faster if self._is_plan(each)), None)
                if real is not None:
                    detail = f"{describe(result.best)} is optimal; {real.planner} has {describe(real.plan)}"
                    self._contradict("optimal", planner, detail)

    def _check_orders(self) -> None:
        """Check the bounds on all orders of an allocation against other orders of it."""
        rng = random.Random(f"orders {self.seed}")
        for planner, result in self.results.items():
            best = result.best
            if best is None or not isinstance(best.schedule, Orders) or best.update_rule != "synchronous":
                continue
            bound = max(
                (each for each in result.bounds if each.scope == SCHEDULE_SCOPE),
                key=lambda each: each.bound_ns,
                default=None,
            )
            if bound is None:
                continue
            rivals = [each for each in self.plans if same_operations(each.plan, best)]
            if is_small(self.seed) and self.problem.within is None:
                rivals += [PlanOfChoice("listed", p) for p in orders_of(self.problem, best, rng, self.effort.orders)]
            for each in rivals:
                self.tally.comparisons += 1
                if each.plan.value_ns < bound.bound_ns and self._is_plan(each):
                    detail = f"any order of {describe(best)} takes {bound.bound_ns} by {bound.method}"
                    self._contradict("order", planner, f"{detail}; {each.planner} has {describe(each.plan)}")
                    break

    def _is_plan(self, choice: PlanOfChoice) -> bool:
        """Return whether a plan is valid: it verifies, and its time is measured in a steady state that repeats."""
        if not self._settled(choice.plan):
            self.tally.unsettled += 1
            return False
        return not verified(self.problem, choice.plan)

    def _settled(self, plan: JudgedPlan) -> bool:
        """Return whether a periodic plan's rounds repeat within the measured window; else its time is an average."""
        if plan.update_rule not in PERIODIC_RULES or isinstance(plan.schedule, Orders):
            return True
        run = unroll(self.problem, plan.allocation, plan.schedule, plan.update_rule)
        return plan.timeline.window_rounds < run.last - run.first

    def _contradict(self, check: str, planner: str, detail: str) -> None:
        self.tally.contradictions.append(Contradiction(self.seed, check, planner, detail))
