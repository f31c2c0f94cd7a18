"""The variables and constraints of one step: ALGORITHMS 7.8.

Times are in units of ``unit_ns``, durations rounded down: every real schedule, with its starts rounded down too, is a
solution, so a bound proven here bounds the real schedules. The unit is 1 ns unless the horizon would not fit. Bytes,
both in use and available, are rounded down likewise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

from ortools.sat.python import cp_model

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.improve.job_shop.memory_limits import Limit, Room, in_flight_limits, rooms
from penstock.solvers.improve.job_shop.reductions import BucketChain, chains
from penstock.solvers.improve.job_shop.shop import Operation, Shop

MOST_UNITS = 2**50
MOST_BYTE_UNITS = 2**16
"""The largest memory of a row in byte units: sums of times and bytes have to fit in 64 bits."""
Values = dict[int, int]
"""The value of each variable, by its index."""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A start variable and a duration, in units."""

    start: Any
    size: int

    @property
    def end(self) -> Any:
        """The start plus the duration."""
        return self.start + self.size

    def start_in(self, values: Values) -> int:
        """Return the step's start in a solution."""
        return values[self.start.index]

    def end_in(self, values: Values) -> int:
        """Return the step's end in a solution."""
        return values[self.start.index] + self.size


@dataclass(eq=False)
class Model:
    """The model of a shop's step that takes at most ``horizon`` units.

    ``transfers`` by (direction, sending stage, micro-batch), ``reductions`` by (lowest stage of the group, number);
    ``defined`` are variables that follow from others, in the order in which they can be computed.
    """

    shop: Shop
    horizon: int
    unit_ns: int
    cp: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    steps: dict[Operation, Scheduled] = field(default_factory=dict)
    transfers: dict[tuple[int, int, int], Scheduled] = field(default_factory=dict)
    reductions: dict[tuple[int, int], Scheduled] = field(default_factory=dict)
    defined: list[tuple[Any, Callable[[Values], int]]] = field(default_factory=list)
    makespan: Any = None
    _users: dict[object, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def build(self) -> None:
        """Add all constraints."""
        shop = self.shop
        self.makespan = self.cp.new_int_var(0, self.horizon, "makespan")
        for each in shop.operations:
            self.steps[each] = self._operate(each)
        for s in range(len(shop.allocation.stages)):
            for direction in (0, 1):
                self._send(s, direction)
        self._follow()
        self._index_order()
        limits = in_flight_limits(shop)
        for limit in limits:
            self._hold(limit)
        for room in rooms(shop, limits):
            self._share(room)
        for chain in chains(shop):
            self._reduce(chain)
        self._finish()
        for intervals in self._users.values():
            self.cp.add_no_overlap(intervals)

    def units(self, duration_ns: int) -> int:
        """Return a duration in units, rounded down."""
        return duration_ns // self.unit_ns

    def _step(self, low: int, latest_end: int, size: int, resources: list[object]) -> Scheduled:
        """Add a step that has its resources to itself if it takes time at all."""
        if latest_end - size < low:
            self.cp.add_bool_or([])
        start = self.cp.new_int_var(low, max(low, latest_end - size), "")
        if size > 0 and resources:
            interval = self.cp.new_fixed_size_interval_var(start, size, "")
            for resource in resources:
                self._users[resource].append(interval)
        return Scheduled(start, size)

    def _operate(self, each: Operation) -> Scheduled:
        """Add an operation between head and tail; the k-th of identical operations comes after the k before it."""
        shop, s = self.shop, each.stage
        times, size = shop.times, self.units(shop.duration_ns(each))
        before, after = shop.place[each.micro_batch]
        head, tail = self.units(times.heads[s]), self.units(times.tails[s])
        first, around, gradient = map(self.units, (times.forward[s], times.rounds[s], times.backward[s]))
        if each.kind == FORWARD:
            tail += gradient + around
        elif each.kind == RECOMPUTE:
            head, tail = head + first, tail + gradient
        else:
            head += first + around
        if each.kind == WEIGHT:
            head, tail = head + gradient, self.units(times.exposed[s]) + self.units(times.update_ns[s])
        return self._step(head + before * size, self.horizon - tail - after * size, size, [("row", each.row)])

    def _send(self, s: int, direction: int) -> None:
        """Add the transfers of stage ``s`` to the next (0) or previous (1) stage, on all resources at once."""
        shop = self.shop
        allocation, ends = shop.allocation, shop.forwards if direction == 0 else shop.gradients
        other = allocation.next(s) if direction == 0 else allocation.previous(s)
        if other is None:
            return
        sizes = [self.units(lag) for lag in shop.times.lags_ns(s, direction)]
        for m in allocation.micro_batches(s):
            c = shop.size_class[m]
            size = sizes[c]
            links = shop.times.channels(s, direction, c) if size else ()
            ends_here, needed = [self.steps[each] for each in ends[s, m]], [self.steps[each] for each in ends[other, m]]
            if links:
                carried = self._step(0, self.horizon, size, [("link", link) for link in links])
                self.transfers[direction, s, m] = carried
                self._precede(ends_here, [carried])
                self._precede([carried], needed)
            else:
                self._precede(ends_here, needed, size)

    def _precede(self, sooner: list[Scheduled], later: list[Scheduled], lag: int = 0) -> None:
        for a, b in product(sooner, later):
            self.cp.add(b.start >= a.end + lag)

    def _follow(self) -> None:
        """Order each row: recomputation after the forward, gradients after it and the round trip, weights last."""
        for each in self.shop.operations:
            if each.kind not in (BACKWARD, INPUT):
                continue
            gradient, forward = self.steps[each], self.steps[each._replace(kind=FORWARD)]
            self._precede([forward], [gradient], self.units(self.shop.times.rounds[each.stage]))
            if self.shop.apart(each):
                again = self.steps[each._replace(kind=RECOMPUTE)]
                self._precede([forward], [again])
                self._precede([again], [gradient])
            if each.kind == INPUT:
                self._precede([gradient], [self.steps[each._replace(kind=WEIGHT)]])

    def _index_order(self) -> None:
        """Put identical micro-batches in index order: exchanging two of them changes nothing."""
        after = {a: b for group in self.shop.groups for a, b in pairwise(group)}
        for each, step in self.steps.items():
            if each.micro_batch in after:
                self._precede([step], [self.steps[each._replace(micro_batch=after[each.micro_batch])]])
        for (direction, s, m), step in self.transfers.items():
            if m in after:
                self._precede([step], [self.transfers[direction, s, after[m]]])

    def _hold(self, limit: Limit) -> None:
        """Limit micro-batches between forward and release; if all are identical F(m + K) waits for the release of m."""
        shop = self.shop
        forwards = [each for each in shop.of_row[limit.row] if each.kind == FORWARD]
        if limit.most >= len(forwards):
            return
        if len({shop.group_of[each.micro_batch] for each in forwards}) == 1:
            for m, each in enumerate(forwards[limit.most :]):
                self._precede([self.steps[shop.release(forwards[m])]], [self.steps[each]])
            return
        spans = [self._between(self.steps[each], self.steps[shop.release(each)]) for each in forwards]
        self.cp.add_cumulative(spans, [1] * len(spans), limit.most)

    def _between(self, first: Scheduled, last: Scheduled, after: bool = False) -> Any:
        """Return the interval from a step's start (``after``: its end) to the end of another."""
        begin, begin_in = (first.end, first.end_in) if after else (first.start, first.start_in)
        length = self.cp.new_int_var(0, self.horizon, "")
        self.defined.append((length, lambda values: last.end_in(values) - begin_in(values)))
        return self.cp.new_interval_var(begin, length, last.end, "")

    def _share(self, room: Room) -> None:
        """Limit stashes, buffers, workspaces and gradients of a row at every instant."""
        unit = 1 + max(0, room.free_bytes) // MOST_BYTE_UNITS
        demands: list[tuple[Any, int]] = []
        for each in self.shop.of_row[room.row]:
            demands += [(interval, size // unit) for interval, size in self._demands(room, each) if size >= unit]
        for s, size in room.gradient_bytes:
            if size >= unit:
                demands.append((self._from_first_gradient(room.row, s), size // unit))
        if room.free_bytes < 0:
            self.cp.add_bool_or([])
        elif demands:
            intervals, sizes = zip(*demands, strict=True)
            self.cp.add_cumulative(intervals, sizes, room.free_bytes // unit)

    def _demands(self, room: Room, each: Operation) -> list[tuple[Any, int]]:
        """Return the memory that an operation is certain to hold, as intervals and bytes, so that bounds hold.

        Real use may be longer: a receive is posted before the operation starts, and a message may take longer to pass
        than its transfer.
        """
        shop, step, memory = self.shop, self.steps[each], room.memory_of(self.shop, each)
        apart, demands = shop.apart(each), []
        release = self.steps[shop.release(each)]
        working = memory.workspace + (memory.rebuilt_inside if each.kind == BACKWARD and not apart else 0)
        if working and step.size:
            demands.append((self.cp.new_fixed_size_interval_var(step.start, step.size, ""), working))
        if memory.rebuilt_whole and (each.kind == RECOMPUTE or (each.kind == INPUT and not apart)):
            demands.append((self._between(step, release), memory.rebuilt_whole))
        if each.kind not in (FORWARD, BACKWARD, INPUT):
            return demands
        direction = 0 if each.kind == FORWARD else 1
        if direction == 0 and memory.stash:
            demands.append((self._between(step, release), memory.stash))
        if received := (memory.received_input, memory.received_gradient)[direction]:
            demands.append((self._between(step, release), received))
        sent, out = (memory.sent_output, memory.sent_gradient)[direction], (direction, each.stage, each.micro_batch)
        if sent and out in self.transfers:
            demands.append((self._between(step, self.transfers[out], after=True), sent))
        return demands

    def _from_first_gradient(self, row: int, s: int) -> Any:
        """Return the interval from the first gradient operation of a stage to the horizon."""
        starts = [
            self.steps[each] for each in self.shop.of_row[row] if each.stage == s and each.kind in (BACKWARD, INPUT)
        ]
        first = self.cp.new_int_var(0, self.horizon, "")
        length = self.cp.new_int_var(0, self.horizon, "")
        self.cp.add_min_equality(first, [step.start for step in starts])
        self.defined.append((first, lambda values: min(step.start_in(values) for step in starts)))
        self.defined.append((length, lambda values: self.horizon - values[first.index]))
        return self.cp.new_interval_var(first, length, self.horizon, "")

    def _reduce(self, chain: BucketChain) -> None:
        """Add buckets one after the other, each on its ring's links in a shared network; then their stages' updates."""
        shop, update = self.shop, self.units(max(self.shop.times.update_ns[s] for s in chain.stages))
        if not shop.problem.rules.shared:
            for place, ends in chain.ends.items():
                rest = self.units(chain.exposed_ns(place)) + update
                for each in ends:
                    self.cp.add(self.makespan >= self.steps[each].end + rest)
            return
        before: list[Scheduled] = []
        for number, bucket in enumerate(chain.buckets):
            resources: list[object] = [("link", link) for link in bucket.resources]
            step = self._step(0, self.horizon - update, self.units(bucket.duration_ns), resources)
            self._precede(before, [step])
            for place, ends in chain.ends.items():
                self._precede(
                    [self.steps[each] for each in ends], [step], -chain.lead_ns[place][number] // self.unit_ns
                )
            self.reductions[chain.stages[0], chain.number + number] = step
            before = [step]
        self.cp.add(self.makespan >= before[0].end + update)

    def _finish(self) -> None:
        """Put a row's tied sums and updates after all its operations, and the step's end after each gradient's tail."""
        shop, times = self.shop, self.shop.times
        for row, operations in enumerate(shop.of_row):
            update = sum(self.units(times.update_ns[s]) for s in shop.stages_of(row))
            update += sum(self.units(tie.duration_ns) for tie in times.ties if shop.devices[row][0] in tie.devices)
            for each in operations:
                if shop.place[each.micro_batch][1] > 0:
                    continue
                rest = update
                if each.kind in (BACKWARD, INPUT):
                    rest = max(rest, self.units(times.tails[each.stage]))
                self.cp.add(self.makespan >= self.steps[each].end + rest)
