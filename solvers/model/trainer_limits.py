"""The limits of another trainer, for planners: its orders, its recomputation, its possible cuts.

All of these trainers replicate every stage equally, run one flushed pipeline of equal micro-batches, and number their
ranks stage after stage (Megatron's order tp-cp-ep-dp-pp, DeepSpeed's ``pipe``-``data``, torchtitan's mesh: the pipeline
is outermost). ``penstock.layouts.limits`` has the table, and checks plans independently of this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from penstock.solvers.model.allocation import Allocation, Stage

Method = Literal["none", "block", "uniform", "every"]
AT_ONCE = 8
"""Layers recomputed together: all numbers up to this are tried, then its doubles."""


class Recomputing(NamedTuple):
    """A way of recomputing stages: ``block``: the first n layers, each by itself; ``uniform``: all layers, n at once.

    ``every``: the layers of a stage whose numbers, from 1 on, n divides, each by itself.
    """

    method: Method = "none"
    layers: int = 0


class Span(NamedTuple):
    """Layers ``first`` to ``last``, both included."""

    first: int
    last: int


def misnumbered(nodes: Sequence[Sequence[int]], stages: Sequence[Stage]) -> tuple[int, ...] | None:
    """Return the devices of the first node where they are not in rank order: stage after stage, node after node.

    That order takes the first devices of each of the cluster's ``nodes``, all together. Return None if it is kept.
    Stages of the same devices count once.
    """
    used = [device for devices in dict.fromkeys(stage.devices for stage in stages) for device in devices]
    node_of = {device: number for number, devices in enumerate(nodes) for device in devices}
    seen: set[int] = set()
    for node, group in groupby(used, key=node_of.__getitem__):
        devices = tuple(group)
        if node in seen or devices != tuple(nodes[node][: len(devices)]):
            return devices
        seen.add(node)
    return None


@dataclass(frozen=True, slots=True)
class Within:
    """The limits of one trainer for one model.

    ``schedules``: by our names. ``rounds``: whether interleaved 1F1B takes its micro-batches in the largest number of
    equal groups that fill the ranks, else in groups as large as the number of ranks. ``recompute``: supported ways in
    addition to none. ``at_once``: whether several layers may be recomputed together. ``span``: the layers that may
    recompute at all. ``cuts`` (L - 1): where stages may end.
    """

    trainer: str
    schedules: tuple[str, ...]
    rounds: bool
    recompute: tuple[Method, ...]
    at_once: bool
    span: Span
    cuts: tuple[bool, ...]

    def runs(self, ranks: int) -> tuple[str, ...]:
        """Return the schedules on ``ranks`` ranks: without a pipeline micro-batches run one by one, as under 1F1B."""
        return tuple(name for name in self.schedules if ranks > 1 or name == "early-backward")

    def group(self, ranks: int, number: int) -> int | None:
        """Return interleaved 1F1B's default group size in micro-batches; None if it refuses this number of them."""
        rounds = max(1, number // ranks)
        if self.rounds:
            return number // rounds if number % rounds == 0 else None
        return ranks if number % ranks == 0 else None

    def keeps(self, allocation: Allocation, schedule: str, global_batch_size: int) -> bool:
        """Return whether a plan has the shape of this trainer's plans, which bounds on them assume.

        One pipeline of equally replicated stages that end where the trainer may cut and recompute in one of its ways
        or the same modules of every layer, micro-batches of one size that replicas share evenly, one of its schedules.
        ``penstock.layouts.limits.faults`` checks placement and the orders of operations as well.
        """
        stages = allocation.stages
        rows, uneven = divmod(global_batch_size, allocation.num_micro_batches)
        equal = len({stage.replicas for stage in stages}) == 1 and not uneven and rows % stages[0].replicas == 0
        by_rows = all(stage.dispatch == "rows" or stage.replicas == 1 for stage in stages)
        expressible = schedule in self.schedules and all(self.cuts[stage.last] for stage in stages[:-1])
        return (
            len(allocation.pipelines) == 1
            and equal
            and by_rows
            and expressible
            and len({stage.modules for stage in stages}) == 1
            and not (stages[0].modules and any(stage.recompute for stage in stages))
            and any(all(self.segments(stage, how) == stage.recompute for stage in stages) for how in self.ways(stages))
        )

    def segments(self, stage: Stage, how: Recomputing) -> tuple[tuple[int, int], ...]:
        """Return the segments that a stage recomputes."""
        low, high = max(stage.first, self.span.first), min(stage.last, self.span.last)
        if how.method == "none":
            return ()
        if how.method == "block":
            return tuple((layer, layer) for layer in range(low, min(high + 1, low + how.layers)))
        if how.method == "every":
            return tuple((layer, layer) for layer in range(low + how.layers - 1, high + 1, how.layers))
        return tuple((layer, min(layer + how.layers - 1, high)) for layer in range(low, high + 1, how.layers))

    def ways(self, stages: Sequence[Stage]) -> Iterator[Recomputing]:
        """Return the ways to recompute, from nothing to everything, the cheapest first."""
        most = max(min(s.last, self.span.last) - max(s.first, self.span.first) + 1 for s in stages)
        yield Recomputing()
        if "block" in self.recompute:
            yield from (Recomputing("block", number) for number in range(1, most))
        together = [n for n in range(1, most + 1) if n <= AT_ONCE or n & (n - 1) == 0 or n == most]
        yield from (Recomputing("uniform", number) for number in (together if self.at_once else together[:1]))
