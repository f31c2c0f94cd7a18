"""Zero bubble: backwards split into input and weight gradients, the latter where a device would idle.

Qi et al., ICLR 2024, ALGORITHMS 7.6: I is the gradient of the input, W the gradient of the weights. The longest idle
time of a rank between its first and last operation is (p - 1) (F + I - W) for H1 and (p - 1) (F + I - 2 W) for H2,
against (p - 1) (F + I + W) of 1F1B; p and 2 p - 1 micro-batches are in flight on every rank, from F to W.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schemas.program import FORWARD, INPUT, WEIGHT
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.chunks import Ranks, in_line


def zb_h1(problem: Problem, allocation: Allocation) -> Orders:
    """Return ZB-H1's orders.

    Rank i runs p - i forwards. Then for each m it runs I(m), W(m - i) and the next forward, at last the remaining W.
    Raises ``UnsupportedRequest`` where a device holds several stages.
    """
    return delayed(in_line(allocation, "zb-h1"), "zb-h1", allocation.num_micro_batches, 1)


def zb_h2(problem: Problem, allocation: Allocation) -> Orders:
    """Return ZB-H2's orders.

    Rank i runs 2 (p - i) - 1 forwards. Then for each m it runs I(m), W(m - 2 i) and the next forward, at last the
    remaining W. Raises ``UnsupportedRequest`` where a device holds several stages.
    """
    return delayed(in_line(allocation, "zb-h2"), "zb-h2", allocation.num_micro_batches, 2)


def delayed(
    ranks: Ranks, name: str, number: int, late: int, most: Sequence[int] | None = None, after: int | None = None
) -> Orders:
    """Return orders with delayed weight gradients.

    Rank i runs late (p - i - 1) + 1 forwards ahead, and weight gradients ``after`` i (late i) micro-batches later.
    ``most``: micro-batches that a rank may keep from F to W; clamps both, first the delay.
    """
    p, before, rows = len(ranks.stages), number, []
    for i in range(p):
        room = number if most is None else most[i]
        warmup = before = max(1, min(before, room, late * (p - i - 1) + 1))
        delay = max(0, min((late if after is None else after) * i, room - warmup))
        row = [(FORWARD, i, m) for m in range(warmup)]
        for m in range(number):
            row.append((INPUT, i, m))
            row += [(WEIGHT, i, m - delay)] if m >= delay else []
            row += [(FORWARD, i, m + warmup)] if m + warmup < number else []
        row += [(WEIGHT, i, m) for m in range(max(0, number - delay), number)]
        rows.append(row)
    return ranks.orders(name, rows)
