"""The judge's rules in plain Python, read off the docstring of ``simulate`` and as slow as that: the tests' oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import NamedTuple

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.allocation import Allocation, Stage
from penstock.solvers.batching import micro_batch_rows
from penstock.solvers.costs import Bucket, buckets, stage_costs, stage_rows, transfer, update_ns
from penstock.solvers.memory import static_bytes, weight_bytes
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import STEP, Orders, Pattern
from penstock.solvers.unroll import unroll
from penstock.solvers.update_rules import UpdateRule

Operation = tuple[int, int, int]
GRADIENTS = (BACKWARD, INPUT, WEIGHT)


class Group(NamedTuple):
    """Neighbouring layers that the same stages hold, one of each pipeline; ``first_number``: of its first bucket."""

    first: int
    last: int
    stages: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    first_number: int


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
    updates: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    makespan: int = 0
    deadlock: bool = False
    window: tuple[int, int] = (0, 0)
    window_rounds: int = 1
    num_rounds: int = 1
    copies: dict[tuple[int, int], int] = field(default_factory=dict)
    _by_round: dict[tuple[int, int], dict[int, list[Operation]]] = field(default_factory=dict)

    @property
    def time(self) -> int:
        """Nanoseconds per global batch."""
        low, high = self.window
        return -(-(high - low) // self.window_rounds)

    def rounds(self, s: int) -> int:
        """How many micro-batches make a round of a stage; without steps in the rows all of them."""
        return self.orders.update_every[s] if self.orders.update_every else self.allocation.num_micro_batches

    def round_operations(self, lane: int, s: int) -> dict[int, list[Operation]]:
        """The gradient operations of a stage in a row, by round."""
        if (lane, s) not in self._by_round:
            found = self._by_round.setdefault((lane, s), {})
            for kind, own, m in self.orders.rows[lane].operations.tolist():
                if own == s and kind in GRADIENTS:
                    found.setdefault(m // self.rounds(s), []).append((kind, own, m))
        return self._by_round[lane, s]


def run_twin(problem: Problem, allocation: Allocation, orders: Orders, overlap: bool | None = None) -> Twin:
    """Simulate one step; ``deadlock`` is set where lanes wait for ever."""
    if overlap is not None:
        problem = replace(problem, rules=replace(problem.rules, overlap_all_reduce=overlap))
    count = allocation.num_micro_batches
    rows = [micro_batch_rows(problem.global_batch_size, count, m) for m in range(count)]
    twin = Twin(problem, allocation, orders, rows)
    _Run(twin).run()
    twin.window = (0, twin.makespan)
    return twin


def run_periodic_twin(
    problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule, overlap: bool | None = None
) -> Twin:
    """Simulate the unrolled pattern and measure its steady state."""
    made = unroll(problem, allocation, pattern, rule)
    twin = run_twin(made.problem, made.allocation, made.orders, overlap)
    number = allocation.num_micro_batches
    done = [0] * made.rounds
    for (_lane, (kind, _s, m)), end in twin.end.items():
        if kind in GRADIENTS:
            done[m // number] = max(done[m // number], end)
    twin.window_rounds, twin.num_rounds = _cycle(done[made.first : made.last + 1], made.whole), made.rounds
    twin.window = (done[made.last - twin.window_rounds], done[made.last])
    for lane, row in enumerate(made.orders.rows):
        for s, stage in enumerate(allocation.stages):
            if row.devices[0] in stage.devices:
                twin.copies[s, lane] = _copies(twin, rule, s, lane)
    return twin


def _cycle(done: list[int], whole: int) -> int:
    """After how many rounds, at most half of them, all gaps come again; else all rounds."""
    rounds = len(done) - 1
    for k in range(whole, rounds // 2 + 1, whole):
        if len({done[t + k] - done[t] for t in range(rounds + 1 - k)}) == 1:
            return k
    return rounds


def _copies(twin: Twin, rule: UpdateRule, s: int, lane: int) -> int:
    """Two where forwards use the version before, as many as micro-batches in flight under weight stashing."""
    if rule == "weight_stashing":
        row = [(k, m) for k, own, m in twin.orders.rows[lane].operations.tolist() if own == s]
        begin = {m: i for i, (k, m) in enumerate(row) if k == FORWARD}
        end = {m: i for i, (k, m) in enumerate(row) if k in GRADIENTS}
        return max(1, *(sum(begin[m] <= i <= end[m] for m in begin) for i in range(len(row))))
    first_half = 2 * s < len(twin.allocation.stages)
    return 2 if rule == "double_buffered" or first_half else 1


def groups_of(problem: Problem, allocation: Allocation, rows: int) -> list[Group]:
    """Layers cut at every stage boundary of every pipeline; those on one device reduce nothing."""

    def held(layer: int) -> tuple[int, ...]:
        return tuple(s for s, stage in enumerate(allocation.stages) if stage.first <= layer <= stage.last)

    found = []
    for stages, run in groupby(range(problem.num_layers), key=held):
        layers = list(run)
        devices = tuple(d for s in stages for d in allocation.stages[s].devices)
        whole = Stage(layers[0], layers[-1], devices)
        found.append(Group(layers[0], layers[-1], stages, buckets(problem, whole, rows), 0))
    behind = {
        (group.stages[0], group.first): sum(
            len(other.buckets) for other in found if other.stages[0] == group.stages[0] and other.first > group.first
        )
        for group in found
    }
    return [group._replace(first_number=behind[group.stages[0], group.first]) for group in found if group.buckets]


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
        self.groups = groups_of(self.problem, self.allocation, twin.rows[0])
        self.announced: dict[tuple[int, int, int], list[int]] = {}
        self.reduced = [0] * len(self.groups)

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
        if kind == STEP:
            return update_ns(self.problem, self.allocation.stages[s])
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
        if kind == STEP:
            rounds = m // self.twin.rounds(s) + 1
            chains = [g for g, group in enumerate(self.groups) if s in group.stages]
            return all(self.reduced[g] >= rounds * len(self.groups[g].buckets) for g in chains)
        if kind == FORWARD:
            return self.allocation.previous(s) is None or (0, s, m) in self.arrived
        own = (lane, (INPUT if kind == WEIGHT else FORWARD, s, m)) in self.ended
        if kind == RECOMPUTE and any((lane, (k, s, m)) in self.ended for k in (BACKWARD, INPUT)):
            return False
        if kind in (WEIGHT, RECOMPUTE) or self.allocation.next(s) is None:
            return own
        return own and (1, s, m) in self.arrived

    def _announce(self, lane: int, op: Operation, end: int) -> None:
        """The last gradient operation of a round has begun: it readies buckets while it runs."""
        kind, s, m = op
        if kind not in (BACKWARD, WEIGHT):
            return
        every = self.twin.rounds(s)
        number = m // every
        own = [o for o in self.twin.round_operations(lane, s)[number] if o[0] != INPUT]
        if op != own[-1] or (number + 1) * every > self.allocation.num_micro_batches:
            return
        stage = self.allocation.stages[s]
        costs = self.problem.costs(self.problem.devices[stage.devices[0]].kind, stage_rows(stage, self.twin.rows[m]))
        sums = costs.weight_ns if kind == WEIGHT else costs.backward_ns
        for g, group in enumerate(self.groups):
            if s not in group.stages:
                continue
            for b, bucket in enumerate(group.buckets):
                lead = int(sums[bucket.first] - sums[stage.first]) if self.problem.rules.overlap_all_reduce else 0
                self.announced.setdefault((g, number, b), []).append(end - lead)
            if self.reduced[g] == number * len(group.buckets):
                self._queue(g, number, 0, None)

    def _queue(self, g: int, number: int, b: int, now: int | None) -> None:
        """Let a bucket wait for its resources once all lanes have readied it; ``now``: the end of the one before."""
        group = self.groups[g]
        lanes = sum(
            1
            for lane in range(len(self.lists))
            for s in group.stages
            if self.twin.round_operations(lane, s).get(number)
        )
        ready = self.announced.get((g, number, b), [])
        if len(ready) < lanes or not ready:
            return
        at = max(ready)
        place = number * sum(len(other.buckets) for other in self.groups if other.stages[0] == group.stages[0])
        entry = ("bucket", g, b, place + group.first_number + b)
        if now is not None and at <= now:
            self.waiting.append(((now, group.stages[0], 2, entry[3]), entry))
        else:
            self.events.append((at, ("ready", entry)))

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
            entry = what[1]
            self.waiting.append(((now, self.groups[entry[1]].stages[0], 2, entry[3]), entry))
        else:
            _name, g, _b, _number = what
            self.taken -= self._resources(what)
            self.reduced[g] += 1
            self._queue(g, *divmod(self.reduced[g], len(self.groups[g].buckets)), now)

    def _pass_on(self, op: Operation, now: int) -> None:
        kind, s, m = op
        if kind in (WEIGHT, RECOMPUTE, STEP):
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
            return set(self.groups[what[1]].buckets[what[2]].resources) if rules.shared else set()
        _name, way, s, m = what
        move = transfer(self.problem, self.allocation, s, self.twin.rows[m], way)
        if rules.shared:
            return set(move.resources)
        edge = s if way == 0 else s - 1
        return {"half": {("edge", edge)}, "full": {("edge", edge, way)}, "none": set()}[rules.channel]

    def _begin(self, what: tuple, now: int) -> None:
        if what[0] == "bucket":
            group = self.groups[what[1]]
            end = now + group.buckets[what[2]].duration_ns
            self.twin.reductions[group.stages[0], what[3]] = (now, end)
        else:
            _name, way, s, m = what
            end = now + transfer(self.problem, self.allocation, s, self.twin.rows[m], way).duration_ns
            self.twin.transfers[s, way, m] = (now, end)
        self.events.append((end, what))

    def _finish(self) -> None:
        twin = self.twin
        reduced = [
            max(end for (s, b), (_t, end) in twin.reductions.items() if self._is_of(g, s, b))
            for g in range(len(self.groups))
        ]
        for lane, row in enumerate(self.lists):
            now = max((twin.end[lane, op] for op in row), default=0)
            lasts = {s: max((i for i, o in enumerate(row) if o[1] == s), default=-1) for s in self.held[lane]}
            for s in sorted(self.held[lane], key=lambda s: (lasts[s], s)):
                if twin.orders.update_every:
                    steps = [(lane, op) for op in row if op[0] == STEP and op[1] == s]
                    twin.updates[s, lane] = [(twin.start[key], twin.end[key]) for key in steps]
                    continue
                now = max([now, *(end for end, group in zip(reduced, self.groups, strict=True) if s in group.stages)])
                twin.updates[s, lane] = [(now, now + update_ns(self.problem, self.allocation.stages[s]))]
                now = twin.updates[s, lane][0][1]
        times = [*twin.end.values(), *(e for _s, e in twin.transfers.values())]
        times += [e for _s, e in (*twin.reductions.values(), *(x for each in twin.updates.values() for x in each))]
        twin.makespan = max(times)

    def _is_of(self, g: int, s: int, number: int) -> bool:
        """Whether a reduction is one of a group's buckets in a flushed step."""
        group = self.groups[g]
        return s == group.stages[0] and 0 <= number - group.first_number < len(group.buckets)


