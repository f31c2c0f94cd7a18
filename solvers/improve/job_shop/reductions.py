"""The all-reduces after the last backwards, for a job shop (``solvers.costs.reductions``)."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from penstock.schemas.program import BACKWARD, WEIGHT
from penstock.solvers.costs.buckets import Bucket
from penstock.solvers.costs.stage import stage_rows
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
        after, longest = 0, 0
        for bucket, lead in zip(reversed(self.buckets), reversed(self.lead_ns[place]), strict=True):
            after += bucket.duration_ns
            longest = max(longest, after - lead)
        return longest


def chains(shop: Shop) -> list[BucketChain]:
    """Return every group that has something to reduce."""
    found, numbers = [], Counter[int]()
    for group, buckets in shop.times.chains:
        ends: dict[tuple[int, int], list[Operation]] = {}
        for each in shop.operations if buckets else ():
            if each.kind in (BACKWARD, WEIGHT) and each.stage in group.stages:
                ends.setdefault((each.row, each.stage), []).append(each)
        if buckets:
            leads = {place: [_lead_ns(shop, own, bucket) for bucket in buckets] for place, own in ends.items()}
            found.append(BucketChain(group.stages, numbers[group.stages[0]], buckets, ends, leads))
            numbers[group.stages[0]] += len(buckets)
    return found


def _lead_ns(shop: Shop, ends: list[Operation], bucket: Bucket) -> int:
    """Return the largest lead over all sizes and kinds, because any of the operations may be the last."""
    if not shop.problem.rules.overlap_all_reduce:
        return 0
    stage, kinds = shop.allocation.stages[ends[0].stage], {each.kind for each in ends}
    longest = 0
    for rows, _count in shop.times.classes:
        costs = shop.problem.costs(shop.problem.devices[stage.devices[0]].kind, stage_rows(stage, rows))
        for kind, sums in ((BACKWARD, costs.backward_ns), (WEIGHT, costs.weight_ns)):
            if kind in kinds:
                longest = max(longest, int(sums[bucket.first] - sums[stage.first]))
    return longest
