"""Collectives as arrays: the ranks that take part in each bucket, each tie and the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import WITHIN_PASSES, Program, RankStage
from penstock.solvers.model.problem import prefix_sums


class Participants(NamedTuple):
    """The arrays of ``Wiring`` with these names."""

    sources: np.ndarray
    source_held: np.ndarray
    table: np.ndarray
    bounds: np.ndarray
    participants: np.ndarray
    participant_rank: np.ndarray


def participants_of(programs: Sequence[Program], replicas: Sequence[tuple[int, RankStage]]) -> Participants:
    """Return the participants: buckets in the order of the replicas, then each rank's ties, then each rank's norm.

    Raises InvalidPlan where the buckets of a rank do not cover each of its layers once, a group does not exist, or its
    ranks do not all have the same buckets in it.
    """
    groups, ties = programs[0].groups, programs[0].shared
    apart = programs[0].update_rule != "elastic_averaging" and programs[0].sharding not in WITHIN_PASSES
    of_rank: dict[int, list[int]] = {program.rank: [] for program in programs}
    for h, (rank, _) in enumerate(replicas):
        of_rank[rank].append(h)
    for program in programs:
        _check_cover(program)
    sources: list[list[int]] = []
    parties: dict[tuple[int, ...], list[int]] = {}
    ranks: list[int] = []
    for rank, one in replicas:
        for first, last, group in one.buckets:
            if group >= len(groups) or (group >= 0 and rank not in groups[group]):
                raise InvalidPlan(
                    f"rank {rank} reduces layers {first} to {last} in group {group}, but is not in this group"
                )
            if group >= 0 and apart:
                parties.setdefault((group, first, last), []).append(len(sources))
            holds = [h for h in of_rank[rank] if replicas[h][1].first <= last and first <= replicas[h][1].last]
            sources.append(holds)
            ranks.append(rank)
    for (group, first, last), members in parties.items():
        if sorted(ranks[participant] for participant in members) != list(groups[group]):
            raise InvalidPlan(f"not all ranks of group {group} have a bucket of layers {first} to {last}")
    for program in programs:
        for k, tie in enumerate(ties):
            if program.rank in groups[tie.group]:
                parties.setdefault((k,), []).append(len(ranks))
            ranks.append(program.rank)
    for program in programs:
        parties.setdefault((), []).append(len(ranks))
        ranks.append(program.rank)
    table = np.full(len(ranks), -1, dtype=np.int64)
    for number, members in enumerate(parties.values()):
        table[members] = number
    return Participants(
        sources=prefix_sums([len(each) for each in sources]),
        source_held=_ints([h for each in sources for h in each]),
        table=table,
        bounds=prefix_sums([len(members) for members in parties.values()]),
        participants=_ints([participant for members in parties.values() for participant in members]),
        participant_rank=_ints(ranks),
    )


def _check_cover(program: Program) -> None:
    layers = {n for one in program.stages for n in range(one.first, one.last + 1)}
    covered = [n for one in program.stages for first, last, _ in one.buckets for n in range(first, last + 1)]
    if sorted(covered) != sorted(layers):
        raise InvalidPlan(
            f"the buckets of rank {program.rank} ({program.device}) cover the layers {sorted(covered)}, but its stages "
            f"hold {sorted(layers)}; each layer has to be in one bucket"
        )


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)
