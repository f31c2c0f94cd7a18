"""The input of a job shop: the operations of every row of a schedule, their durations, and which are identical.

A *row* is the list of operations that some devices run together (``schedule.Row``); here their order is free.
Micro-batches are *alike* if they have one size and the same operations on the same rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row


class Operation(NamedTuple):
    """One operation of one row."""

    kind: int
    stage: int
    micro_batch: int
    row: int


class Shop:
    """The operations of ``orders``, whose order does not matter."""

    def __init__(self, problem: Problem, allocation: Allocation, orders: Orders) -> None:
        self.problem = problem
        self.allocation = allocation
        self.devices = tuple(row.devices for row in orders.rows)
        self.times = StageTimes(problem, allocation, orders)
        self.operations = [
            Operation(kind, s, m, number)
            for number, row in enumerate(orders.rows)
            for kind, s, m in sorted(map(tuple, row.operations.tolist()))
        ]
        self.forwards: dict[tuple[int, int], list[Operation]] = defaultdict(list)
        self.gradients: dict[tuple[int, int], list[Operation]] = defaultdict(list)
        for each in self.operations:
            if each.kind == FORWARD:
                self.forwards[each.stage, each.micro_batch].append(each)
            elif each.kind in (BACKWARD, INPUT):
                self.gradients[each.stage, each.micro_batch].append(each)
        self._apart = {(each.row, each.stage) for each in self.operations if each.kind == RECOMPUTE}

    @cached_property
    def size_class(self) -> list[int]:
        """The row class of each micro-batch."""
        return [c for c, (_rows, count) in enumerate(self.times.classes) for _ in range(count)]

    @cached_property
    def groups(self) -> list[list[int]]:
        """The groups of micro-batches that are alike, in index order."""
        groups: dict[object, list[int]] = {}
        for m, operations in sorted(self.of_micro_batch.items()):
            mark = frozenset((each.kind, each.stage, each.row) for each in operations)
            groups.setdefault((self.size_class[m], mark), []).append(m)
        return list(groups.values())

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """The numbers of alike micro-batches before and after each micro-batch."""
        return {m: (i, len(group) - 1 - i) for group in self.groups for i, m in enumerate(group)}

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The number of each micro-batch's group."""
        return {m: number for number, group in enumerate(self.groups) for m in group}

    @cached_property
    def of_micro_batch(self) -> dict[int, list[Operation]]:
        """The operations of each micro-batch."""
        operations: dict[int, list[Operation]] = defaultdict(list)
        for each in self.operations:
            operations[each.micro_batch].append(each)
        return operations

    @cached_property
    def of_row(self) -> list[list[Operation]]:
        """The operations of each row."""
        rows: list[list[Operation]] = [[] for _ in self.devices]
        for each in self.operations:
            rows[each.row].append(each)
        return rows

    def stages_of(self, row: int) -> list[int]:
        """Return the stages that a row runs."""
        return sorted({each.stage for each in self.of_row[row]})

    @property
    def judgeable(self) -> bool:
        """Return True if ``as_judged`` covers the judge's rules for this shop.

        Private half-duplex channels, one row for each stage, whole backwards, micro-batches all alike, no ties.
        """
        rules = self.problem.rules
        alone = self.times.stages_apart and len(self.devices) == len(self.allocation.stages)
        whole = all(each.kind in (FORWARD, BACKWARD) for each in self.operations)
        return (
            not rules.shared
            and rules.channel == "half"
            and alone
            and whole
            and len(self.groups) == 1
            and not self.times.ties
        )

    def apart(self, operation: Operation) -> bool:
        """Return True if recomputations are separate operations on the operation's row and stage."""
        return (operation.row, operation.stage) in self._apart

    def duration_ns(self, operation: Operation) -> int:
        """Return the duration that the judge counts, in ns."""
        cost = self.times.costs[operation.stage][self.size_class[operation.micro_batch]]
        return cost.durations_ns(apart=self.apart(operation))[operation.kind]

    def release(self, operation: Operation) -> Operation:
        """Return the operation that releases the micro-batch on the row: its backward, or its weight gradient."""
        split = operation._replace(kind=WEIGHT)
        return split if split in self._all else operation._replace(kind=BACKWARD)

    @cached_property
    def _all(self) -> frozenset[Operation]:
        return frozenset(self.operations)

    def depth(self, operation: Operation) -> int:
        """Return a number that grows from each operation of a micro-batch to the next."""
        after = 2 * (2 * len(self.allocation.stages) - operation.stage)
        return {FORWARD: operation.stage, RECOMPUTE: after - 1, WEIGHT: after + 1}.get(operation.kind, after)

    def orders(self, name: str, starts: Iterable[tuple[Operation, int, int]]) -> Orders:
        """Sort each row by start, from (operation, start, size); at equal starts, operations of no duration first."""
        rows: list[list[tuple[int, bool, int, Operation]]] = [[] for _ in self.devices]
        for each, start, size in starts:
            rows[each.row].append((start, size > 0, self.depth(each), each))
        sequences = (np.asarray([each[:3] for _start, _sized, _depth, each in sorted(row)], np.int32) for row in rows)
        return Orders(name, tuple(Row(*pair) for pair in zip(self.devices, sequences, strict=True)))


def whole_backwards(allocation: Allocation) -> Orders:
    """Return rows with whole backwards for an allocation without a schedule; devices that run the same share a row."""
    stages_of = allocation.held_stages
    rows: dict[tuple[object, ...], list[int]] = {}
    for device, stages in stages_of.items():
        turns = any(allocation.stages[s].dispatch == "round_robin" for s in stages)
        rows.setdefault((stages, device if turns else None), []).append(device)
    result = []
    for devices in rows.values():
        operations = [
            (kind, s, m)
            for kind in (FORWARD, BACKWARD)
            for m in range(allocation.num_micro_batches)
            for s in stages_of[devices[0]]
            if _takes(allocation, s, devices[0], m)
        ]
        result.append(Row(tuple(devices), np.asarray(operations, dtype=np.int32).reshape(-1, 3)))
    return Orders("any order", tuple(result))


def _takes(allocation: Allocation, s: int, device: int, m: int) -> bool:
    stage = allocation.stages[s]
    if m not in allocation.micro_batches(s):
        return False
    return stage.dispatch == "rows" or stage.devices[m % stage.replicas] == device
