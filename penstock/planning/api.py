"""What Penstock does, as plain functions on documents: solve, judge, lower, compare.

The service and the command line call these.

``penstock.plan(...)`` is the front door for people; everything here needs the extra ``solvers``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.convert import from_plan, to_plan, to_prediction, to_problem, to_result
from penstock.convert.answers import certificates_of
from penstock.examples import catalogue
from penstock.layouts.limits import faults as faults_beyond
from penstock.layouts.limits import refuse_beyond
from penstock.schemas.api.jobs import PlanComparison, ResultOut
from penstock.schemas.coverage import describe
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import Certificate, Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.program import Program
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.bounds.coverage import allowed, features_of
from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.lowering import lower
from penstock.solvers.lowering.checks import Transport
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, Candidate, Progress, Result
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.planners.catalogue import PLANNERS, resolve
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.schedules.catalogue import SCHEDULES, schedule_row
from penstock.solvers.verify.verifier import check_allocation, check_rows, check_rule, verify

TIME_TOLERANCE = 1e-6
"""A plan's stated time and the judge's may differ by this much, relatively (ALGORITHMS A.7)."""


@dataclass(frozen=True)
class Judgement:
    """What the judge says of a plan. ``faults`` are sentences; none means good."""

    plan: Plan
    timeline: Timeline | None
    faults: tuple[str, ...]
    problem: Problem
    allocation: Allocation | None = None
    schedule: Schedule | None = None


def solve(
    request: PlanRequest,
    on_incumbent: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> ResultOut:
    """Answer a request. Raises InvalidDocument or UnsupportedRequest; having no plan is an answer, not an error.

    ``on_incumbent`` hears of every better plan, ``on_progress`` also of bounds and of the planners at work.
    ``workers``: processes for a large request, by default as many as processors; the plan does not depend on it.
    """
    problem = to_problem(request)
    return to_result(problem, request, _solve(problem, request, on_incumbent, on_progress, workers))


def _solve(
    problem: Problem,
    request: PlanRequest,
    on_incumbent: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> Result:
    refuse_unsupported(request)
    entry = resolve(request.planner)

    def tell(candidate: Candidate) -> None:
        if on_incumbent is not None:
            on_incumbent(to_plan(problem, request, candidate, ()))

    result = entry.solve(
        problem,
        schedule=request.schedule,
        time_limit_ns=request.termination.time_limit_ns,
        max_plans=request.termination.max_plans,
        gap=request.termination.gap,
        options=request.options,
        on_incumbent=tell,
        on_progress=on_progress,
        workers=workers,
    )
    if problem.within is not None and result.best is not None:
        beyond = faults_beyond(problem, result.best.allocation, result.best.schedule, problem.within)
        if beyond:
            raise InvalidPlan(f"planner {request.planner!r} made a plan beyond {request.target}: {beyond[0]}")
    return result


def refuse_unsupported(request: PlanRequest) -> None:
    """What the documents can say and no planner here does yet is refused, never ignored."""
    if request.warm_start is not None:
        raise UnsupportedRequest(
            f"no planner here honours warm_start = {request.warm_start!r}", remedy="leave warm_start out of the request"
        )
    refuse_beyond(request)
    if request.target is not None and not resolve(request.planner).target:
        able = " or ".join(repr(name) for name, entry in PLANNERS.items() if entry.target)
        raise UnsupportedRequest(
            f"planner {request.planner!r} does not stay within what {request.target} can express; {able} does",
            remedy=f"planner {able}, or leave the target out",
        )


def judge(file: PlanFile) -> Judgement:
    """Simulate and verify a plan of anybody's. The plan comes back with the judge's prediction filled in."""
    problem = to_problem(file.request)
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
    faults += _claims(file.plan, file.request, problem, allocation, schedule, timeline)
    assert isinstance(file.request.profile, ModelProfile)
    judged = file.plan.model_copy(update={"prediction": to_prediction(problem, file.request.profile, timeline)})
    unjudged = file.plan.prediction is None and bool(judged.certificates)
    if (unjudged or any(certificate.covers is None for certificate in judged.certificates)) and not faults:
        judged = judged.model_copy(
            update={"certificates": _proven_again(problem, judged, allocation, schedule, timeline)}
        )
    return Judgement(judged, timeline, tuple(faults), problem, allocation, schedule)


def _proven_again(
    problem: Problem, plan: Plan, allocation: Allocation, schedule: Schedule, timeline: Timeline
) -> tuple[Certificate, ...]:
    """New certificates for a plan whose own do not state what they cover, or are another plan's."""
    own = schedule_bound(problem, allocation, schedule, plan.update_rule, plan.overlap_all_reduce)
    candidate = Candidate(plan.planner, allocation, schedule, timeline, plan.overlap_all_reduce, plan.update_rule)
    return certificates_of(candidate, (request_bound(problem), own))


