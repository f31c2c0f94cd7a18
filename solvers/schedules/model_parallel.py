"""Naive model parallelism: one micro-batch in the pipeline at a time (DAPPLE section VII, SPP section V)."""

from __future__ import annotations

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.rows import flushed_rows


def model_parallel(problem: Problem, allocation: Allocation) -> Orders:
    """Return orders in which every stage runs a micro-batch's forward and backward before it starts the next one."""
    warmup = (1,) * len(allocation.stages)
    return Orders("model-parallel", flushed_rows(problem, allocation, warmup), warmup)
