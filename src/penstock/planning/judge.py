"""Judge a plan of any origin: simulate it, verify it, and check every number that it states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.convert import from_plan, to_prediction, to_problem
from penstock.convert.answers import certificates_of
from penstock.convert.requested_degrees import at_choice_of, choice_of
from penstock.layouts.limits import faults as faults_beyond
from penstock.schemas.api.jobs import Simulation, Verdict
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.coverage import describe
from penstock.schemas.errors import InvalidPlan
from penstock.schemas.plan import Certificate, Plan, PlanFile, PlanQuestion
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.coverage import allowed, features_of
from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.costs.memory import shortages
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, JudgedPlan
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.solve.searched import least_bound
from penstock.solvers.verify.verifier import check_allocation, check_rows, check_rule, verify

TIME_TOLERANCE = 1e-6
"""Largest relative difference between a plan's stated time and its simulated time (ALGORITHMS A.7)."""


@dataclass(frozen=True)
class Judgement:
    """The result of judging a plan. ``faults`` are sentences; a plan without faults is valid."""

    plan: Plan
    timeline: Timeline | None
    faults: tuple[str, ...]
    problem: Problem
    allocation: Allocation | None = None
    schedule: Schedule | None = None


def judge(file: PlanFile) -> Judgement:
    """Simulate and verify a plan of any origin; return it with the simulated prediction filled in."""
    problem = to_problem(file.request)
    if (foreign := _foreign_choice(problem, file.plan)) is not None:
        return Judgement(file.plan, None, (foreign,), problem)
    whole, problem = problem, at_choice_of(problem, file.plan)
    rule, overlap = file.plan.update_rule, file.plan.overlap_all_reduce
    try:
        allocation, schedule = from_plan(file.plan, problem)
        faults = check_allocation(problem, allocation, rule)
        faults = faults or check_rule(problem, allocation, schedule, rule)
        if isinstance(schedule, Orders) and not faults:
            faults = check_rows(problem, allocation, schedule, rule)
        if faults:
            return Judgement(file.plan, None, tuple(faults), problem, allocation, schedule)
        timeline = simulate(problem, allocation, schedule, overlap=overlap, update_rule=rule)
    except InvalidPlan as error:
        return Judgement(file.plan, None, (error.detail, *(f"{f.pointer}: {f.detail}" for f in error.faults)), problem)
    faults = verify(problem, allocation, schedule, timeline, overlap=overlap, update_rule=rule)
    request_problem = replace(problem, choices=whole.choices)  # a bound on every plan of the request covers all choices
    faults += _claims(file.plan, file.request, request_problem, allocation, schedule, timeline)
    assert isinstance(file.request.profile, ModelProfile)
    judged = file.plan.model_copy(update={"prediction": to_prediction(problem, file.request.profile, timeline)})
    if file.plan.prediction is None and judged.certificates and not faults:
        judged = judged.model_copy(
            update={"certificates": _proven_again(problem, judged, allocation, schedule, timeline, whole)}
        )
    return Judgement(judged, timeline, tuple(faults), problem, allocation, schedule)


def verdict(question: PlanQuestion, _terms: Terms = NO_TERMS) -> Verdict:
    """Return whether a plan keeps the rules, in sentences."""
    faults = judge(question.file).faults
    return Verdict(valid=not faults, plan_hash=question.file.plan.content_hash(), sentences=faults)


def simulation(question: PlanQuestion, _terms: Terms = NO_TERMS) -> Simulation:
    """Answer as ``simulated``."""
    return simulated(question.file)


def simulated(file: PlanFile) -> Simulation:
    """Return the plan with the judge's prediction. Raises InvalidPlan when it cannot be simulated at all."""
    judgement = judge(file)
    if judgement.timeline is None:
        raise InvalidPlan(
            f"the plan cannot be simulated: {judgement.faults[0]}",
            remedy="see all faults: `penstock verify`",
        )
    return Simulation(valid=not judgement.faults, sentences=judgement.faults, plan=judgement.plan)


