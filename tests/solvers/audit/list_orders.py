"""Orders of a flushed step by plain list scheduling, for the lists of plans that claims are checked against.

The operation that can begin first is put next into its row. A *style* decides between operations that can begin
together, and how many micro-batches a stage may have in flight. No code is shared with planners or their schedules.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import NamedTuple

from problems import as_operations

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row

Operation = tuple[int, int, int]
"""Kind, stage, micro-batch."""
Lane = tuple[int, ...]
"""Devices that run the same operations in the same order."""


class Style(NamedTuple):
    """Rules of a list scheduler.

    ``most``: micro-batches in flight on a stage. ``forward_first``, ``deep_first``: which of two ready operations goes
    first. ``split``: the stages whose backwards are split. ``apart``: the stages whose recomputations are
    operations of their rows. ``noise``: the share of choices that are put behind all others.
    """

    most: int
    forward_first: bool = False
    deep_first: bool = False
    split: frozenset[int] = frozenset()
    apart: frozenset[int] = frozenset()
    noise: float = 0.0


def lanes_of(allocation: Allocation) -> dict[Lane, list[int]]:
    """Return the stages of each row; devices with the same stages share a row, unless they take turns."""
    holds: dict[int, list[int]] = {}
    for s, stage in enumerate(allocation.stages):
        for device in stage.devices:
            holds.setdefault(device, []).append(s)
    rows: dict[tuple[object, ...], list[int]] = {}
    for device, stages in holds.items():
        turns = any(allocation.stages[s].dispatch == "round_robin" for s in stages)
        rows.setdefault((*stages, device if turns else None), []).append(device)
    return {tuple(devices): holds[devices[0]] for devices in rows.values()}


def list_order(problem: Problem, allocation: Allocation, style: Style, rng: random.Random) -> Orders:
    """Return one order that can run."""
    return _Scheduler(problem, allocation, style, rng).run()


class _Scheduler:
    def __init__(self, problem: Problem, allocation: Allocation, style: Style, rng: random.Random) -> None:
        self._allocation, self._style, self._rng = allocation, style, rng
        self._lanes = lanes_of(allocation)
        self._rows: dict[Lane, list[Operation]] = {lane: [] for lane in self._lanes}
        self._free = dict.fromkeys(self._lanes, 0)
        self._ended: dict[tuple[Lane, Operation], int] = {}
        self._waiting = {lane: set(self._operations(lane)) for lane in self._lanes}
        self._flying = {(lane, s): 0 for lane, stages in self._lanes.items() for s in stages}
        rows = -(-problem.global_batch_size // allocation.num_micro_batches)
        self._costs = [stage_costs(problem, stage, rows) for stage in allocation.stages]

    def run(self) -> Orders:
        while any(self._waiting.values()):
            choices = list(self._choices(limited=True)) or list(self._choices(limited=False))
            begin, lane, operation = min(choices, key=self._key)
            self._take(begin, lane, operation)
        return Orders("listed", tuple(Row(lane, as_operations(row)) for lane, row in self._rows.items()))

    def _operations(self, lane: Lane) -> Iterator[Operation]:
        for s in self._lanes[lane]:
            stage = self._allocation.stages[s]
            again = (RECOMPUTE,) if stage.recompute and s in self._style.apart else ()
            kinds = (FORWARD, *again, *((INPUT, WEIGHT) if s in self._style.split else (BACKWARD,)))
            for m in self._allocation.micro_batches(s):
                if stage.dispatch == "rows" or stage.devices.index(lane[0]) == m % stage.replicas:
                    yield from ((kind, s, m) for kind in kinds)

    def _choices(self, limited: bool) -> Iterator[tuple[int, Lane, Operation]]:
        """Yield the operations that may go next on each row, with the earliest time when they can begin."""
        for lane, waiting in self._waiting.items():
            for operation in waiting:
                kind, s, _m = operation
                if limited and kind == FORWARD and self._flying[lane, s] >= self._style.most:
                    continue
                ready = self._ready(lane, operation)
                if ready is not None:
                    yield max(ready, self._free[lane]), lane, operation

    def _key(self, choice: tuple[int, Lane, Operation]) -> tuple[object, ...]:
        begin, lane, (kind, s, m) = choice
        forward = kind == FORWARD
        late = self._rng.random() < self._style.noise
        weight_last = kind == WEIGHT
        depth = -s if self._style.deep_first else s
        return (late, begin, weight_last, forward != self._style.forward_first, m, depth, kind, lane)

    def _ready(self, lane: Lane, operation: Operation) -> int | None:
        """Return when the inputs of an operation are ready; None while some of them have not been placed."""
        kind, s, m = operation
        if kind == FORWARD:
            source = self._allocation.previous(s)
            return 0 if source is None else self._end_of(source, m, (FORWARD,))
        local_inputs = [FORWARD] if kind != WEIGHT else [INPUT]
        if kind in (BACKWARD, INPUT) and s in self._style.apart and self._allocation.stages[s].recompute:
            local_inputs.append(RECOMPUTE)
        ends = [self._ended.get((lane, (each, s, m))) for each in local_inputs]
        if kind in (BACKWARD, INPUT) and (source := self._allocation.next(s)) is not None:
            ends.append(self._end_of(source, m, (BACKWARD, INPUT)))
        return None if None in ends else max(end for end in ends if end is not None)

    def _end_of(self, s: int, m: int, kinds: Collection[int]) -> int | None:
        """Return when all devices that compute a micro-batch of a stage have computed it; None while some have not."""
        if any((kind, s, m) in waiting for waiting in self._waiting.values() for kind in kinds):
            return None
        ends = (self._ended.get((lane, (kind, s, m))) for lane in self._lanes for kind in kinds)
        return max(end for end in ends if end is not None)

    def _take(self, begin: int, lane: Lane, operation: Operation) -> None:
        kind, s, _m = operation
        cost = self._costs[s]
        again = 0 if s in self._style.apart else cost.recompute_ns
        durations = {
            FORWARD: cost.forward_ns,
            BACKWARD: cost.backward_ns + again,
            INPUT: cost.backward_ns - cost.weight_ns + again,
            WEIGHT: cost.weight_ns,
            RECOMPUTE: cost.recompute_ns,
        }
        self._free[lane] = self._ended[lane, operation] = begin + durations[kind]
        self._waiting[lane].remove(operation)
        self._rows[lane].append(operation)
        self._flying[lane, s] += {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}.get(kind, 0)


def moved(orders: Orders, rng: random.Random) -> Orders:
    """Move one operation of a random row to another place; the order may then be one that cannot run."""
    rows = list(orders.rows)
    which = rng.randrange(len(rows))
    operations = rows[which].operations.tolist()
    if len(operations) > 1:
        operation = operations.pop(rng.randrange(len(operations)))
        operations.insert(rng.randint(0, len(operations)), operation)
    rows[which] = Row(rows[which].devices, as_operations(operations))
    return Orders(orders.name, tuple(rows))
