"""GPipe: all forwards, then all backwards (ALGORITHMS 7.2, SPP section II, R-22)."""

from __future__ import annotations

from typing import Literal

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.rows import flushed_rows


def gpipe(problem: Problem, allocation: Allocation, *, backward: Literal["fifo", "lifo"] = "fifo") -> Orders:
    """Return orders in which every stage runs the forwards of all micro-batches, then their backwards.

    ``backward``: the backwards run from the first micro-batch (``fifo``) or from the last, as torchgpipe's
    autograd graph does (``lifo``).
    """
    warmup = tuple(len(allocation.micro_batches(s)) for s in range(len(allocation.stages)))
    rows = flushed_rows(problem, allocation, warmup, last_first=backward == "lifo")
    return Orders("gpipe" if backward == "fifo" else "gpipe-lifo", rows, warmup)
