"""The simulator's rules in plain, slow Python, written from the docstring of ``simulate``: the oracle of its tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.buckets import Bucket, buckets
from penstock.solvers.costs.collectives import all_reduce_ns, ring_resources
from penstock.solvers.costs.stage import stage_costs, stage_rows, update_ns
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import micro_batch_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP, Orders, Pattern
from penstock.solvers.model.unroll import unroll
from penstock.solvers.model.update_rules import UpdateRule

Operation = tuple[int, int, int]
GRADIENTS = (BACKWARD, INPUT, WEIGHT)


class Group(NamedTuple):
    """Neighbouring layers that the same stages hold, one stage per pipeline.

    ``first_number`` is the number of the group's first bucket.
    """

    first: int
    last: int
    stages: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    first_number: int


class Tie(NamedTuple):
    """A parameter with copies on several stages of a pipeline; ``devices`` are the devices of all these stages."""

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    duration_ns: int


@dataclass
class Reference:
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
    tied: list[Tie] = field(default_factory=list)
    ties: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
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
        """Return the number of micro-batches in a round of a stage; without steps in the rows, the whole batch."""
        return self.orders.update_every[s] if self.orders.update_every else self.allocation.num_micro_batches

    def round_operations(self, lane: int, s: int) -> dict[int, list[Operation]]:
        """Return the gradient operations of a stage in a row, by round."""
        if (lane, s) not in self._by_round:
            operations = self._by_round.setdefault((lane, s), {})
            for kind, stage, m in self.orders.rows[lane].operations.tolist():
                if stage == s and kind in GRADIENTS:
                    operations.setdefault(m // self.rounds(s), []).append((kind, stage, m))
        return self._by_round[lane, s]


def run_reference(
    problem: Problem, allocation: Allocation, orders: Orders, overlap: bool | None = None, sums_ties: bool = True
) -> Reference:
    """Simulate one step; ``deadlock`` is set where rows wait for each other for ever."""
    if overlap is not None:
        problem = replace(problem, rules=replace(problem.rules, overlap_all_reduce=overlap))
    count = allocation.num_micro_batches
    rows = [micro_batch_rows(problem.global_batch_size, count, m) for m in range(count)]
    reference = Reference(problem, allocation, orders, rows)
    reference.tied = ties_of(problem, allocation) if sums_ties else []
    _Run(reference).run()
    reference.window = (0, reference.makespan)
    return reference


def run_periodic_reference(
    problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule, overlap: bool | None = None
) -> Reference:
    """Simulate the unrolled pattern and measure its steady state."""
    run = unroll(problem, allocation, pattern, rule)
    reference = run_reference(run.problem, run.allocation, run.orders, overlap, rule == "double_buffered")
    number = allocation.num_micro_batches
    done = [0] * run.rounds
    for (_lane, (kind, _s, m)), end in reference.end.items():
        if kind in GRADIENTS:
            done[m // number] = max(done[m // number], end)
    reference.window_rounds, reference.num_rounds = _cycle(done[run.first : run.last + 1], run.whole), run.rounds
    reference.window = (done[run.last - reference.window_rounds], done[run.last])
    for lane, row in enumerate(run.orders.rows):
        for s, stage in enumerate(allocation.stages):
            if row.devices[0] in stage.devices:
                reference.copies[s, lane] = _copies(reference, rule, s, lane)
    return reference


def _cycle(done: list[int], whole: int) -> int:
    """Return after how many rounds, at most half of them, all gaps repeat; otherwise the number of rounds."""
    rounds = len(done) - 1
    for k in range(whole, rounds // 2 + 1, whole):
        if len({done[t + k] - done[t] for t in range(rounds + 1 - k)}) == 1:
            return k
    return rounds


def _copies(reference: Reference, rule: UpdateRule, s: int, lane: int) -> int:
    """Return the number of weight versions that a row keeps of a stage.

    Two where forwards use the previous version; under weight stashing, the most micro-batches in flight.
    """
    if rule == "weight_stashing":
        row = [(k, m) for k, stage, m in reference.orders.rows[lane].operations.tolist() if stage == s]
        begin = {m: i for i, (k, m) in enumerate(row) if k == FORWARD}
        end = {m: i for i, (k, m) in enumerate(row) if k in GRADIENTS}
        return max(1, *(sum(begin[m] <= i <= end[m] for m in begin) for i in range(len(row))))
    first_half = 2 * s < len(reference.allocation.stages)
    return 2 if rule == "double_buffered" or first_half else 1


def groups_of(problem: Problem, allocation: Allocation) -> list[Group]:
    """Cut the layers at every stage boundary of every pipeline; groups on a single device need no reduction."""

    def stages_with(layer: int) -> tuple[int, ...]:
        return tuple(s for s, stage in enumerate(allocation.stages) if stage.first <= layer <= stage.last)

    groups = []
    for stages, run in groupby(range(problem.num_layers), key=stages_with):
        layers = list(run)
        devices = tuple({d: s for s in stages for d in allocation.stages[s].devices})
        whole = Stage(layers[0], layers[-1], devices)
        groups.append(Group(layers[0], layers[-1], stages, buckets(problem, whole), 0))
    behind = {
        (group.stages[0], group.first): sum(
            len(other.buckets) for other in groups if other.stages[0] == group.stages[0] and other.first > group.first
        )
        for group in groups
    }
    return [group._replace(first_number=behind[group.stages[0], group.first]) for group in groups if group.buckets]


def ties_of(problem: Problem, allocation: Allocation) -> list[Tie]:
    """List the trainable parameters that two stages of the same pipeline have copies of."""
    ties = []
    for _name, layers, size in problem.shared_parameters:
        stages = [s for s, stage in enumerate(allocation.stages) if {*range(stage.first, stage.last + 1)} & {*layers}]
        pipelines = [allocation.pipeline_of[s] for s in stages]
        trained = problem.trainable_bytes[layers[0] + 1] - problem.trainable_bytes[layers[0]]
        if size and trained and len(pipelines) > len(set(pipelines)):
            devices = tuple(sorted({d for s in stages for d in allocation.stages[s].devices}))
            ties.append(Tie(tuple(stages), devices, all_reduce_ns(problem, size, devices)))
    return ties


class _Run:
    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.ties = reference.tied
        self.problem, self.allocation = reference.problem, reference.allocation
        self.lists: list[list[Operation]] = [
            [tuple(map(int, op)) for op in row.operations] for row in reference.orders.rows
        ]
        self.stages = [
            [s for s, stage in enumerate(self.allocation.stages) if row.devices[0] in stage.devices]
            for row in reference.orders.rows
        ]
        self.at = [0] * len(self.lists)
        self.idle = [True] * len(self.lists)
        self.arrived: set[tuple[int, int, int]] = set()
        self.ended: set[tuple[int, Operation]] = set()
        self.events: list[tuple[int, tuple]] = []
        self.waiting: list[tuple[tuple[int, ...], tuple]] = []
        self.busy: set[object] = set()
        self.groups = groups_of(self.problem, self.allocation)
        self.announced: dict[tuple[int, int, int], list[int]] = {}
        self.reduced = [0] * len(self.groups)
        self.summed = {(lane, k): 0 for lane, stages in enumerate(self.stages) for k in self._own_ties(stages)}
        self.came: set[tuple[int, int, int]] = set()

    def _own_ties(self, stages: list[int]) -> list[int]:
        return [k for k, tie in enumerate(self.ties) if {*stages} & {*tie.stages}]

    def _before_step(self, lane: int, s: int) -> list[int]:
        """Return the ties that a step of stage ``s`` waits for: ``s`` is the row's lowest stage with a copy."""
        return [k for k in self._own_ties(self.stages[lane]) if s == min({*self.stages[lane]} & {*self.ties[k].stages})]

    def _come_to_ties(self, lane: int, ties: list[int], update_round: int, now: int) -> bool:
        """Register a row at the first of these ties that is not summed yet; return whether all are summed."""
        for k in ties:
            if self.summed[lane, k] > update_round:
                continue
            if (lane, k, update_round) not in self.came:
                self.came.add((lane, k, update_round))
                lanes = [other for other, tie in self.summed if tie == k]
                if all((other, k, update_round) in self.came for other in lanes):
                    self.events.append((now, ("tie ready", k, update_round)))
            return False
        return True

    def _look_at_ties(self, now: int) -> None:
        """Register the rows that have finished their operations and buckets at their ties, in a flushed step."""
        if self.reference.orders.update_every:
            return
        for lane, row in enumerate(self.lists):
            chains = [g for g, group in enumerate(self.groups) if {*group.stages} & {*self.stages[lane]}]
            over = all(self.reduced[g] >= len(self.groups[g].buckets) for g in chains)
            if self.idle[lane] and self.at[lane] == len(row) and over:
                self._come_to_ties(lane, self._own_ties(self.stages[lane]), 0, now)

    def run(self) -> None:
        now = 0
        self._look_at_ties(now)
        self._start_operations(now)
        while self.events:
            now = min(t for t, _what in self.events)
            while ending := [what for t, what in self.events if t == now]:
                self.events = [(t, what) for t, what in self.events if t != now]
                for what in ending:
                    self._end(what, now)
                self._look_at_ties(now)
            for key, what in sorted(self.waiting):
                needs = self._resources(what)
                if not needs & self.busy:
                    self.busy |= needs
                    self.waiting.remove((key, what))
                    self._begin(what, now)
            self._start_operations(now)
        self.reference.deadlock = any(at < len(row) for at, row in zip(self.at, self.lists, strict=True))
        if not self.reference.deadlock:
            self._finish()

    def duration(self, lane: int, op: Operation) -> int:
        kind, s, m = op
        if kind == STEP:
            return update_ns(self.problem, self.allocation.stages[s])
        cost = stage_costs(self.problem, self.allocation.stages[s], self.reference.rows[m])
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
            if self._is_ready(lane, op) and self._ties_are_summed(lane, op, now):
                self.idle[lane] = False
                end = now + self.duration(lane, op)
                self.reference.start[lane, op], self.reference.end[lane, op] = now, end
                self.events.append((end, ("operation", lane, op)))
                self._announce(lane, op, end)

    def _ties_are_summed(self, lane: int, op: Operation, now: int) -> bool:
        kind, s, m = op
        return kind != STEP or self._come_to_ties(lane, self._before_step(lane, s), m // self.reference.rounds(s), now)

    def _is_ready(self, lane: int, op: Operation) -> bool:
        kind, s, m = op
        if kind == STEP:
            rounds = m // self.reference.rounds(s) + 1
            chains = [g for g, group in enumerate(self.groups) if s in group.stages]
            return all(self.reduced[g] >= rounds * len(self.groups[g].buckets) for g in chains)
        if kind == FORWARD:
            return self.allocation.previous(s) is None or (0, s, m) in self.arrived
        has_input = (lane, (INPUT if kind == WEIGHT else FORWARD, s, m)) in self.ended
        if kind == RECOMPUTE and any((lane, (k, s, m)) in self.ended for k in (BACKWARD, INPUT)):
            return False
        if kind in (WEIGHT, RECOMPUTE) or self.allocation.next(s) is None:
            return has_input
        return has_input and (1, s, m) in self.arrived

    def _announce(self, lane: int, op: Operation, end: int) -> None:
        """Announce buckets when the last gradient operation of a round begins; it readies them while it runs."""
        kind, s, m = op
        if kind not in (BACKWARD, WEIGHT):
            return
        every = self.reference.rounds(s)
        number = m // every
        gradients = [o for o in self.reference.round_operations(lane, s)[number] if o[0] != INPUT]
        if op != gradients[-1] or (number + 1) * every > self.allocation.num_micro_batches:
            return
        stage = self.allocation.stages[s]
        costs = self.problem.costs(
            self.problem.devices[stage.devices[0]].kind, stage_rows(stage, self.reference.rows[m])
        )
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
        """Queue a bucket for its resources once all rows have readied it; ``now`` is the end of the bucket before."""
        group = self.groups[g]
        lanes = sum(
            1
            for lane in range(len(self.lists))
            for s in group.stages
            if self.reference.round_operations(lane, s).get(number)
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
            self.busy -= self._resources(what)
            other = self.allocation.next(s) if way == 0 else self.allocation.previous(s)
            self.arrived.add((way, other, m))
        elif what[0] == "ready":
            entry = what[1]
            self.waiting.append(((now, self.groups[entry[1]].stages[0], 2, entry[3]), entry))
        elif what[0] == "tie ready":
            _name, k, update_round = what
            self.waiting.append(((now, self.ties[k].stages[0], 3, k), ("tie", k, update_round)))
        elif what[0] == "tie":
            self.busy -= self._resources(what)
            for lane, k in self.summed:
                self.summed[lane, k] += k == what[1]
        else:
            _name, g, _b, _number = what
            self.busy -= self._resources(what)
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
        if transfer(self.problem, self.allocation, s, self.reference.rows[m], way) is None:
            self.arrived.add((way, other, m))
        else:
            self.waiting.append(((now, s, way, m), ("transfer", way, s, m)))

    def _resources(self, what: tuple) -> set[object]:
        rules = self.problem.rules
        if what[0] == "bucket":
            return set(self.groups[what[1]].buckets[what[2]].resources) if rules.shared else set()
        if what[0] == "tie":
            devices = self.ties[what[1]].devices
            return set(ring_resources(self.problem, devices)) if rules.shared and len(devices) > 1 else set()
        _name, way, s, m = what
        move = transfer(self.problem, self.allocation, s, self.reference.rows[m], way)
        if rules.shared:
            return set(move.resources)
        edge = s if way == 0 else s - 1
        return {"half": {("edge", edge)}, "full": {("edge", edge, way)}, "none": set()}[rules.channel]

    def _begin(self, what: tuple, now: int) -> None:
        if what[0] == "bucket":
            group = self.groups[what[1]]
            end = now + group.buckets[what[2]].duration_ns
            self.reference.reductions[group.stages[0], what[3]] = (now, end)
        elif what[0] == "tie":
            end = now + self.ties[what[1]].duration_ns
            self.reference.ties[what[1], what[2]] = (now, end)
        else:
            _name, way, s, m = what
            end = now + transfer(self.problem, self.allocation, s, self.reference.rows[m], way).duration_ns
            self.reference.transfers[s, way, m] = (now, end)
        self.events.append((end, what))

    def _finish(self) -> None:
        reference = self.reference
        reduced = [
            max(end for (s, b), (_t, end) in reference.reductions.items() if self._is_of(g, s, b))
            for g in range(len(self.groups))
        ]
        for lane, row in enumerate(self.lists):
            now = max((reference.end[lane, op] for op in row), default=0)
            now = max([now, *(reference.ties[k, 0][1] for other, k in self.summed if other == lane)])
            lasts = {s: max((i for i, o in enumerate(row) if o[1] == s), default=-1) for s in self.stages[lane]}
            for s in sorted(self.stages[lane], key=lambda s: (lasts[s], s)):
                if reference.orders.update_every:
                    steps = [(lane, op) for op in row if op[0] == STEP and op[1] == s]
                    reference.updates[s, lane] = [(reference.start[key], reference.end[key]) for key in steps]
                    continue
                now = max([now, *(end for end, group in zip(reduced, self.groups, strict=True) if s in group.stages)])
                reference.updates[s, lane] = [(now, now + update_ns(self.problem, self.allocation.stages[s]))]
                now = reference.updates[s, lane][0][1]
        times = [*reference.end.values(), *(e for _s, e in reference.transfers.values())]
        times += [
            e for _s, e in (*reference.reductions.values(), *(x for each in reference.updates.values() for x in each))
        ]
        reference.makespan = max(times)

    def _is_of(self, g: int, s: int, number: int) -> bool:
        """Return whether a reduction is one of a group's buckets in a flushed step."""
        group = self.groups[g]
        return s == group.stages[0] and 0 <= number - group.first_number < len(group.buckets)
