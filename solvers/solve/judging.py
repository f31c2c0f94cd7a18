"""The judge of one task's proposals: candidate schedule, timeline, fit into memory, comparison with the best plan.

Every time comes from the simulator. A planner's estimates only decide which proposals are judged, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.costs.shortages import shortage_of
from penstock.solvers.costs.ties import tied_sums
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.pins import broken_pin, keep_pins, keep_pins_of_schedule
from penstock.solvers.model.result import Bound, JudgedPlan, Shortage
from penstock.solvers.model.schedule import Schedule
from penstock.solvers.model.trainer_limits import misnumbered
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.proposal import Proposal, recompute_variants, unreachable, whole_backwards_bound_ns
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.catalogue import ScheduleRow, schedule_row
from penstock.solvers.schedules.support.candidates import CandidateSchedule, candidate_schedules
from penstock.solvers.schedules.support.fitting_orders import Vector, lowered, may_lack
from penstock.solvers.solve.incumbent import Incumbent, Obstacles, Outcome, Proofs, key_of

MOST_FUTILE = 16
"""Consecutive tries of fewer micro-batches in flight that save no memory; after them, something else takes the memory.
"""


class Link(Protocol):
    """A task's link to the process that runs it."""

    def best_ns(self) -> int | None:
        """Return the least time of any plan of other tasks; None where no times are shared."""

    def announce(self, plan: JudgedPlan) -> None:
        """Announce a plan that is better than the task's last one."""

    def proven(self, bound: Bound) -> None:
        """Announce a bound that is higher than the task's last bound on the same plans."""


