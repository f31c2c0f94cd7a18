"""What is asked of a solve: the problem, a schedule, and when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from penstock.schemas.coverage import Covers
from penstock.solvers.bounds.coverage import allowed
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound


class Deadline:
    """When to stop, on a monotonic clock; without a limit it never comes."""

    def __init__(self, limit_ns: int | None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._start = clock()
        self._limit_ns = limit_ns

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._limit_ns is not None

    @property
    def limit_s(self) -> float | None:
        """The limit, in seconds."""
        return None if self._limit_ns is None else self._limit_ns / 1e9

    @property
    def left_s(self) -> float | None:
        """Seconds until the limit; negative when it has passed."""
        return None if self._limit_ns is None else (self._start + self._limit_ns - self._clock()) / 1e9

    @property
    def passed(self) -> bool:
        """Whether the limit has been reached."""
        return self._limit_ns is not None and self._clock() - self._start >= self._limit_ns

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return (self._clock() - self._start) / 1e9


@dataclass(frozen=True)
class Setting:
    """What all tasks of a solve have in common.

    ``schedule``: the one that was asked for, or ``auto``. ``gap``: how far above a bound, relatively, a plan is good
    enough. ``max_plans``: how many plans of one planner are judged; a count, so the answer is the same on every
    machine. ``first_feasible``: stop at the first plan that fits. ``whole``: a bound on every plan of the request,
    where it is known already.
    """

    problem: Problem
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    gap: float = 0.0
    schedule: str = "auto"
    max_plans: int | None = None
    first_feasible: bool = False
    whole: Bound | None = None

    @cached_property
    def every_plan(self) -> Bound:
        """The bound on every plan of the request, from its work and its first micro-batch alone."""
        return request_bound(self.problem) if self.whole is None else self.whole

    @cached_property
    def allowed(self) -> Covers:
        """The class of all plans that the request allows."""
        return allowed(self.problem)

    @property
    def shares_times(self) -> bool:
        """Whether tasks may know each other's best time: not where the answer might depend on when it was known."""
        return self.gap == 0 and self.max_plans is None and not self.first_feasible
