"""1F1B*: the periodic pattern of a contiguous allocation that keeps fewest micro-batches (MadPipe section 4.1).

Stages and the channels between them form one chain s_1, C_1, s_2, …, s_P; a channel's load is the transfers both
ways. From the last stage backwards, elements join a group while its load is at most the period T; stage s of group g
keeps exactly g micro-batches. No pattern of period T keeps fewer on any stage (Proposition 1). Within a group the
forwards run in sequence, then the backwards without idle time.

R-17 (ALGORITHMS): after F on micro-batch i the next backward of a stage in group g is on i - g + 1, not on the
printed i + g - 1; the shift of a backward is its group's, h_B = h_F + g - 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from penstock.schemas.errors import InvalidPlan
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.schedules.support.stage_line import StageLine, as_pattern

NAME = "1f1b-star"


def one_f_one_b_star(problem: Problem, allocation: Allocation, *, period_ns: int | None = None) -> Pattern:
    """Return the 1F1B* pattern of a plan; without a period, of the smallest period that memory and two versions allow.

    Raises ``InvalidPlan`` where a device holds several stages, or no period fits, or the period is below a load.
    """
    line = StageLine.of(problem, allocation)
    if not line.contiguous:
        raise InvalidPlan(
            "1F1B* needs a processor for every stage, but one holds several",
            remedy="schedule inside-out, or a contiguous allocation",
        )
    period = minimal_period_ns(line) if period_ns is None else period_ns
    if period is None:
        raise InvalidPlan(
            "no period lets every stage hold one micro-batch in addition to two versions of its weights",
            remedy="recomputation, smaller micro-batches, or more stages",
        )
    if period < max(chain_loads(line)):
        raise InvalidPlan(f"a period of {period} ns is below the longest stage or channel: {max(chain_loads(line))} ns")
    return pattern(line, period)


def chain_loads(line: StageLine) -> list[int]:
    """Return the loads of s_1, C_1, s_2, …, s_P."""
    return [f + b for f, b in _chain(line)]


def _chain(line: StageLine) -> list[tuple[int, int]]:
    elements = []
    for s in range(line.size):
        elements.append((line.forward_ns[s], line.backward_ns[s]))
        if s + 1 < line.size:
            elements.append((line.hop_forward_ns[s], line.hop_backward_ns[s]))
    return elements


def groups(loads: Sequence[int], period_ns: int) -> list[int]:
    """Return the group of each element of the chain, 1 for the last; every load is at most the period."""
    number, filled, numbers = 1, 0, []
    for load in reversed(loads):
        if filled + load > period_ns:
            number, filled = number + 1, 0
        filled += load
        numbers.append(number)
    return numbers[::-1]


def in_flight(line: StageLine, period_ns: int) -> list[int]:
    """Return g of each stage: the micro-batches that it keeps at this period."""
    return groups(chain_loads(line), period_ns)[::2]


def pattern(line: StageLine, period_ns: int) -> Pattern:
    """Return when F and B of each stage start; each group's forwards and backwards have no pause between them."""
    chain = _chain(line)
    group = groups([f + b for f, b in chain], period_ns)
    forward = list(accumulate((f for f, _b in chain), initial=0))
    backward = [0] * len(chain)
    for s in reversed(range(len(chain))):
        last_of_group = s + 1 == len(chain) or group[s + 1] != group[s]
        turn = forward[s + 1] + (group[s] - 1) * period_ns
        backward[s] = turn if last_of_group else backward[s + 1] + chain[s + 1][1]
    return as_pattern(NAME, period_ns, forward[:-1:2], backward[::2])


def minimal_period_ns(line: StageLine) -> int | None:
    """Return the smallest period at which every stage's g micro-batches fit, exactly; None when one fits at no period.

    g changes only at sums of consecutive loads and never grows with the period: binary search over these sums.
    """
    loads = chain_loads(line)
    longest = max(1, *loads)
    sums = {longest}
    for first in range(len(loads)):
        sums.update(total for total in accumulate(loads[first:]) if total > longest)
    candidates = sorted(sums)
    index = bisect_left(candidates, True, key=lambda period: fits(line, in_flight(line, period)))
    return candidates[index] if index < len(candidates) else None


def fits(line: StageLine, counts: Sequence[int]) -> bool:
    """Return whether stages on separate processors can keep ``counts`` micro-batches, with two weight versions."""
    return all(
        g <= line.most_in_flight
        and line.fixed_bytes[s] + g * line.kept_bytes[s] + line.work_bytes[s] <= line.available_bytes[line.processor[s]]
        for s, g in enumerate(counts)
    )
