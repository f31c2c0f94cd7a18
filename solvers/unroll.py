"""A pattern as the judge and the ranks see it: some rounds of it as one long step, with its optimizer steps in place.

Every micro-batch is as large as the largest one of the request. Devices run their operations in the order of the
pattern's starts (of equals, in the order in which the pattern lists them). A stage steps as late as its rule allows:
just before the first operation of the stage that uses the new version, or that adds to the gradients of a later
round, so that an all-reduce has until then and one gradient buffer is enough.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import FORWARD, RECOMPUTE
from penstock.solvers.allocation import Allocation, Pipeline
from penstock.solvers.batching import row_classes
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import STEP, Orders, Pattern, Row
from penstock.solvers.update_rules import UpdateRule, group_of, micro_batches_per_update, version_used

Operations = list[tuple[int, int, int]]


class Unrolled(NamedTuple):
    """``rounds`` global batches as one step of a problem of their size.

    The steady state is what happens from the end of the last backward of round ``first`` to that of round ``last``.
    """

    problem: Problem
    allocation: Allocation
    orders: Orders
    rounds: int
    first: int
    last: int


def unroll(problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule) -> Unrolled:
    """As many rounds as fill the pipeline, settle, are measured, and are followed by as many as they overlap with."""
    number = allocation.num_micro_batches
    per_period = pattern.micro_batches_per_period
    depth = max(operation.shift for operation in pattern.operations) + 1
    deep = -(-depth * per_period // number)
    first = 2 * deep + 1
    last = first + max(2, 2 * deep)
    rounds = last + deep + 1
    total = rounds * number
    rows = row_classes(problem.global_batch_size, number)[0][0]
    pipelines = tuple(Pipeline(pipeline.stages, (0, total - 1)) for pipeline in allocation.pipelines)
    longer = Allocation(pipelines, total)
    every = tuple(micro_batches_per_update(rule, stage, number) for stage in allocation.stages)
    listed = _operations(allocation, pattern, total)
    made = []
    for alike, devices in _rows(allocation).items():
        own = [(kind, s, m) for kind, s, m in listed if s in alike.stages and _has_turn(alike, s, m)]
        stepping = np.array(_with_steps(longer, own, rule, every), dtype=np.int32).reshape(-1, 3)
        made.append(Row(tuple(devices), stepping))
    orders = Orders(pattern.name, tuple(made), update_every=every)
    return Unrolled(replace(problem, global_batch_size=total * rows), longer, orders, rounds, first, last)


def _operations(allocation: Allocation, pattern: Pattern, total: int) -> Operations:
    """All operations on micro-batches below ``total``, by nominal start."""
    per_period = pattern.micro_batches_per_period
    found = []
    for place, operation in enumerate(pattern.operations):
        for m in range(operation.micro_batch, total, per_period):
            period = m // per_period + operation.shift
            start = period * pattern.period_ns + operation.start_ns
            found.append((start, place, m, operation.kind, operation.stage))
    return [(kind, stage, m) for _start, _place, m, kind, stage in sorted(found)]


class _Alike(NamedTuple):
    """What devices of one row have in common: stages, and (stage, turn, replicas) of those that take turns."""

    stages: tuple[int, ...]
    turns: tuple[tuple[int, int, int], ...]


def _rows(allocation: Allocation) -> dict[_Alike, list[int]]:
    """The devices that run the same operations."""
    holds: dict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(allocation.stages):
        for device in stage.devices:
            holds[device].append(number)
    alike: dict[_Alike, list[int]] = defaultdict(list)
    for device, held in holds.items():
        turns = tuple(
            (s, allocation.stages[s].devices.index(device), allocation.stages[s].replicas)
            for s in held
            if allocation.stages[s].dispatch == "round_robin"
        )
        alike[_Alike(tuple(held), turns)].append(device)
    return alike


def _has_turn(alike: _Alike, s: int, m: int) -> bool:
    return all(m % replicas == turn for stage, turn, replicas in alike.turns if stage == s)


def _with_steps(allocation: Allocation, operations: Operations, rule: UpdateRule, every: tuple[int, ...]) -> Operations:
    """The operations of a row with the steps of its stages; rounds that the row does not complete have none."""
    left: dict[tuple[int, int], int] = defaultdict(int)
    for kind, s, m in operations:
        if kind not in (FORWARD, RECOMPUTE):
            left[s, m // every[s]] += 1
    due: dict[int, int] = {}
    placed: Operations = []
    for kind, s, m in operations:
        if s in due and _needs_step(allocation, rule, kind, s, m // every[s], due[s]):
            placed.append((STEP, s, (due.pop(s) + 1) * every[s] - 1))
        placed.append((kind, s, m))
        if kind not in (FORWARD, RECOMPUTE):
            update_round = m // every[s]
            left[s, update_round] -= 1
            if left[s, update_round] == 0 and (update_round + 1) * every[s] <= allocation.num_micro_batches:
                due[s] = update_round
    return placed + [(STEP, s, (t + 1) * every[s] - 1) for s, t in sorted(due.items())]


def _needs_step(allocation: Allocation, rule: UpdateRule, kind: int, s: int, update_round: int, due: int) -> bool:
    """Whether the step of round ``due`` has to come before an operation of another round."""
    if kind == RECOMPUTE:
        return False
    if kind != FORWARD:
        return update_round > due
    used = version_used(rule, group_of(allocation, s), update_round)
    return used is None or used > due
