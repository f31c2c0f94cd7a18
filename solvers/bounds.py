"""Proven lower bounds on the time per global batch: of one allocation's schedules, and of all plans of a request.

Scope ``schedule of this allocation``: whatever the order, a device cannot begin before the first micro-batch has come
through the stages before it, has to do its work, and what it does last has to travel back (BOUNDS section 2, proof 1:
head, work, tail); and no channel or link carries two transfers at once.

Scope ``all plans of this request``: the work of all layers at their cheapest is shared by all devices at best (load),
and one slice has to pass through every layer forwards and backwards (fill). Both hold for every plan: several stages
per device, replicas, recomputation and any order only add.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from penstock.solvers.allocation import Allocation
from penstock.solvers.batching import row_classes
from penstock.solvers.costs import StageCosts, buckets, stage_costs, transfer, update_ns
from penstock.solvers.problem import Problem
from penstock.solvers.result import REQUEST_SCOPE, SCHEDULE_SCOPE, Bound
from penstock.solvers.schedule import Schedule


def request_bound(problem: Problem) -> Bound:
    """No plan of the request takes less time than this."""
    load = _load_ns(problem)
    path = _path_ns(problem)
    method = "load: all work at its cheapest, on all devices" if load >= path else "fill: one slice through all layers"
    return Bound(REQUEST_SCOPE, "every plan, in any network", max(load, path), method)


def _load_ns(problem: Problem) -> int:
    """Every sample passes every layer, at best as cheaply as in the best measurement; ceil(total / devices).

    A layer's time over its samples is smallest at a measured size: between two of them the time is linear in the
    samples, below the smallest it is constant or proportional, above the largest proportional, and always rounded up.
    """
    total = Fraction(int(problem.update_ns[-1]))
    for layer in range(problem.num_layers):
        cheapest = min(
            Fraction(int(point.forward_ns[layer] + point.backward_ns[layer]), point.rows) / Fraction(speed)
            for source, speed in set(problem.kind_source.values())
            for point in problem.measured[source]
        )
        total += problem.global_batch_size * cheapest
    return -int(-total // problem.num_devices)


def _path_ns(problem: Problem) -> int:
    """The cheapest slice through every layer and back, and the update of the first layer behind it."""
    sizes = {problem.min_slice, *(p.rows for points in problem.measured.values() for p in points)}
    each = []
    for kind in problem.kind_source:
        for rows in sizes:
            costs = problem.costs(kind, rows)
            each.append(np.diff(costs.forward_ns) + np.diff(costs.backward_ns))
    return int(np.min(each, axis=0).sum()) + int(problem.update_ns[1])


def schedule_bound(problem: Problem, allocation: Allocation, schedule: Schedule) -> Bound:
    """No order of the operations of this allocation takes less time than this, in this network."""
    del schedule  # the bound holds for every order; the argument is what the certificate speaks of
    stages = _StageTimes(problem, allocation)
    bounds = {
        "head, work and tail of a device": max(stages.device_ns(d) for s in allocation.stages for d in s.devices),
        "load of a channel": max((stages.channel_ns(s) for s in range(len(allocation.stages))), default=0),
    }
    method, value = max(bounds.items(), key=lambda item: item[1])
    model = f"this allocation, any order, {'shared' if problem.rules.shared else 'private'} network"
    return Bound(SCHEDULE_SCOPE, model, value, method)


class _StageTimes:
    """Times of an allocation's stages for both row classes, and what surrounds them."""

    def __init__(self, problem: Problem, allocation: Allocation) -> None:
        self.problem = problem
        self.allocation = allocation
        self.classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)
        self.costs = [[stage_costs(problem, stage, rows) for rows, _ in self.classes] for stage in allocation.stages]
        self.head = [0] * len(allocation.stages)
        self.back = [0] * len(allocation.stages)
        for s in range(len(allocation.stages)):
            previous = allocation.previous(s)
            if previous is None:
                continue
            self.head[s] = self.head[previous] + self.least(previous, "forward") + self.hop(previous, 0)
            self.back[s] = self.back[previous] + self.least(previous, "backward") + self.hop(s, 1)

    def least(self, s: int, what: str) -> int:
        """The quickest micro-batch's forward or backward on a stage."""
        if what == "forward":
            return min(c.forward_ns for c in self.costs[s])
        return min(_gradient_ns(c) for c in self.costs[s])

    def hop(self, s: int, direction: int) -> int:
        """The quickest micro-batch's transfer from a stage."""
        moves = [transfer(self.problem, self.allocation, s, rows, direction) for rows, _ in self.classes]
        return min(move.duration_ns if move else 0 for move in moves)

    def work(self, s: int, device: int) -> int:
        """What one device computes for a stage in a step, on its own slice of each micro-batch."""
        stage, batches = self.allocation.stages[s], self.allocation.micro_batches(s)
        total, start = 0, 0
        for (_rows, count), costs in zip(self.classes, self.costs[s], strict=True):
            mine = range(max(start, batches.start), min(start + count, batches.stop))
            number = len(mine)
            if stage.dispatch == "round_robin":
                turn = stage.devices.index(device)
                number = sum(m % stage.replicas == turn for m in mine)
            total += number * (costs.forward_ns + costs.backward_ns + costs.recompute_ns)
            start += count
        return total

    def tail(self, s: int) -> int:
        """From the end of a stage's last backward: the way back to the first layer and its update, or its own."""
        first = s
        while (before := self.allocation.previous(first)) is not None:
            first = before
        own = self.exposed(s) + update_ns(self.problem, self.allocation.stages[s])
        return max(own, self.back[s] + self.exposed(first) + update_ns(self.problem, self.allocation.stages[first]))

    def exposed(self, s: int) -> int:
        """What remains of the stage's all-reduce after its last backward, whichever micro-batch that is."""
        return min(self._exposed(s, rows) for rows, _ in self.classes)

    def _exposed(self, s: int, rows: int) -> int:
        behind, longest = 0, 0
        for bucket in reversed(buckets(self.problem, self.allocation.stages[s], rows)):
            behind += bucket.duration_ns
            longest = max(longest, behind - bucket.lead_ns)
        return longest

    def device_ns(self, device: int) -> int:
        """Head, work and tail of one device; of several stages the shortest head and tail."""
        held = [s for s, stage in enumerate(self.allocation.stages) if device in stage.devices]
        work = sum(self.work(s, device) for s in held)
        return min(self.head[s] for s in held) + work + min(self.tail(s) for s in held)

    def channel_ns(self, s: int) -> int:
        """All transfers over the edge behind a stage, where one excludes the next."""
        rules, following = self.problem.rules, self.allocation.next(s)
        if following is None or (not rules.shared and rules.channel == "none"):
            return 0
        loads = [self._carried(s, 0), self._carried(following, 1)]
        if not rules.shared and rules.channel == "half":
            loads = [sum(loads)]
        return self.head[s] + self.least(s, "forward") + max(loads)

    def _carried(self, s: int, direction: int) -> int:
        batches, total, start = self.allocation.micro_batches(s), 0, 0
        for rows, count in self.classes:
            move = transfer(self.problem, self.allocation, s, rows, direction)
            number = len(range(max(start, batches.start), min(start + count, batches.stop)))
            total += number * move.duration_ns if move else 0
            start += count
        return total


def _gradient_ns(costs: StageCosts) -> int:
    """The least time from a stage's backward's start to its gradient: the input part, if weights may wait."""
    return costs.backward_ns - costs.weight_ns
