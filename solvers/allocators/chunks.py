"""Several parts of the model on each device: in a loop (interleaved 1F1B) or in a V (zero bubble).

What counts is the work of a device, so the largest sum of a rank's parts is made small: from parts that are even by
themselves, cuts move as long as that makes the busiest rank less busy. Ties: fewer nanoseconds on the ranks as busy
as the busiest, the first cut, towards the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.allocators.block_partition import smallest_largest
from penstock.solvers.batches import Batch
from penstock.solvers.batching import largest_slice
from penstock.solvers.problem import Problem

Places = Sequence[tuple[int, ...]]
"""The devices of each rank, in replica order."""


def in_a_loop(problem: Problem, batch: Batch, places: Places, chunks: int) -> Allocation:
    """Part c p + r on rank r of p, ``chunks`` parts on each. Raises ``UnsupportedRequest`` for a short chain."""
    return chunked(problem, batch, places, list(range(len(places))) * chunks)


def in_a_v(problem: Problem, batch: Batch, places: Places) -> Allocation:
    """Parts r and 2 p - 1 - r on rank r. Raises ``UnsupportedRequest`` for a chain of fewer than 2 p blocks."""
    ranks = list(range(len(places)))
    return chunked(problem, batch, places, ranks + ranks[::-1])


def chunked(problem: Problem, batch: Batch, places: Places, rank_of: Sequence[int]) -> Allocation:
    """One part on each rank of ``rank_of``, in the order of the model."""
    blocks = int(problem.cuttable.sum()) + 1
    if len(rank_of) > blocks:
        raise UnsupportedRequest(
            f"{len(rank_of)} parts need as many separable blocks of layers; there are {blocks}",
            remedy="fewer devices in a pipeline, or fewer parts on each",
        )
    loads = np.stack([_loads(problem, batch, devices) for devices in places])
    bounds = even_sums(loads, problem.cuttable, rank_of)
    stages = tuple(Stage(i, j - 1, places[r]) for r, (i, j) in zip(rank_of, pairwise(bounds), strict=True))
    return single_pipeline(stages, batch.num_micro_batches)


def even_sums(loads: np.ndarray, cuttable: np.ndarray, rank_of: Sequence[int]) -> list[int]:
    """Bounds of contiguous parts, part k on rank ``rank_of[k]``, that make the busiest rank's sum small.

    ``loads`` (p, L + 1): prefix sums of the layers' times on each rank. Each step moves one cut to the next place
    where a part may end; O(steps × parts), and every step lowers the pair (largest sum, sum of squares).
    """
    places = [0, *(int(i) + 1 for i in np.flatnonzero(cuttable)), loads.shape[1] - 1]
    begin = smallest_largest(np.diff(loads[0]), len(rank_of), cuttable)
    cuts = [places.index(bound) for bound in begin]
    times = loads[:, places].tolist()
    sums = [0] * len(loads)
    for k, r in enumerate(rank_of):
        sums[r] += times[r][cuts[k + 1]] - times[r][cuts[k]]
    while (step := _best_step(times, rank_of, cuts, sums)) is not None:
        k, sums = step[0], step[2]
        cuts[k] += step[1]
    return [places[cut] for cut in cuts]


def _best_step(
    times: list[list[int]], rank_of: Sequence[int], cuts: list[int], sums: list[int]
) -> tuple[int, int, list[int]] | None:
    """The cut, its direction and the new sums that help most; None where nothing helps."""
    best, found = _score(sums), None
    for k in range(1, len(cuts) - 1):
        before, after = rank_of[k - 1], rank_of[k]
        for way in (-1, 1):
            cut = cuts[k] + way
            if not cuts[k - 1] < cut < cuts[k + 1]:
                continue
            changed = sums.copy()
            changed[before] += times[before][cut] - times[before][cuts[k]]
            changed[after] -= times[after][cut] - times[after][cuts[k]]
            if _score(changed) < best:
                best, found = _score(changed), (k, way, changed)
    return found


def _score(sums: list[int]) -> tuple[int, int]:
    return max(sums), sum(each * each for each in sums)


def _loads(problem: Problem, batch: Batch, devices: tuple[int, ...]) -> np.ndarray:
    """Prefix sums of what a layer takes on the slowest of a rank's devices; (L + 1,)."""
    rows = largest_slice(batch.most_rows, len(devices))
    each = [problem.costs(kind, rows) for kind in sorted({problem.devices[d].kind for d in devices})]
    return np.asarray(np.max([costs.forward_ns + costs.backward_ns for costs in each], axis=0), dtype=np.int64)
