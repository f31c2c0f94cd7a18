"""Sections 4 and 5 of docs/theory/judge.md in plain Python: the clock, gradients, and the sums of tied parameters."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count

from page_costs import BACKWARD, FORWARD, STEP, B, Bucket, Costs, F, I, Invalid, Operation, R, Tie, Transfer, W

GRADIENT = (B, I, W)
Span = tuple[int, int]
Moved = tuple[int, int, int]
"""A transfer: its sending stage, direction and micro-batch."""


@dataclass(frozen=True)
class Lane:
    """Devices that run the same row (2.4)."""

    devices: tuple[int, ...]
    row: list[Operation]


@dataclass
class Run:
    """The clock's result: (start, end) of everything, by lane, and the numbers that section 9 measures."""

    costs: Costs
    rule: str
    every: list[int]
    lanes: list[Lane]
    operations: dict[tuple[int, Operation], Span] = field(default_factory=dict)
    transfers: dict[Moved, Span] = field(default_factory=dict)
    reductions: dict[tuple[int, int, int], Span] = field(default_factory=dict)
    """Reductions by group, round, and place in the group."""
    ties: dict[tuple[int, int], Span] = field(default_factory=dict)
    """Sums of ties by the tie's number and the round."""
    steps: dict[tuple[int, int], Span] = field(default_factory=dict)
    """Steps of a flushed plan, by stage and lane."""
    tied: list[Tie] = field(default_factory=list)
    window: Span = (0, 0)
    batches: int = 1
    rounds: int = 1
    time: int = 0

    @property
    def end(self) -> int:
        """The last end of anything."""
        parts = (self.operations, self.transfers, self.reductions, self.ties, self.steps)
        return max(end for part in parts for _start, end in part.values())

    def lanes_of(self, s: int) -> list[int]:
        """List the lanes that hold a stage."""
        devices = self.costs.stages[s].devices
        return [k for k, lane in enumerate(self.lanes) if lane.devices[0] in devices]

    def runners(self, s: int, m: int) -> list[int]:
        """List the lanes that run micro-batch m of a stage."""
        stage = self.costs.stages[s]
        if stage.dispatch == "rows":
            return self.lanes_of(s)
        turn = stage.devices[m % len(stage.devices)]
        return [k for k, lane in enumerate(self.lanes) if turn in lane.devices]

    def apart(self, lane: int, s: int) -> bool:
        """Return whether a lane recomputes a stage apart from its backwards."""
        return any(kind == R and stage == s for kind, stage, _m in self.lanes[lane].row)

    def number(self, s: int, m: int) -> int:
        """Return the round of a micro-batch (5)."""
        return m // self.every[s]


