"""MadPipe's first phase without a grid: the smallest period of an allocation with a special processor (section 4.2).

Algorithm 1 looks for the smallest max(DP(T̂), T̂). DP never grows with T̂, so that is the smallest T at which an
allocation of period at most T exists with its memory counted at T̂ = T, which labels decide exactly
(``label_kernel``). The search goes up from the least possible period in growing steps, then bisects.

Differences from the paper: the special processor's memory is tightened and its stages are no neighbours, unless
``tight`` is False. With the literal memory an exact search finds allocations that no schedule can keep
(SOLVERS.md A). Too many labels are rounded up, which is safe: every result fits, but shorter allocations may be
missed, and ``exact`` says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from penstock.solvers.planners.madpipe.chain import Chain
from penstock.solvers.planners.madpipe.contiguous import Part, PartsAtPeriod, line_of
from penstock.solvers.planners.madpipe.label_kernel import EXISTS, SPECIAL, TOO_MANY, Rounding, special

LABELS = 100_000
"""Limit on the labels of one decision; above it they are rounded."""
MOST_LABELS = 2_000_000
ROUNDED = (1, 500, 125, 32)
"""Parts of the period and the memory to which labels are rounded up, tried in this order; 1: not at all."""
LOOSER = (1.02, 1.05, 1.1, 1.2, 1.4)
SHARES = (0.95, 0.9, 0.8)
FEW_LABELS = 20_000
"""Further searches of ``portfolio``: target periods above the smallest, and shares of the memory.

It tries shares of the memory only if the first search had at most ``FEW_LABELS`` labels.
"""
TOLERANCE = 10_000
"""The precision of the period, 1/TOLERANCE, at which the search ends."""


class Searched(NamedTuple):
    """Allocations at the periods for which the search has one, the shortest period first.

    ``least_ns``: no allocation has a shorter period (by this memory model). ``exact``: no label was rounded.
    """

    allocations: tuple[PartsAtPeriod, ...]
    least_ns: int
    exact: bool
    labels: int


class _Decisions:
    """The decisions, one after the other; rounding, once it was needed, stays."""

    def __init__(self, chain: Chain, tight: bool) -> None:
        self.chain = chain
        self.tight = tight
        self.level = 0
        self.labels = 0
        self.allocations: dict[tuple[Part, ...], PartsAtPeriod] = {}

    def at(self, period_ns: int) -> bool:
        """Return whether an allocation of this period exists; store it."""
        while True:
            last = self.level == len(ROUNDED) - 1
            cap = MOST_LABELS if last else LABELS
            status, labels, stages = special(line_of(self.chain), period_ns, self.tight, self._rounding(period_ns), cap)
            self.labels = max(self.labels, labels)
            if status != TOO_MANY or last:
                break
            self.level += 1
        if status != EXISTS:
            return False
        parts = tuple(Part(k, j, how % SPECIAL, how >= SPECIAL) for k, j, how in stages.tolist())
        if parts not in self.allocations or self.allocations[parts].period_ns > period_ns:
            self.allocations[parts] = PartsAtPeriod(period_ns, parts)
        return True

    def _rounding(self, period_ns: int) -> Rounding:
        parts = ROUNDED[self.level]
        if parts == 1:
            return Rounding(1, 1, 1)
        return Rounding(
            max(1, period_ns // parts), max(1, self.chain.available_bytes // parts), max(1, period_ns // parts)
        )


def special_optimum(
    chain: Chain, *, below_ns: int | None = None, tight: bool = True, extra: tuple[float, ...] = ()
) -> Searched:
    """Return allocations at the smallest period and at some periods above it.

    They have a special processor or are contiguous. ``below_ns``: only shorter periods are searched, since a contiguous
    allocation of this period exists. ``extra``: periods to decide in addition, as multiples of the smallest period.
    """
    decide = _Decisions(chain, tight)
    longest = chain.longest_period_ns() if below_ns is None else below_ns - below_ns // TOLERANCE - 1
    low, step, high, feasible = chain.least_period_ns(), 0, longest, False
    while not feasible and low <= longest:
        high = min(low + step, longest)
        feasible = decide.at(high)
        if not feasible:
            low, step = high + 1, max(1, 2 * step, low // 50)
    while feasible and (high - low) * TOLERANCE > high:
        middle = (low + high) // 2
        if decide.at(middle):
            high = middle
        else:
            low = middle + 1
    for factor in extra if feasible else ():
        period = int(high * factor)
        if period <= longest:
            decide.at(period)
    ranked = sorted(decide.allocations.values(), key=lambda allocation: allocation.period_ns)
    return Searched(tuple(ranked), low, decide.level == 0, decide.labels)


def portfolio(chain: Chain, below_ns: int | None = None) -> Searched:
    """Return allocations worth a schedule: at the smallest period, at longer ones, and, if cheap, with free memory.

    The memory of the special processor is only bounded from below. So an allocation that a schedule can really keep may
    be one that promises less.
    """
    searches = [special_optimum(chain, below_ns=below_ns, extra=LOOSER)]
    if searches[0].labels <= FEW_LABELS:
        less = [replace(chain, available_bytes=int(chain.available_bytes * share)) for share in SHARES]
        searches += [special_optimum(each, below_ns=below_ns, extra=LOOSER) for each in less]
    distinct: dict[tuple[Part, ...], PartsAtPeriod] = {}
    for search in searches:
        for allocation in search.allocations:
            distinct.setdefault(allocation.parts, allocation)
    return Searched(
        tuple(sorted(distinct.values(), key=lambda allocation: allocation.period_ns)),
        searches[0].least_ns,
        all(search.exact for search in searches),
        max(search.labels for search in searches),
    )
