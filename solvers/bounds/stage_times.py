"""The times around the stages of an allocation: heads, tails, work, loads of channels and links.

Every number is a lower bound: where micro-batches differ in size, single steps count with the quicker class, sums
with the actual classes.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.buckets import exposed_ns, leads_ns
from penstock.solvers.costs.infinity import UNLIMITED
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.costs.ties import tied_sums
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Schedule, kinds_of
from penstock.solvers.model.update_rules import UpdateRule


class Use(NamedTuple):
    """The load of a resource by one flow or chain: total time, earliest start, shortest time to the step's end."""

    load_ns: int
    head_ns: int
    tail_ns: int


class StageTimes(StepGraph):
    """Times of an allocation's stages; lists are by stage number."""

    def __init__(
        self, problem: Problem, allocation: Allocation, schedule: Schedule, rule: UpdateRule = "synchronous"
    ) -> None:
        super().__init__(problem, allocation)
        self.ties = tied_sums(problem, allocation, rule)
        kinds = kinds_of(schedule)
        self.split = INPUT in kinds or WEIGHT in kinds
        self.recomputes_apart = RECOMPUTE in kinds
        count, gradient = range(len(allocation.stages)), INPUT if self.split else BACKWARD
        each = [[cost.durations_ns(apart=self.recomputes_apart) for cost in costs] for costs in self.costs]
        self.forward, self.backward, self.weight = (
            [min(times[kind] for times in costs) for costs in each] for kind in (FORWARD, gradient, WEIGHT)
        )
        self.out, self.back = ([min(self.lags_ns(s, way)) for s in count] for way in (0, 1))
        self.exposed = [min(self._exposed(s, rows) for rows, _ in self.classes) for s in count]

    @cached_property
    def summed(self) -> list[int]:
        """The least time that each stage's devices wait for sums of ties, one after the other, before they step."""
        waits_of_stages = []
        for stage in self.allocation.stages:
            waits = [sum(tie.duration_ns for tie in self.ties if d in tie.devices) for d in stage.devices]
            waits_of_stages.append(min(waits))
        return waits_of_stages

    def _exposed(self, s: int, rows: int) -> int:
        """Return the part of all-reduces and sums of ties after the stage's last backward of ``rows``."""
        stage = self.allocation.stages[s]
        longest = 0
        for group, chain in self.reductions:
            if s in group.stages:
                ready = leads_ns(self.problem, stage, rows, chain)
                longest = max(longest, exposed_ns(chain, [max(lead) if self.split else lead[0] for lead in ready]))
        return longest + self.summed[s]

    @cached_property
    def stages_apart(self) -> bool:
        """True if stages share no devices, a stage's devices compute every micro-batch, and there is one pipeline."""
        devices = [device for stage in self.allocation.stages for device in stage.devices]
        turns = any(stage.dispatch == "round_robin" and stage.replicas > 1 for stage in self.allocation.stages)
        return len(set(devices)) == len(devices) and not turns and len(self.allocation.pipelines) == 1

    @cached_property
    def heads(self) -> list[int]:
        """The earliest start of each stage's first forward."""
        heads: list[int] = []
        for s in range(len(self.allocation.stages)):
            before = self.allocation.previous(s)
            heads.append(0 if before is None else heads[before] + self.forward[before] + self.out[before])
        return heads

    @cached_property
    def rounds(self) -> list[int]:
        """The shortest time from the end of a micro-batch's forward to the start of its backward on each stage."""
        rounds = [0] * len(self.allocation.stages)
        for s in reversed(range(len(self.allocation.stages))):
            after = self.allocation.next(s)
            if after is not None:
                inside = self.forward[after] + rounds[after] + self.backward[after]
                rounds[s] = self.out[s] + inside + self.back[after]
        return rounds

    @cached_property
    def tails(self) -> list[int]:
        """The time after a stage's last gradient: the way back to any earlier stage, and its remaining time."""
        tails: list[int] = []
        for s in range(len(self.allocation.stages)):
            rest = self.exposed[s] + self.update_ns[s]
            before = self.allocation.previous(s)
            tails.append(rest if before is None else max(rest, self.back[s] + self.backward[before] + tails[before]))
        return tails

    def work_ns(self, device: int) -> int:
        """Return the time that a device computes in a step, with its updates."""
        return sum(self.stage_work(s, device) + self.update_ns[s] for s in self.allocation.held_stages[device])

    def stage_work(self, s: int, device: int) -> int:
        """Return the work of a stage on one of its devices, without the update."""
        counts = zip(self.counts(s, device), self.costs[s], strict=True)
        return sum(number * cost.passes_ns for number, cost in counts)

    def device_ns(self, device: int) -> int:
        """Return head, work and tail of one device; for several stages the shortest head and tail.

        With split backwards the last operation may be a weight gradient, after which only the update has to follow.
        """
        stages = [s for s in self.allocation.held_stages[device] if self.stage_work(s, device) > 0]
        if not stages:
            return self.work_ns(device)
        head = min(self.heads[s] for s in stages)
        plain = head + self.work_ns(device)
        weights = sum(self._weights_ns(s, device) for s in stages) if self.split else 0
        work = sum(self.stage_work(s, device) for s in stages) - weights
        return max(plain, head + work + min(self.tails[s] for s in stages))

    def _weights_ns(self, s: int, device: int) -> int:
        """Return the most time of the stage's work in separate weight gradients and unattached recomputations."""
        counts = zip(self.counts(s, device), self.costs[s], strict=True)
        return sum(number * cost.weight_ns for number, cost in counts)

    @cached_property
    def resources(self) -> dict[int, list[Use]]:
        """The load of each link, port or private channel in a step."""
        uses: dict[int, list[Use]] = {}
        for s in range(len(self.allocation.stages)):
            for direction in (0, 1):
                for c, (number, lag) in enumerate(zip(self.counts(s), self.lags_ns(s, direction), strict=True)):
                    for resource in self.channels(s, direction, c) if number > 0 else ():
                        uses.setdefault(resource, []).append(self._flow_use(s, direction, number * lag))
        for group, chain in self.reductions if self.problem.rules.shared else ():
            head = max(self.heads[s] for s in group.stages)
            update = max(self.update_ns[s] for s in group.stages)
            for bucket in chain:
                for resource in bucket.resources:
                    uses.setdefault(resource, []).append(Use(bucket.duration_ns, head, update))
        for tie in self.ties:
            head = max(self.heads[s] for s in tie.stages)
            update = max(self.update_ns[s] for s in tie.stages)
            for resource in tie.resources:
                uses.setdefault(resource, []).append(Use(tie.duration_ns, head, update))
        return uses

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

    def resource_ns(self, resource: int) -> int:
        """Return a resource's load plus the earliest start of its flows and the shortest time after them."""
        uses = self.resources[resource]
        load = sum(use.load_ns for use in uses)
        return min(use.head_ns for use in uses) + load + min(use.tail_ns for use in uses)

    def in_flight(self, s: int) -> int:
        """Return the most micro-batches that a stage alone on its devices holds between F and B (split: W); at least 1.

        When most are in flight, a backward (split: a W) ends one. Memory at its start has everything that the stage
        holds for the step, each one's stash and received input, the gradient that the backward reads, and its
        workspace.
        """
        sizes = self.memory[s]
        free = free_bytes(self.problem, self.allocation.stages[s].devices) - self.static[s].total
        free -= min(each.received_gradient for each in sizes)
        if (self.weight[s] if self.split else self.backward[s]) > 0:
            free -= min(each.workspace + (0 if self.recomputes_apart else each.rebuilt_inside) for each in sizes)
        flight = self.flight_bytes(s)
        return UNLIMITED if flight == 0 else max(1, free // flight)

    def flight_bytes(self, s: int) -> int:
        """Return the least bytes of a micro-batch between F and the end of its gradient: stash and received input."""
        sizes = zip(self.costs[s], self.memory[s], strict=True)
        return min(cost.kept_bytes + each.received_input for cost, each in sizes)

    def forward_bytes(self, s: int) -> int:
        """Return the least bytes of an unreleased forward, on a device that may also hold the stage before.

        This is ``flight_bytes`` with the input of a stage that recomputes its first layers if it was not received.
        """
        return min(each.stash + each.received_input for each in self.memory[s])
