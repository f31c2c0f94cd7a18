"""Memory: the bytes that a stage occupies and a device has, the micro-batches that fit, and a simulated plan's
shortage.

All sizes are bytes of one device (ALGORITHMS 1.7, 2.6).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np

from penstock.solvers.costs.stage import stage_costs, stage_rows
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Shortage
from penstock.solvers.model.timeline import Timeline

Bytes = TypeVar("Bytes", int, np.ndarray)


class Static(NamedTuple):
    """Bytes that a stage occupies on each of its devices for the whole step, gradient buckets included."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Return the sum of all parts, in bytes."""
        return sum(self)


def free_bytes(problem: Problem, devices: Iterable[int]) -> int:
    """Return the bytes that the smallest of the devices has for stages: its capacity less its context."""
    return min(problem.capacity_bytes(d) - problem.devices[d].context_bytes for d in devices)


def context_bytes(problem: Problem, device: int) -> int:
    """Return the bytes that a device's runtime occupies before training allocates anything."""
    return problem.devices[device].context_bytes


class Weights(NamedTuple):
    """Bytes of parameters: on a device's GPU, the trained part of these, and of that the part that the GPU owns."""

    parameters: int
    trainable: int
    owned: int


def weight_bytes(problem: Problem, stage: Stage) -> Weights:
    """Return the parameter bytes of one replica of a stage.

    Tied weights count in the first layer that uses them; a later stage that uses them holds a copy.
    """
    i, j = stage.first, stage.last + 1
    sums = (problem.parameter_bytes, problem.trainable_bytes, problem.owned_bytes)
    parameters, trainable, owned = (int(each[j] - each[i]) for each in sums)
    for _name, layers, size in problem.shared_parameters:
        if any(i <= layer < j for layer in layers) and not i <= layers[0] < j:
            parameters += size
            trainable += size
            owned += owned_of(problem, size)
    return Weights(parameters, trainable, owned)


def owned_of(problem: Problem, size: int) -> int:
    """Return the part of a tied parameter that one GPU sums and updates."""
    return size if problem.copies is None else -(-size // problem.copies.holders)


def static_bytes(problem: Problem, stage: Stage) -> Static:
    """Return the bytes of parameters, gradients and optimizer states of one replica of a stage."""
    parameters, trainable, owned = weight_bytes(problem, stage)
    return Static(parameters, *training_bytes(problem, trainable, owned, stage.replicas))


def training_bytes(problem: Problem, trainable: Bytes, owned: Bytes, replicas: int) -> tuple[Bytes, Bytes]:
    """Return the bytes of gradients and optimizer states of ``trainable`` parameter bytes, on each of ``replicas``.

    If optimizer states are sharded, a GPU keeps the states of its owned part, less the part that other replicas keep.
    """
    rules = problem.memory
    states = -(-owned * rules.state_factor // replicas) if rules.shard_states else trainable * rules.state_factor
    return trainable * rules.gradient_factor, states


class Averaged(NamedTuple):
    """Bytes of elastic averaging on a device: always, and additionally while one of its pipelines steps."""

    always: int
    at_step: int


def averaging_bytes(problem: Problem, stage: Stage, pipelines: int) -> Averaged:
    """Return the bytes of averaging in addition to ``pipelines`` models of a stage.

    The reference model is there once, each pipeline's update from its step until the next one's pull. A step also has
    the parameters that it has pulled of the reference.
    """
    trainable = weight_bytes(problem, stage).trainable
    return Averaged((1 + pipelines) * trainable, trainable)


def step_bytes(problem: Problem, stage: Stage) -> int:
    """Return the bytes that an optimizer step over the stage's layers needs on each replica, only while it runs.

    If optimizer states are sharded, a replica steps its part: of layers that are stepped at once it needs that part.
    """
    if problem.update_workspace_bytes is None:
        return 0
    workspaces = problem.update_workspace_bytes[stage.first : stage.last + 1]
    if problem.update_in_turn:
        return int(workspaces.max())
    return -(-int(workspaces.sum()) // (stage.replicas if problem.memory.shard_states else 1))


def activation_bytes(problem: Problem, stage: Stage, rows: int) -> int:
    """Return the bytes that one in-flight micro-batch keeps alive on a replica: its stash and its received input."""
    kept = stage_costs(problem, stage, rows).kept_bytes
    if problem.memory.count_buffers and stage.first > 0:
        kept += int(problem.forward_bytes[stage.first - 1]) * stage_rows(stage, rows)
    return kept


def transient_bytes(problem: Problem, stage: Stage, rows: int) -> int:
    """Return an upper estimate of workspace and of the buffers that do not belong to an in-flight micro-batch.

    One receive ahead and one send in progress on each side (ALGORITHMS 1.7: twice both boundaries).
    """
    total = stage_costs(problem, stage, rows).workspace_bytes
    if problem.memory.count_buffers:
        share = stage_rows(stage, rows)
        if stage.first > 0:
            total += (
                int(problem.forward_bytes[stage.first - 1]) + int(problem.backward_bytes[stage.first - 1])
            ) * share
        if stage.last < problem.num_layers - 1:
            total += (int(problem.forward_bytes[stage.last]) + int(problem.backward_bytes[stage.last])) * share
    return total


def micro_batches_that_fit(problem: Problem, stage: Stage, rows: int) -> int:
    """Return D, the number of in-flight micro-batches that fit on the stage's smallest device; 0 if none fits.

    ``rows`` is the size of the largest micro-batch. Zero-byte stashes fit without limit (2^31).
    """
    free = free_bytes(problem, stage.devices) - static_bytes(problem, stage).total
    if stage.replicas > 1 and not problem.codec:
        free -= max(problem.devices[d].group_bytes for d in stage.devices)
    if free < step_bytes(problem, stage):
        return 0
    free -= transient_bytes(problem, stage, rows)
    if free < 0:
        return 0
    each = activation_bytes(problem, stage, rows)
    return 2**31 if each == 0 else free // each


def spare_bytes(problem: Problem, timeline: Timeline) -> dict[int, int]:
    """Return the bytes that each device has left at its simulated peak; negative where it overflows."""
    return {d: problem.capacity_bytes(d) - use.memory.total for d, use in timeline.uses.items()}


def fits(problem: Problem, timeline: Timeline) -> bool:
    """Return whether every device's simulated peak fits in its memory."""
    return min(spare_bytes(problem, timeline).values()) >= 0


def shortages(problem: Problem, allocation: Allocation, timeline: Timeline) -> tuple[Shortage, ...]:
    """Return the devices whose simulated peak exceeds their memory, the largest shortage first."""
    lacking = []
    for device, spare in spare_bytes(problem, timeline).items():
        if spare < 0:
            stage = next(s for s in allocation.stages if device in s.devices)
            available = problem.capacity_bytes(device)
            lacking.append(Shortage(stage.first, stage.last, device, available - spare, available))
    return tuple(sorted(lacking, key=lambda short: (-short.missing_bytes, short.device)))


def largest_shortage(problem: Problem, allocation: Allocation, timeline: Timeline) -> Shortage | None:
    """Return the largest of ``shortages``; None if everything fits."""
    return next(iter(shortages(problem, allocation, timeline)), None)
