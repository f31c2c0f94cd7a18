"""The rules of ``sharing``'s docstring in plain Python, nanosecond by nanosecond: the tests' oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from reference_measures import step_workspace

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.costs.memory import static_bytes, weight_bytes
from penstock.solvers.costs.stage import stage_costs, update_ns
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import micro_batch_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.timeline import Timeline

STEP = ("step", -1)


@dataclass
class SharedReference:
    """The result of one iteration, by stage number.

    Operations are (kind, micro-batch), and ("step", -1) for the update.
    """

    start: dict[tuple[int, tuple], int] = field(default_factory=dict)
    end: dict[tuple[int, tuple], int] = field(default_factory=dict)
    transfers: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    makespan: int = 0
    deadlock: bool = False


def run_sharing_reference(problem: Problem, allocation: Allocation, orders: Orders) -> SharedReference:
    """Simulate one iteration; ``deadlock`` is set where lanes wait for ever."""
    return _Run(problem, allocation, orders).run()


class _Run:
    def __init__(self, problem: Problem, allocation: Allocation, orders: Orders) -> None:
        self.problem, self.allocation = problem, allocation
        self.rows = [
            micro_batch_rows(problem.global_batch_size, allocation.num_micro_batches, m)
            for m in range(allocation.num_micro_batches)
        ]
        self.left: dict[int, list[tuple]] = {}
        for row in orders.rows:
            operations = [(int(kind), int(m)) for kind, _s, m in row.operations]
            self.left[int(row.operations[0, 1])] = [*operations, STEP]
        self.active: dict[int, tuple[tuple, Fraction]] = {}
        self.flying: dict[tuple[int, int, int], int] = {}
        self.waiting: list[tuple[int, int, int, int]] = []
        self.arrived: set[tuple[int, int, int]] = set()
        self.reference = SharedReference()

    def run(self) -> SharedReference:
        now = 0
        while True:
            self._settle(now)
            if not self.active and not self.flying:
                break
            if self.active:
                for s, speed in self._speeds().items():
                    op, left = self.active[s]
                    self.active[s] = (op, left - speed)
            now += 1
        self.reference.deadlock = any(self.left.values())
        self.reference.makespan = max(self.reference.end.values(), default=0)
        return self.reference

    def _settle(self, now: int) -> None:
        """Run everything that happens at one instant."""
        self._start_operations(now)
        while True:
            ended = [s for s, (_op, left) in self.active.items() if left <= 0]
            landed = [key for key, end in self.flying.items() if end <= now]
            if not ended and not landed:
                return
            for s in ended:
                op, _left = self.active.pop(s)
                self.reference.end[s, op] = now
                self.left[s].pop(0)
                self._pass_on(s, op, now)
            for key in landed:
                del self.flying[key]
                way, s, m = key
                self.arrived.add((way, self._other(way, s), m))
            self._start_transfers(now)
            self._start_operations(now)

    def _other(self, way: int, s: int) -> int | None:
        return self.allocation.next(s) if way == 0 else self.allocation.previous(s)

    def _start_operations(self, now: int) -> None:
        for s, operations in self.left.items():
            if s in self.active or not operations or not self._is_ready(s, operations[0]):
                continue
            self.reference.start[s, operations[0]] = now
            self.active[s] = (operations[0], Fraction(self._work(s, operations[0])))

    def _is_ready(self, s: int, op: tuple) -> bool:
        if op == STEP:
            return True
        kind, m = op
        source = self.allocation.previous(s) if kind == FORWARD else self.allocation.next(s)
        if kind == BACKWARD and (s, (FORWARD, m)) not in self.reference.end:
            return False
        return source is None or (0 if kind == FORWARD else 1, s, m) in self.arrived

    def _work(self, s: int, op: tuple) -> int:
        stage = self.allocation.stages[s]
        if op == STEP:
            return update_ns(self.problem, stage)
        cost = stage_costs(self.problem, stage, self.rows[op[1]])
        return cost.forward_ns if op[0] == FORWARD else cost.backward_ns + cost.recompute_ns

    def _speeds(self) -> dict[int, Fraction]:
        used: dict[int, int] = {}
        for s, (op, _left) in self.active.items():
            device = self.allocation.stages[s].devices[0]
            used[device] = used.get(device, 0) + self._share(s, op)
        speeds = {}
        for s in self.active:
            total = used[self.allocation.stages[s].devices[0]]
            speeds[s] = Fraction(min(720_720, 720_720 * 1_000_000 // total), 720_720)
        return speeds

    def _share(self, s: int, op: tuple) -> int:
        run = self.problem.pipeline_run
        if op == STEP or run is None:
            return 1_000_000
        number = len(self.allocation.pipelines[0].stages)
        curve = run.ranks[s % number].utilisation_ppm
        rows = Fraction(self.problem.global_batch_size, run.num_micro_batches)
        share = Fraction(sum(curve), len(curve)) * self.rows[op[1]] / rows / run.num_pipelines
        return max(1, min(1_000_000, -int(-share // 1)))

    def _pass_on(self, s: int, op: tuple, now: int) -> None:
        if op == STEP:
            return
        way = 0 if op[0] == FORWARD else 1
        if self._other(way, s) is None:
            return
        if transfer(self.problem, self.allocation, s, self.rows[op[1]], way) is None:
            self.arrived.add((way, self._other(way, s), op[1]))
        else:
            self.waiting.append((now, s, way, op[1]))

    def _start_transfers(self, now: int) -> None:
        for entry in sorted(self.waiting):
            _ready, s, way, m = entry
            busy = set().union(*(self._resources(w, u) for w, u, _m in self.flying)) if self.flying else set()
            if self._resources(way, s) & busy:
                continue
            self.waiting.remove(entry)
            end = now + transfer(self.problem, self.allocation, s, self.rows[m], way).duration_ns
            self.flying[way, s, m] = end
            self.reference.transfers[s, way, m] = (now, end)

    def _resources(self, way: int, s: int) -> set[object]:
        if self.problem.rules.shared:
            return set(transfer(self.problem, self.allocation, s, self.rows[0], way).resources)
        devices = self.allocation.stages[s].devices, self.allocation.stages[self._other(way, s)].devices
        pair = tuple(sorted(devices))
        return {"half": {pair}, "full": {(pair, way)}, "none": set()}[self.problem.rules.channel]


def shared_reference_curve(
    problem: Problem, allocation: Allocation, reference: SharedReference, device: int
) -> dict[int, int]:
    """Return the bytes on a device, by each time at which they change."""
    events: dict[int, int] = {0: problem.devices[device].context_bytes}

    def add(start: int, end: int | None, size: int) -> None:
        events[start] = events.get(start, 0) + size
        if end is not None:
            events[end] = events.get(end, 0) - size

    stages = [s for s, stage in enumerate(allocation.stages) if device in stage.devices]
    add(0, None, (1 + len(stages)) * weight_bytes(problem, allocation.stages[stages[0]])[1])
    for s in stages:
        _stage_events(problem, allocation, reference, s, add)
    level, curve = 0, {}
    for t in sorted(events):
        level += events[t]
        curve[t] = level
    return curve


def _stage_events(problem: Problem, allocation: Allocation, reference: SharedReference, s: int, add) -> None:
    stage, count = allocation.stages[s], allocation.num_micro_batches
    static = static_bytes(problem, stage)
    add(0, None, static.parameters + static.optimizer)
    add(min(reference.start[s, (BACKWARD, m)] for m in range(count)), reference.end[s, STEP], static.gradients)
    pulled = weight_bytes(problem, stage)[1]
    add(reference.start[s, STEP], reference.end[s, STEP], step_workspace(problem, stage) + pulled)
    for m in range(count):
        rows = micro_batch_rows(problem.global_batch_size, count, m)
        cost = stage_costs(problem, stage, rows)
        plain = stage_costs(problem, replace(stage, recompute=()), rows)
        release = reference.end[s, (BACKWARD, m)]
        add(reference.start[s, (FORWARD, m)], release, cost.kept_bytes)
        add(reference.start[s, (FORWARD, m)], reference.end[s, (FORWARD, m)], plain.workspace_bytes)
        add(reference.start[s, (BACKWARD, m)], release, cost.workspace_bytes)
        if not problem.memory.count_buffers:
            continue
        for sender, way, cut in ((s - 1, 0, stage.first - 1), (s + 1, 1, stage.last)):
            if (sender, way, m) in reference.transfers and allocation.pipeline_of[sender] == allocation.pipeline_of[s]:
                sizes = problem.forward_bytes if way == 0 else problem.backward_bytes
                add(_posted(allocation, reference, s, (way, m)), release, int(sizes[cut]) * rows)
        for way, kind, cut in ((0, FORWARD, stage.last), (1, BACKWARD, stage.first - 1)):
            if (s, way, m) in reference.transfers:
                sizes = problem.forward_bytes if way == 0 else problem.backward_bytes
                sent, landed = reference.transfers[s, way, m]
                reader = allocation.next(s) if way == 0 else allocation.previous(s)
                passed = max(sent, _posted(allocation, reference, reader, (way, m))) + landed - sent
                add(reference.end[s, (kind, m)], passed, int(sizes[cut]) * rows)


def _posted(allocation: Allocation, reference: SharedReference, s: int, op: tuple[int, int]) -> int:
    """Return when a stage's row posts the receive of an operation (decision 6), by the order of ends."""
    order = [operation for stage, operation in reference.end if stage == s and operation != STEP]
    at = order.index(op)
    place = at - 1 if at > 0 and order[at - 1][0] == op[0] else max(0, at - 2)
    return reference.end[s, order[place - 1]] if place > 0 else 0


