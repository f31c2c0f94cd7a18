"""The throughput model of ALGORITHMS 5.4: an estimate of a configuration's period, by which proposals are ordered.

A period of M micro-batches takes M slots of every group. A slot takes at least the work of each device in it, and the
time of every cycle: a micro-batch's way from device i to device j and back, over the K_i - K_j + 1 slots that the
warm-up leaves for it (with K = N - i nothing hides the transfers). The devices work in step but for the slots by which
the warm-up lets them run ahead of each other, K - N + 1: for that number only the load of a device with both groups
counts. The part of a group's all-reduce beyond the other group's slots, and the optimizer steps, come on top; shared
links and channels bound the whole. With one group there is no other to overlap with: as gradients have one buffer, the
next backward waits for the all-reduce of the last.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from penstock.solvers.costs.buckets import stage_all_reduce_ns
from penstock.solvers.costs.collectives import ring_resources
from penstock.solvers.costs.stage import StageCosts, stage_costs, update_ns
from penstock.solvers.costs.tables.device_line import Affine, affine_transfer
from penstock.solvers.costs.transfer import boundary_bytes, channels
from penstock.solvers.grid.places import Places
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.planners.wpipe.shape import Shape

Loads = dict[int, int]
"""A dict from a link of a shared network, or a private channel, to its time."""


class Links:
    """The transfers between neighbouring places of a layout, and the rings of its replicas; each is computed once."""

    def __init__(self, problem: Problem, places: Places) -> None:
        self._problem = problem
        self._places = places
        self._ways: dict[tuple[int, int], Affine | None] = {}
        self._rings: dict[int, tuple[int, ...]] = {}

    def way(self, source: int, target: int) -> Affine | None:
        """Return the costs of a transfer between two places; None where nothing has to travel."""
        if (source, target) not in self._ways:
            sender, receiver = self._places[source], self._places[target]
            nothing = sender == receiver or not self._problem.forward_bytes.any()
            cost = None if nothing else affine_transfer(self._problem, sender, receiver, len(sender))
            self._ways[source, target] = cost
        return self._ways[source, target]

    def ring(self, place: int) -> tuple[int, ...]:
        """Return the resources that the all-reduces of a place use."""
        if place not in self._rings:
            shared = self._problem.rules.shared
            self._rings[place] = ring_resources(self._problem, self._places[place]) if shared else ()
        return self._rings[place]


def period_ns(problem: Problem, shape: Shape, allocation: Allocation, links: Links) -> int:
    """Return the time per global batch, by the model."""
    number = shape.batch.num_micro_batches
    costs = [stage_costs(problem, stage, shape.batch.most_rows) for stage in allocation.stages]
    loads: Loads = defaultdict(int)
    hops = _hops(problem, shape, allocation, links, loads)
    slots = [
        _slot_ns(shape, costs[low : low + shape.depth], hops[low : low + shape.depth - 1])
        for low in range(0, len(costs), shape.depth)
    ]
    loaded = max(sum(cost.passes_ns for cost in costs[place :: shape.depth]) for place in range(shape.depth))
    total = (number - shape.slack) * sum(slots) + shape.slack * loaded
    for group, slot_ns in enumerate(slots):
        hidden_by = slots[1 - group] if shape.groups == 2 else slot_ns
        total += _after_slots_ns(problem, shape, allocation, group, hidden_by, links, loads)
    return max(total, max(loads.values(), default=0))


def _hops(problem: Problem, shape: Shape, allocation: Allocation, links: Links, loads: Loads) -> list[int]:
    """Return the transfers of a micro-batch to each next stage and back, together.

    Each adds M times its duration to the loads of the resources on its way.
    """
    rows, number = shape.batch.most_rows, shape.batch.num_micro_batches
    hops = []
    for s, stage in enumerate(allocation.stages[:-1]):
        here, there = s % shape.depth, (s + 1) % shape.depth
        both = 0
        for direction, way in enumerate((links.way(here, there), links.way(there, here))):
            if way is None:
                continue
            sent_ns = way.time_ns(boundary_bytes(problem, stage.last, rows, direction))
            both += sent_ns
            for resource in channels(problem.rules, way.resources, s, direction):
                loads[resource] += number * sent_ns
        hops.append(both)
    return hops


def _slot_ns(shape: Shape, costs: list[StageCosts], hops: list[int]) -> int:
    """Return the time of the slowest device, or of the slowest cycle between two devices."""
    alone = max(cost.passes_ns for cost in costs)
    work = prefix_sums([cost.forward_ns + cost.backward_ns for cost in costs])
    way = prefix_sums(hops)
    ahead = np.asarray([shape.ahead(i) for i in range(shape.depth)])
    around = work[None, 1:] - work[:-1, None] + way[None, :] - way[:, None]
    slots = np.maximum(ahead[:, None] - ahead[None, :] + 1, 1)
    return max(alone, int(np.triu(-(-around // slots)).max()))


def _after_slots_ns(
    problem: Problem,
    shape: Shape,
    allocation: Allocation,
    group: int,
    hidden_by_ns: int,
    links: Links,
    loads: Loads,
) -> int:
    """Return the time that all-reduce and step of a group add to a period.

    With two groups M - K + 1 slots of the other come before the next gradients. With one group it is the forward
    between two backwards, and the last backward itself, which readies the buckets.
    """
    longest = 0
    number = shape.batch.num_micro_batches
    for place in range(shape.depth):
        stage = allocation.stages[group * shape.depth + place]
        reduce_ns = stage_all_reduce_ns(problem, stage)
        if reduce_ns:
            for resource in links.ring(place):
                loads[resource] += reduce_ns
        free_slots = max(0, number - shape.ahead(place) + 1) if shape.groups == 2 else 1
        longest = max(longest, update_ns(problem, stage) + max(0, reduce_ns - free_slots * hidden_by_ns))
    return longest
