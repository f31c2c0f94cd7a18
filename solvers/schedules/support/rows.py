"""Rows of a schedule, built with numpy: one per distinct order; each round-robin replica has a separate share."""

from __future__ import annotations

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Row


def flushed_rows(
    problem: Problem, allocation: Allocation, warmup: tuple[int, ...], *, last_first: bool = False
) -> tuple[Row, ...]:
    """Return rows in which each stage runs ``warmup`` forwards, then a backward and a forward in turn.

    The remaining backwards follow. A round-robin replica runs the stage's order restricted to its micro-batches, which
    cannot deadlock where the stage's order does not. ``last_first`` runs the backwards from the last micro-batch to the
    first, and needs every forward in the warm-up.
    """
    refuse_shared_devices(problem, allocation)
    rows: list[Row] = []
    for number, stage in enumerate(allocation.stages):
        micro_batches = allocation.micro_batches(number)
        operations = _order(number, micro_batches.start, len(micro_batches), warmup[number], last_first)
        if stage.dispatch == "rows" or stage.replicas == 1:
            rows.append(Row(stage.devices, operations))
            continue
        turn = operations[:, 2] % stage.replicas
        rows += [Row((device,), operations[turn == i]) for i, device in enumerate(stage.devices)]
    return tuple(rows)


def _order(stage: int, first: int, count: int, warmup: int, last_first: bool) -> np.ndarray:
    """Return a stage's operations, (2 count, 3) int32.

    The position of F_m is m in the warm-up, then every second one; B_b fills the gaps.
    """
    k = min(warmup, count)
    numbers = np.arange(count)
    operations = np.empty((2 * count, 3), dtype=np.int32)
    operations[:, 1] = stage
    forward = np.where(numbers < k, numbers, 2 * numbers - k + 1)
    backward = np.where(numbers < count - k, k + 2 * numbers, count + numbers)
    operations[forward, 0] = FORWARD
    operations[forward, 2] = first + numbers
    operations[backward, 0] = BACKWARD
    operations[backward, 2] = first + (numbers[::-1] if last_first else numbers)
    return operations


def refuse_shared_devices(problem: Problem, allocation: Allocation) -> None:
    seen: dict[int, int] = {}
    for number, stage in enumerate(allocation.stages):
        for device in stage.devices:
            if device in seen:
                name = problem.devices[device].name
                raise UnsupportedRequest(
                    f"device {name!r} holds stages {seen[device]} and {number}; this schedule runs one per device",
                    remedy="a schedule for several stages per device, or an allocation with one",
                )
            seen[device] = number
