"""The state of a solve: the incumbent, what is proven, and what kept others from being plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.solvers.bounds.feasibility import Proof, proof_of_infeasibility
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.costs.codecs import best_codecs, with_codecs
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, Candidate, Progress, Result, Shortage, Status
from penstock.solvers.solve.incumbent import Incumbent
from penstock.solvers.solve.limits import Setting
from penstock.solvers.solve.outcome import Closing, Found, Obstacles, Outcome
from penstock.solvers.solve.proofs import Proofs
from penstock.solvers.verify.verifier import verify


@dataclass
class State:
    """What is known so far, from all tasks.

    ``on_incumbent`` is called with every better plan, ``on_progress`` also with bounds and the tasks at work.
    ``plain``: the best of plain plans (``Found.plain``). ``lost``: tasks whose process died, and of what. ``remedy``:
    what makes an infeasible request feasible. ``codec_note``: what codecs save.
    """

    setting: Setting
    on_incumbent: Callable[[Candidate], None] | None = None
    on_progress: Callable[[Progress], None] | None = None
    best: Candidate | None = None
    announced: Candidate | None = None
    incumbent: Incumbent[Found] = field(default_factory=Incumbent)
    plain: Incumbent[Found] = field(default_factory=Incumbent)
    obstacles: Obstacles = field(default_factory=Obstacles)
    closings: list[Closing] = field(default_factory=list)
    unfinished: dict[str, None] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    refused: list[UnsupportedRequest] = field(default_factory=list)
    remedy: str | None = None
    judged: int = 0
    codec_note: str = ""

    def __post_init__(self) -> None:
        self.proofs = Proofs(self.setting)

    @property
    def problem(self) -> Problem:
        """The problem that is solved."""
        return self.setting.problem

    def take(self, name: str, outcome: Outcome) -> None:
        """Take over what a task has found, proven or met; of plans that tie the earlier one stays."""
        if outcome.unfinished:
            self.unfinished[name] = None
        if outcome.lost is not None:
            self.lost[name] = outcome.lost
        if outcome.note:
            self.notes[name] = outcome.note
        if outcome.closing is not None:
            self.closings.append(outcome.closing)
        if outcome.refused is not None:
            self.refused.append(outcome.refused)
        self.judged += outcome.judged
        self.remedy = self.remedy or outcome.remedy
        self.obstacles.add(outcome.obstacles)
        for bound in outcome.proven:
            self.proofs.add(bound)
        if outcome.found is not None:
            self.offer(outcome.found)

    def offer(self, found: Found) -> None:
        """Make a plan the incumbent if it is better."""
        if found.plain:
            self.plain.offer(found)
        if self.incumbent.offer(found):
            self.best = found.candidate(self.problem)
            self._announce(self.best)

    def announce(self, found: Found) -> None:
        """Pass on a plan that is better than all that were passed on, before it is its task's turn to be taken."""
        if self.announced is None or found.value_ns < self.announced.value_ns:
            self._announce(found.candidate(self.problem))

    def _announce(self, plan: Candidate) -> None:
        if self.announced is None or plan.value_ns < self.announced.value_ns:
            self.announced = plan
            if self.on_incumbent is not None:
                self.on_incumbent(plan)

    def report(self, proven: Iterable[Bound], working: tuple[str, ...]) -> None:
        """Report progress; ``proven``: bounds that are not taken yet."""
        if self.on_progress is not None:
            value_ns = None if self.announced is None else self.announced.value_ns
            self.on_progress(Progress(value_ns, self.proofs.on_every_plan(proven), working))

    @property
    def shared_ns(self) -> int | None:
        """The least time known, for tasks to know; None where the answer might depend on when it was known."""
        shared = self.announced if self.setting.shares_times else None
        return None if shared is None else shared.value_ns

    @property
    def done(self) -> bool:
        """Whether no better plan like the incumbent is needed."""
        return self.proofs.reached(self.best)

    def enough(self, plans: Covers | None) -> bool:
        """Return whether no search for a class of plans is needed."""
        return self.proofs.spare(self.best, plans)

    def choose_codecs(self) -> None:
        """Encode the incumbent's tensors where that saves time in the simulation (WPipe, appendix A.3)."""
        best = self.best
        if best is None or not self.problem.codec or best.update_rule == "elastic_averaging":
            return
        how: dict[str, Any] = {"overlap": best.overlap_all_reduce, "update_rule": best.update_rule}

        def judge(allocation: Allocation) -> int | None:
            if self.setting.deadline.passed:
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

    @cached_property
    def refuted(self) -> Proof | None:
        """The proof that there is no plan, looked for when none was found."""
        return None if self.best is not None else proof_of_infeasibility(self.problem)

    @property
    def status(self) -> Status:
        """That of a solve without a plan: ``infeasible`` with a proof only, also where a limit came first."""
        if self.refuted is not None:
            return Status.INFEASIBLE
        return Status.TIME_LIMIT if self.unfinished else Status.NONE_FOUND

    @property
    def shortage(self) -> Shortage | None:
        """What the nearest plan lacks, where there is no plan, with the remedy if one was found."""
        short = self.obstacles.shortage or (None if self.refuted is None else self.refuted.shortage)
        return short and replace(short, remedy=self.remedy)

    def result(self, why: str) -> Result:
        """Return the answer. Raises ``InvalidPlan`` where the verifier refuses the incumbent (our bug)."""
        unfinished, seconds = tuple(self.unfinished), self.setting.deadline.seconds
        if self.best is None:
            return Result(self.status, why, None, (), self.shortage, seconds, unfinished)
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
            raise InvalidPlan(f"planner {best.planner!r} made a plan that does not verify: " + "; ".join(faults[:3]))
        analytic = schedule_bound(
            self.problem, best.allocation, best.schedule, best.update_rule, best.overlap_all_reduce
        )
        closed = [closing.bound for closing in self.closings if closing.covers(best)]
        own = max((analytic, *closed), key=lambda bound: bound.bound_ns)
        bounds = (*self.proofs.shown(best), own)
        # A steady state whose cycle is longer than what was measured may be averaged a little too fast.
        sound = all(best.value_ns >= bound.bound_ns for bound in bounds)
        optimal = sound and best.value_ns <= bounds[0].bound_ns + bounds[0].tolerance_ns
        status = Status.OPTIMAL if optimal else Status.FEASIBLE
        return Result(status, why, best, bounds, None, self.setting.deadline.seconds, unfinished)