class Judge:
    """The judge of one task's proposals in their order: it keeps the best plan that fits, and the obstacles to others.

    Its judgements do not depend on what other tasks find meanwhile: whether a plan is tried with fewer in-flight
    micro-batches depends only on its memory. A better time from elsewhere (``ceiling_ns``, by default from the link)
    rules
    out only plans with a bound strictly above it. ``patience``: how many plans in a row may be judged that are no
    better
    than the best plan before them.
    """

    def __init__(
        self,
        setting: Setting,
        link: Link | None = None,
        ceiling_ns: Callable[[], int | None] | None = None,
        patience: int | None = None,
    ) -> None:
        self.setting, self.problem = setting, setting.problem
        self.link = link
        self.ceiling_ns = ceiling_ns or (lambda: None if link is None else link.best_ns())
        self.incumbent, self.proofs, self.obstacles = Incumbent(), Proofs(setting), Obstacles()
        self.judged, self.note, self.unfinished = 0, "", False
        self._limit: int | None = None
        self._patience, self._better_at = patience, 0
        self._seen: set[object] = set()
        self._kept: list[Schedule] = []  # by whose identity they are seen

    @property
    def best(self) -> JudgedPlan | None:
        """The best plan so far."""
        return self.incumbent.best

    @property
    def done(self) -> bool:
        """Whether no better plan is needed."""
        return self.proofs.reached(self.best)

    @property
    def stopped(self) -> bool:
        """Whether the task has had its time, its number of plans, or its patience."""
        return self._limited or self.out_of_patience

    @property
    def _limited(self) -> bool:
        return self.setting.deadline.passed or (self._limit is not None and self.judged >= self._limit)

    @property
    def out_of_patience(self) -> bool:
        """Whether more plans in a row than its patience allows were no better than its best."""
        return self._patience is not None and self.best is not None and self.judged - self._better_at >= self._patience

    def outcome(self) -> Outcome:
        """Return the result of the proposals so far."""
        return Outcome(
            best=self.best,
            proven=tuple(self.proofs.by_class.values()),
            obstacles=self.obstacles,
            unfinished=self.unfinished,
            out_of_patience=self.out_of_patience and not self.unfinished and not self.done,
            note=self.note,
        )

    def prove(self, bound: Bound) -> None:
        """Take a bound, and announce it if it is higher."""
        if self.proofs.add(bound) and self.link is not None:
            self.link.proven(bound)

    def offer(self, plan: JudgedPlan) -> None:
        """Take a simulated plan that fits, and announce it if it is the new incumbent."""
        if self.incumbent.offer(plan):
            self._better_at = self.judged
            if self.link is not None:
                self.link.announce(plan)

    def judge_all(self, planner: str, proposals: Iterable[Proposal]) -> None:
        """Judge proposals in order until a limit, or until nothing better is needed."""
        most = self.setting.max_plans
        self._limit = None if most is None else self.judged + most
        waiting = iter(proposals)
        while not (self.done or self.stopped):  # before the next one is made, which may take a whole search
            proposal = next(waiting, None)
            if proposal is None or self.stopped:
                break
            self._judge(planner, proposal)
        self.unfinished = self._limited and not self.done

    def _judge(self, planner: str, proposal: Proposal) -> None:
        if proposal.proven is not None:
            self.prove(proposal.proven)
        self.note = proposal.note or self.note
        if not proposal.schedules and proposal.fixed is None:
            self.judged += 1
            return
        self.obstacles.proposed = True
        if self.problem.pins:
            kept = self._pinned(proposal)
            if kept is None:
                self.obstacles.unpinned = broken_pin(self.problem, proposal.allocation)
                return
            proposal = kept
        if (apart := unreachable(self.problem, proposal.allocation)) is not None:
            self.obstacles.disconnected = apart
        elif proposal.fixed is None:
            self._try_schedules(planner, proposal)
        elif self.setting.schedule in ("auto", proposal.fixed.name):
            self._try_fixed(planner, proposal, proposal.fixed)

    def _pinned(self, proposal: Proposal) -> Proposal | None:
        """Return the proposal with devices changed so that it keeps the pins, and the target's numbering of ranks."""
        fixed = proposal.fixed
        if fixed is None:
            allocation = keep_pins(self.problem, proposal.allocation)
        else:
            pinned = keep_pins_of_schedule(self.problem, proposal.allocation, fixed)
            allocation, fixed = (None, None) if pinned is None else pinned
        if allocation is None:
            return None
        numbered = self.problem.within is None or misnumbered(self.problem.nodes(), allocation.stages) is None
        judged = proposal.judged if allocation == proposal.allocation else None
        return proposal._replace(allocation=allocation, fixed=fixed, judged=judged) if numbered else None

    def _try_schedules(self, planner: str, proposal: Proposal) -> None:
        """Judge every candidate schedule of a proposal, with recomputation where memory or the request asks for it."""
        requested = self.setting.schedule
        schedules = proposal.schedules if requested == "auto" else (requested,)
        rows = _rows(planner, schedules) if requested == "auto" else [schedule_row(requested)]
        if not any(row.for_any_stages for row in rows):
            return
        split = any(row.split for row in rows)
        for allocation in recompute_variants(self.problem, proposal.allocation, schedules):
            if not split and self._surpassed(whole_backwards_bound_ns(self.problem, allocation)):
                continue
            for schedule in schedules:
                for candidate in candidate_schedules(self.problem, allocation, schedule, proposal.policy):
                    for overlap in proposal.overlaps:
                        self._try(planner, allocation, candidate, overlap)

    def _surpassed(self, bound_ns: int) -> bool:
        """Return whether a better plan is known, here or elsewhere, than a bound allows."""
        elsewhere_ns = self.ceiling_ns()
        if elsewhere_ns is not None and bound_ns > elsewhere_ns:
            return True
        return self.best is not None and bound_ns > self.best.value_ns

    def _try(self, planner: str, allocation: Allocation, candidate: CandidateSchedule, overlap: bool) -> None:
        """Judge a candidate schedule; where it takes too much memory, with fewer micro-batches in flight."""

        def attempt(warmup: Vector) -> Shortage | None:
            lower = candidate._replace(warmup=warmup)
            if not self._is_new((allocation, lower, overlap)):
                return None
            short = shortage_of(self.problem, allocation, warmup)
            if short is not None:
                return short
            try:
                orders = lower.orders(self.problem, allocation)
            except UnsupportedRequest as refused:  # the schedule does not order such stages
                self.obstacles.disconnected = f"in the last one tried, {refused.detail}"
                return None
            matters = may_lack(self.problem, allocation, lower)
            return self._accept(planner, allocation, orders, overlap, "synchronous", memory=matters)

        patience = MOST_FUTILE if candidate.row.fewer else 0
        short = lowered(self.problem, allocation, candidate.warmup, attempt, patience)
        if short is not None:
            self.obstacles.lacks(short)

    def _try_fixed(self, planner: str, proposal: Proposal, schedule: Schedule) -> None:
        """Judge a proposal's own schedule, once for each all-reduce setting."""
        for overlap in proposal.overlaps:
            if not self._is_new((proposal.allocation, id(schedule), overlap, proposal.update_rule)):
                return
            self._kept.append(schedule)
            plan = planner, proposal.allocation, schedule, overlap, proposal.update_rule
            short = self._accept(*plan, memory=self.best is None, judged=proposal.judged)
            if short is not None:
                self.obstacles.lacks(short)

    def _is_new(self, mark: object) -> bool:
        """Return whether a plan is still to be judged: not yet seen, and no limit reached."""
        enough = self.setting.first_feasible and self.best is not None
        if mark in self._seen or self.stopped or enough:
            return False
        self._seen.add(mark)
        return True

    def _accept(
        self,
        planner: str,
        allocation: Allocation,
        schedule: Schedule,
        overlap: bool,
        update_rule: UpdateRule,
        *,
        memory: bool,
        judged: JudgedPlan | None = None,
    ) -> Shortage | None:
        """Simulate a plan and take it if it fits and is better; return the shortage when it does not fit.

        ``memory``: whether the shortage is needed even of a plan that is not better. ``judged``: the plan's earlier
        simulation.
        """
        self.judged += 1
        how: dict[str, Any] = {"overlap": overlap, "update_rule": update_rule}
        try:
            value = makespan_ns(self.problem, allocation, schedule, **how) if judged is None else judged.value_ns
        except InvalidPlan as error:
            if not tied_sums(self.problem, allocation, update_rule):
                raise  # our bug: planners' orders run, unless ranks wait for each other's sums of tied parameters
            words = f"{error.detail[0].lower()}{error.detail[1:].rstrip('.')}"
            self.obstacles.disconnected = f"in the last one tried, {words}"
            return None
        better = self.incumbent.is_beaten_by(key_of(value, allocation, schedule))
        if not better and not memory:
            return None
        timeline = None if judged is None else judged.simulated
        short = None
        if timeline is None:
            timeline = simulate(self.problem, allocation, schedule, **how)
            short = largest_shortage(self.problem, allocation, timeline)
        if short is None and better:
            self.offer(JudgedPlan.of(planner, allocation, schedule, timeline, overlap, update_rule))
        return short


def _rows(planner: str, schedules: tuple[str, ...]) -> list[ScheduleRow]:
    """Return the schedules that a planner proposes.

    Raises ``InvalidPlan`` for one that does not exist or does not order arbitrary stages (the planner's bug).
    """
    try:
        rows = [schedule_row(schedule) for schedule in schedules]
    except UnsupportedRequest as unknown:
        detail = f"planner {planner!r} proposes what there is not: {unknown.detail}"
        raise InvalidPlan(detail, remedy=unknown.remedy) from None
    for row in rows:
        if not row.for_any_stages:
            raise InvalidPlan(
                f"planner {planner!r} proposes schedule {row.name!r}, which does not order arbitrary stages",
                remedy="its orders or its pattern as the proposal's fixed schedule",
            )
    return rows
