"""Sections 8 and 9 of docs/theory/judge.md in plain Python: memory over time, and the prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from page_clock import GRADIENT, Run, Span
from page_costs import BACKWARD, FORWARD, STEP, B, F, I, Operation, R, W, up

CATEGORIES = ("parameters", "gradients", "optimizer", "versions", "activations", "buffers", "workspace", "context")
Resident = tuple[int, int | None, int, str]
"""Start, end (None: for ever), bytes, and category."""


@dataclass(frozen=True)
class Use:
    """The numbers of section 9 for a device."""

    busy: int
    communication: int
    idle: int
    breakdown: dict[str, int]
    curve: dict[int, int]


class Memory:
    """Section 8 for one run."""

    def __init__(self, run: Run) -> None:
        self.run, self.costs = run, run.costs
        self.rules = run.costs.problem.memory
        self.elastic = run.rule == "elastic_averaging"
        self.rows = [[operation for operation in lane.row if operation[0] != STEP] for lane in run.lanes]
        self.places = [{operation: n for n, operation in enumerate(row)} for row in self.rows]
        self.ends = {
            (k, s, m): run.operations[k, (kind, s, m)][1]
            for k, row in enumerate(self.rows)
            for kind, s, m in row
            if kind in (B, W)
        }
        self.posted = self._postings()

    def residents(self, k: int) -> list[Resident]:
        """List everything that a lane's devices hold, apart from their context."""
        entries = []
        stages = [s for s in range(len(self.costs.stages)) if k in self.run.lanes_of(s)]
        for s in stages:
            entries += self._always(k, s)
            entries += self._gradients(k, s)
            entries += self._step_workspace(k, s)
        for operation in self.rows[k]:
            entries += self._of_operation(k, operation)
            entries += self._buffers(k, operation)
        return entries

    # 8.2

    def trainable(self, s: int) -> int:
        """Return the trainable bytes with the copies of ties."""
        return self._with_ties(s, self.costs.Q)

    def shared_out(self, s: int) -> int:
        """Return the trainable bytes whose states replicas share out, with the copies of ties."""
        return self._with_ties(s, self.costs.O, self.costs.summed_bytes)

    def _with_ties(self, s: int, size: list[int], per_device: Callable[[int], int] = int) -> int:
        layers = range(self.costs.stages[s].first, self.costs.stages[s].last + 1)
        copies = [
            per_device(tied)
            for _name, of, tied in self.costs.problem.shared_parameters
            if of[0] not in layers and any(layer in layers for layer in of)
        ]
        return sum(size[layer] for layer in layers) + sum(copies)

    def _always(self, k: int, s: int) -> list[Resident]:
        trainable, replicas = self.trainable(s), len(self.costs.stages[s].devices)
        states = trainable * self.rules.state_factor
        if self.rules.shard_states:
            states = up(self.shared_out(s) * self.rules.state_factor, replicas)
        return [
            (0, None, self._with_ties(s, self.costs.P), "parameters"),
            (0, None, states, "optimizer"),
            (0, None, (self._copies(k, s) - 1) * trainable, "versions"),
        ]

    def _copies(self, k: int, s: int) -> int:
        rule, stage = self.run.rule, self.costs.stages[s]
        if rule == "double_buffered":
            return 2
        if rule == "double_grouped":
            return 2 if 2 * s < len(self.costs.stages) else 1
        if rule != "weight_stashing":
            return 1
        most = now = 0
        for kind, other, _m in self.rows[k]:
            if other == s:
                now += (kind == F) - (kind in (B, W))
                most = max(most, now)
        turns = len(stage.devices) if stage.dispatch == "round_robin" else 1
        return max(1, up(most * turns, self.run.every[s]))

    # 8.1

    def _gradients(self, k: int, s: int) -> list[Resident]:
        size = self.rules.gradient_factor * self.trainable(s)
        first: dict[int, int] = {}
        for operation in self.rows[k]:
            if operation[1] == s and operation[0] in GRADIENT:
                first.setdefault(self.run.number(s, operation[2]), self.run.operations[k, operation][0])
        residents: list[Resident] = []
        for t, start in first.items():
            if (s, k) in self.run.steps:
                end = self.run.steps[s, k][1]
            else:
                step = self.run.operations.get((k, (STEP, s, (t + 1) * self.run.every[s] - 1)))
                end = step[1] if step else None
            residents.append((start, end, size, "gradients"))
        return residents

    def _step_workspace(self, k: int, s: int) -> list[Resident]:
        stage, problem = self.costs.stages[s], self.costs.problem
        workspace = problem.update_workspace_bytes
        sizes = [0 if workspace is None else int(workspace[layer]) for layer in range(stage.first, stage.last + 1)]
        size = up(sum(sizes), len(stage.devices) if self.rules.shard_states else 1)
        if problem.update_in_turn:
            size = max(sizes)
        size += self.trainable(s) if self.elastic else 0
        spans = [self.run.steps[s, k]] if (s, k) in self.run.steps else []
        spans += [
            span for (lane, (kind, of, _m)), span in self.run.operations.items() if (lane, kind, of) == (k, STEP, s)
        ]
        return [(start, end, size, "workspace") for start, end in spans]

    def _of_operation(self, k: int, operation: Operation) -> list[Resident]:
        kind, s, m = operation
        rows = self.costs.rows(m)
        cost, apart = self.costs.stage(s, rows), self.run.apart(k, s)
        start, end = self.run.operations[k, operation]
        over = self.ends[k, s, m]
        inside = cost.inside if kind == B and not apart else 0
        residents: list[Resident] = [(start, end, cost.work + inside, "workspace")]
        if kind == F:
            residents.append((start, over, cost.kept + self._handed(s, rows), "activations"))
        if kind == R or (kind == I and not apart):
            residents.append((start, over, cost.whole, "activations"))
        return residents

    # 8.3

    def _handed(self, s: int, rows: int) -> int:
        stage, source = self.costs.stages[s], self.costs.neighbour(s, BACKWARD)
        begins = any(a == stage.first for a, _b in stage.recompute)
        if not (self.rules.count_buffers and begins and stage.first > 0):
            return 0
        if source is not None and self.costs.transfer(source, FORWARD, rows) is not None:
            return 0
        return self.costs.A[stage.first - 1] * self.costs.share(s, rows)

    # 8.4 and 8.5

    def _buffers(self, k: int, operation: Operation) -> list[Resident]:
        kind, s, m = operation
        if not self.rules.count_buffers or kind not in (F, B, I):
            return []
        direction = FORWARD if kind == F else BACKWARD
        rows, z = self.costs.rows(m), self.costs.share(s, self.costs.rows(m))
        residents: list[Resident] = []
        source = self.costs.neighbour(s, BACKWARD if kind == F else FORWARD)
        if source is not None and self.costs.transfer(source, direction, rows) is not None:
            size = self.costs.size(source, direction, z)
            if self.costs.message(source, direction, rows) and self._coded(source, direction):
                size += self.costs.message(source, direction, z)
            residents.append((self.posted[k, operation], self.ends[k, s, m], size, "buffers"))
        target = self.costs.neighbour(s, direction)
        if target is not None and self.costs.transfer(s, direction, rows) is not None:
            start, end = self.run.transfers[s, direction, m]
            reads = [self._posting(lane, target, direction, m) for lane in self.run.runners(target, m)]
            passed = max([start, *reads]) + end - start
            sent = self.run.operations[k, operation][1]
            residents.append((sent, passed, self.costs.size(s, direction, z), "buffers"))
        return residents

    def _coded(self, source: int, direction: int) -> bool:
        return self.costs.stages[source].coded[1 if direction == FORWARD else 0]

    def _posting(self, k: int, s: int, direction: int, m: int) -> int:
        kinds = (F,) if direction == FORWARD else (B, I)
        return next(self.posted[k, (kind, s, m)] for kind in kinds if (k, (kind, s, m)) in self.posted)

    def _postings(self) -> dict[tuple[int, Operation], int]:
        times = {}
        for k, row in enumerate(self.rows):
            before: dict[tuple[int, int], int] = {}
            for n, operation in enumerate(row):
                kind, s, _m = operation
                if kind not in (F, B, I):
                    continue
                direction = FORWARD if kind == F else BACKWARD
                at = max(before.get((s, direction), -1), n - 2, 0)
                times[k, operation] = self.run.operations[k, row[at - 1]][1] if at else 0
                before[s, direction] = n
        return times


