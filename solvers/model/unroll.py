"""A pattern unrolled for the simulator and the ranks: some rounds as one long step, with its optimizer steps in place.

Every micro-batch is as large as the largest one of the request. Devices run their operations in the order of the
pattern's starts (ties: in the order in which the pattern lists them). A stage steps as late as its rule allows:
just before the first operation of the stage that uses the new version, or that adds to the gradients of a later
round, so that an all-reduce has time until then and one gradient buffer is enough.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import lcm
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD, RECOMPUTE, WEIGHT
from penstock.solvers.model.allocation import Allocation, Pipeline
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP, Orders, Pattern, Row
from penstock.solvers.model.update_rules import UpdateRule, group_of, micro_batches_per_update, version_used

MEASURED = 48
"""The least number of measured micro-batches: devices that start eagerly may repeat only every few rounds."""


class Unrolled(NamedTuple):
    """An unrolled pattern: ``rounds`` global batches as one step of a problem of their size.

    The steady state lies between the ends of the last backwards of rounds ``first`` and ``last``. After ``whole``
    rounds the pattern and every round-robin replica repeat.
    """

    problem: Problem
    allocation: Allocation
    orders: Orders
    rounds: int
    first: int
    last: int
    whole: int


@lru_cache(maxsize=8)
def unroll(problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule) -> Unrolled:
    """Return enough rounds to fill the pipeline, settle, be measured, and be followed by the rounds that overlap them.

    Raises InvalidPlan where the pattern lacks operations or names a stage that the allocation lacks, and where a
    replica would have no work for an update.
    """
    number = allocation.num_micro_batches
    _check(allocation, pattern, rule)
    deep = depth(allocation, pattern)
    first = 2 * deep + 1
    whole = whole_rounds(allocation, pattern)
    last = first + -(-max(2, 2 * deep, -(-MEASURED // number)) // whole) * whole
    rounds = last + deep + 1
    rows = row_classes(problem.global_batch_size, number)[0][0]
    longer, orders = run_of(allocation, pattern, rule, rounds)
    size = rounds * number * rows
    return Unrolled(replace(problem, global_batch_size=size), longer, orders, rounds, first, last, whole)


def run_of(allocation: Allocation, pattern: Pattern, rule: UpdateRule, rounds: int) -> tuple[Allocation, Orders]:
    """Return ``rounds`` global batches as one flushed step: the allocation of all micro-batches, the rows with steps.

    Raises InvalidPlan as ``unroll`` does.
    """
    number = allocation.num_micro_batches
    _check(allocation, pattern, rule)
    total = rounds * number
    pipelines = tuple(Pipeline(pipeline.stages, (0, total - 1)) for pipeline in allocation.pipelines)
    longer = Allocation(pipelines, total)
    every = tuple(micro_batches_per_update(rule, stage, number) for stage in allocation.stages)
    rows = []
    for alike, devices in _rows(allocation).items():
        operations = _operations(pattern, total, alike)
        rows.append(Row(tuple(devices), _with_steps(longer, operations, rule, every)))
    return longer, Orders(pattern.name, tuple(rows), update_every=every)


def depth(allocation: Allocation, pattern: Pattern) -> int:
    """Return the largest number of global batches that the pattern overlaps with one of them."""
    deepest = max(operation.shift for operation in pattern.operations) + 1
    return -(-deepest * pattern.micro_batches_per_period // allocation.num_micro_batches)


def _check(allocation: Allocation, pattern: Pattern, rule: UpdateRule) -> None:
    count = len(allocation.stages)
    listed = {(operation.stage, operation.micro_batch, operation.kind) for operation in pattern.operations}
    if unknown := sorted({s for s, _m, _kind in listed} - set(range(count))):
        raise InvalidPlan(f"Pattern {pattern.name} names stage {unknown[0]}, but the plan has {count} stages.")
    for s, m in product(range(count), range(pattern.micro_batches_per_period)):
        for name, kinds in (("forward", (FORWARD,)), ("backward", (BACKWARD, WEIGHT))):
            if not any((s, m, kind) in listed for kind in kinds):
                what = f"{name} of stage {s} for micro-batch {m} of its period"
                raise InvalidPlan(f"Pattern {pattern.name} has no {what}.")
    for s, stage in enumerate(allocation.stages):
        number = micro_batches_per_update(rule, stage, allocation.num_micro_batches)
        if stage.dispatch == "round_robin" and number < stage.replicas:
            raise InvalidPlan(
                f"Stage {s} steps after every {number} micro-batches, but its {stage.replicas} replicas take turns.",
                remedy=f"use at least {stage.replicas} micro-batches, or fewer replicas",
            )


def whole_rounds(allocation: Allocation, pattern: Pattern) -> int:
    """Return the number of global batches after which the pattern and every round-robin replica repeat."""
    turns = [stage.replicas for stage in allocation.stages if stage.dispatch == "round_robin"]
    number = allocation.num_micro_batches
    return lcm(number, pattern.micro_batches_per_period, *turns) // number


class _Alike(NamedTuple):
    """The properties shared by devices of one row: stages, and (stage, turn, replicas) of stages that take turns."""

    stages: tuple[int, ...]
    turns: tuple[tuple[int, int, int], ...]


def _rows(allocation: Allocation) -> dict[_Alike, list[int]]:
    """Return the sets of devices that run the same operations."""
    holds: dict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(allocation.stages):
        for device in stage.devices:
            holds[device].append(number)
    alike: dict[_Alike, list[int]] = defaultdict(list)
    for device, stages in holds.items():
        turns = tuple(
            (s, allocation.stages[s].devices.index(device), allocation.stages[s].replicas)
            for s in stages
            if allocation.stages[s].dispatch == "round_robin"
        )
        alike[_Alike(tuple(stages), turns)].append(device)
    return alike


def _operations(pattern: Pattern, total: int, alike: _Alike) -> np.ndarray:
    """Return a row's operations on micro-batches below ``total``, by nominal start; ties in the pattern's order."""
    turns = {s: (turn, replicas) for s, turn, replicas in alike.turns}
    starts, places, listed_parts = [], [], []
    for place, operation in enumerate(pattern.operations):
        if operation.stage not in alike.stages:
            continue
        m = np.arange(operation.micro_batch, total, pattern.micro_batches_per_period, dtype=np.int64)
        turn, replicas = turns.get(operation.stage, (0, 1))
        m = m[m % replicas == turn]
        period = m // pattern.micro_batches_per_period + operation.shift
        starts.append(period * pattern.period_ns + operation.start_ns)
        places.append(np.full(len(m), place))
        listed_parts.append(np.stack((np.full(len(m), operation.kind), np.full(len(m), operation.stage), m), axis=1))
    if not listed_parts:
        return np.empty((0, 3), dtype=np.int32)
    listed = np.concatenate(listed_parts).astype(np.int32)
    return listed[np.lexsort((listed[:, 2], np.concatenate(places), np.concatenate(starts)))]


def _with_steps(allocation: Allocation, operations: np.ndarray, rule: UpdateRule, every: tuple[int, ...]) -> np.ndarray:
    """Return the operations of a row with the steps of its stages; incomplete rounds have no step."""
    steps = [_steps(allocation, operations, rule, s, every[s]) for s in np.unique(operations[:, 1]).tolist()]
    position, stage, m = np.concatenate([np.empty((3, 0), dtype=np.int64), *steps], axis=1)
    order = np.lexsort((m, stage, position))
    rows = np.stack((np.full(len(m), STEP), stage, m), axis=1)[order]
    return np.ascontiguousarray(np.insert(operations, position[order], rows, axis=0), dtype=np.int32)


def _steps(allocation: Allocation, operations: np.ndarray, rule: UpdateRule, s: int, every: int) -> np.ndarray:
    """Return (3, rounds): the operation of the row before which stage ``s`` steps, ``s``, the round's last micro-batch.

    That is the first operation after the round's gradients that is a gradient, or a forward that uses a version
    which the step makes.
    """
    rounds = np.arange(allocation.num_micro_batches // every)
    kind, update_round = operations[:, 0], operations[:, 2] // every
    of_stage = operations[:, 1] == s
    gradients = np.flatnonzero(of_stage & (kind != FORWARD) & (kind != RECOMPUTE))
    forwards = np.flatnonzero(of_stage & (kind == FORWARD))
    finished = np.full(len(rounds) + 1, -1)
    finished[np.minimum(update_round[gradients], len(rounds))] = gradients
    finished = finished[: len(rounds)]
    after = np.searchsorted(forwards, finished, side="right")
    used = _versions_used(allocation, rule, s, update_round[forwards])
    if used is not None:
        after = np.maximum(after, np.searchsorted(np.maximum.accumulate(used), rounds, side="right"))
    limit = len(operations)
    following = np.append(gradients, limit)[np.searchsorted(gradients, finished, side="right")]
    position = np.minimum(following, np.append(forwards, limit)[after])
    return np.stack((position, np.full(len(rounds), s), (rounds + 1) * every - 1))


def _versions_used(allocation: Allocation, rule: UpdateRule, s: int, update_round: np.ndarray) -> np.ndarray | None:
    """Return ``version_used`` of many rounds; None where forwards use the newest version."""
    group = group_of(allocation, s)
    if version_used(rule, group, 0) is None:
        return None
    rounds = range(int(update_round.max(initial=0)) + 1)
    versions = np.asarray([version_used(rule, group, each) for each in rounds], dtype=np.int64)
    return np.asarray(versions[update_round])
