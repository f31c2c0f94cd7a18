"""Judging an allocation inside a planner's own search: the best early-backward order that fits in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.costs.shortages import shortage_of
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.drafts import Draft, drafts
from penstock.solvers.schedules.early_backward import depths, fitted


class Trial(NamedTuple):
    """A judged plan that fits."""

    value_ns: int
    allocation: Allocation
    orders: Orders


class Outcome(NamedTuple):
    """``trial`` is the plan when it is good enough and fits; else ``value_ns`` is its time, whether it fits or not."""

    value_ns: int
    trial: Trial | None = None
    lacking: int | None = None


def judged(problem: Problem, allocation: Allocation, orders: Orders, below_ns: int) -> Outcome:
    """The plan, when it takes less than ``below_ns`` and fits; else the device that lacks most, if that is why."""
    value = makespan_ns(problem, allocation, orders)
    if value >= below_ns:
        return Outcome(value)
    timeline = simulate(problem, allocation, orders)
    short = largest_shortage(problem, allocation, timeline)
    if short is not None:
        return Outcome(value, lacking=short.device)
    return Outcome(value, Trial(value, allocation, orders))


def best_order(problem: Problem, allocation: Allocation, below_ns: int) -> Outcome:
    """The best of the usual warm-ups."""
    return best_of(problem, allocation, warmups(problem, allocation), below_ns)


def best_of(problem: Problem, allocation: Allocation, vectors: Iterable[tuple[int, ...]], below_ns: int) -> Outcome:
    """The best of these warm-ups, each with fewer micro-batches in flight where memory asks for it."""
    best, least = None, NEVER_NS
    seen: set[tuple[int, ...]] = set()
    for vector in vectors:
        attempt: tuple[int, ...] | None = vector
        while attempt is not None and attempt not in seen:
            seen.add(attempt)
            found = _attempt(problem, allocation, attempt, below_ns if best is None else best.value_ns)
            best, least = found.trial or best, min(least, found.value_ns)
            attempt = None if found.lacking is None else _fewer(problem, allocation, attempt, found.lacking)
    return Outcome(least if best is None else best.value_ns, best)


def warmups(problem: Problem, allocation: Allocation) -> Iterator[tuple[int, ...]]:
    """P_A, P_B, two between them, SPP's PE (ALGORITHMS 3.3: K = 4 (S - n) + 1), and as many as memory holds."""
    yield from (draft.warmup for draft in drafts(problem, allocation, "early-backward", "best"))
    yield fitted(problem, allocation, tuple(4 * depth - 3 for depth in depths(allocation)))


def _attempt(problem: Problem, allocation: Allocation, warmup: tuple[int, ...], below_ns: int) -> Outcome:
    short = shortage_of(problem, allocation, warmup)
    if short is not None:
        return Outcome(NEVER_NS, lacking=short.device)
    return judged(problem, allocation, Draft("early-backward", warmup).orders(problem, allocation), below_ns)


def _fewer(problem: Problem, allocation: Allocation, warmup: tuple[int, ...], device: int) -> tuple[int, ...] | None:
    """One micro-batch less in flight on the device's stage, and no more behind it."""
    stage = next(s for s, each in enumerate(allocation.stages) if device in each.devices)
    if warmup[stage] <= 1:
        return None
    wanted = [min(k, warmup[stage] - 1) if s >= stage else k for s, k in enumerate(warmup)]
    return fitted(problem, allocation, wanted)
