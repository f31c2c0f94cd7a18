"""The orders that other trainers run, by our names (``within``)."""

from __future__ import annotations

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.allocation import Allocation
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.interleaved import interleaved, looped_bfs

ONE_STAGE = ("early-backward", "gpipe")
"""Orders with one stage on each rank; all others have two or more, in a loop."""
MADE = {"gpipe": gpipe, "interleaved": interleaved, "looped-bfs": looped_bfs}


def order_of(problem: Problem, allocation: Allocation, name: str) -> Orders:
    """The order that trainers run under one of our names; 1F1B with S - i forwards first, whatever memory holds.

    Raises UnsupportedRequest where the stages do not allow it.
    """
    if name == "early-backward":
        count, number = len(allocation.stages), allocation.num_micro_batches
        return early_backward(problem, allocation, warmup=[min(count - s, number) for s in range(count)])
    if name in MADE:
        return MADE[name](problem, allocation)
    raise UnsupportedRequest(
        f"no trainer runs schedule {name!r}", remedy=f"one of {', '.join(('early-backward', *MADE))}"
    )
