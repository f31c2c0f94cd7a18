"""What comes of a task: plans, bounds, and how it ended. Small without timelines, because it crosses processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import INPUT
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, Candidate, Shortage
from penstock.solvers.model.schedule import Orders, Schedule, kinds_of
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import UpdateRule


@dataclass(slots=True)
class Found:
    """A plan that fits, with its simulated time; its timeline stays in the process that simulated it."""

    planner: str
    allocation: Allocation
    schedule: Schedule
    value_ns: int
    overlap: bool
    update_rule: UpdateRule
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, candidate: Candidate) -> Found:
        """Return a simulated plan with its timeline."""
        c = candidate
        return cls(c.planner, c.allocation, c.schedule, c.value_ns, c.overlap_all_reduce, c.update_rule, c.timeline)

    def __reduce__(self) -> tuple[type[Found], tuple[object, ...]]:
        return Found, (self.planner, self.allocation, self.schedule, self.value_ns, self.overlap, self.update_rule)

    @property
    def plain(self) -> bool:
        """Whether it is anything but a flushed step of several pipelines, or one with split backwards."""
        if self.update_rule != "synchronous" or not isinstance(self.schedule, Orders):
            return True
        return len(self.allocation.pipelines) == 1 and INPUT not in kinds_of(self.schedule)

    def candidate(self, problem: Problem) -> Candidate:
        """Return the plan with its timeline, which is simulated once in a process.

        Raises ``InvalidPlan`` where that is not what another process has found (our bug).
        """
        if self.timeline is None:
            how = self.allocation, self.schedule
            timeline = simulate(problem, *how, overlap=self.overlap, update_rule=self.update_rule)
            slower = timeline.time_per_global_batch_ns != self.value_ns
            if slower or largest_shortage(problem, self.allocation, timeline):
                raise InvalidPlan(f"a plan of {self.planner!r} is slower or larger than its own process has found")
            self.timeline = timeline
        return Candidate(self.planner, self.allocation, self.schedule, self.timeline, self.overlap, self.update_rule)


class Closing(NamedTuple):
    """A bound on every schedule of a plan's allocation with operations of these kinds."""

    plan: Found
    bound: Bound

    def covers(self, candidate: Candidate) -> bool:
        """Return whether a plan has one of those schedules."""
        own, other = self.plan, Found.of(candidate)
        if not (isinstance(own.schedule, Orders) and isinstance(other.schedule, Orders)):
            return False
        same = (own.allocation, own.overlap, own.update_rule) == (other.allocation, other.overlap, other.update_rule)
        return same and kinds_of(own.schedule) == kinds_of(other.schedule)


@dataclass
class Obstacles:
    """What kept proposals from becoming plans.

    ``shortage``: the least of all shortages; ``disconnected`` and ``unpinned``: of the last proposal that devices do
    not connect, or that breaks a pin; ``proposed``: whether there was any proposal.
    """

    shortage: Shortage | None = None
    disconnected: str | None = None
    unpinned: str | None = None
    proposed: bool = False

    def lacks(self, short: Shortage) -> None:
        """Keep a shortage, if it is the least."""
        if self.shortage is None or short.missing_bytes < self.shortage.missing_bytes:
            self.shortage = short

    def add(self, later: Obstacles) -> None:
        """Keep those of a later task as well."""
        if later.shortage is not None:
            self.lacks(later.shortage)
        self.disconnected = later.disconnected or self.disconnected
        self.unpinned = later.unpinned or self.unpinned
        self.proposed = self.proposed or later.proposed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ended.

    ``found`` and ``proven``: its best plan and its bounds, of all that it announced. ``closing``: what it has proven of
    one allocation's schedules. ``unfinished``: it was cut off by a limit. ``note``: for ``why``. ``refused``: why it
    cannot take the request. ``lost``: what ended its process. ``remedy``: what makes an infeasible request feasible.
    """

    found: Found | None = None
    proven: tuple[Bound, ...] = ()
    closing: Closing | None = None
    obstacles: Obstacles = field(default_factory=Obstacles)
    judged: int = 0
    unfinished: bool = False
    note: str = ""
    refused: UnsupportedRequest | None = None
    lost: str | None = None
    remedy: str | None = None
