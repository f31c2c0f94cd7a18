"""One solve: judges proposals, keeps the best plan that fits, and makes the result with its proof.

Every number comes from ``simulate``; a planner's own estimate decides only what is judged, and in which order.
Ties: time per global batch, fewest devices, then the allocation's layers and devices, then fewest warm-up forwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD
from penstock.solvers.allocation import Allocation
from penstock.solvers.bounds import request_bound, schedule_bound
from penstock.solvers.pins import broken_pin, keep_pins, keep_pins_of_schedule
from penstock.solvers.planners.proposal import (
    DRAFTED,
    Draft,
    Proposal,
    drafts,
    recompute_variants,
    shortage_of,
    unreachable,
    work_bound_ns,
)
from penstock.solvers.problem import Problem
from penstock.solvers.result import Bound, Candidate, Result, Shortage, Status
from penstock.solvers.schedule import Orders, Schedule
from penstock.solvers.schedules.early_backward import fitted
from penstock.solvers.simulate import makespan_ns, simulate
from penstock.solvers.timeline import Timeline
from penstock.solvers.update_rules import UpdateRule
from penstock.solvers.verify import verify


class Attempt(NamedTuple):
    """What is judged."""

    planner: str
    allocation: Allocation
    schedule: Schedule
    overlap: bool
    update_rule: UpdateRule


Key = tuple[int, int, tuple[object, ...], int, str]


class Deadline:
    """When to stop, on a monotonic clock; without a limit it never comes."""

    def __init__(self, limit_ns: int | None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._start = clock()
        self._limit_ns = limit_ns

    @property
    def passed(self) -> bool:
        """Whether the limit has been reached."""
        return self._limit_ns is not None and self._clock() - self._start >= self._limit_ns

    @property
    def seconds(self) -> float:
        """Since the start."""
        return (self._clock() - self._start) / 1e9


@dataclass
class Session:
    """The state of a solve. ``first_feasible``: stop at the first plan that fits (to try remedies).

    ``max_plans``: how many plans of one planner are judged; a count, so the answer is the same on every machine.
    """

    problem: Problem
    deadline: Deadline
    gap: float = 0.0
    schedule: str = "auto"
    on_incumbent: Callable[[Candidate], None] | None = None
    first_feasible: bool = False
    max_plans: int | None = None
    best: Candidate | None = None
    shortage: Shortage | None = None
    disconnected: str | None = None
    unpinned: str | None = None
    proposed: bool = False
    judged: int = 0
    unfinished: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    _key: Key | None = None
    _seen: set[object] = field(default_factory=set)
    _kept: list[Schedule] = field(default_factory=list)
    _bound: Bound | None = None
    _proven: Bound | None = None
    _limit: int | None = None

    @property
    def bound(self) -> Bound:
        """Of the whole request; a planner's own proof where it speaks of plans such as the best one."""
        if self._bound is None:
            self._bound = request_bound(self.problem)
        proven = self._proven
        if proven is None or proven.bound_ns <= self._bound.bound_ns:
            return self._bound
        if self.best is None or (self.best.value_ns >= proven.bound_ns and is_contiguous(self.best)):
            return proven
        return self._bound

    def prove(self, bound: Bound) -> None:
        """Take a planner's proof, when it says more than what is known."""
        if self._proven is None or bound.bound_ns > self._proven.bound_ns:
            self._proven = bound

    @property
    def done(self) -> bool:
        """Whether nothing better is needed: within the gap, or the first feasible plan was asked for."""
        if self.best is None:
            return False
        return self.first_feasible or self.best.value_ns <= self.bound.bound_ns * (1.0 + self.gap)

    def judge_all(self, planner: str, proposals: Iterable[Proposal]) -> None:
        """Judge proposals in order until the limit, or until nothing better is needed."""
        self._limit = None if self.max_plans is None else self.judged + self.max_plans
        for proposal in proposals:
            if self.done:
                return
            if self._stopped:
                self.unfinished.append(planner)
                return
            self._judge(planner, proposal)
        if self._stopped and not self.done:
            self.unfinished.append(planner)

    @property
    def _stopped(self) -> bool:
        """Whether the planner at work has had its time, or its plans."""
        return self.deadline.passed or (self._limit is not None and self.judged >= self._limit)

    def _judge(self, planner: str, proposal: Proposal) -> None:
        if proposal.proven is not None:
            self.prove(proposal.proven)
        if proposal.note:
            self.notes[planner] = proposal.note
        schedules = proposal.schedules if self.schedule == "auto" else (self.schedule,)
        self.proposed = True
        if self.problem.pins:
            kept = self._pinned(proposal)
            if kept is None:
                self.unpinned = broken_pin(self.problem, proposal.allocation)
                return
            proposal = kept
        if (problem := unreachable(self.problem, proposal.allocation)) is not None:
            self.disconnected = problem
            return
        if proposal.fixed is not None:
            if self.schedule in ("auto", proposal.fixed.name):
                self._try_fixed(planner, proposal, proposal.fixed)
            return
        if self.schedule not in ("auto", *DRAFTED):
            return
        for allocation in recompute_variants(self.problem, proposal.allocation, schedules):
            if self.best is not None and work_bound_ns(self.problem, allocation) > self.best.value_ns:
                continue
            for schedule in schedules:
                for draft in drafts(self.problem, allocation, schedule, proposal.policy):
                    for overlap in proposal.overlaps:
                        self._try(planner, allocation, draft, overlap)

    def _pinned(self, proposal: Proposal) -> Proposal | None:
        """The proposal with its devices changed so that it keeps the pins."""
        if proposal.fixed is not None:
            found = keep_pins_of_schedule(self.problem, proposal.allocation, proposal.fixed)
            return None if found is None else proposal._replace(allocation=found[0], fixed=found[1])
        allocation = keep_pins(self.problem, proposal.allocation)
        return None if allocation is None else proposal._replace(allocation=allocation)

    def _try(self, planner: str, allocation: Allocation, draft: Draft, overlap: bool) -> None:
        """Judge one plan; where it takes too much memory, with fewer micro-batches in flight."""
        attempt = draft
        while True:
            mark = (allocation, attempt, overlap)
            if mark in self._seen or self._stopped or (self.first_feasible and self.best is not None):
                return
            self._seen.add(mark)
            short = shortage_of(self.problem, allocation, attempt.warmup)
            if short is None:
                orders = attempt.orders(self.problem, allocation)
                short = self._accept(Attempt(planner, allocation, orders, overlap, "synchronous"))
            if short is None:
                return
            fewer = self._fewer(allocation, attempt, short)
            if fewer is None:
                self._note(short)
                return
            attempt = fewer

    def _try_fixed(self, planner: str, proposal: Proposal, schedule: Schedule) -> None:
        """Judge a proposal's own schedule, once for each all-reduce setting."""
        for overlap in proposal.overlaps:
            plan = Attempt(planner, proposal.allocation, schedule, overlap, proposal.update_rule)
            mark = (proposal.allocation, id(schedule), overlap, proposal.update_rule)
            if mark in self._seen or self._stopped or (self.first_feasible and self.best is not None):
                return
            self._seen.add(mark)
            self._kept.append(schedule)
            short = self._accept(plan)
            if short is not None:
                self._note(short)

    def _accept(self, plan: Attempt) -> Shortage | None:
        """Take the plan if it fits and is better; the shortage when it does not fit."""
        self.judged += 1
        how: dict[str, Any] = {"overlap": plan.overlap, "update_rule": plan.update_rule}
        value = makespan_ns(self.problem, plan.allocation, plan.schedule, **how)
        key = _key(value, plan.allocation, plan.schedule)
        if self._key is not None and key >= self._key:
            return None
        timeline = simulate(self.problem, plan.allocation, plan.schedule, **how)
        short = _over(self.problem, plan.allocation, timeline)
        if short is not None:
            return short
        self.best = Candidate(plan.planner, plan.allocation, plan.schedule, timeline, plan.overlap, plan.update_rule)
        self._key = key
        if self.on_incumbent is not None:
            self.on_incumbent(self.best)
        return None

    def _fewer(self, allocation: Allocation, draft: Draft, short: Shortage) -> Draft | None:
        """The same schedule with one micro-batch less in flight on the stage that lacks memory."""
        stage = next(s for s, each in enumerate(allocation.stages) if each.first == short.first_layer)
        if draft.name != "early-backward" or draft.warmup[stage] <= 1:
            return None
        wanted = [min(k, draft.warmup[stage] - 1) if s >= stage else k for s, k in enumerate(draft.warmup)]
        return Draft(draft.name, fitted(self.problem, allocation, wanted))

    def _note(self, short: Shortage) -> None:
        if self.shortage is None or short.missing_bytes < self.shortage.missing_bytes:
            self.shortage = short

    def result(self, name: str, why: str) -> Result:
        """The answer so far. Raises ``InvalidPlan`` where the judge's verifier refuses the best plan (our bug)."""
        unfinished = tuple(dict.fromkeys(self.unfinished))
        if self.best is None:
            status = Status.TIME_LIMIT if unfinished else Status.INFEASIBLE
            return Result(status, why, None, (), self.shortage, self.deadline.seconds, unfinished)
        best = self.best
        faults = verify(
            self.problem,
            best.allocation,
            best.schedule,
            best.timeline,
            overlap=best.overlap_all_reduce,
            update_rule=best.update_rule,
        )
        if faults:
            raise InvalidPlan(f"planner {name!r} made a plan that does not verify: " + "; ".join(faults[:3]))
        rules = replace(self.problem.rules, overlap_all_reduce=best.overlap_all_reduce)
        judged = replace(self.problem, rules=rules)
        bounds = (self.bound, schedule_bound(judged, best.allocation, best.schedule, best.update_rule))
        # A steady state whose cycle is longer than what was measured may be averaged a little too fast.
        sound = all(best.value_ns >= bound.bound_ns for bound in bounds)
        optimal = sound and best.value_ns <= self.bound.bound_ns + self.bound.tolerance_ns
        status = Status.OPTIMAL if optimal else Status.FEASIBLE
        return Result(status, why, best, bounds, None, self.deadline.seconds, unfinished)


