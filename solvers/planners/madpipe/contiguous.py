"""The exact contiguous optimum under 1F1B*: the smallest period of any contiguous allocation (MadPipe section 4.1).

Labels decide whether a period is possible (``contiguous_kernel``). A period longer than a possible one is possible too,
because no group number grows with the period. So bisection is exact to the nanosecond.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from penstock.solvers.planners.madpipe.chain import Chain
from penstock.solvers.planners.madpipe.contiguous_kernel import Line, contiguous


class Part(NamedTuple):
    """A stage between two boundaries; ``variant``: how it recomputes, ``special``: on the special processor."""

    first: int
    after: int
    variant: int
    special: bool = False


class PartsAtPeriod(NamedTuple):
    """An allocation that the search at ``period_ns`` promises; its actual period may be smaller."""

    period_ns: int
    parts: tuple[Part, ...]


def line_of(chain: Chain) -> Line:
    """Return the chain's arrays for the kernels."""
    return Line(
        chain.load_ns,
        chain.fixed_bytes,
        chain.kept_bytes,
        chain.work_bytes,
        chain.hop_ns,
        chain.available_bytes,
        chain.most_in_flight,
    )


def at_period(chain: Chain, period_ns: int) -> PartsAtPeriod | None:
    """Return a contiguous allocation of this period whose stages fit under 1F1B*, or None if none exists."""
    stages = contiguous(line_of(chain), period_ns).tolist()
    return PartsAtPeriod(period_ns, tuple(Part(*stage) for stage in stages)) if stages else None


def contiguous_optimum(chain: Chain) -> PartsAtPeriod | None:
    """Return the contiguous allocation of the smallest period, or None if no allocation fits at any period."""
    best = at_period(chain, chain.longest_period_ns())
    if best is None:
        return None
    low, step = chain.least_period_ns(), 0
    while low + step < best.period_ns:
        candidate = at_period(chain, low + step)
        if candidate is not None:
            best = candidate
            break
        low, step = low + step + 1, max(1, 2 * step, low // 50)
    while low < best.period_ns:
        middle = (low + best.period_ns) // 2
        candidate = at_period(chain, middle)
        if candidate is None:
            low = middle + 1
        else:
            best = candidate
    return best


def ladder(chain: Chain, period_ns: int, steps: int, upper_bound_ns: int | None = None) -> list[PartsAtPeriod]:
    """Return other allocations at longer periods, where stages keep fewer micro-batches.

    Each is listed once, the shortest first.
    """
    longest = chain.longest_period_ns() if upper_bound_ns is None else upper_bound_ns
    distinct: dict[tuple[Part, ...], PartsAtPeriod] = {}
    for i in range(1, steps + 1):
        period = period_ns + (longest - period_ns) * i * i // (steps * steps)
        better = at_period(chain, period)
        if better is not None:
            distinct.setdefault(better.parts, better)
    return list(distinct.values())


def least_memory(chain: Chain) -> PartsAtPeriod | None:
    """Return the allocation that needs least memory at the longest period, to 1/1000; None if no allocation fits."""
    longest = chain.longest_period_ns()
    best = at_period(chain, longest)
    low, high = 0, chain.available_bytes
    while best is not None and high - low > 1 and (high - low) * 1000 > chain.available_bytes:
        middle = (low + high) // 2
        candidate = at_period(replace(chain, available_bytes=middle), longest)
        if candidate is None:
            low = middle
        else:
            best, high = candidate, middle
    return best