def refuse_unsound(file: PlanFile) -> None:
    """Raise InvalidPlan when a plan of our own planners does not verify: nobody may get it."""
    faults = judge(file).faults
    if faults:
        raise InvalidPlan(
            f"planner {file.plan.planner!r} made a plan that does not verify: {faults[0]}",
            remedy="use another planner, and report this request: it is a bug in Penstock",
        )


def _foreign_choice(problem: Problem, plan: Plan) -> str | None:
    """Return why a plan's degrees and sharding differ from its request's, or None if they are."""
    choice = choice_of(plan)
    if choice is None and problem.choices:
        return f"The plan does not say its degrees; the request allows {_listed(problem.choices)}."
    if choice is not None and choice not in problem.choices:
        allows = f"allows {_listed(problem.choices)}" if problem.choices else "allows degrees of 1 with nothing sharded"
        return f"The plan is at {choice}; the request {allows}."
    return None


def _listed(choices: tuple[Choice, ...]) -> str:
    return "; ".join(map(str, choices))


def _proven_again(
    problem: Problem, plan: Plan, allocation: Allocation, schedule: Schedule, timeline: Timeline, whole: Problem
) -> tuple[Certificate, ...]:
    """Return new certificates for a plan that was edited by hand: its own belong to another plan.

    ``problem`` is at the plan's degrees, ``whole`` is the request's, which may leave them open.
    """
    bound_of_schedule = schedule_bound(problem, allocation, schedule, plan.update_rule, plan.overlap_all_reduce)
    candidate = JudgedPlan.of(plan.planner, allocation, schedule, timeline, plan.overlap_all_reduce, plan.update_rule)
    wide = least_bound(whole) if whole.choices else request_bound(problem)
    return certificates_of(candidate, (wide, bound_of_schedule))


def _claims(
    plan: Plan,
    request: PlanRequest,
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    timeline: Timeline,
) -> Iterator[str]:
    """Return faults for numbers that simulation does not reproduce, and for plans that their request does not allow."""
    if plan.prediction is not None:
        claimed, judged = plan.prediction.time_per_global_batch_ns, timeline.time_per_global_batch_ns
        if abs(claimed - judged) > TIME_TOLERANCE * judged:
            yield f"The plan says {claimed} ns per global batch; the judge finds {judged} ns."
    if plan.request_hash != request.content_hash():
        yield f"The plan was made for the request {plan.request_hash}, not for the one that comes with it."
    if plan.update_rule not in request.update_rules:
        yield f"The plan has {plan.update_rule} updates; the request allows {', '.join(request.update_rules)}."
    if request.codec is None and any(pipeline.codecs for pipeline in plan.pipelines):
        yield "The plan encodes tensors; the request does not allow codecs."
    if (broken := broken_pin(problem, allocation)) is not None:
        yield f"The plan breaks a pin: {broken}."
    if plan.prediction is not None:  # else it was edited by hand: its certificates belong to another plan
        yield from _uncovered(plan, problem, allocation, schedule, timeline)
    if problem.within is not None:
        for beyond in faults_beyond(problem, allocation, schedule, problem.within):
            yield f"The request requires a plan that {problem.within.trainer} can express, but {beyond}."


def _uncovered(
    plan: Plan, problem: Problem, allocation: Allocation, schedule: Schedule, timeline: Timeline
) -> Iterator[str]:
    """Return faults for certificates that do not cover their plan or request, and for bounds above the time."""
    fits = not shortages(problem, allocation, timeline)
    features = features_of(problem, allocation, schedule, plan.update_rule, plan.overlap_all_reduce, fits)
    for number, certificate in enumerate(plan.certificates):
        if certificate.bound_ns > timeline.time_per_global_batch_ns:
            yield (
                f"Certificate {number} says that no plan takes less than {certificate.bound_ns} ns; "
                f"the judge finds {timeline.time_per_global_batch_ns} ns."
            )
        covers = certificate.covers.covers()
        if certificate.scope == REQUEST_SCOPE and not allowed(problem) <= covers:
            yield f"Certificate {number} does not cover every plan of the request, as it says: {describe(covers)}."
        elif not features <= covers:
            yield (
                f"Certificate {number} does not cover the plan that carries it ({certificate.model}); "
                "a plan that was changed by hand leaves `prediction` and `certificates` out."
            )