def curve_of(residents: Iterable[Resident]) -> dict[int, dict[str, int]]:
    """Return the bytes by category, from each instant at which they change."""
    changes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    changes[0] = defaultdict(int)
    for start, end, size, what in residents:
        changes[start][what] += size
        if end is not None:
            changes[end][what] -= size
    now = dict.fromkeys(CATEGORIES, 0)
    curve = {}
    for at in sorted(changes):
        now = {what: size + changes[at].get(what, 0) for what, size in now.items()}
        curve[at] = now
    return curve


def uses(run: Run) -> dict[int, Use]:
    """Return section 9's numbers of each device."""
    memory = Memory(run)
    lanes: dict[int, list[int]] = defaultdict(list)
    for k, lane in enumerate(run.lanes):
        for d in lane.devices:
            lanes[d].append(k)
    by_device = {}
    for d, device_lanes in lanes.items():
        residents = [each for k in device_lanes for each in memory.residents(k)]
        residents.append((0, None, run.costs.problem.devices[d].context_bytes, "context"))
        if run.rule == "elastic_averaging":
            s = min(s for s, stage in enumerate(run.costs.stages) if d in stage.devices)
            residents.append((0, None, (1 + len(device_lanes)) * memory.trainable(s), "versions"))
        curve = curve_of(residents)
        peak = max(curve.values(), key=lambda parts: sum(parts.values()))
        busy, communication = _busy(run, device_lanes)
        rest = run.time - busy - communication
        total = {at: sum(parts.values()) for at, parts in curve.items()}
        by_device[d] = Use(busy, communication, rest, peak, total)
    return by_device


