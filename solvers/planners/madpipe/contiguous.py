"""The exact contiguous optimum under 1F1B*: the smallest period of any contiguous allocation (MadPipe section 4.1).

Whether a period is possible is decided by labels (``contiguous_kernel``); possibility never ends as the period grows,
because no group number does. So the answer is exact to the nanosecond by bisection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from penstock.solvers.planners.madpipe.chain import Chain
from penstock.solvers.planners.madpipe.contiguous_kernel import Line, contiguous


class Part(NamedTuple):
    """A stage between two boundaries of the chain; whether it recomputes, and is on the special processor."""

    first: int
    after: int
    variant: int
    special: bool = False


class PartsAtPeriod(NamedTuple):
    """An allocation that the search at ``period_ns`` promises; its actual period may be smaller."""

    period_ns: int
    parts: tuple[Part, ...]


def line_of(chain: Chain) -> Line:
    """The chain as kernels take it."""
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
    """A contiguous allocation of this period whose stages fit under 1F1B*; None when there is none."""
    stages = contiguous(line_of(chain), period_ns).tolist()
    return PartsAtPeriod(period_ns, tuple(Part(*stage) for stage in stages)) if stages else None


def contiguous_optimum(chain: Chain) -> PartsAtPeriod | None:
    """The smallest period of a contiguous allocation; None when none fits at any period."""
    best = at_period(chain, chain.longest_period_ns())
    if best is None:
        return None
    low, step = chain.least_period_ns(), 0
    while low + step < best.period_ns:
        found = at_period(chain, low + step)
        if found is not None:
            best = found
            break
        low, step = low + step + 1, max(1, 2 * step, low // 50)
    while low < best.period_ns:
        middle = (low + best.period_ns) // 2
        found = at_period(chain, middle)
        if found is None:
            low = middle + 1
        else:
            best = found
    return best


def ladder(chain: Chain, period_ns: int, steps: int, longest_ns: int | None = None) -> list[PartsAtPeriod]:
    """Other allocations at longer periods, where stages keep fewer micro-batches; each once, the shortest first."""
    longest = chain.longest_period_ns() if longest_ns is None else longest_ns
    found: dict[tuple[Part, ...], PartsAtPeriod] = {}
    for i in range(1, steps + 1):
        period = period_ns + (longest - period_ns) * i * i // (steps * steps)
        better = at_period(chain, period)
        if better is not None:
            found.setdefault(better.parts, better)
    return list(found.values())


def least_memory(chain: Chain) -> PartsAtPeriod | None:
    """At the longest period the allocation that needs least memory, to 1/1000; None where none fits."""
    longest = chain.longest_period_ns()
    best = at_period(chain, longest)
    low, high = 0, chain.available_bytes
    while best is not None and high - low > 1 and (high - low) * 1000 > chain.available_bytes:
        middle = (low + high) // 2
        found = at_period(replace(chain, available_bytes=middle), longest)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best