def twin_curve(twin: Twin, device: int) -> dict[int, int]:
    """Bytes on a device from each time on at which something changes."""
    events: dict[int, int] = {0: twin.problem.devices[device].context_bytes}

    def add(start: int, end: int | None, size: int) -> None:
        events[start] = events.get(start, 0) + size
        if end is not None:
            events[end] = events.get(end, 0) - size

    lane = next(i for i, row in enumerate(twin.orders.rows) if device in row.devices)
    add(0, None, twin_versions(twin, lane))
    for s, stage in enumerate(twin.allocation.stages):
        if device in stage.devices:
            _stage_events(twin, lane, s, add)
    level, curve = 0, {}
    for t in sorted(events):
        level += events[t]
        curve[t] = level
    return curve


def twin_versions(twin: Twin, lane: int) -> int:
    """Bytes of the weights that a lane keeps beside the current ones."""
    held = [(s, copies) for (s, other), copies in twin.copies.items() if other == lane]
    return sum((copies - 1) * weight_bytes(twin.problem, twin.allocation.stages[s])[1] for s, copies in held)


def twin_misses_versions(twin: Twin, rule: UpdateRule) -> bool:
    """Whether any operation of a periodic run needs a weight version that is not made yet, or not kept any more."""
    return any(_misses_versions(twin, rule, s, lane, copies) for (s, lane), copies in twin.copies.items())


