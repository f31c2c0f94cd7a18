"""Section 7 of docs/theory/judge.md in plain Python: pipelines that share processors (elastic averaging)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from fractions import Fraction
from math import ceil

from page_clock import Lane, Moved, Run
from page_costs import BACKWARD, FORWARD, STEP, Costs, F, Invalid, Operation, Transfer
from page_simulator import check_rows, refuse_unreachable

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders

TICKS = 720_720
ALL = 1_000_000


class SharedCosts(Costs):
    """Costs of pipelines that share the channel between two devices."""

    def _channel(self, s: int, direction: int) -> frozenset[Hashable]:
        resources = super()._channel(s, direction)
        depth = len(self.stages) // len(self.ranges)
        return frozenset((name, edge % depth, *more) for name, edge, *more in resources)


def simulate_sharing_page(problem: Problem, allocation: Allocation, orders: Orders) -> Run:
    """Run an iteration."""
    costs = SharedCosts(problem, allocation, None)
    lanes = [Lane(row.devices, [tuple(map(int, each)) for each in row.operations]) for row in orders.rows]
    run = OneStageRows(costs, "elastic_averaging", [costs.M] * len(costs.stages), lanes)
    check_rows(run)
    refuse_unreachable(run)
    Shared(run).run_all()
    run.window = (0, run.end)
    run.batches = run.rounds = len(allocation.pipelines)
    run.time = -(-run.end // run.batches)
    return run


class OneStageRows(Run):
    """A run whose rows hold one stage each; the lane of a stage is the lane with its row."""

    def lanes_of(self, s: int) -> list[int]:
        """Return the lane of a stage."""
        return [k for k, lane in enumerate(self.lanes) if lane.row and lane.row[0][1] == s]

    def runners(self, s: int, m: int) -> list[int]:
        """Return the lane of a stage."""
        return self.lanes_of(s)


class Shared:
    """The clock of section 4 with speeds; ``left`` has the ticks that running operations still need."""

    def __init__(self, run: Run) -> None:
        self.run, self.costs, self.now = run, run.costs, 0
        self.next = [0] * len(run.lanes)
        self.stepped = [False] * len(run.lanes)
        self.left: dict[int, int] = {}
        self.shares: dict[int, int] = {}
        self.started: dict[int, tuple[int, Operation]] = {}
        self.flying: dict[Moved, int] = {}
        self.arrived: set[Moved] = set()
        self.waiting: list[tuple[int, int, int, int]] = []

    def run_all(self) -> None:
        """Run all events from time 0 on."""
        self._start_operations()
        while self.left or self.flying:
            self._advance()
            self._end()
            self._start_transfers()
            self._start_operations()
        if not all(self.stepped):
            raise Invalid("the plan waits in a circle")

    def _share(self, s: int, m: int) -> int:
        """Return u, the share of the processor, of an operation."""
        measured = self.costs.problem.pipeline_run
        if measured is None:
            return ALL
        curve = measured.ranks[s % len(measured.ranks)].utilisation_ppm or (ALL,)
        batch = self.costs.problem.global_batch_size
        work = sum(curve) * self.costs.rows(m) * measured.num_micro_batches
        return min(ALL, max(1, ceil(Fraction(work, len(curve) * batch * measured.num_pipelines))))

    def _speeds(self) -> dict[int, int]:
        """Return the ticks per nanosecond of each running lane."""
        load: dict[int, int] = defaultdict(int)
        for k in self.left:
            load[self.run.lanes[k].devices[0]] += self.shares[k]
        loads = {k: load[self.run.lanes[k].devices[0]] for k in self.left}
        return {k: TICKS if each <= ALL else TICKS * ALL // each for k, each in loads.items()}

    def _advance(self) -> None:
        speeds = self._speeds()
        ends = [self.now + -(-left // speeds[k]) for k, left in self.left.items()] + list(self.flying.values())
        then = min(ends)
        for k in self.left:
            self.left[k] -= (then - self.now) * speeds[k]
        self.now = then

    def _end(self) -> None:
        for k in [k for k, left in self.left.items() if left <= 0]:
            del self.left[k]
            start, (kind, s, m) = self.started.pop(k)
            if kind == STEP:
                self.run.steps[s, k] = (start, self.now)
                self.stepped[k] = True
                continue
            self.run.operations[k, (kind, s, m)] = (start, self.now)
            self.next[k] += 1
            moved = (s, FORWARD if kind == F else BACKWARD, m)
            if self.costs.transfer(s, moved[1], self.costs.rows(m)) is None:
                self.arrived.add(moved)
            else:
                self.waiting.append((self.now, *moved))
            if self.next[k] == len(self.run.lanes[k].row):
                self._start(k, (STEP, s, 0), self.costs.step(s), ALL)
        for moved in [moved for moved, end in self.flying.items() if end == self.now]:
            del self.flying[moved]
            self.arrived.add(moved)

    def _start_transfers(self) -> None:
        left = []
        for entry in sorted(self.waiting):
            s, direction, m = moved = entry[1:]
            busy = {each for t, way, n in self.flying for each in self._transfer(t, way, n).resources}
            needs = self._transfer(s, direction, m)
            if needs.resources & busy:
                left.append(entry)
                continue
            self.flying[moved] = self.now + needs.duration
            self.run.transfers[moved] = (self.now, self.now + needs.duration)
        self.waiting = left

    def _transfer(self, s: int, direction: int, m: int) -> Transfer:
        return self.costs.transfer(s, direction, self.costs.rows(m))

    def _start_operations(self) -> None:
        for k, lane in enumerate(self.run.lanes):
            if k in self.left or self.next[k] == len(lane.row):
                continue
            kind, s, m = lane.row[self.next[k]]
            direction = FORWARD if kind == F else BACKWARD
            source = self.costs.neighbour(s, 1 - direction)
            if source is None or (source, direction, m) in self.arrived:
                duration = self.costs.duration((kind, s, m), apart=False)
                self._start(k, (kind, s, m), duration, self._share(s, m))

    def _start(self, k: int, operation: Operation, duration: int, share: int) -> None:
        self.left[k], self.shares[k] = duration * TICKS, share
        self.started[k] = (self.now, operation)