def _busy(run: Run, lanes: list[int]) -> tuple[int, int]:
    """Return the busy time, and the time of communication alone, in the window, per global batch."""
    stages = {s for s in range(len(run.costs.stages)) if set(run.lanes_of(s)) & set(lanes)}
    work = [span for (k, _operation), span in run.operations.items() if k in lanes]
    work += [span for (_s, k), span in run.steps.items() if k in lanes]
    moving = []
    for (s, direction, m), span in run.transfers.items():
        t = run.costs.neighbour(s, direction)
        ends = [run.runners(s, m), run.runners(t, m) if t is not None else []]
        if any(k in lanes for runners in ends for k in runners):
            moving.append(span)
    moving += [span for (g, _t, _k), span in run.reductions.items() if stages & set(run.costs.groups[g].stages)]
    moving += [span for (number, _t), span in run.ties.items() if stages & set(run.tied[number].stages)]
    busy = _covered(work, run.window)
    both = _covered([*work, *moving], run.window)
    return busy // run.batches, (both - busy) // run.batches


def _covered(spans: list[Span], window: Span) -> int:
    """Return the nanoseconds of the window that the spans cover."""
    covered, until = 0, window[0]
    for start, end in sorted(spans):
        start, end = max(start, until), min(end, window[1])
        if end > start:
            covered += end - start
            until = end
    return covered


def fill_and_drain(run: Run) -> tuple[int, int]:
    """Return fill and drain (section 9)."""
    ran = [[run.operations[k, operation] for operation in lane.row] for k, lane in enumerate(run.lanes) if lane.row]
    end = max(spans[-1][1] for spans in ran) if run.rule in PERIODIC else run.end
    return max(spans[0][0] for spans in ran), end - min(spans[-1][1] for spans in ran)


PERIODIC = ("weight_stashing", "double_buffered", "double_grouped")
