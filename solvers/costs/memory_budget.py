"""Memory for one micro-batch: the need of a stage on each device, and exchanging devices so that it fits."""

from __future__ import annotations

from penstock.solvers.costs.memory import free_bytes, static_bytes, transient_bytes
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.pins import allowed_devices, exchanged
from penstock.solvers.model.problem import Problem


def needed_bytes(problem: Problem, stage: Stage, rows: int, *, buffers: bool = False) -> int:
    """Return the bytes in use on each device during a backward of ``rows`` samples, context excluded.

    A recomputing stage has rebuilt its stash by then. ``buffers``: whether to add an upper estimate of buffers.
    """
    whole = stage.plain
    costs = stage_costs(problem, whole, rows)
    passing = transient_bytes(problem, whole, rows) if buffers else costs.workspace_bytes
    return static_bytes(problem, stage).total + costs.kept_bytes + (passing if costs.backward_ns or buffers else 0)


def with_room(problem: Problem, allocation: Allocation) -> Allocation:
    """Return the allocation with devices exchanged where one lacks memory and others have enough; pins are kept.

    If no exchange leaves memory for buffers, one without buffers is tried; if that fails nothing changes.
    """
    free = [free_bytes(problem, [device]) for device in range(problem.num_devices)]
    if len(set(free)) == 1:
        return allocation
    rows = most_rows(problem, allocation)
    for buffers in (True, False):
        needs = {stage: needed_bytes(problem, stage, rows, buffers=buffers) for stage in allocation.stages}
        if all(free[device] >= needs[stage] for stage in allocation.stages for device in stage.devices):
            return allocation
        other = exchanged(problem, allocation, lambda stage, needs=needs: _roomy(problem, stage, free, needs[stage]))  # type: ignore[misc]
        if other is not None:
            return other
    return allocation


def _roomy(problem: Problem, stage: Stage, free: list[int], needed: int) -> frozenset[int]:
    """Return the devices that may hold a stage and have at least the needed memory."""
    return frozenset(d for d in allowed_devices(problem, stage.first, stage.last) if free[d] >= needed)