def _misses_versions(twin: Twin, rule: UpdateRule, s: int, lane: int, copies: int) -> bool:
    row = [(k, m) for k, own, m in twin.orders.rows[lane].operations.tolist() if own == s]
    last = {m: i for i, (k, m) in enumerate(row) if k in GRADIENTS}
    second_half = 2 * s >= len(twin.allocation.stages)
    newest, taken = 0, {}
    for i, (kind, m) in enumerate(row):
        if kind == STEP:
            newest += 1
        if rule == "weight_stashing":
            if kind == FORWARD:
                taken[m] = newest
            if len({newest, *(v for other, v in taken.items() if last[other] >= i)}) > copies:
                return True
        elif kind != STEP:
            number = m // twin.rounds(s)
            used = number if rule == "double_grouped" and second_half else max(0, number - 1)
            if not newest - copies < used <= newest:
                return True
    return False


def _stage_events(twin: Twin, lane: int, s: int, add) -> None:
    problem, stage = twin.problem, twin.allocation.stages[s]
    held = static_bytes(problem, stage)
    add(0, None, held.parameters + held.optimizer)
    own = [tuple(map(int, op)) for op in twin.orders.rows[lane].operations if op[1] == s]
    steps = twin.updates[s, lane]
    for number, gradients in twin.round_operations(lane, s).items():
        end = steps[number][1] if number < len(steps) else None
        add(min(twin.start[lane, op] for op in gradients), end, held.gradients)
    apart = any(op[0] == RECOMPUTE for op in own)
    for op in own:
        kind, _s, m = op
        if kind == STEP:
            continue
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


