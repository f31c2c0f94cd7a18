"""The all-reduces after the last backwards, for a job shop (``solvers.costs.reductions``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.schemas.program import BACKWARD, WEIGHT
from penstock.solvers.costs.buckets import Bucket, exposed_ns, leads_ns
from penstock.solvers.improve.job_shop.shop import Operation, Shop


class BucketChain(NamedTuple):
    """A group's buckets.

    ``number`` is the first bucket's, over all buckets whose groups have the same lowest stage. For each row and stage
    of the group, ``ends`` has the operations that may be the last gradient, ``lead_ns`` how long before its end each
    bucket may be ready.
    """

    stages: tuple[int, ...]
    number: int
    buckets: tuple[Bucket, ...]
    ends: dict[tuple[int, int], list[Operation]]
    lead_ns: dict[tuple[int, int], list[int]]

    def exposed_ns(self, place: tuple[int, int]) -> int:
        """Return the rest of the reductions after the last gradient of a row and stage, if no link delays them."""
        return exposed_ns(self.buckets, self.lead_ns[place])


def chains(shop: Shop) -> list[BucketChain]:
    """Return the chains of buckets of all groups that reduce gradients."""
    result, numbers = [], Counter[int]()
    for group, buckets in shop.times.reductions:
        ends: dict[tuple[int, int], list[Operation]] = {}
        for each in shop.operations if buckets else ():
            if each.kind in (BACKWARD, WEIGHT) and each.stage in group.stages:
                ends.setdefault((each.row, each.stage), []).append(each)
        if buckets:
            leads = {place: _leads_ns(shop, last_operations, buckets) for place, last_operations in ends.items()}
            result.append(BucketChain(group.stages, numbers[group.stages[0]], buckets, ends, leads))
            numbers[group.stages[0]] += len(buckets)
    return result


def _leads_ns(shop: Shop, ends: list[Operation], buckets: Sequence[Bucket]) -> list[int]:
    """Return each bucket's largest lead over all sizes and kinds, because any of the operations may be the last."""
    stage, kinds = shop.allocation.stages[ends[0].stage], {each.kind for each in ends}
    ways = [way for way, kind in enumerate((BACKWARD, WEIGHT)) if kind in kinds]
    ready = [leads_ns(shop.problem, stage, rows, buckets) for rows, _count in shop.times.classes]
    return [max(lead[way] for lead in classes for way in ways) for classes in zip(*ready, strict=True)]
