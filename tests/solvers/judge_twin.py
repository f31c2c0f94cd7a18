"""The judge's rules in plain Python, read off the docstring of ``simulate`` and as slow as that: the tests' oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.allocation import Allocation
from penstock.solvers.batching import micro_batch_rows
from penstock.solvers.costs import buckets, stage_costs, stage_rows, transfer, update_ns
from penstock.solvers.memory import static_bytes
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders

Operation = tuple[int, int, int]


@dataclass
class Twin:
    """One simulated step."""

    problem: Problem
    allocation: Allocation
    orders: Orders
    rows: list[int]
    start: dict[tuple[int, Operation], int] = field(default_factory=dict)
    end: dict[tuple[int, Operation], int] = field(default_factory=dict)
    transfers: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    reductions: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    updates: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    makespan: int = 0
    deadlock: bool = False


def run_twin(problem: Problem, allocation: Allocation, orders: Orders, overlap: bool | None = None) -> Twin:
    """Simulate one step; ``deadlock`` is set where lanes wait for ever."""
    if overlap is not None:
        problem = replace(problem, rules=replace(problem.rules, overlap_all_reduce=overlap))
    count = allocation.num_micro_batches
    rows = [micro_batch_rows(problem.global_batch_size, count, m) for m in range(count)]
    twin = Twin(problem, allocation, orders, rows)
    _Run(twin).run()
    return twin


class _Run:
    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        self.problem, self.allocation = twin.problem, twin.allocation
        self.lists: list[list[Operation]] = [[tuple(map(int, op)) for op in row.operations] for row in twin.orders.rows]
        self.held = [
            [s for s, stage in enumerate(self.allocation.stages) if row.devices[0] in stage.devices]
            for row in twin.orders.rows
        ]
        self.at = [0] * len(self.lists)
        self.idle = [True] * len(self.lists)
        self.arrived: set[tuple[int, int, int]] = set()
        self.ended: set[tuple[int, Operation]] = set()
        self.events: list[tuple[int, tuple]] = []
        self.waiting: list[tuple[tuple[int, ...], tuple]] = []
        self.taken: set[object] = set()
        self.chains = {
            s: buckets(self.problem, stage, twin.rows[0])
            for s, stage in enumerate(self.allocation.stages)
            if stage.replicas > 1
        }
        self.announced: dict[int, dict[int, list[int]]] = {s: {} for s in self.chains}

    def run(self) -> None:
        now = 0
        self._start_operations(now)
        while self.events:
            now = min(t for t, _what in self.events)
            ending = [what for t, what in self.events if t == now]
            self.events = [(t, what) for t, what in self.events if t != now]
            for what in ending:
                self._end(what, now)
            for key, what in sorted(self.waiting):
                needs = self._resources(what)
                if not needs & self.taken:
                    self.taken |= needs
                    self.waiting.remove((key, what))
                    self._begin(what, now)
            self._start_operations(now)
        self.twin.deadlock = any(at < len(row) for at, row in zip(self.at, self.lists, strict=True))
        if not self.twin.deadlock:
            self._finish()

    def duration(self, lane: int, op: Operation) -> int:
        kind, s, m = op
        cost = stage_costs(self.problem, self.allocation.stages[s], self.twin.rows[m])
        apart = any(k == RECOMPUTE and other == s for k, other, _m in self.lists[lane])
        again = 0 if apart else cost.recompute_ns
        return {
            FORWARD: cost.forward_ns,
            BACKWARD: cost.backward_ns + again,
            INPUT: cost.backward_ns - cost.weight_ns + again,
            WEIGHT: cost.weight_ns,
            RECOMPUTE: cost.recompute_ns,
        }[kind]

    def _start_operations(self, now: int) -> None:
        for lane, row in enumerate(self.lists):
            if not self.idle[lane] or self.at[lane] == len(row):
                continue
            op = row[self.at[lane]]
            if self._is_ready(lane, op):
                self.idle[lane] = False
                end = now + self.duration(lane, op)
                self.twin.start[lane, op], self.twin.end[lane, op] = now, end
                self.events.append((end, ("operation", lane, op)))
                self._announce(lane, op, end)

    def _is_ready(self, lane: int, op: Operation) -> bool:
        kind, s, m = op
        if kind == FORWARD:
            return self.allocation.previous(s) is None or (0, s, m) in self.arrived
        own = (lane, (INPUT if kind == WEIGHT else FORWARD, s, m)) in self.ended
        if kind == RECOMPUTE and any((lane, (k, s, m)) in self.ended for k in (BACKWARD, INPUT)):
            return False
        if kind in (WEIGHT, RECOMPUTE) or self.allocation.next(s) is None:
            return own
        return own and (1, s, m) in self.arrived

    def _announce(self, lane: int, op: Operation, end: int) -> None:
        s = op[1]
        gradients = [o for o in self.lists[lane] if o[1] == s and o[0] in (BACKWARD, WEIGHT)]
        if s not in self.chains or op != gradients[-1]:
            return
        stage = self.allocation.stages[s]
        chain = buckets(self.problem, stage, self.twin.rows[op[2]])
        weights = self.problem.costs(
            self.problem.devices[stage.devices[0]].kind, stage_rows(stage, self.twin.rows[op[2]])
        )
        for b, bucket in enumerate(chain):
            lead = bucket.lead_ns
            if op[0] == WEIGHT and self.problem.rules.overlap_all_reduce:
                lead = int(weights.weight_ns[bucket.first] - weights.weight_ns[stage.first])
            self.announced[s].setdefault(b, []).append(end - lead)
        lanes = sum(1 for row in self.lists if any(o[1] == s for o in row))
        if chain and len(self.announced[s][0]) == lanes:
            self.events.append((max(self.announced[s][0]), ("ready", s, 0)))

    def _end(self, what: tuple, now: int) -> None:
        if what[0] == "operation":
            _name, lane, op = what
            self.at[lane] += 1
            self.idle[lane] = True
            self.ended.add((lane, op))
            self._pass_on(op, now)
        elif what[0] == "transfer":
            _name, way, s, m = what
            self.taken -= self._resources(what)
            other = self.allocation.next(s) if way == 0 else self.allocation.previous(s)
            self.arrived.add((way, other, m))
        elif what[0] == "ready":
            _name, s, b = what
            self.waiting.append(((now, s, 2, b), ("bucket", s, b)))
        else:
            _name, s, b = what
            self.taken -= self._resources(what)
            if b + 1 < len(self.chains[s]):
                ready = max(now, *self.announced[s][b + 1])
                if ready > now:
                    self.events.append((ready, ("ready", s, b + 1)))
                else:
                    self.waiting.append(((now, s, 2, b + 1), ("bucket", s, b + 1)))

    def _pass_on(self, op: Operation, now: int) -> None:
        kind, s, m = op
        if kind in (WEIGHT, RECOMPUTE):
            return
        way = 0 if kind == FORWARD else 1
        other = self.allocation.next(s) if way == 0 else self.allocation.previous(s)
        runs = [lane for lane, row in enumerate(self.lists) if op in row]
        if other is None or any((lane, op) not in self.ended for lane in runs):
            return
        if transfer(self.problem, self.allocation, s, self.twin.rows[m], way) is None:
            self.arrived.add((way, other, m))
        else:
            self.waiting.append(((now, s, way, m), ("transfer", way, s, m)))

    def _resources(self, what: tuple) -> set[object]:
        rules = self.problem.rules
        if what[0] == "bucket":
            return set(self.chains[what[1]][what[2]].resources) if rules.shared else set()
        _name, way, s, m = what
        move = transfer(self.problem, self.allocation, s, self.twin.rows[m], way)
        if rules.shared:
            return set(move.resources)
        edge = s if way == 0 else s - 1
        return {"half": {("edge", edge)}, "full": {("edge", edge, way)}, "none": set()}[rules.channel]

    def _begin(self, what: tuple, now: int) -> None:
        if what[0] == "bucket":
            end = now + self.chains[what[1]][what[2]].duration_ns
            self.twin.reductions[what[1], what[2]] = (now, end)
        else:
            _name, way, s, m = what
            end = now + transfer(self.problem, self.allocation, s, self.twin.rows[m], way).duration_ns
            self.twin.transfers[s, way, m] = (now, end)
        self.events.append((end, what))

    def _finish(self) -> None:
        twin = self.twin
        for lane, row in enumerate(self.lists):
            now = max((twin.end[lane, op] for op in row), default=0)
            lasts = {s: max((i for i, o in enumerate(row) if o[1] == s), default=-1) for s in self.held[lane]}
            for s in sorted(self.held[lane], key=lambda s: (lasts[s], s)):
                now = max([now, *(end for (stage, _b), (_t, end) in twin.reductions.items() if stage == s)])
                twin.updates[s, lane] = (now, now + update_ns(self.problem, self.allocation.stages[s]))
                now = twin.updates[s, lane][1]
        times = [*twin.end.values(), *(e for _s, e in twin.transfers.values())]
        times += [e for _s, e in (*twin.reductions.values(), *twin.updates.values())]
        twin.makespan = max(times)


def twin_curve(twin: Twin, device: int) -> dict[int, int]:
    """Bytes on a device from each time on at which something changes."""
    events: dict[int, int] = {0: twin.problem.devices[device].context_bytes}

    def add(start: int, end: int | None, size: int) -> None:
        events[start] = events.get(start, 0) + size
        if end is not None:
            events[end] = events.get(end, 0) - size

    lane = next(i for i, row in enumerate(twin.orders.rows) if device in row.devices)
    for s, stage in enumerate(twin.allocation.stages):
        if device in stage.devices:
            _stage_events(twin, lane, s, add)
    level, curve = 0, {}
    for t in sorted(events):
        level += events[t]
        curve[t] = level
    return curve


def _stage_events(twin: Twin, lane: int, s: int, add) -> None:
    problem, stage = twin.problem, twin.allocation.stages[s]
    held = static_bytes(problem, stage)
    add(0, None, held.parameters + held.optimizer)
    own = [tuple(map(int, op)) for op in twin.orders.rows[lane].operations if op[1] == s]
    grads = [twin.start[lane, op] for op in own if op[0] in (BACKWARD, INPUT, WEIGHT)]
    step_end = twin.updates[s, lane][1]
    add(min(grads, default=step_end), step_end, held.gradients)
    apart = any(op[0] == RECOMPUTE for op in own)
    for op in own:
        kind, _s, m = op
        rows = twin.rows[m]
        cost = stage_costs(problem, stage, rows)
        plain = stage_costs(problem, replace(stage, recompute=()), rows)
        rebuilt = cost.workspace_bytes - plain.workspace_bytes
        inside = rebuilt if kind == BACKWARD and not apart else 0
        add(twin.start[lane, op], twin.end[lane, op], plain.workspace_bytes + inside)
        if kind == FORWARD:
            last = (WEIGHT, s, m) if (WEIGHT, s, m) in own else (BACKWARD, s, m)
            release = twin.end[lane, last]
            add(twin.start[lane, op], release, cost.kept_bytes)
            opening = (RECOMPUTE, s, m) if apart else (INPUT, s, m)
            if opening in own:
                parts = sum(_stash(problem, stage, a, b, rows) for a, b in stage.recompute)
                add(twin.start[lane, opening], release, parts)
            _buffers(twin, lane, s, m, release, add)


def _stash(problem: Problem, stage, first: int, last: int, rows: int) -> int:
    kinds = {problem.devices[d].kind for d in stage.devices}
    sums = [problem.costs(kind, stage_rows(stage, rows)).stash_bytes for kind in kinds]
    return max(int(each[last + 1] - each[first]) for each in sums)


def _buffers(twin: Twin, lane: int, s: int, m: int, release: int, add) -> None:
    problem, stage = twin.problem, twin.allocation.stages[s]
    if not problem.memory.count_buffers:
        return
    share = stage_rows(stage, twin.rows[m])
    before, after = twin.allocation.previous(s), twin.allocation.next(s)
    if before is not None and (before, 0, m) in twin.transfers:
        add(twin.transfers[before, 0, m][0], release, int(problem.forward_bytes[stage.first - 1]) * share)
    if after is not None and (after, 1, m) in twin.transfers:
        add(twin.transfers[after, 1, m][0], release, int(problem.backward_bytes[stage.last]) * share)
    if (s, 0, m) in twin.transfers:
        made = twin.end[lane, (FORWARD, s, m)]
        add(made, twin.transfers[s, 0, m][1], int(problem.forward_bytes[stage.last]) * share)
    if (s, 1, m) in twin.transfers:
        ends = [twin.end[lane, (k, s, m)] for k in (BACKWARD, INPUT) if (lane, (k, s, m)) in twin.end]
        add(ends[0], twin.transfers[s, 1, m][1], int(problem.backward_bytes[stage.first - 1]) * share)


def twin_communication(twin: Twin, lane: int) -> int:
    """Nanoseconds in which a lane does not compute while one of its transfers or reductions runs."""
    held = {s for s, other in twin.updates if other == lane}
    busy = [(t, twin.end[key]) for key, t in twin.start.items() if key[0] == lane]
    busy += [each for (_s, other), each in twin.updates.items() if other == lane]
    active = [each for (s, _b), each in twin.reductions.items() if s in held]
    mine = {op for own, op in twin.start if own == lane}
    for (s, way, m), each in twin.transfers.items():
        other = twin.allocation.next(s) if way == 0 else twin.allocation.previous(s)
        if any((FORWARD, end, m) in mine for end in (s, other)):
            active.append(each)
    edges = sorted({t for pair in (*busy, *active) for t in pair})
    total = 0
    for low, high in pairwise(edges):
        computes = any(a <= low and high <= b for a, b in busy)
        if not computes and any(a <= low and high <= b for a, b in active):
            total += high - low
    return total