def _claims(
    plan: Plan,
    request: PlanRequest,
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    timeline: Timeline,
) -> Iterator[str]:
    """A plan never carries a number that the judge does not give, and is one that its request asks for."""
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
    if plan.prediction is not None:  # else it was changed by hand: its certificates are another plan's
        yield from _uncovered(plan, problem, allocation, schedule, timeline)
    if problem.within is not None:
        for beyond in faults_beyond(problem, allocation, schedule, problem.within):
            yield f"The request wants a plan that {problem.within.trainer} can express, but {beyond}."


def _uncovered(
    plan: Plan, problem: Problem, allocation: Allocation, schedule: Schedule, timeline: Timeline
) -> Iterator[str]:
    """A certificate covers the plan that carries it, and what it says of the request; no bound is above the time."""
    fits = all(use.memory.total <= problem.capacity_bytes(d) for d, use in timeline.uses.items())
    features = features_of(problem, allocation, schedule, plan.update_rule, plan.overlap_all_reduce, fits)
    for number, certificate in enumerate(plan.certificates):
        if certificate.bound_ns > timeline.time_per_global_batch_ns:
            yield (
                f"Certificate {number} says that no plan takes less than {certificate.bound_ns} ns; "
                f"the judge finds {timeline.time_per_global_batch_ns} ns."
            )
        if certificate.covers is None:
            continue
        covers = certificate.covers.covers()
        if certificate.scope == REQUEST_SCOPE and not allowed(problem) <= covers:
            yield f"Certificate {number} does not cover every plan of the request, as it says: {describe(covers)}."
        elif not features <= covers:
            yield (
                f"Certificate {number} does not cover the plan that carries it ({certificate.model}); "
                "a plan that was changed by hand leaves `prediction` and `certificates` out."
            )


def programs(
    file: PlanFile,
    *,
    batches: int = 1,
    norm: bool = False,
    transport: Transport = "gloo",
    staleness: int = 0,
) -> list[Program]:
    """One program per rank. Raises InvalidPlan when the plan does not verify or would hang.

    ``batches``: global batches that a program of a periodic plan trains before it is flushed. ``norm``: with the norm
    of all gradients, for clipping and fp16. ``staleness``: of the reference model, under elastic averaging.
    Raises UnsupportedRequest where the plan's update rule has no such thing.
    """
    judgement = _judged(file)
    assert judgement.schedule is not None
    return _lowered(judgement, judgement.schedule, batches, norm, transport, staleness)


def ladder(
    file: PlanFile, *, norm: bool = False, transport: Transport = "gloo", staleness: int = 0
) -> list[list[Program]]:
    """Programs with δ = 0, 1, … forwards in advance, one per rank each (AvgPipe, algorithm 1), as memory allows.

    The last has K - 1, beyond which nothing was gained (ALGORITHMS 6.2), or as many as there are micro-batches.
    Raises as ``programs``; UnsupportedRequest for a plan with another schedule.
    """
    if file.plan.schedule.name != "advance-forward":
        raise UnsupportedRequest(
            f"schedule {file.plan.schedule.name} has no forwards in advance to search",
            remedy="plan with planner avgpipe, or schedule advance-forward",
        )
    judgement = _judged(file)
    rungs: list[list[Program]] = []
    for orders in _rungs(judgement):
        rungs.append(_lowered(judgement, orders, 1, norm, transport, staleness))
    if not rungs:
        raise InvalidPlan(
            "even 1F1B does not fit into the memory of the plan's devices",
            remedy="run the plan without advance_forward",
        )
    return rungs


