"""Recomputation as an operation of its own, which can run while a gradient is awaited (WPipe, figure 13)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.schemas.program import BACKWARD, INPUT, RECOMPUTE
from penstock.solvers.allocation import Allocation
from penstock.solvers.schedule import Orders, Row


def recomputed(allocation: Allocation, orders: Orders) -> Orders:
    """The orders with an R right before each B or I of the stages that recompute.

    The R starts as soon as the device is free, the gradient or not: where the gradient is on its way, it costs nothing.
    """
    return replace(orders, rows=tuple(Row(row.devices, _with_again(allocation, row.operations)) for row in orders.rows))


def _with_again(allocation: Allocation, operations: np.ndarray) -> np.ndarray:
    again = np.asarray([bool(stage.recompute) for stage in allocation.stages])
    before = np.flatnonzero(np.isin(operations[:, 0], (BACKWARD, INPUT)) & again[operations[:, 1]])
    inserted = operations[before].copy()
    inserted[:, 0] = RECOMPUTE
    return np.insert(operations, before, inserted, axis=0)
