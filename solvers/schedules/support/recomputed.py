"""Recomputation as a separate operation, which can run while a gradient is awaited (WPipe, figure 13).

It is worth its time where two micro-batches or more of a stage wait for it. Where a micro-batch's gradient comes before
the next forward, as on the last stage of 1F1B, no wait can hide it, and one stash is kept either way.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.schedule import Orders, Row


def recomputed(allocation: Allocation, orders: Orders) -> Orders:
    """Return the orders with an R right before each B or I of the stages that recompute.

    The R starts as soon as the device is free, even without the gradient: while the gradient is on its way, it costs no
    time.
    """
    return replace(orders, rows=tuple(Row(row.devices, _with_again(allocation, row.operations)) for row in orders.rows))


def recomputing(allocation: Allocation, orders: Orders | None) -> Allocation:
    """Return the allocation with stages that recompute whole.

    These are the stages for which that is worth its time in these orders, or without orders all stages.
    """
    flying = in_flight(allocation, orders) if orders is not None else None
    wanted = [flying is None or flying[s] > 1 for s in range(len(allocation.stages))]
    plain = (replace(stage, recompute=()) for stage in allocation.stages)
    return allocation.having(stage.whole if again else stage for again, stage in zip(wanted, plain, strict=True))


def in_flight(allocation: Allocation, orders: Orders) -> list[int]:
    """Return the most micro-batches of each stage between their forward and their recomputation, on one device."""
    most = [0] * len(allocation.stages)
    for row in orders.rows:
        kinds, stages, _batches = row.operations.T
        steps = (kinds == FORWARD).astype(np.int64) - np.isin(kinds, (BACKWARD, INPUT))
        for s in np.unique(stages).tolist():
            most[s] = max(most[s], int(np.cumsum(steps[stages == s]).max()))
    return most


def _with_again(allocation: Allocation, operations: np.ndarray) -> np.ndarray:
    again = np.asarray([bool(stage.recompute) for stage in allocation.stages])
    before = np.flatnonzero(np.isin(operations[:, 0], (BACKWARD, INPUT)) & again[operations[:, 1]])
    inserted = operations[before].copy()
    inserted[:, 0] = RECOMPUTE
    return np.insert(operations, before, inserted, axis=0)