class Clock:
    """Sections 4 and 5: the repetition of three steps."""

    def __init__(self, run: Run, total: int) -> None:
        self.run, self.costs = run, run.costs
        self.now = 0
        self.numbers = count()
        self.events: list[tuple[int, int, str, Hashable]] = []
        self.next = [0] * len(run.lanes)
        self.running = [False] * len(run.lanes)
        self.arrived: set[Moved] = set()
        self.ended: dict[Moved, int] = defaultdict(int)
        self.busy: set[Hashable] = set()
        self.waiting: list[tuple[tuple[int, int, int, int], str, Hashable]] = []
        self._apart = {(k, s): run.apart(k, s) for k in range(len(run.lanes)) for s in range(len(self.costs.stages))}
        self._prepare_buckets(total)
        self._prepare_ties()

    def run_all(self) -> None:
        """Run all events from time 0 on."""
        self._start_operations()
        while self.events:
            self.now = self.events[0][0]
            ending = []
            while self.events and self.events[0][0] == self.now:
                ending.append(heapq.heappop(self.events)[2:])
            for what, which in ending:
                getattr(self, f"_end_{what}")(which)
            self._come_to_ties()
            self._start_waiting()
            self._start_operations()
        rows = [len(lane.row) for lane in self.run.lanes]
        if self.next != rows or len(self.run.ties) != len(self.run.tied) * self.tie_rounds:
            raise Invalid("the plan waits in a circle")

    def _at(self, when: int, what: str, which: Hashable) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), what, which))

    # Step 1: what ends.

    def _end_operation(self, which: tuple[int, Operation]) -> None:
        lane, (kind, s, m) = which
        self.running[lane] = False
        self.next[lane] += 1
        if kind not in (F, B, I):
            return
        moved = (s, FORWARD if kind == F else BACKWARD, m)
        self.ended[moved] += 1
        if self.ended[moved] < len(self.run.runners(s, m)):
            return
        if self.costs.transfer(s, moved[1], self.costs.rows(m)) is None:
            self.arrived.add(moved)
        else:
            self.waiting.append(((self.now, *moved), "transfer", moved))

    def _end_transfer(self, moved: Moved) -> None:
        self.arrived.add(moved)
        self.busy -= self._needs("transfer", moved).resources

    # Step 2: transfers, buckets and ties.

    def _needs(self, what: str, which: Hashable) -> Transfer | Bucket | Tie:
        """Return the duration and resources of a transfer, bucket or tie."""
        if what == "transfer":
            s, direction, m = which
            return self.costs.transfer(s, direction, self.costs.rows(m))
        if what == "bucket":
            group, _round, k = which
            return self.costs.groups[group].buckets[k]
        return self.run.tied[which[0]]

    def _start_waiting(self) -> None:
        left = []
        spans = {"transfer": self.run.transfers, "bucket": self.run.reductions, "tie": self.run.ties}
        for entry in sorted(self.waiting):
            _key, what, which = entry
            needs = self._needs(what, which)
            if needs.resources & self.busy:
                left.append(entry)
                continue
            self.busy |= needs.resources
            spans[what][which] = (self.now, self.now + needs.duration)
            self._at(self.now + needs.duration, what, which)
        self.waiting = left

    # Step 3: operations.

    def _start_operations(self) -> None:
        for k, lane in enumerate(self.run.lanes):
            if self.running[k] or self.next[k] == len(lane.row):
                continue
            operation = lane.row[self.next[k]]
            if not self._ready(k, operation):
                continue
            self.running[k] = True
            end = self.now + self.costs.duration(operation, self._apart[k, operation[1]])
            self.run.operations[k, operation] = (self.now, end)
            self._at(end, "operation", (k, operation))
            if operation[0] == STEP:
                self.ties_met[k] = 0
            self._announce(k, operation, end)

    def _ready(self, lane: int, operation: Operation) -> bool:
        kind, s, m = operation
        if kind == STEP:
            if not self._reduced(s, self.run.number(s, m)):
                return False
            self._come(lane, operation, in_step_1=False)
            return self.ties_met[lane] == len(self.ties_before.get((lane, operation), ()))
        if kind == F:
            source = self.costs.neighbour(s, BACKWARD)
            return source is None or (source, FORWARD, m) in self.arrived
        if kind in (B, I):
            source = self.costs.neighbour(s, FORWARD)
            return source is None or (source, BACKWARD, m) in self.arrived
        return True

    # Section 5: buckets.

    def _prepare_buckets(self, total: int) -> None:
        """Prepare the state of buckets.

        ``last[lane, operation]`` lists each (group, round, stage) whose last B or W on the lane is this operation.
        """
        run = self.run
        self.last: dict[tuple[int, Operation], list[tuple[int, int, int]]] = defaultdict(list)
        self.unannounced: dict[tuple[int, int], int] = defaultdict(int)
        self.there: dict[tuple[int, int, int], int] = defaultdict(int)
        self.come_in: set[tuple[int, int, int]] = set()
        """Buckets whose gradient is complete."""
        self.reduced: set[tuple[int, int]] = set()
        """Groups and rounds whose last bucket has ended."""
        self.chain: dict[int, tuple[int, int] | None] = {}
        """By group: the round and place of the next bucket; None while one is waiting or running."""
        self.rounds = {}
        for g, group in enumerate(self.costs.groups):
            self.rounds[g] = total // run.every[group.stages[0]]
            if group.buckets:
                self.chain[g] = (0, 0)
            for s in group.stages:
                for k in run.lanes_of(s):
                    last_of_round = {}
                    for operation in run.lanes[k].row:
                        if operation[1] == s and operation[0] in (B, W):
                            last_of_round[run.number(s, operation[2])] = operation
                    for t, operation in last_of_round.items():
                        if t < self.rounds[g]:
                            self.last[k, operation].append((g, t, s))
                            self.unannounced[g, t] += 1

    def _announce(self, lane: int, operation: Operation, end: int) -> None:
        kind, _s, m = operation
        for g, t, s in self.last.get((lane, operation), ()):
            stage = self.costs.stages[s]
            device = self.costs.problem.devices[stage.devices[0]].kind
            z = self.costs.share(s, self.costs.rows(m))
            name = "backward_ns" if kind == B else "weight_ns"
            self.unannounced[g, t] -= 1
            for k, bucket in enumerate(self.costs.groups[g].buckets):
                lead = self.costs.total(name, device, range(stage.first, bucket.first), z) if self.costs.overlap else 0
                self.there[g, t, k] = max(self.there[g, t, k], end - lead)
                if self.unannounced[g, t] == 0:
                    self._at(self.there[g, t, k], "gradient", (g, t, k))

    def _end_gradient(self, which: tuple[int, int, int]) -> None:
        self.come_in.add(which)
        g, t, k = which
        if self.chain[g] == (t, k):
            self._queue(which)

    def _queue(self, which: tuple[int, int, int]) -> None:
        g, _t, k = which
        group = self.costs.groups[g]
        self.chain[g] = None
        self.waiting.append(((self.now, group.stages[0], 2, group.buckets[k].number), "bucket", which))

    def _end_bucket(self, which: tuple[int, int, int]) -> None:
        g, t, k = which
        buckets = self.costs.groups[g].buckets
        self.busy -= buckets[k].resources
        after = (t, k + 1) if k + 1 < len(buckets) else (t + 1, 0)
        if after[1] == 0:
            self.reduced.add((g, t))
        self.chain[g] = after
        if (g, *after) in self.come_in:
            self._queue((g, *after))

    def _reduced(self, s: int, t: int) -> bool:
        """Return whether all buckets of a round of all groups of a stage have ended."""
        for g, group in enumerate(self.costs.groups):
            if s in group.stages and group.buckets and (g, t) not in self.reduced:
                return False
        return True

    # Section 5: tied parameters.

    def _prepare_ties(self) -> None:
        """Prepare the state of ties.

        ``ties_before`` lists the ties that a lane sums before a STEP, or (None) before its flushed steps.
        """
        run = self.run
        self.tie_rounds = 1 if run.rule == "synchronous" else self.rounds[0]
        self.ties_before: dict[tuple[int, Operation | None], list[int]] = defaultdict(list)
        self.tie_lanes = []
        for tie in run.tied:
            lanes = [k for k, lane in enumerate(run.lanes) if set(lane.devices) & set(tie.devices)]
            self.tie_lanes.append(len(lanes))
            for k in lanes:
                lowest = min(s for s in tie.stages if k in run.lanes_of(s))
                if run.rule == "synchronous":
                    self.ties_before[k, None].append(tie.number)
                for operation in run.lanes[k].row:
                    if operation[0] == STEP and operation[1] == lowest:
                        self.ties_before[k, operation].append(tie.number)
        self.ties_met = [0] * len(run.lanes)
        self.at_tie: dict[int, tuple[int, int]] = {}
        self.comers: dict[tuple[int, int], int] = defaultdict(int)

    def _come_to_ties(self) -> None:
        """Let lanes come to ties in step 1: after the end of a sum, or with nothing left before their flushed steps."""
        for k, lane in enumerate(self.run.lanes):
            if self.run.rule != "synchronous":
                if self.ties_met[k]:
                    self._come(k, lane.row[self.next[k]], in_step_1=True)
                continue
            stages = [s for s in range(len(self.costs.stages)) if k in self.run.lanes_of(s)]
            if self.next[k] == len(lane.row) and all(self._reduced(s, 0) for s in stages):
                self._come(k, None, in_step_1=True)

    def _come(self, lane: int, before: Operation | None, *, in_step_1: bool) -> None:
        ties, met = self.ties_before.get((lane, before), []), self.ties_met[lane]
        if lane in self.at_tie or met == len(ties):
            return
        t = 0 if before is None else self.run.number(*before[1:])
        self.at_tie[lane] = tie = (ties[met], t)
        self.comers[tie] += 1
        if self.comers[tie] < self.tie_lanes[tie[0]]:
            return
        if in_step_1:
            self._end_wait(tie)
        else:
            self._at(self.now, "wait", tie)

    def _end_wait(self, tie: tuple[int, int]) -> None:
        number = tie[0]
        self.waiting.append(((self.now, self.run.tied[number].stages[0], 3, number), "tie", tie))

    def _end_tie(self, tie: tuple[int, int]) -> None:
        self.busy -= self.run.tied[tie[0]].resources
        for lane in [k for k, at in self.at_tie.items() if at == tie]:
            del self.at_tie[lane]
            self.ties_met[lane] += 1
