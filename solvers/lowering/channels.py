"""The channels of each rank: its exchanges with each peer.

Replicas i of a stage and j of the next exchange the rows that both hold (DAPPLE, section V-B2: split and concatenate);
under round-robin dispatch, the rows of the micro-batches that both take. A direction in which a boundary has no bytes
has no channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import CODECS, Channel
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import slice_bounds
from penstock.solvers.model.problem import Problem

TENSORS_PER_CUT = 64
"""The least number of tensors for which a channel reserves tags; more where the profile has more."""

Rows = tuple[tuple[int, int], ...]


def channels(
    problem: Problem, allocation: Allocation, ranks: Sequence[Sequence[int]], classes: Rows, batches: int
) -> dict[int, list[Channel]]:
    """Return the channels of each rank, by edge, direction, replicas.

    Both ends of an exchange within a rank are neighbours. ``ranks``: each stage's replicas' ranks. Raises
    UnsupportedRequest for more tags than 2^31.
    """
    of_rank: dict[int, list[Channel]] = {rank: [] for replicas in ranks for rank in replicas}
    used: dict[tuple[int, int], int] = {}
    for low in range(len(allocation.stages)):
        high = allocation.next(low)
        if high is None:
            continue
        below, above = allocation.stages[low], allocation.stages[high]
        span = allocation.micro_batches(low)
        turns = _pairs(below, above, span.start, (batches - 1) * allocation.num_micro_batches + len(span), classes)
        pairs = [(i, j, *rows) for i, j in turns if (rows := _common(below, i, above, j, classes))]
        for kind, sizes in (("F", problem.forward_bytes), ("B", problem.backward_bytes)):
            if sizes[below.last] == 0:
                continue
            tensors = max(TENSORS_PER_CUT, len(problem.boundary_tensors[below.last]))
            for i, j, rows_below, rows_above in pairs:
                a, b = ranks[low][i], ranks[high][j]
                ends = [(a, low, high, b, rows_below), (b, high, low, a, rows_above)]
                if kind == "B":
                    ends.reverse()
                key = (ends[0][0], ends[1][0])
                tag = _tag(used, key, batches * allocation.num_micro_batches * tensors, below.coded[1])
                codec = CODECS[0] if below.coded[1] else None
                for rank, stage, peer_stage, peer, mine in ends:
                    of_rank[rank].append(
                        Channel("F" if kind == "F" else "B", stage, peer_stage, peer, mine, tag, codec)
                    )
    return of_rank


def slices(stage: Stage, replica: int, classes: Rows) -> Rows:
    """Return the rows of a micro-batch of each class that a replica computes."""
    if stage.dispatch == "round_robin":
        return tuple((0, rows) for rows, _ in classes)
    return tuple(slice_bounds(rows, stage.replicas, replica) for rows, _ in classes)


def _tag(used: dict[tuple[int, int], int], pair: tuple[int, int], width: int, coded: bool) -> int:
    """Return the first tag of a channel: tags are unique among the messages from one rank to another; 0 is not used.

    A codec takes the same number again, for full tensors that follow where one cannot be encoded.
    """
    tag = used.get(pair, 1)
    used[pair] = tag + width
    if tag + width > (2**30 if coded else 2**31):
        raise UnsupportedRequest(
            f"ranks {pair[0]} and {pair[1]} exchange more messages in a step than there are tags (2^31)",
            remedy="fewer micro-batches, or fewer global batches at a time",
        )
    return tag


def _pairs(below: Stage, above: Stage, first: int, turns: int, classes: Rows) -> list[tuple[int, int]]:
    """Return the pairs of replicas that may exchange rows; if both take turns, pairs with a common micro-batch."""
    if below.dispatch == above.dispatch == "round_robin":
        turns = min(turns, lcm(below.replicas, above.replicas))
        return sorted({(m % below.replicas, m % above.replicas) for m in range(first, first + turns)})
    if "round_robin" in (below.dispatch, above.dispatch):
        return [(i, j) for i in range(below.replicas) for j in range(above.replicas)]
    met: set[tuple[int, int]] = set()
    for rows, _ in classes:
        met.update(_overlapping(rows, below.replicas, above.replicas))
    return sorted(met)


def _overlapping(rows: int, below: int, above: int) -> Iterator[tuple[int, int]]:
    """Yield the overlapping slices of two partitions of the rows, in one walk along the cuts of both."""
    i = j = 0
    while i < below and j < above:
        (low, high), (other_low, other_high) = slice_bounds(rows, below, i), slice_bounds(rows, above, j)
        if max(low, other_low) < min(high, other_high):
            yield i, j
        i, j = i + (high <= other_high), j + (other_high <= high)


def _common(below: Stage, i: int, above: Stage, j: int, classes: Rows) -> tuple[Rows, Rows] | None:
    """Return the rows that replicas i and j both hold, relative to each one's slice; None when no class has any."""
    mine, theirs = [], []
    for (low, high), (other_low, other_high) in zip(slices(below, i, classes), slices(above, j, classes), strict=True):
        start, end = max(low, other_low), min(high, other_high)
        mine.append((start - low, end - low) if start < end else (0, 0))
        theirs.append((start - other_low, end - other_low) if start < end else (0, 0))
    if not any(end for _, end in mine):
        return None
    return tuple(mine), tuple(theirs)
