"""Inside-out: a periodic pattern for any allocation, also with a special processor, by list scheduling.

Operations are placed modulo the period (Rau, *Iterative modulo scheduling*, MICRO 1994), from the last stage
outwards: each forward as late, each backward as early as what is placed already allows, so that what a stage keeps
between them is kept briefly. On a contiguous allocation it keeps the same number as 1F1B*. Where stages
share a processor it is a heuristic: a few orders are tried at each period, and the period grows until memory suffices.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache
from typing import NamedTuple

from penstock.schemas.errors import InvalidPlan
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.schedules.support.stage_line import StageLine, as_pattern

NAME = "inside-out"
LADDER = 40
REFINEMENTS = 10


class Starts(NamedTuple):
    """The starts of F and B of micro-batch 0 on each stage."""

    forward_ns: list[int]
    backward_ns: list[int]


def inside_out(problem: Problem, allocation: Allocation, *, period_ns: int | None = None) -> Pattern:
    """Return a pattern of this period, or of the smallest possible period of the search."""
    line = StageLine.of(problem, allocation)
    pattern = smallest(line) if period_ns is None else at_period(line, period_ns)
    if pattern is None:
        raise InvalidPlan(
            "no period was found at which every processor can keep its micro-batches"
            if period_ns is None
            else f"no pattern of period {period_ns} ns was found that fits in memory",
            remedy="a longer period, recomputation, smaller micro-batches, or a contiguous allocation",
        )
    return pattern


def smallest(line: StageLine, below_ns: int | None = None) -> Pattern | None:
    """Return the pattern of the smallest period that the search reaches.

    It tries a ladder of periods, then bisects under its first success. ``below_ns``: only periods below this one count.
    """
    low, high = line.load_bound_ns(), line.alone_ns()
    most = high if below_ns is None else min(high, below_ns - 1)
    failed = low - 1
    for period in _ladder(low, high):
        if period > most:
            return None
        best = at_period(line, period)
        if best is not None:
            break
        failed = period
    else:
        return None
    for _ in range(REFINEMENTS):
        if best.period_ns - failed <= 1:
            break
        middle = (best.period_ns + failed) // 2
        better = at_period(line, middle)
        if better is None:
            failed = middle
        else:
            best = better
    return best


def _ladder(low: int, high: int) -> Iterator[int]:
    """Yield periods from ``low`` to ``high``, close together at first."""
    for i in range(LADDER):
        yield low + (high - low) * i * i // (LADDER * LADDER)
    yield high


def at_period(line: StageLine, period_ns: int) -> Pattern | None:
    """Return the first of the orders that fits in memory at this period."""
    for backward_first in _orders(line.size):
        starts = _place(line, period_ns, backward_first)
        if starts is not None and fits(line, period_ns, starts):
            shift = -(min(starts.forward_ns) // period_ns) * period_ns
            return as_pattern(
                NAME, period_ns, [t + shift for t in starts.forward_ns], [t + shift for t in starts.backward_ns]
            )
    return None


@cache
def _orders(size: int) -> tuple[tuple[bool, ...], ...]:
    """Return which stages place their backward before their forward: all, none, every second one, one half."""
    stages = range(size)
    return tuple(
        dict.fromkeys(
            (
                (True,) * size,
                (False,) * size,
                tuple(s % 2 == 0 for s in stages),
                tuple(s % 2 == 1 for s in stages),
                tuple(2 * s < size for s in stages),
                tuple(2 * s >= size for s in stages),
            )
        )
    )


class _Reservations:
    """The parts of the period for which each resource is reserved."""

    def __init__(self, period_ns: int) -> None:
        self._period_ns = period_ns
        self._intervals: dict[Hashable, list[tuple[int, int]]] = {}

    def earliest(self, resource: Hashable, ready_ns: int, duration_ns: int) -> int | None:
        """Reserve and return the first start from ``ready_ns`` on with the resource free long enough each period."""
        return self._place(resource, ready_ns, duration_ns, 1)

    def latest(self, resource: Hashable, due_ns: int, duration_ns: int) -> int | None:
        """Reserve and return the last start that ends by ``due_ns``."""
        return self._place(resource, due_ns - duration_ns, duration_ns, -1)

    def _place(self, resource: Hashable, start: int, duration: int, way: int) -> int | None:
        intervals = self._intervals.setdefault(resource, [])
        if duration == 0:
            return start
        first = start
        while abs(start - first) < self._period_ns:
            step = self._to_free(intervals, start, duration, way)
            if step == 0:
                intervals.append((start % self._period_ns, duration))
                return start
            start += way * step
        return None

    def _to_free(self, intervals: list[tuple[int, int]], start: int, duration: int, way: int) -> int:
        """Return how far to move to leave the first conflicting reservation; 0 without a conflict."""
        for other, length in intervals:
            after = (start - other) % self._period_ns
            if after < length or self._period_ns - after < duration:
                if way > 0:
                    return (length - after) % self._period_ns or self._period_ns
                return (after + duration) % self._period_ns or self._period_ns
        return self._period_ns if duration > self._period_ns else 0


def _place(line: StageLine, period_ns: int, backward_first: tuple[bool, ...]) -> Starts | None:
    """Return the starts of all operations from the last stage outwards, the turn at 0; None if a resource is full."""
    free = _Reservations(period_ns)
    last = line.size - 1
    forward, backward = [0] * line.size, [0] * line.size
    due, ready = 0, 0
    for s in range(last, -1, -1):
        link = frozenset(line.processor[s : s + 2])
        moved = s < last and len(link) == 2
        order = ("B", "F") if backward_first[s] and s < last else ("F", "B")
        for kind in order:
            if kind == "F":
                sent = free.latest(link, due, line.hop_forward_ns[s]) if moved else due
                start = None if sent is None else free.latest(line.processor[s], sent, line.forward_ns[s])
                if start is None:
                    return None
                forward[s] = due = start
            else:
                sent = free.earliest(link, ready, line.hop_backward_ns[s]) if moved else ready
                came = sent if sent is None or not moved else sent + line.hop_backward_ns[s]
                start = None if came is None else free.earliest(line.processor[s], came, line.backward_ns[s])
                if start is None:
                    return None
                backward[s] = start
                ready = start + line.backward_ns[s]
    return Starts(forward, backward)


def peak_in_flight(line: StageLine, period_ns: int, starts: Starts) -> list[int]:
    """Return each stage's peak of micro-batches with F started and B not ended, in the order in which the rows run."""
    ends = [t + d for t, d in zip(starts.backward_ns, line.backward_ns, strict=True)]
    return [-((f - e) // period_ns) for f, e in zip(starts.forward_ns, ends, strict=True)]


def fits(line: StageLine, period_ns: int, starts: Starts) -> bool:
    """Return whether every processor's peak fits in memory; a peak is at the start of a forward."""
    ends = [t + d for t, d in zip(starts.backward_ns, line.backward_ns, strict=True)]
    if any(count > line.most_in_flight for count in peak_in_flight(line, period_ns, starts)):
        return False
    for number, available in enumerate(line.available_bytes):
        stages = [s for s in range(line.size) if line.processor[s] == number]
        always = sum(line.fixed_bytes[s] for s in stages) + max(line.work_bytes[s] for s in stages)
        for now in (starts.forward_ns[s] for s in stages):
            kept = sum(
                line.kept_bytes[s] * ((now - starts.forward_ns[s]) // period_ns - (now - ends[s]) // period_ns)
                for s in stages
            )
            if always + kept > available:
                return False
    return True
