"""The traffic between devices in one global batch: activations, gradients, and the rings of all-reduces."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from math import lcm
from typing import NamedTuple

from penstock.solvers.costs.reductions import group_buckets, reduction_groups
from penstock.solvers.costs.ties import tied_sums
from penstock.solvers.costs.transfer import message_bytes, row_pairs
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.update_rules import UpdateRule, micro_batches_per_update

SORTS = ("activations", "gradients", "all-reduce")
Pair = tuple[int, int]


class Flow(NamedTuple):
    """The traffic from one device to another: bytes per global batch by sort, as in ``SORTS``.

    ``utilisation``: the share of the global batch's time in which the busiest link of its route carries data.
    """

    source: int
    target: int
    sizes: tuple[int, int, int]
    utilisation: float

    @property
    def bytes(self) -> int:
        """Return the bytes of all sorts together."""
        return sum(self.sizes)


def traffic(
    problem: Problem, allocation: Allocation, time_ns: int, rule: UpdateRule = "synchronous"
) -> tuple[Flow, ...]:
    """Return the flows of a plan whose global batch takes ``time_ns``, the largest first, without unreachable pairs."""
    sizes: dict[Pair, Counter[int]] = defaultdict(Counter)
    for s in range(len(allocation.stages)):
        for direction, other in ((0, allocation.next(s)), (1, allocation.previous(s))):
            if other is not None:
                _add_messages(problem, allocation, s, other, direction, sizes)
    for group in reduction_groups(allocation):
        moved = sum(bucket.bytes for bucket in group_buckets(problem, group))
        moved *= _updates(allocation, rule, group.stages[0])
        count = len(group.devices)
        for u, v, parts in problem.network.ring(group.devices) if count > 1 else ():
            sizes[u, v][2] += 2 * (count - 1) * moved // (count * parts)
    for tie in tied_sums(problem, allocation, rule):
        count = len(tie.devices)
        for u, v, parts in problem.network.ring(tie.devices) if count > 1 else ():
            sizes[u, v][2] += 2 * (count - 1) * tie.bytes // (count * parts)
    load: Counter[int] = Counter()
    ways = {pair: _way(problem, pair) for pair in sizes}
    for pair, kinds in sizes.items():
        total = kinds.total()
        for resource in ways[pair]:
            load[resource] += total
    rates = problem.network.resources
    busy = {r: size / rates[r].bandwidth_bytes_per_s * 1e9 / time_ns for r, size in load.items()}
    flows = [
        Flow(*pair, (kinds[0], kinds[1], kinds[2]), max((busy[r] for r in ways[pair]), default=0.0))
        for pair, kinds in sizes.items()
        if kinds.total()
    ]
    return tuple(sorted(flows, key=lambda flow: (-flow.bytes, flow.source, flow.target)))


def _updates(allocation: Allocation, rule: UpdateRule, s: int) -> int:
    """Return the largest number of optimizer steps of a stage in a global batch."""
    return -(
        -allocation.num_micro_batches
        // micro_batches_per_update(rule, allocation.stages[s], allocation.num_micro_batches)
    )


def _way(problem: Problem, pair: Pair) -> tuple[int, ...]:
    route = problem.network.route(*pair)
    return route.resources if route else ()


def _add_messages(
    problem: Problem, allocation: Allocation, s: int, other: int, direction: int, sizes: dict[Pair, Counter[int]]
) -> None:
    """Add the messages of all micro-batches from a stage to its neighbour, from replica to replica."""
    source, target = allocation.stages[s], allocation.stages[other]
    cut = source.last if direction == 0 else target.last
    larger = row_classes(problem.global_batch_size, allocation.num_micro_batches)
    period = lcm(_turns(source), _turns(target))
    counted = Counter((m % period, int(m >= larger[0][1])) for m in allocation.micro_batches(s))
    for (turn, late), count in counted.items():
        rows = larger[late][0]
        for u, v, part in row_pairs(_holder(source, turn), _holder(target, turn), rows):
            if u != v:
                size = message_bytes(problem, cut, part, direction, coded=source.coded[1 - direction])
                sizes[u, v][direction] += size * count


def _turns(stage: Stage) -> int:
    return stage.replicas if stage.dispatch == "round_robin" else 1


def _holder(stage: Stage, micro_batch: int) -> Stage:
    """Return the stage as one micro-batch uses it: of replicas that take turns, the one whose turn it is."""
    if stage.dispatch == "rows":
        return stage
    return replace(stage, devices=(stage.devices[micro_batch % stage.replicas],))
