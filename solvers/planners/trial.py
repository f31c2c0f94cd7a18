"""Judging an allocation inside a planner's own search: the best early-backward order that fits in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.solvers.allocation import Allocation
from penstock.solvers.planners.proposal import Draft, drafts, shortage_of
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders
from penstock.solvers.schedules.early_backward import depths, fitted
from penstock.solvers.simulate import makespan_ns, simulate
from penstock.solvers.timeline import Timeline


class Trial(NamedTuple):
    """A judged plan that fits."""

    value_ns: int
    allocation: Allocation
    orders: Orders
    timeline: Timeline


def judged(problem: Problem, allocation: Allocation, orders: Orders, below_ns: int) -> Trial | Timeline | None:
    """The plan, when it takes less than ``below_ns`` and fits; its timeline when only memory is lacking."""
    value = makespan_ns(problem, allocation, orders)
    if value >= below_ns:
        return None
    timeline = simulate(problem, allocation, orders)
    if lacking(problem, timeline) is not None:
        return timeline
    return Trial(value, allocation, orders, timeline)


def lacking(problem: Problem, timeline: Timeline) -> int | None:
    """A device whose memory does not suffice: the one that lacks most."""
    missing = {d: use.memory.total - problem.capacity_bytes(d) for d, use in timeline.uses.items()}
    worst = max(missing, key=lambda d: (missing[d], -d))
    return worst if missing[worst] > 0 else None


def best_order(problem: Problem, allocation: Allocation, below_ns: int) -> Trial | None:
    """The best of the usual warm-ups that takes less than ``below_ns`` and fits; None when there is none."""
    return best_of(problem, allocation, warmups(problem, allocation), below_ns)


def best_of(
    problem: Problem, allocation: Allocation, vectors: Iterable[tuple[int, ...]], below_ns: int
) -> Trial | None:
    """The best of these warm-ups, each with fewer micro-batches in flight where memory asks for it."""
    best: Trial | None = None
    seen: set[tuple[int, ...]] = set()
    for vector in vectors:
        attempt: tuple[int, ...] | None = vector
        while attempt is not None and attempt not in seen:
            seen.add(attempt)
            found = _attempt(problem, allocation, attempt, below_ns if best is None else best.value_ns)
            if isinstance(found, Trial):
                best = found
            attempt = _fewer(problem, allocation, attempt, found) if isinstance(found, int) else None
    return best


def warmups(problem: Problem, allocation: Allocation) -> Iterator[tuple[int, ...]]:
    """P_A, P_B, two between them, SPP's PE (ALGORITHMS 3.3: K = 4 (S - n) + 1), and as many as memory holds."""
    yield from (draft.warmup for draft in drafts(problem, allocation, "early-backward", "best"))
    yield fitted(problem, allocation, tuple(4 * depth - 3 for depth in depths(allocation)))


def _attempt(problem: Problem, allocation: Allocation, warmup: tuple[int, ...], below_ns: int) -> Trial | int | None:
    """The plan, or the stage that lacks memory, or None when it is not better."""
    short = shortage_of(problem, allocation, warmup)
    if short is not None:
        return _stage_of(allocation, short.device)
    orders = Draft("early-backward", warmup).orders(problem, allocation)
    found = judged(problem, allocation, orders, below_ns)
    if not isinstance(found, Timeline):
        return found
    device = lacking(problem, found)
    assert device is not None
    return _stage_of(allocation, device)


def _stage_of(allocation: Allocation, device: int) -> int:
    return next(s for s, stage in enumerate(allocation.stages) if device in stage.devices)


def _fewer(problem: Problem, allocation: Allocation, warmup: tuple[int, ...], stage: int) -> tuple[int, ...] | None:
    """One micro-batch less in flight on the stage, and no more behind it."""
    if warmup[stage] <= 1:
        return None
    wanted = [min(k, warmup[stage] - 1) if s >= stage else k for s, k in enumerate(warmup)]
    return fitted(problem, allocation, wanted)
