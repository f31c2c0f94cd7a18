"""Data parallelism: every device holds the whole model (ALGORITHMS 7.1)."""

from __future__ import annotations

from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem


def data_parallel(problem: Problem, batch: Batch) -> Allocation:
    """One stage on all devices, or on as many as the micro-batches feed; micro-batches are accumulation steps."""
    replicas = max(1, min(problem.num_devices, batch.replicas_fed(problem.min_slice)))
    stage = Stage(0, problem.num_layers - 1, tuple(range(replicas)))
    return single_pipeline((stage,), batch.num_micro_batches)
