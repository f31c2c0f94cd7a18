"""The incumbent: the best plan so far.

Ties: time per global batch, fewest devices, then the allocation's layers and devices, then fewest warm-up forwards,
then the plan that was offered first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.schedule import Orders, Schedule

Key = tuple[int, int, tuple[object, ...], int, str]


class Plan(Protocol):
    """A timed plan."""

    @property
    def allocation(self) -> Allocation:
        """Its stages."""

    @property
    def schedule(self) -> Schedule:
        """Its orders or its pattern."""

    @property
    def value_ns(self) -> int:
        """Its time per global batch."""


P = TypeVar("P", bound=Plan)


def key_of(value_ns: int, allocation: Allocation, schedule: Schedule) -> Key:
    """Return what plans are ranked by; the least is the best."""
    stages = tuple((s.first, s.last, s.devices, s.dispatch, s.recompute) for s in allocation.stages)
    used = len({d for s in allocation.stages for d in s.devices})
    warmup = sum(schedule.warmup) if isinstance(schedule, Orders) else 0
    return value_ns, used, (stages, allocation.num_micro_batches), warmup, schedule.name


@dataclass
class Incumbent(Generic[P]):
    """The best plan of those that were offered; None before the first."""

    best: P | None = None
    _key: Key | None = None

    def is_beaten_by(self, key: Key) -> bool:
        """Return whether a plan with this key is better."""
        return self._key is None or key < self._key

    def offer(self, plan: P) -> bool:
        """Take a plan if it is better than the incumbent; return whether it is."""
        key = key_of(plan.value_ns, plan.allocation, plan.schedule)
        if not self.is_beaten_by(key):
            return False
        self.best, self._key = plan, key
        return True
