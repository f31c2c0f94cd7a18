"""One solve: judges proposals, keeps the best plan that fits, and makes the result with its proof.

Every number comes from ``simulate``; a planner's own estimate decides only what is judged, and in which order.
Ties go as ``ranking`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.solvers.bounds.coverage import allowed, features_of_candidate
from penstock.solvers.bounds.feasibility import Proof, proof_of_infeasibility
from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.costs.codecs import best_codecs, with_codecs
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.costs.shortages import shortage_of
from penstock.solvers.costs.ties import tied_sums
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.pins import broken_pin, keep_pins, keep_pins_of_schedule
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, Candidate, Progress, Result, Shortage, Status
from penstock.solvers.model.schedule import Schedule
from penstock.solvers.model.trainer_limits import misnumbered
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.proposal import (
    Proposal,
    recompute_variants,
    unreachable,
    whole_backwards_bound_ns,
)
from penstock.solvers.schedules.catalogue import ScheduleRow, schedule_row
from penstock.solvers.schedules.drafts import Draft, drafts
from penstock.solvers.schedules.early_backward import fitted
from penstock.solvers.solve.deadline import Deadline
from penstock.solvers.solve.outcome import Closing, Found, Outcome
from penstock.solvers.solve.ranking import Key, key_of, may_lack
from penstock.solvers.verify.verifier import verify

MOST_FUTILE = 16
"""Micro-batches fewer in flight, one after the other, that save no memory: then something else takes it."""


class Attempt(NamedTuple):
    """What is judged."""

    planner: str
    allocation: Allocation
    schedule: Schedule
    overlap: bool
    update_rule: UpdateRule


def _rows(planner: str, schedules: tuple[str, ...]) -> list[ScheduleRow]:
    """Schedules that a planner proposes. Raises ``InvalidPlan`` for any that cannot be drafted (the planner's bug)."""
    try:
        rows = [schedule_row(schedule) for schedule in schedules]
    except UnsupportedRequest as unknown:
        detail = f"planner {planner!r} proposes what there is not: {unknown.detail}"
        raise InvalidPlan(detail, remedy=unknown.remedy) from None
    for row in rows:
        if not row.drafted:
            raise InvalidPlan(
                f"planner {planner!r} proposes schedule {row.name!r}, which cannot be drafted for any stages",
                remedy="its orders or its pattern as the proposal's fixed schedule",
            )
    return rows


@dataclass
class Session:
    """The state of a solve. ``first_feasible``: stop at the first plan that fits (to try remedies).

    ``max_plans``: how many plans of one planner are judged; a count, so the answer is the same on every machine.
    ``ceiling_ns``: the least time of plans known elsewhere. What is judged does not depend on plans known already, here
    or there, but for those that are proven to take longer (``portfolio``). ``plain``: the best of plain plans
    (``Found.plain``). ``lost``: planners whose process died, and of what; ``codec_note``: what codecs save.
    ``refuted``: the proof that there is no plan, looked for when none was found.
    """

    problem: Problem
    deadline: Deadline
    gap: float = 0.0
    schedule: str = "auto"
    on_incumbent: Callable[[Candidate], None] | None = None
    on_bound: Callable[[Bound], None] | None = None
    on_progress: Callable[[Progress], None] | None = None
    first_feasible: bool = False
    max_plans: int | None = None
    ceiling_ns: Callable[[], int | None] = lambda: None
    whole: Bound | None = None
    best: Candidate | None = None
    shortage: Shortage | None = None
    disconnected: str | None = None
    unpinned: str | None = None
    proposed: bool = False
    judged: int = 0
    unfinished: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    plain: Found | None = None
    lost: dict[str, str] = field(default_factory=dict)
    codec_note: str = ""
    refuted: Proof | None = None
    _announced: Candidate | None = None
    _key: Key | None = None
    _seen: set[object] = field(default_factory=set)
    _kept: list[Schedule] = field(default_factory=list)
    proofs: dict[Covers, Bound] = field(default_factory=dict)
    _closings: list[Closing] = field(default_factory=list)
    _limit: int | None = None
    _known: tuple[Candidate, Covers] | None = None

    @property
    def every_plan(self) -> Bound:
        """On every plan of the request, from its work and its first micro-batch alone."""
        if self.whole is None:
            self.whole = request_bound(self.problem)
        return self.whole

    @cached_property
    def allowed(self) -> Covers:
        """The class of all plans that the request allows."""
        return allowed(self.problem)

    @property
    def bound(self) -> Bound:
        """The highest bound on every plan of the request."""
        return self._widest(self.proofs.values())

    @property
    def own_bound(self) -> Bound:
        """The highest bound that covers the best plan, and perhaps not every plan of the request."""
        best = self.best
        if best is None:
            return self.bound
        plan = self._features(best)
        known = [bound for bound in self.proofs.values() if plan <= bound.covers and bound.bound_ns <= best.value_ns]
        return max((self.bound, *known), key=lambda bound: bound.bound_ns)

    @property
    def shown_bounds(self) -> tuple[Bound, ...]:
        """The bound on every plan of the request, then a higher one that covers the best plan, if there is one."""
        wide, own = self.bound, self.own_bound
        return (wide,) if own.bound_ns <= wide.bound_ns else (wide, own)

    def _features(self, plan: Candidate) -> Covers:
        """The plan's features, found once for the best plan."""
        if self._known is None or self._known[0] is not plan:
            self._known = plan, features_of_candidate(self.problem, plan)
        return self._known[1]

    def _widest(self, proofs: Iterable[Bound]) -> Bound:
        known = [bound for bound in proofs if self.allowed <= bound.covers]
        return max((self.every_plan, *known), key=lambda bound: bound.bound_ns)

    def prove(self, bound: Bound) -> None:
        """Take a proof, when it says more than what is known of the class of plans that it covers."""
        known = self.proofs.get(bound.covers)
        if known is None or bound.bound_ns > known.bound_ns:
            self.proofs[bound.covers] = bound
            if self.on_bound is not None:
                self.on_bound(bound)

    @property
    def done(self) -> bool:
        """Whether no better plan like the best one is needed: it is within the gap of a bound that covers it.

        Or the first feasible plan was asked for.
        """
        if self.best is None:
            return False
        return self.first_feasible or self.best.value_ns <= self.own_bound.bound_ns * (1.0 + self.gap)

    def enough(self, plans: Covers | None) -> bool:
        """Whether a search for a class of plans can be spared: a bound covers all of them. None: any plan.

        The gap that was asked for is between the best plan and a bound that covers it as well.
        """
        best = self.best
        if best is None or self.first_feasible:
            return best is not None
        own, wanted = self._features(best), self.allowed if plans is None else plans
        spared = [bound for bound in (self.every_plan, *self.proofs.values()) if wanted <= bound.covers]
        return any(
            best.value_ns <= bound.bound_ns * (1.0 + (self.gap if own <= bound.covers else 0.0)) for bound in spared
        )

    def outcome(self, planner: str) -> Outcome:
        """What came of one planner's search in a session of its own."""
        return Outcome(
            found=None if self.best is None else Found.of(self.best),
            proven=tuple(self.proofs.values()),
            shortage=self.shortage,
            disconnected=self.disconnected,
            unpinned=self.unpinned,
            proposed=self.proposed,
            judged=self.judged,
            unfinished=planner in self.unfinished,
            note=self.notes.get(planner, ""),
        )

    def take(self, name: str, outcome: Outcome) -> None:
        """Take over what a task has found, proven or met."""
        if outcome.unfinished:
            self.unfinished.append(name)
        if outcome.lost is not None:
            self.lost[name] = outcome.lost
        self.judged += outcome.judged
        found = outcome.found
        for bound in outcome.proven:
            self.prove(bound)
        if outcome.closing is not None:
            self._closings.append(outcome.closing)
        if outcome.shortage is not None:
            self._note(outcome.shortage)
        if outcome.note:
            self.notes[name] = outcome.note
        self.disconnected = outcome.disconnected or self.disconnected
        self.unpinned = outcome.unpinned or self.unpinned
        self.proposed = self.proposed or outcome.proposed
        if found is not None:
            self.offer(found)

    def offer(self, found: Found) -> None:
        """Make a plan the best one if it is; ties go to the earlier. It is judged again."""
        key = key_of(found.value_ns, found.allocation, found.schedule)
        before = self.plain
        if found.plain and (before is None or key < key_of(before.value_ns, before.allocation, before.schedule)):
            self.plain = found
        if self._key is None or key < self._key:
            self.best, self._key = self._judged(found), key
            self._announce(self.best)

    def announce(self, found: Found) -> None:
        """Tell of a plan that is better than all that was told, before it is its turn to be taken."""
        if self.announced_ns is None or found.value_ns < self.announced_ns:
            self._announce(self._judged(found))

    @property
    def announced_ns(self) -> int | None:
        """The time of the best plan that was told."""
        return None if self._announced is None else self._announced.value_ns

    def _announce(self, candidate: Candidate) -> None:
        if self.announced_ns is None or candidate.value_ns < self.announced_ns:
            self._announced = candidate
            if self.on_incumbent is not None:
                self.on_incumbent(candidate)

    def _judged(self, found: Found) -> Candidate:
        """The plan with its timeline. Raises ``InvalidPlan`` where it is not what was said of it (our bug)."""
        timeline = simulate(
            self.problem, found.allocation, found.schedule, overlap=found.overlap, update_rule=found.update_rule
        )
        if timeline.time_per_global_batch_ns != found.value_ns or largest_shortage(
            self.problem, found.allocation, timeline
        ):
            raise InvalidPlan(f"{found.planner!r} told of a plan that the judge finds slower or too large")
        return Candidate(found.planner, found.allocation, found.schedule, timeline, found.overlap, found.update_rule)

    def progress(self, proven: Iterable[Bound], working: tuple[str, ...]) -> Progress:
        """How far it is, with proofs that are not taken yet."""
        return Progress(self.announced_ns, self._widest((*self.proofs.values(), *proven)), working)

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
        rows = [schedule_row(self.schedule)] if self.schedule != "auto" else _rows(planner, schedules)
        if not any(row.drafted for row in rows):
            return
        split = any(row.split for row in rows)
        for allocation in recompute_variants(self.problem, proposal.allocation, schedules):
            if not split and self._surpassed(whole_backwards_bound_ns(self.problem, allocation)):
                continue
            for schedule in schedules:
                for draft in drafts(self.problem, allocation, schedule, proposal.policy):
                    for overlap in proposal.overlaps:
                        self._try(planner, allocation, draft, overlap)

    def _surpassed(self, bound_ns: int) -> bool:
        """Whether a better plan is known, here or elsewhere, than a bound allows."""
        elsewhere_ns = self.ceiling_ns()
        if elsewhere_ns is not None and bound_ns > elsewhere_ns:
            return True
        return self.best is not None and bound_ns > self.best.value_ns

    def _pinned(self, proposal: Proposal) -> Proposal | None:
        """The proposal with its devices changed so that it keeps the pins, and the target's numbering of ranks."""
        kept = self._moved(proposal)
        if kept is None or self.problem.within is None:
            return kept
        return None if misnumbered(self.problem.nodes(), kept.allocation.stages) is not None else kept

    def _moved(self, proposal: Proposal) -> Proposal | None:
        if proposal.fixed is not None:
            found = keep_pins_of_schedule(self.problem, proposal.allocation, proposal.fixed)
            return None if found is None else proposal._replace(allocation=found[0], fixed=found[1])
        allocation = keep_pins(self.problem, proposal.allocation)
        return None if allocation is None else proposal._replace(allocation=allocation)

    def _try(self, planner: str, allocation: Allocation, draft: Draft, overlap: bool) -> None:
        """Judge one plan; where it takes too much memory, with fewer micro-batches in flight."""
        attempt, futile = draft, 0
        least: int | None = None
        while True:
            mark = (allocation, attempt, overlap)
            if mark in self._seen or self._stopped or (self.first_feasible and self.best is not None):
                return
            self._seen.add(mark)
            short = shortage_of(self.problem, allocation, attempt.warmup)
            if short is None:
                try:
                    orders = attempt.orders(self.problem, allocation)
                except UnsupportedRequest as refused:  # the schedule does not order such stages
                    self.disconnected = f"in the last one tried, {refused.detail}"
                    return
                plan = Attempt(planner, allocation, orders, overlap, "synchronous")
                short = self._accept(plan, memory=may_lack(self.problem, allocation, attempt))
            if short is None:
                return
            futile = 0 if least is None or short.missing_bytes < least else futile + 1
            least = short.missing_bytes if least is None else min(least, short.missing_bytes)
            fewer = self._fewer(allocation, attempt, short) if futile < MOST_FUTILE else None
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
            short = self._accept(plan, memory=self.best is None)
            if short is not None:
                self._note(short)

    def _accept(self, plan: Attempt, *, memory: bool) -> Shortage | None:
        """Take the plan if it fits and is better; the shortage when it does not fit.

        ``memory``: whether what it lacks has to be known of a plan that is not better.
        """
        self.judged += 1
        how: dict[str, Any] = {"overlap": plan.overlap, "update_rule": plan.update_rule}
        try:
            value = makespan_ns(self.problem, plan.allocation, plan.schedule, **how)
        except InvalidPlan as error:
            if not tied_sums(self.problem, plan.allocation, plan.update_rule):
                raise  # our bug: planners' orders run, but for ranks that wait for each other's sums of tied parameters
            self.disconnected = f"in the last one tried, {error.detail[0].lower()}{error.detail[1:].rstrip('.')}"
            return None
        key = key_of(value, plan.allocation, plan.schedule)
        worse = self._key is not None and key >= self._key
        if worse and not memory:
            return None
        timeline = simulate(self.problem, plan.allocation, plan.schedule, **how)
        short = largest_shortage(self.problem, plan.allocation, timeline)
        if short is not None or worse:
            return short
        self.best = Candidate(plan.planner, plan.allocation, plan.schedule, timeline, plan.overlap, plan.update_rule)
        self._key = key
        if self.on_incumbent is not None:
            self.on_incumbent(self.best)
        self._announced = self.best
        return None

    def choose_codecs(self) -> None:
        """Encode the best plan's tensors where the judge finds that it saves time (WPipe, appendix A.3)."""
        best = self.best
        if best is None or not self.problem.codec or best.update_rule == "elastic_averaging":
            return
        how: dict[str, Any] = {"overlap": best.overlap_all_reduce, "update_rule": best.update_rule}

        def judge(allocation: Allocation) -> int | None:
            if self.deadline.passed:
                return None
            timeline = simulate(self.problem, allocation, best.schedule, **how)
            short = largest_shortage(self.problem, allocation, timeline)
            return timeline.time_per_global_batch_ns if short is None else None

        edges = best_codecs(self.problem, best.allocation, best.value_ns, judge)
        if edges:
            allocation = with_codecs(best.allocation, edges)
            timeline = simulate(self.problem, allocation, best.schedule, **how)
            saved = 100 * (1 - timeline.time_per_global_batch_ns / best.value_ns)
            self.codec_note = f"fp16s behind stages {sorted(edges)} takes {saved:.2f} % off"
            self.best = replace(best, allocation=allocation, timeline=timeline)
            self._announce(self.best)

    def _fewer(self, allocation: Allocation, draft: Draft, short: Shortage) -> Draft | None:
        """The same schedule with one micro-batch less in flight on the stage that lacks memory."""
        stage = next(s for s, each in enumerate(allocation.stages) if each.first == short.first_layer)
        if not draft.row.fewer or draft.warmup[stage] <= 1:
            return None
        wanted = [min(k, draft.warmup[stage] - 1) if s >= stage else k for s, k in enumerate(draft.warmup)]
        return draft._replace(warmup=fitted(self.problem, allocation, wanted))

    def _note(self, short: Shortage) -> None:
        if self.shortage is None or short.missing_bytes < self.shortage.missing_bytes:
            self.shortage = short

    def result(self, name: str, why: str) -> Result:
        """The answer so far. Raises ``InvalidPlan`` where the judge's verifier refuses the best plan (our bug)."""
        unfinished = tuple(dict.fromkeys(self.unfinished))
        if self.best is None:
            return self._nothing(why, unfinished)
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
        how = best.allocation, best.schedule, best.update_rule, best.overlap_all_reduce
        analytic = schedule_bound(self.problem, *how)
        closed = [closing.bound for closing in self._closings if closing.speaks_of(best)]
        wide = self.bound
        bounds = (*self.shown_bounds, max((analytic, *closed), key=lambda bound: bound.bound_ns))
        # A steady state whose cycle is longer than what was measured may be averaged a little too fast.
        sound = all(best.value_ns >= bound.bound_ns for bound in bounds)
        optimal = sound and best.value_ns <= wide.bound_ns + wide.tolerance_ns
        status = Status.OPTIMAL if optimal else Status.FEASIBLE
        return Result(status, why, best, bounds, None, self.deadline.seconds, unfinished)

    def _nothing(self, why: str, unfinished: tuple[str, ...]) -> Result:
        """The answer without a plan: ``infeasible`` with a proof only, also where a limit came first."""
        self.refuted = proof_of_infeasibility(self.problem)
        open_status = Status.TIME_LIMIT if unfinished else Status.NONE_FOUND
        status = open_status if self.refuted is None else Status.INFEASIBLE
        shortage = self.shortage or (None if self.refuted is None else self.refuted.shortage)
        return Result(status, why, None, (), shortage, self.deadline.seconds, unfinished)
