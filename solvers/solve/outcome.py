"""What a task tells: plans without their timelines, bounds, and how it ended. Small, because it crosses processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import INPUT
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.result import Bound, Candidate, Shortage
from penstock.solvers.model.schedule import Orders, Schedule, kinds_of
from penstock.solvers.model.update_rules import UpdateRule


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that fits, and its time by the judge; who takes it judges it again."""

    planner: str
    allocation: Allocation
    schedule: Schedule
    value_ns: int
    overlap: bool
    update_rule: UpdateRule

    @classmethod
    def of(cls, candidate: Candidate) -> Found:
        """A judged plan."""
        c = candidate
        return cls(c.planner, c.allocation, c.schedule, c.value_ns, c.overlap_all_reduce, c.update_rule)

    @property
    def plain(self) -> bool:
        """Not a flushed step of several pipelines, or with split backwards."""
        if self.update_rule != "synchronous" or not isinstance(self.schedule, Orders):
            return True
        return len(self.allocation.pipelines) == 1 and INPUT not in kinds_of(self.schedule)


class Closing(NamedTuple):
    """No schedule of this plan's allocation, with operations of these kinds, is below the bound."""

    plan: Found
    bound: Bound

    def speaks_of(self, candidate: Candidate) -> bool:
        """Whether a plan is one of those schedules."""
        own, other = self.plan, Found.of(candidate)
        if not (isinstance(own.schedule, Orders) and isinstance(other.schedule, Orders)):
            return False
        same = (own.allocation, own.overlap, own.update_rule) == (other.allocation, other.overlap, other.update_rule)
        return same and kinds_of(own.schedule) == kinds_of(other.schedule)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ended. ``lost``: what ended its process; ``remedy``: what makes an infeasible request feasible."""

    found: Found | None = None
    proven: tuple[Bound, ...] = ()
    closing: Closing | None = None
    shortage: Shortage | None = None
    disconnected: str | None = None
    unpinned: str | None = None
    proposed: bool = False
    judged: int = 0
    unfinished: bool = False
    note: str = ""
    refused: UnsupportedRequest | None = None
    lost: str | None = None
    remedy: str | None = None