def _rungs(judgement: Judgement) -> Iterator[Orders]:
    """Orders with δ = 0, 1, … that differ and fit."""
    problem, allocation = judgement.problem, judgement.allocation
    assert allocation is not None
    before: tuple[int, ...] = ()
    for delta in range(max(len(pipeline.stages) for pipeline in allocation.pipelines)):
        orders = advance_forward(problem, allocation, delta=delta)
        timeline = simulate(
            *(problem, allocation, orders),
            overlap=judgement.plan.overlap_all_reduce,
            update_rule=judgement.plan.update_rule,
        )
        fits = all(use.memory.total <= problem.capacity_bytes(d) for d, use in timeline.uses.items())
        if orders.warmup == before or not fits:
            break
        before = orders.warmup
        yield orders


def _judged(file: PlanFile) -> Judgement:
    judgement = judge(file)
    if judgement.faults:
        raise InvalidPlan(f"the plan does not verify: {judgement.faults[0]}", remedy="see `penstock verify`")
    return judgement


def _lowered(
    judgement: Judgement, schedule: Schedule, batches: int, norm: bool, transport: Transport, staleness: int
) -> list[Program]:
    assert judgement.allocation is not None
    return lower(
        judgement.problem,
        judgement.allocation,
        schedule,
        update_rule=judgement.plan.update_rule,
        transport=transport,
        overlap=judgement.plan.overlap_all_reduce,
        batches=batches,
        norm=norm,
        staleness=staleness,
    )


def compare(
    request: PlanRequest,
    planners: Sequence[str] = (),
    schedules: Sequence[str] = (),
    workers: int | None = None,
) -> Iterator[PlanComparison]:
    """Each planner with each schedule that it can be combined with, one row at a time as they finish.

    ``auto`` comes last, with all schedules at once; so has ``exact``, which makes its own. A planner that cannot take
    the request has one row, which says why.
    Raises UnsupportedRequest for an unknown name, and where no planner goes with any of the schedules.
    """
    problem = to_problem(request)
    alone = one_device_ns(problem)
    rules = frozenset(request.update_rules)
    for planner, own in pairs(planners, schedules).items():
        fitting = [schedule for schedule in own if schedule == "auto" or SCHEDULES[schedule].supports & rules]
        for schedule in fitting or own[:1]:
            asked = request.model_copy(update={"planner": planner, "schedule": schedule, "options": {}})
            started = time.monotonic()
            try:
                result = _solve(problem, asked, workers=workers)
            except UnsupportedRequest as error:
                yield _refused(planner, error)
                break
            yield _row(problem, planner, schedule, result, alone, time.monotonic() - started)


def pairs(planners: Sequence[str], schedules: Sequence[str]) -> dict[str, list[str]]:
    """The schedules that ``compare`` asks each planner for; raises as it does."""
    for schedule in schedules:
        schedule_row(schedule)
    found = {}
    for name in planners or (*(name for name in PLANNERS if name != "auto"), "auto"):
        entry = resolve(name)
        every = ["auto"] if not schedules and (name == "auto" or not entry.accepts) else list(entry.accepts)
        own = [schedule for schedule in every if not schedules or schedule in schedules]
        if own:
            found[name] = own
    if not found:
        raise UnsupportedRequest(
            f"none of the planners {', '.join(planners)} combines with {' or '.join(schedules)}",
            remedy="; ".join(f"{name}: {', '.join(resolve(name).accepts)}" for name in planners),
        )
    return found


def _refused(planner: str, error: UnsupportedRequest) -> PlanComparison:
    return PlanComparison(
        planner=planner,
        schedule=None,
        update_rule=None,
        status="unsupported",
        iteration_ns=None,
        peak_memory_bytes=None,
        bound_ns=None,
        gap=None,
        speedup_vs_one_device=None,
        seconds=0.0,
        why=f"{error.detail}; {error.remedy}" if error.remedy else error.detail,
    )


