"""``Result``: a planner's answer with its proof, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from penstock.solvers.allocation import Allocation
from penstock.solvers.schedule import Schedule
from penstock.solvers.timeline import Timeline
from penstock.solvers.update_rules import UpdateRule


class Status(StrEnum):
    """``optimal`` means value ≤ request-scope bound + tolerance; ``infeasible`` that no plan exists (``feasibility``).

    ``none_found``: the search ended without a plan, and that there is none is not proven.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NONE_FOUND = "none_found"
    TIME_LIMIT = "time_limit"


Scope = Literal["schedule of this allocation", "all plans of this request"]

SCHEDULE_SCOPE: Final = "schedule of this allocation"
REQUEST_SCOPE: Final = "all plans of this request"


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound on the time per global batch."""

    scope: Scope
    model: str
    bound_ns: int
    method: str
    tolerance_ns: int = 0


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
    """How far a solve is: the best plan's time, the bound that holds for plans of its kind, who is at work."""

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
