"""Facts about memory before a plan is simulated: the stages that cannot fit, and the stages that fit in every order.

The shortages of a simulated plan are in ``memory.shortages``.
"""

from __future__ import annotations

from penstock.solvers.costs.memory import activation_bytes, free_bytes, static_bytes, step_bytes, transient_bytes
from penstock.solvers.costs.stage import stage_costs, stage_rows
from penstock.solvers.costs.transfer import boundary_bytes
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import most_rows, row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Shortage


def shortage_of(problem: Problem, allocation: Allocation, in_flight: tuple[int, ...]) -> Shortage | None:
    """Return the largest memory shortage that every order has; None when all stages may fit.

    When the first backward of a stage begins, its fixed bytes, the stashes and inputs of the in-flight micro-batches
    and the backward's workspace are allocated, whatever the order of the transfers.
    """
    rows = row_classes(problem.global_batch_size, allocation.num_micro_batches)[-1][0]
    worst: Shortage | None = None
    for number, stage in enumerate(allocation.stages):
        costs = stage_costs(problem, stage, rows)
        flying = in_flight[number]
        if stage.dispatch == "round_robin":
            flying = flying // stage.replicas
        needed = static_bytes(problem, stage).total + flying * activation_bytes(problem, stage, rows)
        needed += costs.workspace_bytes if costs.backward_ns else 0
        for device in stage.devices:
            lacks, available = needed - free_bytes(problem, [device]), problem.capacity_bytes(device)
            if lacks > 0 and (worst is None or lacks > worst.missing_bytes):
                worst = Shortage(stage.first, stage.last, device, available + lacks, available)
    return worst


def surely_fits(problem: Problem, allocation: Allocation, stage: Stage) -> bool:
    """Return whether a stage can hold all micro-batches at once, with every buffer that may be in use."""
    rows = most_rows(problem, allocation)
    each = activation_bytes(problem, stage, rows)
    if problem.memory.count_buffers:
        share = stage_rows(stage, rows)
        if stage.first > 0:
            each += boundary_bytes(problem, stage.first - 1, share, 1)
        if stage.last < problem.num_layers - 1:
            each += sum(boundary_bytes(problem, stage.last, share, direction) for direction in (0, 1))
    passing = max(transient_bytes(problem, stage, rows), step_bytes(problem, stage))
    needed = static_bytes(problem, stage).total + passing + allocation.num_micro_batches * each
    return needed <= free_bytes(problem, stage.devices)
