"""A judged run as *nodes*: everything that took time, and what each of them may have waited for.

Nodes are numbered: first the operations of all rows, then transfers, all-reduces of buckets, all-reduces of ties, and
the updates that are in no row. By the judge's rules (``simulate``) they wait as follows:

* an operation for its device and its input;
* a transfer for its producers and its channel or links;
* a bucket for the gradients of its layers, the bucket before it and its links;
* a tie for the rows, buckets and earlier ties of all its devices, and its links;
* an update for its device, its device's ties and the buckets of its stage's groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, WEIGHT
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.judge.operation_tables import Tables, cost_tables
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import STEP, Pattern
from penstock.solvers.model.timeline import Interval
from penstock.solvers.model.unroll import unroll

What = Literal["operation", "transfer", "all-reduce", "update"]
Because = Literal["start", "input", "device", "order", "channel", "gradients", "bucket", "reduction"]
"""The reason why a node began when it did and not earlier.

* ``start``: no node came before it.
* ``input``: its input arrived.
* ``device``: its device was busy.
* ``order``: its device had other work first, although the node was ready.
* ``channel``: a channel or link was busy.
* ``gradients``: the gradients of its layers became ready.
* ``bucket``: the bucket before it ended.
* ``reduction``: the all-reduce ended.
"""

Whole = TypeVar("Whole", int, np.ndarray)

GRADIENTS = (BACKWARD, INPUT, WEIGHT)


class Cause(NamedTuple):
    """A node that may have delayed another node, and the reason."""

    node: int
    because: Because


class JudgedRun:
    """The nodes of a plan's timeline. Times are the whole run's; a periodic plan's run has many rounds."""

    def __init__(self, problem: Problem, plan: JudgedPlan) -> None:
        self.plan, self.plan_problem = plan, problem
        self.timeline = plan.timeline
        self.allocation = plan.allocation
        self.shares_processors = plan.update_rule == "elastic_averaging"
        self.problem = replace(problem, rules=replace(problem.rules, overlap_all_reduce=plan.overlap_all_reduce))
        self.every = (plan.allocation.num_micro_batches,) * len(plan.allocation.stages)
        self.periodic = isinstance(plan.schedule, Pattern)
        if isinstance(plan.schedule, Pattern):
            unrolled = unroll(problem, plan.allocation, plan.schedule, plan.update_rule)
            self.problem = replace(unrolled.problem, rules=self.problem.rules)
            self.allocation, self.every = unrolled.allocation, unrolled.orders.update_every
        tracks, moved = self.timeline.tracks, self.timeline.transfers
        self.lane_devices = tuple(track.devices for track in tracks)
        self.lane_start = prefix_sums([len(track.start_ns) for track in tracks])
        operations = np.concatenate([track.operations for track in tracks]).astype(np.int64)
        self.kind, self.stage_of, self.batch = operations.T
        updates = () if self.periodic else self.timeline.updates
        reduced, ties = self.timeline.reductions, self.timeline.ties
        rest = np.array([each[2:] for each in (*reduced, *ties, *updates)], dtype=np.int64).reshape(-1, 2)
        self.start = np.concatenate([*(t.start_ns for t in tracks), moved.start_ns, rest[:, 0]])
        self.end = np.concatenate([*(t.end_ns for t in tracks), moved.end_ns, rest[:, 1]])
        sizes = [len(operations), len(moved.start_ns), len(reduced), len(ties), len(updates)]
        places = map(int, np.cumsum(sizes))
        self.first_transfer, self.first_reduction, self.first_tie, self.first_update, self.count = places

    # ---- what a node is ------------------------------------------------------------------------------------------

    def what(self, node: int) -> What:
        """Return the node's sort."""
        if node < self.first_transfer:
            return "update" if self.kind[node] == STEP else "operation"
        if node < self.first_reduction:
            return "transfer"
        return "all-reduce" if node < self.first_update else "update"

    def stage(self, node: int) -> int:
        """Return the stage that computes, sends or updates; for an all-reduce the lowest stage that takes part."""
        if node < self.first_transfer:
            return int(self.stage_of[node])
        if node < self.first_reduction:
            return int(self.timeline.transfers.stage[node - self.first_transfer])
        return self._interval(node).stage

    def number(self, node: int) -> int:
        """Return the micro-batch, or the number of the bucket or tie; -1 for an update."""
        if node < self.first_transfer:
            return -1 if self.kind[node] == STEP else int(self.batch[node])
        if node < self.first_reduction:
            return int(self.timeline.transfers.micro_batch[node - self.first_transfer])
        return self._interval(node).bucket

    def detail(self, node: int) -> int:
        """Return an operation's kind, a transfer's direction, 1 for the sum of a tie; 0 for the others."""
        if node < self.first_transfer:
            return int(self.kind[node])
        if node < self.first_reduction:
            return int(self.timeline.transfers.direction[node - self.first_transfer])
        return int(self.first_tie <= node < self.first_update)

    def lane(self, node: int) -> int | None:
        """Return the row that an operation or update belongs to, or follows."""
        if node < self.first_transfer:
            return int(np.searchsorted(self.lane_start, node, side="right")) - 1
        return self._update_lanes[node - self.first_update] if node >= self.first_update else None

    def _interval(self, node: int) -> Interval:
        if node < self.first_tie:
            return self.timeline.reductions[node - self.first_reduction]
        if node < self.first_update:
            return self.timeline.ties[node - self.first_tie]
        return self.timeline.updates[node - self.first_update]

    # ---- what it may have waited for -----------------------------------------------------------------------------

    def causes(self, node: int) -> Iterator[Cause]:
        """Yield the nodes that ended (or had gradients ready) when ``node`` began, the device's previous work first."""
        if node < self.first_transfer:
            yield from self._before_operation(node)
        elif node < self.first_reduction:
            yield from self._before_transfer(node)
        elif node < self.first_tie:
            yield from self._before_bucket(node)
        elif node < self.first_update:
            yield from self._before_tie(node)
        else:
            yield from self._before_update(node)

    def _before_operation(self, node: int) -> Iterator[Cause]:
        lane, at = self.lane(node), self.start[node]
        assert lane is not None
        inputs = self.inputs(node)
        if node > self.lane_start[lane] and self.end[node - 1] == at:
            ready = max((int(self.end[each]) for each in inputs), default=0)
            yield Cause(node - 1, "order" if inputs and ready <= self.start[node - 1] else "device")
        for each in inputs:
            if self.end[each] == at:
                yield Cause(each, "reduction" if self.kind[node] == STEP else "input")

    def inputs(self, node: int) -> list[int]:
        """Return an operation's inputs from other rows: a transfer, neighbours' operations, a round's last buckets."""
        kind, s, m = int(self.kind[node]), int(self.stage_of[node]), int(self.batch[node])
        if kind == STEP:
            lane = self.lane(node)
            assert lane is not None
            update_round = m // self.every[s]
            return [*self._ties_before_step(lane, s, update_round), *self._last_buckets(s, update_round)]
        if kind not in (FORWARD, BACKWARD, INPUT):
            return []
        way = 0 if kind == FORWARD else 1
        source = self.allocation.previous(s) if way == 0 else self.allocation.next(s)
        if source is None:
            return []
        sent = self._sent.get((source, way, m))
        return [sent] if sent is not None else self.producers(source, way, m)

    def producers(self, s: int, way: int, m: int) -> list[int]:
        """Return the operations of a stage, on all its rows, that compute its output or the gradient of its input."""
        return [i for kind in ((FORWARD,) if way == 0 else (BACKWARD, INPUT)) for i in self._operations(kind, s, m)]

    def _before_transfer(self, node: int) -> Iterator[Cause]:
        at = self.start[node]
        for each in self.producers(self.stage(node), self.detail(node), self.number(node)):
            if self.end[each] == at:
                yield Cause(each, "input")
        yield from self._holders(node)

    def _before_bucket(self, node: int) -> Iterator[Cause]:
        chains, reductions = self.tables.chains, self.tables.reductions
        place = node - self.first_reduction
        g, bucket, at = int(reductions.group[place]), int(reductions.bucket[place]), int(self.start[node])
        size = int(chains.start[g + 1] - chains.start[g])
        update_round = (place - int(chains.run_start[g])) // size
        for s in range(len(self.allocation.stages)):
            for k in range(int(chains.member_start[s]), int(chains.member_start[s + 1])):
                if chains.member_group[k] != g:
                    continue
                first = 4 * (int(chains.member_lead[k]) + bucket - int(chains.start[g]))
                for last in self._last_gradients(s, update_round):
                    column = (2 if self.kind[last] == WEIGHT else 0) + int(self.batch[last] >= self.tables.flows.cut)
                    if self.end[last] - chains.lead_ns[first + column] == at:
                        yield Cause(last, "gradients")
        if bucket > chains.start[g] and self.end[node - 1] == at:
            yield Cause(node - 1, "bucket")
        yield from self._holders(node)

    def _before_tie(self, node: int) -> Iterator[Cause]:
        at, number = self.start[node], self.timeline.ties[node - self.first_tie].bucket
        update_round = node - self.first_tie - int(self.tables.ties.run_start[number])
        for lane, devices in enumerate(self.lane_devices):
            if devices[0] in self.tables.sums[number].devices:
                yield from (
                    cause for cause in self._before_coming(lane, number, update_round) if self.end[cause.node] == at
                )
        yield from self._holders(node)

    def _before_coming(self, lane: int, number: int, update_round: int) -> Iterator[Cause]:
        """Yield the nodes that a lane awaits before it reaches a tie: its operations, earlier ties, its buckets."""
        if self.periodic:
            s = min(set(self._stages_of_lane(lane)) & set(self.tables.sums[number].stages))
            stages, ties = [s], self._ties_before_step(lane, s, update_round)
            low, high = self.lane_start[lane], self.lane_start[lane + 1]
            step = (self.kind[low:high] == STEP) & (self.stage_of[low:high] == s)
            last = int(low) + int(np.flatnonzero(step & (self.batch[low:high] // self.every[s] == update_round))[0]) - 1
        else:
            stages, ties = self._stages_of_lane(lane), self._ties_of_lane(lane)
            last = int(self.lane_start[lane + 1]) - 1
        if last >= self.lane_start[lane]:
            yield Cause(last, "gradients")
        earlier = self.first_tie + int(self.tables.ties.run_start[number]) + update_round
        yield from (Cause(each, "bucket") for each in ties if each < earlier)
        for s in stages:
            yield from (Cause(each, "bucket") for each in self._last_buckets(s, update_round))

    def _stages_of_lane(self, lane: int) -> list[int]:
        return list(self.allocation.held_stages[self.lane_devices[lane][0]])

    def _ties_of_lane(self, lane: int) -> list[int]:
        """Return a lane's ties in a flushed step, in their order."""
        if not self.timeline.ties:
            return []
        device = self.lane_devices[lane][0]
        return [self.first_tie + k for k, tie in enumerate(self.tables.sums) if device in tie.devices]

    def _ties_before_step(self, lane: int, s: int, update_round: int) -> list[int]:
        """Return the ties that a step in a lane's row waits for, in their order."""
        if not self.timeline.ties:
            return []
        stages, start = set(self._stages_of_lane(lane)), self.tables.ties.run_start
        return [
            self.first_tie + int(start[k]) + update_round
            for k, tie in enumerate(self.tables.sums)
            if s == min(stages & set(tie.stages), default=-1)
        ]

    def _before_update(self, node: int) -> Iterator[Cause]:
        lane, at = self.lane(node), self.start[node]
        assert lane is not None
        if (last := int(self.lane_start[lane + 1]) - 1) >= self.lane_start[lane] and self.end[last] == at:
            yield Cause(last, "device")
        for other in range(self.first_update, self.count):
            if other != node and self.lane(other) == lane and self.end[other] == at:
                yield Cause(other, "device")
        for each in (*self._ties_of_lane(lane), *self._last_buckets(self.stage(node), 0)):
            if self.end[each] == at:
                yield Cause(each, "reduction")

    def _last_buckets(self, s: int, update_round: int) -> list[int]:
        """Return the last bucket of each of the stage's groups in a round."""
        if self.shares_processors or not self.timeline.reductions:
            return []
        chains, nodes = self.tables.chains, []
        for g in chains.member_group[chains.member_start[s] : chains.member_start[s + 1]].tolist():
            size = int(chains.start[g + 1] - chains.start[g])
            if size:
                nodes.append(self.first_reduction + int(chains.run_start[g]) + (update_round + 1) * size - 1)
        return nodes

    def _last_gradients(self, s: int, update_round: int) -> list[int]:
        """Return the last gradient operation of a round on each row of a stage."""
        nodes = []
        for low, high in zip(self.lane_start[:-1].tolist(), self.lane_start[1:].tolist(), strict=True):
            gradients = (self.stage_of[low:high] == s) & (self.batch[low:high] // self.every[s] == update_round)
            gradients &= (self.kind[low:high] == BACKWARD) | (self.kind[low:high] == WEIGHT)
            if (at := np.flatnonzero(gradients)).size:
                nodes.append(low + int(at[-1]))
        return nodes

    def _holders(self, node: int) -> Iterator[Cause]:
        """Yield the transfers and buckets that released a resource of ``node`` when it began."""
        needed = self.resources(node)
        if not needed:
            return
        order, ends = self._by_end
        at = self.start[node]
        for k in range(int(np.searchsorted(ends, at, side="left")), int(np.searchsorted(ends, at, side="right"))):
            other = int(order[k])
            if other != node and needed & self.resources(other):
                yield Cause(other, "channel")

    def loads(self) -> list[tuple[int, int]]:
        """Return (node, total time) for all traffic on the same resources, which one of its nodes represents."""
        moved, lasts = self.timeline.transfers, self.end - self.start
        late = moved.micro_batch >= self.graph.classes[0][1]
        key = (moved.stage.astype(np.int64) * 2 + moved.direction) * 2 + late
        _keys, first, which = np.unique(key, return_index=True, return_inverse=True)
        total = np.zeros(len(first), dtype=np.int64)
        np.add.at(total, which, lasts[self.first_transfer : self.first_reduction])
        totals = list(zip((self.first_transfer + first).tolist(), total.tolist(), strict=True))
        return totals + [(node, int(lasts[node])) for node in range(self.first_reduction, self.first_update)]

    def network_resources(self, node: int) -> frozenset[int]:
        """Return the ``resources`` by their numbers in the shared network."""
        numbers = self.resources(node)
        return numbers if self.shares_processors else frozenset(self.tables.resource_ids[each] for each in numbers)

    def resources(self, node: int) -> frozenset[int]:
        """Return the shared network's links, or the private channel, that a transfer or a bucket occupies."""
        if node >= self.first_tie:
            number = self.timeline.ties[node - self.first_tie].bucket
            return self._resources_of_user(len(self.tables.flows.flow_ns) + len(self.tables.chains.stage) + number)
        if node >= self.first_reduction:
            g = int(self.tables.reductions.group[node - self.first_reduction])
            return self._resources_of_user(len(self.tables.flows.flow_ns) + g)
        s, way = self.stage(node), self.detail(node)
        if self.shares_processors:
            return frozenset(self.graph.channels(s % len(self.allocation.pipelines[0].stages), way))
        late = int(self.number(node) >= self.tables.flows.cut)
        return self._resources_of_user(int(self.tables.flows.flow_of[(s * 2 + way) * 2 + late]))

    def _resources_of_user(self, user: int) -> frozenset[int]:
        flows = self.tables.flows
        return frozenset(flows.resources[flows.resource_start[user] : flows.resource_start[user + 1]].tolist())

    # ---- where things stand --------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> StepGraph:
        """The graph of the run's operations."""
        return StepGraph(self.problem, self.allocation)

    @cached_property
    def tables(self) -> Tables:
        """Return the simulator's tables of the run."""
        every = self.every if self.periodic else ()
        rule = self.plan.update_rule
        return cost_tables(self.problem, self.allocation, self.plan.overlap_all_reduce, every, rule)

    @cached_property
    def _sent(self) -> dict[tuple[int, int, int], int]:
        moved = self.timeline.transfers
        keys = zip(moved.stage.tolist(), moved.direction.tolist(), moved.micro_batch.tolist(), strict=True)
        return {key: self.first_transfer + j for j, key in enumerate(keys)}

    @cached_property
    def _codes(self) -> tuple[np.ndarray, np.ndarray]:
        codes = np.asarray(self._code(self.kind, self.stage_of, self.batch))
        order = np.argsort(codes, kind="stable")
        return order, codes[order]

    def _code(self, kind: Whole, stage: Whole, batch: Whole) -> Whole:
        """Return one number that identifies an operation."""
        count, number = len(self.allocation.stages), self.allocation.num_micro_batches
        code: Whole = (kind * count + stage) * number + batch
        return code

    def _operations(self, kind: int, s: int, m: int) -> list[int]:
        order, codes = self._codes
        code = self._code(kind, s, m)
        low, high = np.searchsorted(codes, code, side="left"), np.searchsorted(codes, code, side="right")
        return [int(i) for i in order[low:high]]

    @cached_property
    def _by_end(self) -> tuple[np.ndarray, np.ndarray]:
        """Return transfers and buckets by their ends."""
        nodes = np.arange(self.first_transfer, self.first_update)
        order = nodes[np.argsort(self.end[nodes], kind="stable")]
        return order, self.end[order]

    @cached_property
    def _update_lanes(self) -> list[int]:
        """Return the row of each update; the updates of a stage are in the order of its rows."""
        holds = [set(self.stage_of[low:high].tolist()) for low, high in self._lane_ranges]
        turn: dict[int, int] = {}
        result = []
        for update in self.timeline.updates:
            if self.shares_processors:
                lanes = [lane for lane, stages in enumerate(holds) if update.stage in stages]
            else:
                devices = set(self.allocation.stages[update.stage].devices)
                lanes = [lane for lane, members in enumerate(self.lane_devices) if devices & set(members)]
            result.append(lanes[turn.get(update.stage, 0)])
            turn[update.stage] = turn.get(update.stage, 0) + 1
        return result

    @property
    def _lane_ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.lane_start[:-1].tolist(), self.lane_start[1:].tolist(), strict=True))