def is_contiguous(found: Candidate) -> bool:
    """Whether planners' proofs speak of such plans: a flushed pipeline, stages apart, by rows, whole backwards."""
    stages = found.allocation.stages
    devices = [device for stage in stages for device in stage.devices]
    apart = len(found.allocation.pipelines) == 1 and len(set(devices)) == len(devices)
    by_rows = all(stage.dispatch == "rows" or stage.replicas == 1 for stage in stages)
    if found.update_rule != "synchronous" or not isinstance(found.schedule, Orders) or not (apart and by_rows):
        return False
    return all((row.operations[:, 0] <= BACKWARD).all() for row in found.schedule.rows)


def _key(value_ns: int, allocation: Allocation, schedule: Schedule) -> Key:
    stages = tuple((s.first, s.last, s.devices, s.dispatch, s.recompute) for s in allocation.stages)
    used = len({d for s in allocation.stages for d in s.devices})
    warmup = sum(schedule.warmup) if isinstance(schedule, Orders) else 0
    return value_ns, used, (stages, allocation.num_micro_batches), warmup, schedule.name


def _over(problem: Problem, allocation: Allocation, timeline: Timeline) -> Shortage | None:
    """The device whose simulated peak exceeds its memory most; None when all fit."""
    worst: Shortage | None = None
    for device, use in timeline.uses.items():
        needed, available = use.memory.total, problem.capacity_bytes(device)
        if needed > available and (worst is None or needed - available > worst.missing_bytes):
            stage = next(s for s in allocation.stages if device in s.devices)
            worst = Shortage(stage.first, stage.last, device, needed, available)
    return worst