def twin_use(twin: Twin, lane: int) -> tuple[int, int]:
    """Per global batch in the window: time in which a lane computes, and does not while it communicates."""
    held = {s for s, other in twin.updates if other == lane}
    busy = [(t, twin.end[key]) for key, t in twin.start.items() if key[0] == lane]
    if not twin.orders.update_every:
        busy += [pair for (_s, other), each in twin.updates.items() if other == lane for pair in each]
    groups = groups_of(twin.problem, twin.allocation, twin.rows[0])
    active = []
    for (s, number), each in twin.reductions.items():
        own = [group for group in groups if group.stages[0] == s]
        place = number % sum(len(group.buckets) for group in own)
        stages = next(x.stages for x in own if 0 <= place - x.first_number < len(x.buckets))
        if held & set(stages):
            active.append(each)
    mine = {op for own, op in twin.start if own == lane}
    for (s, way, m), each in twin.transfers.items():
        other = twin.allocation.next(s) if way == 0 else twin.allocation.previous(s)
        if any((FORWARD, end, m) in mine for end in (s, other)):
            active.append(each)
    first, last = twin.window
    edges = sorted({min(max(t, first), last) for pair in (*busy, *active) for t in pair} | {first, last})
    computing = communicating = 0
    for low, high in pairwise(edges):
        if any(a <= low and high <= b for a, b in busy):
            computing += high - low
        elif any(a <= low and high <= b for a, b in active):
            communicating += high - low
    return computing // twin.window_rounds, communicating // twin.window_rounds
