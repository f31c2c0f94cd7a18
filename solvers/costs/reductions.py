"""The stages that reduce their gradients together, and the chains of buckets in which they do so (ALGORITHMS 1.6).

Layers are cut at every stage boundary of every pipeline: a *group* is a run of layers that one stage of each pipeline
holds, on all their devices, each once. With one pipeline the groups are its stages. A group's buckets form a *chain*;
a stage that accumulates ``every`` micro-batches before it steps goes through its chain once a *round*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.buckets import Bucket, buckets, leads_ns
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import Problem, prefix_sums


class ReductionGroup(NamedTuple):
    """Layers ``first`` to ``last``, the stages that hold them (one of each pipeline), and all their devices."""

    first: int
    last: int
    stages: tuple[int, ...]
    devices: tuple[int, ...]


@Fields.register
class Chains(NamedTuple):
    """Arrays for kernels; G chains of C buckets together, M memberships of stages in groups, R rounds of all chains.

    Buckets of a round have the numbers ``start[g]`` to ``start[g + 1]``; over all rounds bucket k of round t of a
    chain is number ``run_start[g] + t n + k``, where n is its number of buckets. Stage s is in the groups
    ``member_group[member_start[s]:member_start[s + 1]]``; ``member_lead`` is the position of the leads of a
    membership's first bucket: four for each bucket, after a B (two row classes) or a W (two).
    """

    stage: np.ndarray
    start: np.ndarray
    rounds: np.ndarray
    round_start: np.ndarray
    run_start: np.ndarray
    bucket_ns: np.ndarray
    member_start: np.ndarray
    member_group: np.ndarray
    member_lead: np.ndarray
    lead_ns: np.ndarray
    every: np.ndarray


class Reductions(NamedTuple):
    """All reductions of a run: bucket within its round, group, and the lowest stage and number that intervals use."""

    bucket: np.ndarray
    group: np.ndarray
    stage: np.ndarray
    number: np.ndarray


def reduction_groups(allocation: Allocation) -> tuple[ReductionGroup, ...]:
    """Return the groups, ordered by lowest stage and then from its last layers down."""
    begins = [[stage.first for stage in pipeline.stages] for pipeline in allocation.pipelines]
    cuts = sorted({first for each in begins for first in each})
    ends = [*cuts[1:], allocation.stages[-1].last + 1]
    below = [allocation.pipeline_of.index(p) - 1 for p in range(len(begins))]
    groups = []
    for first, stop in zip(cuts, ends, strict=True):
        stages = tuple(low + bisect_right(each, first) for low, each in zip(below, begins, strict=True))
        devices = tuple(dict.fromkeys(d for s in stages for d in allocation.stages[s].devices))
        groups.append(ReductionGroup(first, stop - 1, stages, devices))
    return tuple(sorted(groups, key=lambda group: (group.stages[0], -group.first)))


def group_buckets(problem: Problem, group: ReductionGroup) -> tuple[Bucket, ...]:
    """Return the group's buckets, last layers first."""
    return buckets(problem, Stage(group.first, group.last, group.devices))


def make_chains(
    problem: Problem,
    allocation: Allocation,
    reductions: Sequence[tuple[ReductionGroup, Sequence[Bucket]]],
    rows: Sequence[int],
    every: tuple[int, ...],
) -> Chains:
    """Return the chains of all groups with their buckets; ``rows``: of each row class."""
    groups, buckets_of = zip(*reductions, strict=True)
    sizes = [len(each) for each in buckets_of]
    rounds = [allocation.num_micro_batches // every[group.stages[0]] for group in groups]
    members: list[list[int]] = [[] for _ in allocation.stages]
    for g, group in enumerate(groups):
        for s in group.stages:
            members[s].append(g)
    places: list[int] = []
    leads: list[int] = []
    for s, groups_of in enumerate(members):
        for g in groups_of:
            places.append(len(leads) // 4)
            ready = [leads_ns(problem, allocation.stages[s], size, buckets_of[g]) for size in (rows[0], rows[-1])]
            leads += [each[way] for classes in zip(*ready, strict=True) for way in (0, 1) for each in classes]
    return Chains(
        stage=_ints([group.stages[0] for group in groups]),
        start=prefix_sums(sizes),
        rounds=_ints(rounds),
        round_start=prefix_sums(rounds),
        run_start=prefix_sums([size * count for size, count in zip(sizes, rounds, strict=True)]),
        bucket_ns=_ints([bucket.duration_ns for each in buckets_of for bucket in each]),
        member_start=prefix_sums([len(groups_of) for groups_of in members]),
        member_group=_ints([g for groups_of in members for g in groups_of]),
        member_lead=_ints(places),
        lead_ns=_ints(leads),
        every=_ints(list(every)),
    )


def all_reductions(chains: Chains) -> Reductions:
    """Return every reduction of a run, ordered by chain, round and bucket."""
    sizes = np.diff(chains.start)
    group = np.repeat(np.arange(len(sizes)), sizes * chains.rounds)
    within = np.arange(len(group)) - chains.run_start[group]
    of_stage = np.bincount(chains.stage, weights=sizes).astype(np.int64)
    first_of_stage = chains.start[np.searchsorted(chains.stage, chains.stage)]
    update_round, k = np.divmod(within, sizes[group])
    bucket = chains.start[group] + k
    stage = chains.stage[group]
    number = update_round * of_stage[stage] + bucket - first_of_stage[group]
    return Reductions(bucket, group, stage, number)


def _ints(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)