def _row(
    problem: Problem, planner: str, schedule: str, result: Result, alone_ns: int | None, seconds: float
) -> PlanComparison:
    best = result.best
    bound = max((b.bound_ns for b in result.bounds if b.scope == REQUEST_SCOPE), default=None)
    return PlanComparison(
        planner=planner,
        schedule=best.schedule.name if best and schedule == "auto" else schedule,
        update_rule=best.update_rule if best else None,
        status=result.status.value,
        iteration_ns=best.value_ns if best else None,
        peak_memory_bytes=best.timeline.peak_memory_bytes if best else None,
        bound_ns=bound,
        gap=best.value_ns / bound - 1 if best and bound else None,
        speedup_vs_one_device=alone_ns / best.value_ns if best and alone_ns else None,
        seconds=round(seconds, 6),
        why=result.why,
    )


def one_device_ns(problem: Problem) -> int | None:
    """The global batch on the fastest single device, whatever its memory: what speed-ups are relative to."""
    best = None
    sizes = problem.micro_batch_sizes or tuple(sorted({m.rows for ms in problem.measured.values() for m in ms}))
    for kind in sorted({device.kind for device in problem.devices}):
        for size in sizes:
            count = -(-problem.global_batch_size // size)
            total = int(problem.update_ns[-1])
            for rows, number in row_classes(problem.global_batch_size, count):
                costs = problem.costs(kind, rows)
                total += number * int(costs.forward_ns[-1] + costs.backward_ns[-1])
            best = total if best is None else min(best, total)
    return best


# ---- for people ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A result with its request: what ``penstock.plan`` returns."""

    result: ResultOut
    request: PlanRequest

    @property
    def status(self) -> str:
        """optimal, feasible, infeasible, none_found or time_limit."""
        return self.result.status

    @property
    def file(self) -> PlanFile:
        """The plan with its request inline. Raises InvalidPlan when there is none, with the reason."""
        if self.result.plan is None:
            raise InvalidPlan(f"there is no plan: {self.result.why}")
        return PlanFile(plan=self.result.plan, request=self.request)

    @property
    def seconds_per_global_batch(self) -> float:
        """The judge's prediction, in seconds."""
        prediction = self.file.plan.prediction
        assert prediction is not None
        return prediction.time_per_global_batch_ns / 1e9

    @property
    def gap(self) -> float | None:
        """How far from the best possible plan of the request this one can be at most; None without a bound."""
        return next((c.gap for c in self.result.certificates if c.scope == REQUEST_SCOPE), None)

    def judge(self) -> Judgement:
        """The judge's timeline of the plan."""
        return judge(self.file)

    def timeline(self, width: int = 100) -> str:
        """The timeline as text, a line per device."""
        from penstock.cli.plan.timeline_text import render_timeline

        judgement = self.judge()
        assert judgement.timeline is not None
        return render_timeline(judgement.problem, judgement.timeline, judgement.allocation, width=width)

    def save(self, path: str | Path) -> None:
        """Write the plan file."""
        self.file.write(path)


def find_profile(given: str | Path | ModelProfile) -> ModelProfile:
    """A profile by value, by file, or by the name of a shipped example."""
    if isinstance(given, ModelProfile):
        return given
    path = Path(given)
    return ModelProfile.read(path) if path.suffix or path.exists() else catalogue.profile(str(given))


def find_topology(given: str | Path | ClusterTopology) -> ClusterTopology:
    """A topology by value, by file, or by the name of a shipped example (``8x8xH100``)."""
    if isinstance(given, ClusterTopology):
        return given
    path = Path(given)
    return ClusterTopology.read(path) if path.suffix or path.exists() else catalogue.cluster(str(given))


def plan(
    profile: str | Path | ModelProfile,
    topology: str | Path | ClusterTopology,
    *,
    global_batch_size: int,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **more: Any,
) -> Answer:
    """Plan a model for a cluster. ``more``: any field of PlanRequest (``planner="dapple"``, ``recompute="always"``).

    ``workers`` and ``on_progress`` are those of ``solve``.
    """
    request = PlanRequest.parse(
        {
            "profile": find_profile(profile),
            "topology": find_topology(topology),
            "global_batch_size": global_batch_size,
            **more,
        },
        units=True,
    )
    return Answer(solve(request, on_progress=on_progress, workers=workers), request)


__all__ = [
    "Answer",
    "Judgement",
    "Progress",
    "compare",
    "find_profile",
    "find_topology",
    "judge",
    "ladder",
    "one_device_ns",
    "pairs",
    "plan",
    "programs",
    "solve",
]