def assert_as_sharing_reference(problem: Problem, allocation: Allocation, orders: Orders, timeline: Timeline) -> None:
    """Check all times to the nanosecond and all memory to the byte."""
    reference = run_sharing_reference(problem, allocation, orders)
    assert timeline.window_ns == (0, reference.makespan)
    for row, track in zip(orders.rows, timeline.tracks, strict=True):
        for (kind, s, m), a, b in zip(row.operations.tolist(), track.start_ns, track.end_ns, strict=True):
            assert (a, b) == (reference.start[s, (kind, m)], reference.end[s, (kind, m)])
    for each in timeline.updates:
        assert (each.start_ns, each.end_ns) == (reference.start[each.stage, STEP], reference.end[each.stage, STEP])
    sent = timeline.transfers
    keys = zip(sent.stage.tolist(), sent.direction.tolist(), sent.micro_batch.tolist(), strict=True)
    times = zip(sent.start_ns.tolist(), sent.end_ns.tolist(), strict=True)
    assert dict(zip(keys, times, strict=True)) == reference.transfers
    for device, use in timeline.uses.items():
        curve = shared_reference_curve(problem, allocation, reference, device)
        assert use.memory.total == max(curve.values())
        changed = {t: size for t, size in curve.items() if t == 0 or size != _before(curve, t)}
        times, size = timeline.memory_curve(device)
        assert dict(zip(times.tolist(), size.tolist(), strict=True)) == changed
        assert _seconds_used(reference, allocation, device, len(allocation.pipelines)) == use[:2]


def _before(curve: dict[int, int], t: int) -> int:
    return curve[max(at for at in curve if at < t)]


def _seconds_used(reference: SharedReference, allocation: Allocation, device: int, batches: int) -> tuple[int, int]:
    stages = {s for s, stage in enumerate(allocation.stages) if device in stage.devices}
    busy = {t for (s, op), a in reference.start.items() if s in stages for t in range(a, reference.end[s, op])}
    moving = set()
    for (s, way, _m), (a, b) in reference.transfers.items():
        other = allocation.next(s) if way == 0 else allocation.previous(s)
        if s in stages or other in stages:
            moving |= set(range(a, b))
    return len(busy) // batches, len(moving - busy) // batches
