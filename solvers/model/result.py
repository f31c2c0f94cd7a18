"""``Result``: a planner's answer with its proof, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from penstock.schemas.coverage import CLASS_SCOPE, REQUEST_SCOPE, SCHEDULE_SCOPE, Covers, Scope, model_of
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.schedule import Schedule
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import UpdateRule


class Status(StrEnum):
    """``optimal`` means value ≤ a bound on every plan of the request + its tolerance; ``infeasible`` that none exists.

    ``infeasible`` has a proof (``feasibility``). ``none_found``: the search ended without a plan, and that there is
    none is not proven.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NONE_FOUND = "none_found"
    TIME_LIMIT = "time_limit"


__all__ = [
    "CLASS_SCOPE",
    "REQUEST_SCOPE",
    "SCHEDULE_SCOPE",
    "Bound",
    "Candidate",
    "Progress",
    "Result",
    "Scope",
    "Shortage",
    "Status",
]


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound on the time per global batch of every plan that ``covers`` allows.

    ``scope`` says how that class relates to the request: all of its plans, some of them, or the orders of one plan's
    allocation.
    """

    scope: Scope
    covers: Covers
    bound_ns: int
    method: str
    tolerance_ns: int = 0

    @property
    def model(self) -> str:
        """Which plans the bound covers, in words."""
        return model_of(self.scope, self.covers)


@dataclass(frozen=True, slots=True)
class Shortage:
    """The tightest stage of the best attempt: which device lacks how many bytes, and the first remedy that works."""

    first_layer: int
    last_layer: int
    device: int
    needed_bytes: int
    available_bytes: int
    remedy: str | None = None

    @property
    def missing_bytes(self) -> int:
        """What is lacking."""
        return self.needed_bytes - self.available_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A judged plan."""

    planner: str
    allocation: Allocation
    schedule: Schedule
    timeline: Timeline
    overlap_all_reduce: bool = True
    update_rule: UpdateRule = "synchronous"

    @property
    def value_ns(self) -> int:
        """Time per global batch, by the judge."""
        return self.timeline.time_per_global_batch_ns


class Progress(NamedTuple):
    """How far a solve is: the best plan's time, the bound on every plan of the request, who is at work."""

    value_ns: int | None
    bound: Bound
    working: tuple[str, ...]

    @property
    def gap(self) -> float | None:
        """Value / bound - 1."""
        return None if self.value_ns is None or self.bound.bound_ns <= 0 else self.value_ns / self.bound.bound_ns - 1


@dataclass(frozen=True, slots=True)
class Result:
    """What a planner found. ``best`` is None when infeasible, when none was found, or when the limit came first."""

    status: Status
    why: str
    best: Candidate | None = None
    bounds: tuple[Bound, ...] = ()
    shortage: Shortage | None = None
    seconds: float = 0.0
    unfinished: tuple[str, ...] = ()
