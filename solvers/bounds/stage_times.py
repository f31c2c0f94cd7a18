"""The times around the stages of an allocation: heads, tails, work, loads of channels and links.

Every number is a lower bound: where micro-batches differ in size, single steps count with the quicker class, sums
with the actual classes.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from penstock.schemas.program import INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.buckets import Bucket, exposed_ns, leads_ns
from penstock.solvers.costs.infinity import UNLIMITED
from penstock.solvers.costs.memory import free_bytes, static_bytes
from penstock.solvers.costs.reductions import ReductionGroup, group_buckets, reduction_groups
from penstock.solvers.costs.stage import input_bytes, stage_costs, stage_rows, update_ns
from penstock.solvers.costs.ties import tied_sums
from penstock.solvers.costs.transfer import Transfer, boundary_bytes, transfer
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Schedule, kinds_of
from penstock.solvers.model.update_rules import UpdateRule


class Use(NamedTuple):
    """The load of a resource by one flow or chain: total time, earliest start, shortest time to the step's end."""

    load_ns: int
    head_ns: int
    tail_ns: int


class StageTimes:
    """Times of an allocation's stages; lists are by stage number."""

    def __init__(
        self, problem: Problem, allocation: Allocation, schedule: Schedule, rule: UpdateRule = "synchronous"
    ) -> None:
        self.problem = problem
        self.allocation = allocation
        self.ties = tied_sums(problem, allocation, rule)
        self.classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)
        self.costs = [[stage_costs(problem, stage, rows) for rows, _ in self.classes] for stage in allocation.stages]
        kinds = kinds_of(schedule)
        self.split = INPUT in kinds or WEIGHT in kinds
        self.recomputes_apart = RECOMPUTE in kinds
        count = range(len(allocation.stages))
        self.forward = [min(c.forward_ns for c in costs) for costs in self.costs]
        self.backward = [min(self._gradient_ns(s, c) for c in range(len(self.classes))) for s in count]
        self.weight = [min(c.weight_ns for c in costs) for costs in self.costs]
        self.out = [self._hop(s, 0) for s in count]
        self.back = [self._hop(s, 1) for s in count]
        self.update = [update_ns(problem, stage) for stage in allocation.stages]
        self.exposed = [min(self._exposed(s, rows) for rows, _ in self.classes) for s in count]

    def _gradient_ns(self, s: int, c: int) -> int:
        """Return the time from the start of a micro-batch's backward on a stage to the gradient of its input."""
        cost = self.costs[s][c]
        again = 0 if self.recomputes_apart else cost.recompute_ns
        return cost.backward_ns + again - (cost.weight_ns if self.split else 0)

    def _hop(self, s: int, direction: int) -> int:
        moves = [transfer(self.problem, self.allocation, s, rows, direction) for rows, _ in self.classes]
        return min(move.duration_ns if move else 0 for move in moves)

    @cached_property
    def chains(self) -> list[tuple[ReductionGroup, tuple[Bucket, ...]]]:
        """The buckets that each group of layers reduces."""
        return [(group, group_buckets(self.problem, group)) for group in reduction_groups(self.allocation)]

    @cached_property
    def summed(self) -> list[int]:
        """The least time that each stage's devices wait for sums of ties, one after the other, before they step."""
        found = []
        for stage in self.allocation.stages:
            waits = [sum(tie.duration_ns for tie in self.ties if d in tie.devices) for d in stage.devices]
            found.append(min(waits))
        return found

    def _exposed(self, s: int, rows: int) -> int:
        """Return what is left of all-reduces and sums of ties after the stage's last backward of ``rows``."""
        stage = self.allocation.stages[s]
        longest = 0
        for group, chain in self.chains:
            if s in group.stages:
                ready = leads_ns(self.problem, stage, rows, chain)
                longest = max(longest, exposed_ns(chain, [max(lead) if self.split else lead[0] for lead in ready]))
        return longest + self.summed[s]

    @cached_property
    def stages_apart(self) -> bool:
        """True if every stage has devices of its own that all compute every micro-batch, in one pipeline."""
        devices = [device for stage in self.allocation.stages for device in stage.devices]
        turns = any(stage.dispatch == "round_robin" and stage.replicas > 1 for stage in self.allocation.stages)
        return len(set(devices)) == len(devices) and not turns and len(self.allocation.pipelines) == 1

    @cached_property
    def heads(self) -> list[int]:
        """The earliest start of each stage's first forward."""
        found: list[int] = []
        for s in range(len(self.allocation.stages)):
            before = self.allocation.previous(s)
            found.append(0 if before is None else found[before] + self.forward[before] + self.out[before])
        return found

    @cached_property
    def rounds(self) -> list[int]:
        """The shortest time from the end of a micro-batch's forward to the start of its backward on each stage."""
        found = [0] * len(self.allocation.stages)
        for s in reversed(range(len(self.allocation.stages))):
            after = self.allocation.next(s)
            if after is not None:
                inside = self.forward[after] + found[after] + self.backward[after]
                found[s] = self.out[s] + inside + self.back[after]
        return found

    @cached_property
    def tails(self) -> list[int]:
        """The time after a stage's last gradient: the way back to any earlier stage, and its remaining time."""
        found: list[int] = []
        for s in range(len(self.allocation.stages)):
            rest = self.exposed[s] + self.update[s]
            before = self.allocation.previous(s)
            found.append(rest if before is None else max(rest, self.back[s] + self.backward[before] + found[before]))
        return found

    def work_ns(self, device: int, updates: bool = True) -> int:
        """Return the time that a device computes in a step, with or without its updates."""
        held = [s for s, stage in enumerate(self.allocation.stages) if device in stage.devices]
        return sum(self.stage_work(s, device) + (self.update[s] if updates else 0) for s in held)

    def stage_work(self, s: int, device: int) -> int:
        """Return the work of a stage on one of its devices, without the update."""
        stage, total = self.allocation.stages[s], 0
        for c, batches in enumerate(self._batches(s)):
            number = len(batches)
            if stage.dispatch == "round_robin":
                turn = stage.devices.index(device)
                number = sum(m % stage.replicas == turn for m in batches)
            cost = self.costs[s][c]
            total += number * (cost.forward_ns + cost.backward_ns + cost.recompute_ns)
        return total

    def _batches(self, s: int) -> list[range]:
        """Return the stage's micro-batches of each row class."""
        own, start, found = self.allocation.micro_batches(s), 0, []
        for _rows, count in self.classes:
            found.append(range(max(start, own.start), min(start + count, own.stop)))
            start += count
        return found

    def device_ns(self, device: int) -> int:
        """Return head, work and tail of one device; for several stages the shortest head and tail.

        With split backwards the last operation may be a weight gradient, after which only the update has to follow.
        """
        held = [s for s, stage in enumerate(self.allocation.stages) if device in stage.devices]
        held = [s for s in held if self.stage_work(s, device) > 0]
        if not held:
            return self.work_ns(device)
        head = min(self.heads[s] for s in held)
        plain = head + self.work_ns(device)
        weights = sum(self._weights_ns(s, device) for s in held) if self.split else 0
        work = sum(self.stage_work(s, device) for s in held) - weights
        return max(plain, head + work + min(self.tails[s] for s in held))

    def _weights_ns(self, s: int, device: int) -> int:
        """Return the most time of the stage's work in separate weight gradients and unattached recomputations."""
        stage, total = self.allocation.stages[s], 0
        for c, batches in enumerate(self._batches(s)):
            number = len(batches)
            if stage.dispatch == "round_robin":
                number = sum(m % stage.replicas == stage.devices.index(device) for m in batches)
            total += number * self.costs[s][c].weight_ns
        return total

    @cached_property
    def resources(self) -> dict[object, list[Use]]:
        """The load of each link, port or private channel in a step."""
        found: dict[object, list[Use]] = {}
        for s in range(len(self.allocation.stages)):
            for direction in (0, 1):
                for c, batches in enumerate(self._batches(s)):
                    move = transfer(self.problem, self.allocation, s, self.classes[c][0], direction)
                    if move is not None and len(batches) > 0:
                        use = self._flow_use(s, direction, len(batches) * move.duration_ns)
                        for resource in self.channels(s, direction, move):
                            found.setdefault(resource, []).append(use)
        for group, chain in self.chains if self.problem.rules.shared else ():
            head = max(self.heads[s] for s in group.stages)
            update = max(self.update[s] for s in group.stages)
            for bucket in chain:
                for resource in bucket.resources:
                    found.setdefault(resource, []).append(Use(bucket.duration_ns, head, update))
        for tie in self.ties:
            head = max(self.heads[s] for s in tie.stages)
            update = max(self.update[s] for s in tie.stages)
            for resource in tie.resources:
                found.setdefault(resource, []).append(Use(tie.duration_ns, head, update))
        return found

    def _flow_use(self, s: int, direction: int, load: int) -> Use:
        ahead = self.heads[s] + self.forward[s]
        if direction == 0:
            after = self.allocation.next(s)
            assert after is not None
            rest = self.forward[after] + self.rounds[after] + self.backward[after] + self.tails[after]
            return Use(load, ahead, rest)
        before = self.allocation.previous(s)
        assert before is not None
        return Use(load, ahead + self.rounds[s] + self.backward[s], self.backward[before] + self.tails[before])

    def channels(self, s: int, direction: int, move: Transfer) -> tuple[object, ...]:
        """Return what a transfer occupies: links of the shared network, or the private channel of its edge."""
        rules, edge = self.problem.rules, s if direction == 0 else s - 1
        if rules.shared:
            return move.resources
        if rules.channel == "half":
            return (edge,)
        return ((edge, direction),) if rules.channel == "full" else ()

    def resource_ns(self, resource: object) -> int:
        """Return a resource's load plus the earliest start and the shortest remaining time of what it carries."""
        uses = self.resources[resource]
        load = sum(use.load_ns for use in uses)
        return min(use.head_ns for use in uses) + load + min(use.tail_ns for use in uses)

    def in_flight(self, s: int) -> int:
        """Return the most micro-batches that a stage alone on its devices holds between F and B (split: W); at least 1.

        When most are in flight, a backward (split: a W) ends one, and memory at its start has everything that the stage
        holds for the step, each one's stash and received input, the gradient that it reads, and its workspace.
        """
        stage, problem = self.allocation.stages[s], self.problem
        free = free_bytes(problem, stage.devices) - static_bytes(problem, stage).total
        each = self.flight_bytes(s)
        free -= min(self._received_gradient(s, rows) for rows, _ in self.classes)
        if (self.weight[s] if self.split else self.backward[s]) > 0:
            free -= min(self._workspace(s, c) for c in range(len(self.classes)))
        return UNLIMITED if each == 0 else max(1, free // each)

    def flight_bytes(self, s: int) -> int:
        """Return the least bytes of a micro-batch between F and the end of its gradient: stash and received input."""
        return min(self._flight_bytes(s, c) for c in range(len(self.classes)))

    def forward_bytes(self, s: int) -> int:
        """Return the least bytes of an unreleased forward, on a device that may also hold the stage before.

        This is ``flight_bytes`` with the input of a stage that recomputes its first layers if it was not received.
        """
        stage = self.allocation.stages[s]
        begins = any(first == stage.first for first, _last in stage.recompute)
        handed = begins and self.problem.memory.count_buffers and self.allocation.previous(s) is not None
        found = []
        for c, (rows, _count) in enumerate(self.classes):
            own = self._flight_bytes(s, c)
            received = own > self.costs[s][c].kept_bytes
            more = input_bytes(self.problem, stage.first, stage_rows(stage, rows)) if handed and not received else 0
            found.append(own + more)
        return min(found)

    def _received_gradient(self, s: int, rows: int) -> int:
        after = self.allocation.next(s)
        if after is None or not self.problem.memory.count_buffers:
            return 0
        if transfer(self.problem, self.allocation, after, rows, 1) is None:
            return 0
        stage = self.allocation.stages[s]
        return boundary_bytes(self.problem, stage.last, stage_rows(stage, rows), 1)

    def _workspace(self, s: int, c: int) -> int:
        """Return a backward's workspace, with what it rebuilds unless that is an operation of its own."""
        stage, rows = self.allocation.stages[s], self.classes[c][0]
        return (
            stage_costs(self.problem, stage.plain, rows) if self.recomputes_apart else self.costs[s][c]
        ).workspace_bytes

    def _flight_bytes(self, s: int, c: int) -> int:
        rows = self.classes[c][0]
        kept = self.costs[s][c].kept_bytes
        before = self.allocation.previous(s)
        if before is None or not self.problem.memory.count_buffers:
            return kept
        if transfer(self.problem, self.allocation, before, rows, 0) is None:
            return kept
        stage = self.allocation.stages[s]
        return kept + boundary_bytes(self.problem, stage.first - 1, stage_rows(stage, rows), 0)
