"""The variables and constraints of one step: ALGORITHMS 7.8.

Times are in units of ``unit_ns``, durations rounded down: every real schedule, with its starts rounded down too, is a
solution, so what is proven here bounds the real ones. The unit is 1 ns unless the horizon would not fit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.allocation import Allocation
from penstock.solvers.batching import row_classes
from penstock.solvers.costs import buckets, transfer
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders
from penstock.solvers.stage_times import StageTimes

MOST_UNITS = 2**50
Key = tuple[int, int, int]
"""(kind of operation or direction of transfer, stage, micro-batch)."""


@dataclass(frozen=True, eq=False)
class Step:
    """A start variable and a duration, in units."""

    start: Any
    size: int

    @property
    def end(self) -> Any:
        """Start plus duration."""
        return self.start + self.size


@dataclass(eq=False)
class Model:
    """One allocation's step that takes at most ``horizon`` units; ``operations`` and ``transfers`` by key."""

    problem: Problem
    allocation: Allocation
    horizon: int
    unit_ns: int
    cp: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    operations: dict[Key, Step] = field(default_factory=dict)
    transfers: dict[Key, Step] = field(default_factory=dict)
    reductions: dict[tuple[int, int], Step] = field(default_factory=dict)
    users: dict[object, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.times = StageTimes(self.problem, self.allocation, Orders("any order", ()))
        classes = row_classes(self.problem.global_batch_size, self.allocation.num_micro_batches)
        self.size_class = [c for c, (_rows, count) in enumerate(classes) for _ in range(count)]
        self.groups = [[m for m, c in enumerate(self.size_class) if c == k] for k in range(len(classes))]
        self.rows = [rows for rows, _count in classes]

    @property
    def stages(self) -> range:
        """Stage numbers."""
        return range(len(self.allocation.stages))

    def units(self, duration_ns: int) -> int:
        """A duration, rounded down."""
        return duration_ns // self.unit_ns

    def build(self) -> Any:
        """All constraints; the variable of the makespan."""
        makespan = self.cp.new_int_var(0, self.horizon, "makespan")
        for s in self.stages:
            for m in range(self.allocation.num_micro_batches):
                self._operate(s, m)
        for s in self.stages:
            for direction in (0, 1):
                self._send(s, direction)
            self._turn_round(s)
            self._index_order(s)
            self._hold(s)
            self._finish(s, makespan)
        for intervals in self.users.values():
            self.cp.add_no_overlap(intervals)
        return makespan

    def _operate(self, s: int, m: int) -> None:
        """Forward and backward between head and tail; the k-th of its size after the k before it."""
        times, c = self.times, self.size_class[m]
        cost = times.costs[s][c]
        before = self.groups[c].index(m)
        after = len(self.groups[c]) - 1 - before
        head, tail = self.units(times.heads[s]), self.units(times.tails[s])
        around, first = self.units(times.rounds[s]), self.units(times.forward[s])
        forward, backward = self.units(cost.forward_ns), self.units(cost.backward_ns + cost.recompute_ns)
        behind = around + self.units(times.backward[s]) + tail
        self.operations[FORWARD, s, m] = self._step(
            head + before * forward, self.horizon - behind - after * forward, forward, [("device", s)]
        )
        self.operations[BACKWARD, s, m] = self._step(
            head + first + around + before * backward, self.horizon - tail - after * backward, backward, [("device", s)]
        )

    def _step(self, low: int, latest_end: int, size: int, resources: list[object]) -> Step:
        if latest_end - size < low:
            self.cp.add(self.cp.new_constant(0) == 1)
        start = self.cp.new_int_var(low, max(low, latest_end - size), "")
        step = Step(start, size)
        if size > 0 and resources:
            interval = self.cp.new_fixed_size_interval_var(start, size, "")
            for resource in resources:
                self.users[resource].append(interval)
        return step

    def _send(self, s: int, direction: int) -> None:
        """What stage ``s`` makes is carried to the next (0) or previous (1) stage, on all resources at once."""
        allocation = self.allocation
        other = allocation.next(s) if direction == 0 else allocation.previous(s)
        if other is None:
            return
        kind = FORWARD if direction == 0 else BACKWARD
        moves = [transfer(self.problem, allocation, s, rows, direction) for rows in self.rows]
        for m, c in enumerate(self.size_class):
            made, needed = self.operations[kind, s, m], self.operations[kind, other, m]
            move = moves[c]
            resources = [] if move is None else [("link", r) for r in self.times.channels(s, direction, move)]
            size = 0 if move is None else self.units(move.duration_ns)
            if not resources or size == 0:
                self.cp.add(needed.start >= made.end + size)
                continue
            step = self._step(0, self.horizon, size, list(resources))
            self.cp.add(step.start >= made.end)
            self.cp.add(needed.start >= step.end)
            self.transfers[direction, s, m] = step

    def _turn_round(self, s: int) -> None:
        """A micro-batch's backward comes on each stage after its forward and its way round behind it."""
        for m in range(self.allocation.num_micro_batches):
            forward, backward = self.operations[FORWARD, s, m], self.operations[BACKWARD, s, m]
            self.cp.add(backward.start >= forward.end + self.units(self.times.rounds[s]))

    def _index_order(self, s: int) -> None:
        """Micro-batches of one size in index order: exchanging two that are alike changes nothing."""
        for group in self.groups:
            for a, b in pairwise(group):
                for kind in (FORWARD, BACKWARD):
                    self.cp.add(self.operations[kind, s, b].start >= self.operations[kind, s, a].end)
                for direction in (0, 1):
                    if (direction, s, a) in self.transfers:
                        self.cp.add(self.transfers[direction, s, b].start >= self.transfers[direction, s, a].end)

    def _hold(self, s: int) -> None:
        """At most as many micro-batches between forward and backward as memory holds here and at every stage before.

        Of one size and so in index order: F(m + K) waits for B(m). Of two sizes: at most K at any time.
        """
        limit, count = min(map(self.times.in_flight, range(s + 1))), self.allocation.num_micro_batches
        if limit >= count:
            return
        pairs = [(self.operations[FORWARD, s, m], self.operations[BACKWARD, s, m]) for m in range(count)]
        if len(self.groups) == 1:
            for m in range(count - limit):
                self.cp.add(pairs[m + limit][0].start >= pairs[m][1].end)
            return
        held = []
        for forward, backward in pairs:
            length = self.cp.new_int_var(0, self.horizon, "")
            held.append(self.cp.new_interval_var(forward.start, length, backward.end, ""))
        self.cp.add_cumulative(held, [1] * count, limit)

    def _finish(self, s: int, makespan: Any) -> None:
        """All-reduce and update follow the last backward; buckets are a chain and take their ring's links."""
        update = self.units(self.times.update[s])
        last = [self.operations[BACKWARD, s, group[-1]] for group in self.groups]
        chain = [buckets(self.problem, self.allocation.stages[s], rows) for rows in self.rows]
        if not self.problem.rules.shared or not chain[0]:
            exposed = self.units(self.times.exposed[s])
            for backward in last:
                self.cp.add(makespan >= backward.end + exposed + update)
        else:
            before: Step | None = None
            for number, each in enumerate(zip(*chain, strict=True)):
                resources: list[object] = [("link", r) for r in each[0].resources]
                step = self._step(0, self.horizon - update, self.units(each[0].duration_ns), resources)
                lead = -(-max(bucket.lead_ns for bucket in each) // self.unit_ns)
                for backward in last:
                    self.cp.add(step.start >= backward.end - lead)
                if before is not None:
                    self.cp.add(step.start >= before.end)
                self.reductions[s, number] = before = step
            assert before is not None
            self.cp.add(makespan >= before.end + update)
            for backward in last:
                self.cp.add(makespan >= backward.end + update)
        if self.allocation.previous(s) is None:
            return
        tail = self.units(self.times.tails[s])
        for backward in last:
            self.cp.add(makespan >= backward.end + tail)
