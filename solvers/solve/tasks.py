"""Tasks: a planner's search, the neighbourhood of a plan, the order of one allocation, a bound, a remedy.

Each is a small picklable value; ``run`` does it, in this process or in another, announces on its link what it finds on
the way, and returns how it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.device_count import bound as device_count
from penstock.solvers.bounds.schedule_bound import MOST_LABELLED, one_pipeline_bound, request_bound
from penstock.solvers.bounds.trainer import within_bounds
from penstock.solvers.improve.neighbourhood import flushed, steady
from penstock.solvers.improve.order import close
from penstock.solvers.improve.remedies import find_remedy
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.update_rules import PERIODIC_RULES
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.simple.candidates import first_plans, last_plans, simplest_plans, unlimited
from penstock.solvers.solve.judging import Judge, Link
from penstock.solvers.solve.limits import Setting
from penstock.solvers.solve.outcome import Closing, Found, Outcome


class Task(Protocol):
    """``name`` of the planner or the phase; ``makes``: the class of its plans; None for any plan of the request."""

    @property
    def name(self) -> str:
        """Of the planner or the phase."""

    @property
    def makes(self) -> Covers | None:
        """The class of its plans: a bound that covers it may make the task needless."""

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Do it, and return how it ended."""


@dataclass(frozen=True)
class Ask:
    """A planner's proposals, judged; ``also``: schedules that those of several stages are tried under as well.

    ``early``: to be begun before others.
    """

    name: str
    values: Mapping[str, object]
    also: tuple[str, ...] = ()
    makes: Covers | None = None
    early: bool = False

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Judge until the proposals' end, the limit, or the gap; return the best plan and the bounds."""
        judge, row = Judge(setting, link), PLANNERS[self.name]
        assert row.proposals is not None
        try:
            own = _also_under(self.also, row.proposals(setting.problem, self.values))
            simple = row.simple if unlimited(row.options, self.values) else ()
            before, after = first_plans(setting.problem, simple), simplest_plans(setting.problem, simple)
            last = last_plans(setting.problem, simple, lambda: judge.best is None)
            judge.judge_all(self.name, chain(before, own, after, last))
        except UnsupportedRequest as refused:
            return replace(judge.outcome(), refused=refused)
        return judge.outcome()


def _also_under(schedules: tuple[str, ...], proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    for proposal in proposals:
        yield proposal
        if len(proposal.allocation.stages) > 1 and proposal.fixed is None:
            yield from (proposal._replace(schedules=(schedule,)) for schedule in schedules)


@dataclass(frozen=True)
class Polish:
    """Neighbourhood search from a plan; ``proven``: known bounds; ``effort`` in about seconds of one core, counted."""

    start: Found
    proven: tuple[Bound, ...]
    effort: float
    name: str = "polish"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Search until the effort is spent, the limit, or the gap; return the best plan."""
        judge = Judge(setting, link)
        judge.offer(self.start.candidate(setting.problem))
        for bound in self.proven:
            judge.prove(bound)
        judge.judge_all(self.name, self._proposals(judge))
        return judge.outcome()

    def _proposals(self, judge: Judge) -> Iterator[Proposal]:
        problem, rule = judge.problem, self.start.update_rule

        def stopped() -> bool:
            return judge.done or judge.setting.deadline.passed

        if rule in PERIODIC_RULES:
            # Each step goes on from what the last one found: what others find meanwhile must not change the walk.
            judge.ceiling_ns = lambda: None
            for plan in steady.search(problem, rule, self.effort, lambda: judge.best, stopped):
                yield self._proposal(plan.allocation, plan.schedule, problem.rules.overlap_all_reduce)
        elif judge.best is not None:
            for better in flushed.search(problem, judge.best, self.effort, stopped):
                yield self._proposal(better.allocation, better.schedule, better.overlap)

    def _proposal(self, allocation: Allocation, schedule: Schedule, overlap: bool) -> Proposal:
        rule = self.start.update_rule
        return Proposal(allocation, (schedule.name,), overlaps=(overlap,), update_rule=rule, fixed=schedule)


@dataclass(frozen=True)
class Close:
    """A better order of a plan's allocation, or the proof that there is none; ``effort`` as in ``close``."""

    start: Found
    effort: float
    name: str = "closing"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Improve the order until it is proven, the effort is spent, or the limit; return the best plan and the bound.

        A schedule that was asked for is not exchanged.
        """
        start = self.start
        best: list[Found] = []

        def better(orders: Orders, value_ns: int) -> None:
            best[:] = [replace(start, planner=self.name, schedule=orders, value_ns=value_ns, timeline=None)]
            link.found(best[0])

        closed = close(
            setting.problem,
            start.allocation,
            start.schedule,
            overlap=start.overlap,
            value_ns=start.value_ns,
            effort=self.effort,
            update_rule=start.update_rule,
            stopped=lambda: setting.deadline.passed,
            on_better=better if setting.schedule == "auto" else None,
        )
        return Outcome(
            found=best[0] if best else None,
            closing=Closing(start, closed.bound),
            unfinished=setting.deadline.passed,
        )


@dataclass(frozen=True)
class Prove:
    """The bound of all plans of one pipeline, whatever their devices hold; of many devices, of stages apart.

    With a target, also of its plans.
    """

    name: str = "bound"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Return the bounds."""
        if setting.problem.num_devices > MOST_LABELLED:
            bound = device_count.bounds(setting.problem, request_bound(setting.problem).bound_ns, link.proven)
        else:
            bound = one_pipeline_bound(setting.problem)
        found = (bound, *(within_bounds(setting.problem) if setting.problem.within is not None else ()))
        for each in found:
            link.proven(each)
        return Outcome(proven=found)


Feasible = Callable[[Setting, str, Mapping[str, object]], bool]
"""Whether a planner with these options finds a plan that fits."""


@dataclass(frozen=True)
class Remedy:
    """The first change that makes a request feasible for a planner with these options."""

    planner: str
    values: Mapping[str, object]
    feasible: Feasible
    name: str = "remedy"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Try changes until one works, or the limit; return the one that works."""

        def feasible(changed: Problem) -> bool:
            tried = Setting(changed, setting.deadline, schedule=setting.schedule, first_feasible=True)
            return not setting.deadline.passed and self.feasible(tried, self.planner, self.values)

        return Outcome(remedy=find_remedy(setting.problem, feasible))
