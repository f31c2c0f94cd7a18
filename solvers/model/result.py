"""``Result``: a planner's answer with its proof, or the reason why there is no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from penstock.schemas.amounts import duration, percent
from penstock.schemas.coverage import CLASS_SCOPE, REQUEST_SCOPE, SCHEDULE_SCOPE, Covers, Scope, model_of
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import INPUT
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.schedule import Orders, Schedule, kinds_of
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import UpdateRule


class Reason(NamedTuple):
    """The reason why a planner is not run: ``kind`` has a place ``{}`` for each of the values.

    Reasons of one kind, as at several choices of degrees, are combined without comparing their words.
    """

    kind: str
    values: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.combined([self])

    @classmethod
    def combined(cls, reasons: Sequence[Reason]) -> str:
        """Return reasons of one kind as one text: each place has the least and the greatest of its values."""
        places = zip(*(reason.values for reason in reasons), strict=True)
        return reasons[0].kind.format(*(_range(min(values), max(values)) for values in places))


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


class Refusal(UnsupportedRequest):
    """A request that a planner cannot take, for a reason that other requests share with other values."""

    def __init__(self, reason: Reason, *, remedy: str) -> None:
        super().__init__(str(reason), remedy=remedy)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _refusal, (self.reason, self.remedy)


def _refusal(reason: Reason, remedy: str) -> Refusal:
    return Refusal(reason, remedy=remedy)


def reason_of(error: UnsupportedRequest) -> Reason:
    """Return why a planner cannot take a request: its detail is a kind without values unless it is a ``Refusal``."""
    if isinstance(error, Refusal):
        return error.reason
    return Reason(error.detail.rstrip(".").replace("{", "{{").replace("}", "}}"))


class Status(StrEnum):
    """``optimal`` means value ≤ a bound on every plan of the request + its tolerance; ``infeasible`` that none exists.

    ``infeasible`` has a proof (``feasibility``). ``none_found``: the search ended without a plan, but did not prove
    that none exists.
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
    "JudgedPlan",
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
        """Return which plans the bound covers, in words."""
        return model_of(self.scope, self.covers)


@dataclass(frozen=True, slots=True)
class Shortage:
    """The shortage of the best attempt's tightest stage: device, bytes lacking, and the first remedy that works."""

    first_layer: int
    last_layer: int
    device: int
    needed_bytes: int
    available_bytes: int
    remedy: str | None = None

    @property
    def missing_bytes(self) -> int:
        """Return the bytes that are lacking."""
        return self.needed_bytes - self.available_bytes


@dataclass(slots=True)
class JudgedPlan:
    """A plan with its simulated time; its timeline stays in the process that simulated it."""

    planner: str
    allocation: Allocation
    schedule: Schedule
    value_ns: int
    overlap_all_reduce: bool = True
    update_rule: UpdateRule = "synchronous"
    simulated: Timeline | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        planner: str,
        allocation: Allocation,
        schedule: Schedule,
        timeline: Timeline,
        overlap_all_reduce: bool = True,
        update_rule: UpdateRule = "synchronous",
    ) -> JudgedPlan:
        """Return the plan with its timeline."""
        value_ns = timeline.time_per_global_batch_ns
        return cls(planner, allocation, schedule, value_ns, overlap_all_reduce, update_rule, timeline)

    def __reduce__(self) -> tuple[type[JudgedPlan], tuple[object, ...]]:
        how = self.overlap_all_reduce, self.update_rule
        return JudgedPlan, (self.planner, self.allocation, self.schedule, self.value_ns, *how)

    @property
    def timeline(self) -> Timeline:
        """Return the timeline; ``with_timeline`` simulates the plan of another process."""
        assert self.simulated is not None, f"the plan of {self.planner!r} was simulated in another process"
        return self.simulated

    @property
    def orders(self) -> Orders:
        """Return the schedule of a flushed step."""
        assert isinstance(self.schedule, Orders), self.schedule
        return self.schedule

    @property
    def is_plain(self) -> bool:
        """Return whether it is neither a flushed step of several pipelines nor one with split backwards."""
        if self.update_rule != "synchronous" or not isinstance(self.schedule, Orders):
            return True
        return len(self.allocation.pipelines) == 1 and INPUT not in kinds_of(self.schedule)


class Progress(NamedTuple):
    """Progress of a solve: the best plan's time, the bound on every plan of the request, the tasks at work."""

    value_ns: int | None
    bound: Bound
    working: tuple[str, ...]

    @property
    def gap(self) -> float | None:
        """Return value / bound - 1."""
        return None if self.value_ns is None or self.bound.bound_ns <= 0 else self.value_ns / self.bound.bound_ns - 1

    def __str__(self) -> str:
        """Return it in words: the best time, the bound, the gap, the tasks at work."""
        return self.in_words("")

    def in_words(self, planner: str) -> str:
        """Return it in words, with the planner of the best plan where that is known."""
        made_by = f" by {planner}" if planner else ""
        best = "no plan yet" if self.value_ns is None else f"{duration(self.value_ns)}{made_by}"
        gap = "" if self.gap is None else f", gap {percent(self.gap)}"
        working = f"; {', '.join(self.working)}" if self.working else ""
        return f"{best}, bound {duration(self.bound.bound_ns)}{gap}{working}"


class Alternative(NamedTuple):
    """A choice of degrees: its best plan, the bound on all of its plans, and why it is not the answer.

    ``value_ns`` and ``peak_bytes`` (of the fullest device) are None if no plan was found, ``bound_ns`` if the choice
    cannot be made; ``why`` is empty for the answer.
    """

    choice: Choice
    value_ns: int | None
    peak_bytes: int | None
    bound_ns: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Result:
    """A planner's result. ``best`` is None if infeasible, if no plan was found, or if the limit was reached first.

    ``why``: clauses, the plan or its obstacle first. ``choice``: the degrees and the sharding of the problem that the
    best plan, or the shortage, belongs to. ``not_asked``: for ``auto``, the planners that were not run, each with the
    reason. ``alternatives``: the choices that were compared, the best plans first.
    """

    status: Status
    why: tuple[str, ...]
    best: JudgedPlan | None = None
    bounds: tuple[Bound, ...] = ()
    shortage: Shortage | None = None
    seconds: float = 0.0
    unfinished: tuple[str, ...] = ()
    choice: Choice | None = None
    not_asked: Mapping[str, Reason] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()

    @property
    def sentence(self) -> str:
        """Return the clauses as one sentence."""
        return "; ".join(self.why)
