"""Several parts of the model on each device: in a loop (interleaved 1F1B), in a V (zero bubble), both ways (Chimera).

A device's work is the sum of its rank's parts, so the largest sum is made small: beginning with even parts, cuts move
as long as that makes the busiest rank less busy. Ties: fewer nanoseconds on the ranks as busy as the busiest, the first
cut, towards the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.grid.block_partition import smallest_largest
from penstock.solvers.grid.pinned_cuts import keeping_pins
from penstock.solvers.grid.places import Places
from penstock.solvers.model.allocation import Allocation, Pipeline, single_pipeline, stages_on
from penstock.solvers.model.micro_batches import Batch, largest_slice
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Reason, Refusal

Direction = Literal["loop", "v", "both_ways"]
"""Orders of parts over the ranks: in a loop, down and back up, or down and up in pipelines side by side."""


class Turns(NamedTuple):
    """A way to give ranks parts; ``number``: parts on each rank, or of Chimera the pipelines in each direction."""

    direction: Direction
    number: int


LINE = Turns("loop", 1)
"""One part on each rank."""
IN_A_V = Turns("v", 2)
"""Parts r and 2 p - 1 - r on rank r of p."""


def laid_out(problem: Problem, batch: Batch, places: Places, turns: Turns) -> Allocation:
    """Return the parts of the model on ranks in turn. Raises ``UnsupportedRequest`` for a short chain."""
    if turns.direction == "both_ways":
        return both_ways(problem, batch, places, turns.number)
    ranks = list(range(len(places)))
    return in_turn(problem, batch, places, ranks + ranks[::-1] if turns.direction == "v" else ranks * turns.number)


def both_ways(problem: Problem, batch: Batch, places: Places, pairs: int) -> Allocation:
    """Return Chimera's pipelines: ``pairs`` down the D ranks, each D / pairs ranks further on, and as many back up.

    All are cut alike. The ranks that hold the same parts (``_from_turn``) form a class, and the classes' sums are made
    even; each pipeline takes the same number of micro-batches, or one more. Raises ``UnsupportedRequest`` for an odd
    number of ranks, a number that 2 pairs do not divide, fewer micro-batches than pipelines, a short chain, and where
    no cut keeps the pins.
    """
    depth, number = len(places), batch.num_micro_batches
    if depth % (2 * pairs) or number < 2 * pairs:
        raise UnsupportedRequest(
            f"{2 * pairs} pipelines, half in each direction, need at least {2 * pairs} micro-batches and a number of "
            f"ranks that {2 * pairs} divides; there are {number} micro-batches and {depth} ranks",
            remedy="an even number of ranks and pairs 1",
        )
    apart = depth // pairs
    alike = [[d for k in range(depth) if _from_turn(k, apart) == c for d in places[k]] for c in range(apart // 2)]
    loads = np.stack([_loads(problem, batch, tuple(devices), len(places[0])) for devices in alike])
    bounds = even_sums(loads, _cuttable(problem, depth), [_from_turn(s, apart) for s in range(depth)])
    pipelines, first = [], 0
    for q in range(2 * pairs):
        count = number // (2 * pairs) + (q < number % (2 * pairs))
        ranks = range(depth) if q % 2 == 0 else range(depth - 1, -1, -1)
        of_stages = [places[(rank + q // 2 * apart) % depth] for rank in ranks]
        pipelines.append(Pipeline(stages_on(of_stages, bounds), (first, first + count - 1)))
        first += count
    allocation = Allocation(tuple(pipelines), number)
    if not problem.pins:
        return allocation
    return keeping_pins(problem, allocation, [_from_turn(s, apart) for s in range(depth)], 2 * pairs * len(places[0]))


def _from_turn(place: int, apart: int) -> int:
    """Return a number that ranks share with their stages: rank r holds r, D - 1 - r, and stages D / pairs further."""
    return min(place % apart, apart - 1 - place % apart)


def in_turn(problem: Problem, batch: Batch, places: Places, rank_of: Sequence[int]) -> Allocation:
    """Return one part on each rank of ``rank_of``, in the order of the model, on devices that keep the pins.

    With a target, which orders the ranks itself, devices stay where they are. Raises ``UnsupportedRequest`` where no
    cut keeps the pins, and for a short chain.
    """
    loads = np.stack([_loads(problem, batch, devices, len(devices)) for devices in places])
    bounds = even_sums(loads, _cuttable(problem, len(rank_of)), rank_of)
    allocation = single_pipeline(stages_on([places[r] for r in rank_of], bounds), batch.num_micro_batches)
    if not problem.pins or problem.within is not None:
        return allocation
    return keeping_pins(problem, allocation, rank_of, len(places[0]))


def _cuttable(problem: Problem, parts: int) -> np.ndarray:
    """Return where the chain may be cut into ``parts`` parts. Raises ``UnsupportedRequest`` for a short chain."""
    blocks = problem.num_blocks
    if parts > blocks:
        raise Refusal(
            Reason("{0} parts need {0} separable blocks of layers; there are {1}", (parts, blocks)),
            remedy="fewer devices in a pipeline, or fewer parts on each",
        )
    return problem.cuttable


def even_sums(loads: np.ndarray, cuttable: np.ndarray, rank_of: Sequence[int]) -> list[int]:
    """Cut layers into contiguous parts, part k on rank ``rank_of[k]``, so that the busiest rank's sum is small.

    Returns the bounds. ``loads`` (p, L + 1): prefix sums of the layers' times on each rank. Each step moves one cut to
    the next place where a part may end; O(steps × parts), and every step lowers the pair (largest sum, sum of squares).
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
    """Return the cut, its direction and the new sums that help most; None where nothing helps."""
    best, step = _score(sums), None
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
                best, step = _score(changed), (k, way, changed)
    return step


def _score(sums: list[int]) -> tuple[int, int]:
    return max(sums), sum(each * each for each in sums)


def _loads(problem: Problem, batch: Batch, devices: tuple[int, ...], replicas: int) -> np.ndarray:
    """Return prefix sums of a layer's time on the slowest of the devices, as one of ``replicas`` replicas; (L + 1,)."""
    rows = largest_slice(batch.most_rows, replicas)
    each = [problem.costs(kind, rows) for kind in sorted({problem.devices[d].kind for d in devices})]
    return np.asarray(np.max([costs.passes_ns for costs in each], axis=0), dtype=np.int64)
