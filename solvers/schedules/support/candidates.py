"""Candidate schedules of any allocation: the micro-batches that they keep in flight are known before they are built."""

from __future__ import annotations

from typing import NamedTuple

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.catalogue import SCHEDULES, ScheduleRow, schedule_row
from penstock.solvers.schedules.support.recomputed import recomputed


class CandidateSchedule(NamedTuple):
    """An order that is not built yet: the micro-batches that each stage keeps in flight say whether it can fit.

    ``apart``: recomputations are separate operations, which may run while a gradient is awaited. ``parameters``: the
    parameters of the schedule's row, with their values.
    """

    name: str
    warmup: tuple[int, ...]
    apart: bool = False
    parameters: tuple[tuple[str, object], ...] = ()

    @property
    def row(self) -> ScheduleRow:
        """The schedule's row in the catalogue."""
        return SCHEDULES[self.name]

    def orders(self, problem: Problem, allocation: Allocation) -> Orders:
        """Return the order. Raise ``UnsupportedRequest`` where the schedule does not order such stages."""
        vector = {"warmup": self.warmup} if self.row.by_vector else {}
        orders = self.row.orders(problem, allocation, **vector, **dict(self.parameters))
        return recomputed(allocation, orders) if self.apart else orders


def candidate_schedules(
    problem: Problem, allocation: Allocation, schedule: str, policy: str
) -> list[CandidateSchedule]:
    """Return every candidate order of a schedule for an allocation, each once; none of a schedule that needs a planner.

    Where stages recompute, orders with recomputations as separate operations come first. These keep what they rebuild
    while they wait, so orders with recomputation within the backwards follow. Raises ``UnsupportedRequest`` for a
    schedule that does not exist.
    """
    row = schedule_row(schedule)
    if not row.for_any_stages:
        return []
    plain = [
        CandidateSchedule(row.orders_of or row.name, vector, parameters=tuple(values.items()))
        for vector in row.in_flight(problem, allocation, policy)
        for values in row.choices(allocation)
    ]
    if not any(stage.recompute for stage in allocation.stages):
        return plain
    return [*(candidate._replace(apart=True) for candidate in plain), *plain]
