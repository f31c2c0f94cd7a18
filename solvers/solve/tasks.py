"""Tasks: a planner's search, the neighbourhood of a plan, the closing of one allocation, the search for a remedy.

Each is a small picklable value; ``run`` does it, in this process or in another, and tells what it finds on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.device_count import bound as device_count
from penstock.solvers.bounds.schedule_bound import one_pipeline_bound, request_bound
from penstock.solvers.bounds.trainer import within_bounds
from penstock.solvers.improve.neighbourhood import steady
from penstock.solvers.improve.neighbourhood.flushed import search
from penstock.solvers.improve.order import close
from penstock.solvers.improve.remedies import find_remedy
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.update_rules import PERIODIC_RULES
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.simple.candidates import first_plans, last_plans, simplest_plans, unlimited
from penstock.solvers.solve.deadline import Deadline
from penstock.solvers.solve.outcome import Closing, Found, Outcome
from penstock.solvers.solve.session import Session

if TYPE_CHECKING:
    from penstock.solvers.planners.catalogue import Planner

Proposals = Callable[[Problem, Mapping[str, object]], Iterator[Proposal]]


@dataclass(frozen=True)
class Setting:
    """What all tasks of a solve have in common; fields as in ``Session``."""

    problem: Problem
    deadline: Deadline
    gap: float
    schedule: str
    max_plans: int | None
    first_feasible: bool
    every_plan: Bound | None
    planners: Mapping[str, Planner]

    @classmethod
    def of(cls, session: Session, planners: Mapping[str, Planner]) -> Setting:
        """That of a session."""
        s = session
        bound = None if s.first_feasible else s.every_plan
        return cls(s.problem, s.deadline, s.gap, s.schedule, s.max_plans, s.first_feasible, bound, planners)

    def session(self, link: Link) -> Session:
        """A session for one task."""
        return Session(
            self.problem,
            self.deadline,
            self.gap,
            self.schedule,
            on_incumbent=lambda candidate: link.found(Found.of(candidate)),
            on_bound=link.proven,
            first_feasible=self.first_feasible,
            max_plans=self.max_plans,
            ceiling_ns=link.best_ns,
            whole=self.every_plan,
        )


class Link(Protocol):
    """A task's line to whoever gave it."""

    def best_ns(self) -> int | None:
        """The least time known of any plan; None where nothing is shared."""

    def found(self, found: Found) -> None:
        """A better plan than the task's last one."""

    def proven(self, bound: Bound) -> None:
        """A better bound than the task's last one."""


class Task(Protocol):
    """``name`` says who is at work; ``makes``: the class of its plans; None for any plan of the request."""

    @property
    def name(self) -> str:
        """Of the planner or the phase."""

    @property
    def makes(self) -> Covers | None:
        """A bound that covers this class may make the task needless."""

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Do it."""


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
        """Until its end, the limit, or the gap."""
        session = setting.session(link)
        entry = setting.planners[self.name]
        assert entry.proposals is not None
        try:
            own = _also_under(self.also, entry.proposals(setting.problem, self.values))
            simple = entry.simple if unlimited(entry.options, self.values) else ()
            before, after = first_plans(setting.problem, simple), simplest_plans(setting.problem, simple)
            last = last_plans(setting.problem, simple, lambda: session.best is None)
            session.judge_all(self.name, chain(before, own, after, last))
        except UnsupportedRequest as refused:
            return replace(session.outcome(self.name), refused=refused)
        return session.outcome(self.name)


def _also_under(schedules: tuple[str, ...], proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    for proposal in proposals:
        yield proposal
        if len(proposal.allocation.stages) > 1 and proposal.fixed is None:
            yield from (proposal._replace(schedules=(schedule,)) for schedule in schedules)


def _unknown() -> None:
    """No time of other searches."""
    return


@dataclass(frozen=True)
class Polish:
    """Neighbourhood search from a plan; ``proven``: what is known of all plans of its kind; ``effort`` as there."""

    start: Found
    proven: tuple[Bound, ...]
    effort: float
    name: str = "polish"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Until its end, the limit, or the gap."""
        session = setting.session(link)
        session.offer(self.start)
        for bound in self.proven:
            session.prove(bound)
        rule = self.start.update_rule
        if rule in PERIODIC_RULES:
            # Each step goes on from what the last one judged: what others find meanwhile must not change the walk.
            session.ceiling_ns = _unknown
            session.judge_all(self.name, steady.search(session, rule, self.effort))
        else:
            session.judge_all(self.name, search(session, self.effort))
        return session.outcome(self.name)


@dataclass(frozen=True)
class Close:
    """A better order of a plan's allocation, or the proof that there is none; ``effort`` as in ``close``."""

    start: Found
    effort: float
    name: str = "closing"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Until its end, its effort, or the limit. A schedule that was asked for is not exchanged."""
        start = self.start
        best: list[Found] = []

        def better(orders: Orders, value_ns: int) -> None:
            best[:] = [replace(start, planner=self.name, schedule=orders, value_ns=value_ns)]
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


MOST_LABELLED = 256
"""Devices up to which the label search takes no longer than planners do."""


@dataclass(frozen=True)
class Prove:
    """The bound of all plans of one pipeline, whatever their devices hold; of many devices, of stages apart.

    With a target, also of its plans.
    """

    name: str = "bound"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Until its end."""
        if setting.problem.num_devices > MOST_LABELLED:
            bound = device_count.bounds(setting.problem, request_bound(setting.problem).bound_ns, link.proven)
        else:
            bound = one_pipeline_bound(setting.problem)
        found = (bound, *(within_bounds(setting.problem) if setting.problem.within is not None else ()))
        for each in found:
            link.proven(each)
        return Outcome(proven=found)


@dataclass(frozen=True)
class Remedy:
    """The first change that makes a request feasible for a planner with these options."""

    planner: str
    values: Mapping[str, object]
    name: str = "remedy"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Until one works, or the limit."""
        entry, deadline = setting.planners[self.planner], setting.deadline

        def feasible(changed: Problem) -> bool:
            return not deadline.passed and entry.feasible(changed, setting.schedule, self.values, deadline)

        return Outcome(remedy=find_remedy(setting.problem, feasible), unfinished=deadline.passed)
