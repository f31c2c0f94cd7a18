"""Which devices lack memory: for certain before a plan is simulated, and by the simulated peaks."""

from __future__ import annotations

from penstock.solvers.costs.durations import boundary_bytes, stage_costs, stage_rows
from penstock.solvers.costs.memory import activation_bytes, static_bytes, transient_bytes
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Shortage
from penstock.solvers.model.slices import row_classes
from penstock.solvers.model.timeline import Timeline


def shortages(problem: Problem, allocation: Allocation, timeline: Timeline) -> tuple[Shortage, ...]:
    """Return the devices whose simulated peak exceeds their memory, the one that lacks most first."""
    found = []
    for device, use in timeline.uses.items():
        needed, available = use.memory.total, problem.capacity_bytes(device)
        if needed > available:
            stage = next(s for s in allocation.stages if device in s.devices)
            found.append(Shortage(stage.first, stage.last, device, needed, available))
    return tuple(sorted(found, key=lambda short: (-short.missing_bytes, short.device)))


def largest_shortage(problem: Problem, allocation: Allocation, timeline: Timeline) -> Shortage | None:
    """Return the first of ``shortages``; None when all devices have enough memory."""
    return next(iter(shortages(problem, allocation, timeline)), None)


def shortage_of(problem: Problem, allocation: Allocation, in_flight: tuple[int, ...]) -> Shortage | None:
    """Return the stage that certainly lacks most memory, whatever the order; None when all may fit.

    When the first backward of a stage begins, its fixed bytes, the stashes and inputs of the micro-batches in flight
    and the backward's workspace are there, whatever the order of the transfers.
    """
    rows = row_classes(problem.global_batch_size, allocation.num_micro_batches)[-1][0]
    worst: Shortage | None = None
    for number, stage in enumerate(allocation.stages):
        costs = stage_costs(problem, stage, rows)
        flying = in_flight[number]
        if stage.dispatch == "round_robin":
            flying = flying // stage.replicas
        held = static_bytes(problem, stage).total + flying * activation_bytes(problem, stage, rows)
        held += costs.workspace_bytes if costs.backward_ns else 0
        for device in stage.devices:
            needed = held + problem.devices[device].context_bytes
            available = problem.capacity_bytes(device)
            if needed > available and (worst is None or needed - available > worst.missing_bytes):
                worst = Shortage(stage.first, stage.last, device, needed, available)
    return worst


def surely_fits(problem: Problem, allocation: Allocation, stage: Stage) -> bool:
    """Return whether a stage holds all micro-batches at once, with every buffer that can be waiting."""
    rows = -(-problem.global_batch_size // allocation.num_micro_batches)
    each = activation_bytes(problem, stage, rows)
    if problem.memory.count_buffers:
        share = stage_rows(stage, rows)
        if stage.first > 0:
            each += boundary_bytes(problem, stage.first - 1, share, 1)
        if stage.last < problem.num_layers - 1:
            each += sum(boundary_bytes(problem, stage.last, share, direction) for direction in (0, 1))
    held = static_bytes(problem, stage).total + transient_bytes(problem, stage, rows)
    held += allocation.num_micro_batches * each
    return all(held + problem.devices[d].context_bytes <= problem.capacity_bytes(d) for d in stage.devices)
