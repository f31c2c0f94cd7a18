"""Groups of ranks that reduce, average or sum gradients together: buckets, their groups, and ties.

Layers are cut at every stage boundary of every pipeline, so that one set of ranks holds all layers of an interval
(HetPipe's workers have different partitions, Chimera's directions different devices); an interval's buckets are the
judge's. Under elastic averaging the shares of a device average all their layers. Groups are never shared by two
intervals, so that their collectives need no common order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.schemas.program import Shared
from penstock.solvers.costs.reductions import ReductionGroup, group_buckets, reduction_groups
from penstock.solvers.costs.ties import tied_stages
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem

Buckets = tuple[tuple[int, int, int], ...]


class Grouping(NamedTuple):
    """The groups' ranks by number, the ``buckets`` of each (stage, rank) that has some, and the ties (``shared``)."""

    groups: tuple[tuple[int, ...], ...]
    buckets: dict[tuple[int, int], Buckets]
    shared: tuple[Shared, ...]


def groups_of(problem: Problem, allocation: Allocation, ranks: Sequence[Sequence[int]], averaging: bool) -> Grouping:
    """Return all ranks' grouping; ``ranks``: each stage's replicas' ranks."""
    groups: list[tuple[int, ...]] = []
    buckets_of: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for interval in reduction_groups(allocation):
        together = tuple(sorted({rank for s in interval.stages for rank in ranks[s]}))
        number = -1
        if averaging or len(together) > 1 or problem.copies is not None:
            number = len(groups)
            groups.append(together)
        parts = [(interval.first, interval.last)] if averaging else _parts(problem, interval)
        for rank in together:
            owner = min(s for s in interval.stages if rank in ranks[s])
            buckets_of.setdefault((owner, rank), []).extend((first, last, number) for first, last in parts)
    shared = []
    for name, layers, _ in problem.shared_parameters:
        users = tied_stages(allocation, layers)
        if any(len(stages) > 1 for stages in users):
            shared.append(Shared(name, tuple(layers), len(groups)))
            groups.append(tuple(sorted({rank for stages in users for s in stages for rank in ranks[s]})))
    buckets = {key: tuple(sorted(intervals, reverse=True)) for key, intervals in buckets_of.items()}
    return Grouping(tuple(groups), buckets, tuple(shared))


def _parts(problem: Problem, interval: ReductionGroup) -> list[tuple[int, int]]:
    """Return the judge's buckets, extended to all layers: the model may have parameters that the profile lacks."""
    parts = list(dict.fromkeys((each.first, each.last) for each in group_buckets(problem, interval)))
    parts = parts or [(interval.first, interval.last)]
    parts[-1] = interval.first, parts[-1][1]
    return parts
