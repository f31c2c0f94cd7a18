"""Naive model parallelism: the whole cluster as one chain of devices, balanced by time or by memory."""

from __future__ import annotations

from typing import Literal

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.block_partition import block_partition


def model_parallel(
    problem: Problem, batch: Batch, num_stages: int, *, by: Literal["time", "layers", "parameters"] = "parameters"
) -> Allocation:
    """One stage on each of the first ``num_stages`` devices; parameters, which set the memory, are balanced."""
    return block_partition(problem, batch, num_stages, by=by)
