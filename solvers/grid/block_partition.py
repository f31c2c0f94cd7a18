"""GPipe's block partition: the contiguous partition whose largest block is smallest (ALGORITHMS 7.2).

Binary search on the largest block with a greedy test, which moves both ends to sums of blocks, O(S log L log total);
among the optima the lexicographically smallest cut vector. The largest block is at most the mean plus the largest
layer (Bárány and Grinberg).
By time on devices of several kinds each stage's time is for its device's kind: a dynamic program, O(S L^2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.tables.stage_table import static_sums
from penstock.solvers.grid.block_kernel import run_worker
from penstock.solvers.grid.places import side_by_side
from penstock.solvers.model.allocation import Allocation, single_pipeline, stages_on
from penstock.solvers.model.micro_batches import Batch, candidates
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.model.result import Reason, Refusal

By = Literal["time", "layers", "parameters"]


def block_partition(problem: Problem, batch: Batch, num_stages: int, *, by: By = "time") -> Allocation:
    """Return ``num_stages`` stages of nearly equal time, layers or parameters, one on each of the first devices.

    Raises ``UnsupportedRequest`` where the chain has fewer blocks than stages, or the cluster fewer devices.
    """
    blocks = problem.num_blocks
    if not 1 <= num_stages <= min(blocks, problem.num_devices):
        kind = "{0} stages need {0} devices and separable blocks of layers; there are {1} devices and {2} blocks"
        raise Refusal(
            Reason(kind, (num_stages, problem.num_devices, blocks)),
            remedy=f"between 1 and {min(blocks, problem.num_devices)} stages",
        )
    kinds = [problem.devices[d].kind for d in range(num_stages)]
    if by == "time" and len(set(kinds)) > 1:
        by_kind = smallest_largest_on([_layer_times(problem, batch, kind) for kind in kinds], problem.cuttable)
        assert by_kind is not None
        bounds = by_kind
    else:
        bounds = smallest_largest(_weights(problem, batch, by), num_stages, problem.cuttable)
    return single_pipeline(stages_on([(s,) for s in range(num_stages)], bounds), batch.num_micro_batches)


def thinnest(problem: Problem, width: int = 1) -> tuple[Allocation, ...]:
    """Return the plans that need least memory; if they do not fit, the judge computes the bytes that are missing.

    They have the most stages, of ``width`` replicas each, and the smallest micro-batches, and share parameters evenly,
    then time.
    """
    places = side_by_side(range(problem.num_devices), width)
    ways: tuple[By, ...] = ("parameters", "time")
    most = min(len(places), problem.num_blocks)
    smallest = [batch for batch in candidates(problem, (width,)) if batch.replicas_fed(problem.min_slice) >= width]
    shared = (block_partition(problem, batch, most, by=by) for batch in smallest[-1:] for by in ways)
    return tuple(
        each.having(replace(stage, devices=place) for stage, place in zip(each.stages, places, strict=False))
        for each in shared
    )


def smallest_largest(
    weights: Sequence[int] | np.ndarray, blocks: int, cuttable: Sequence[bool] | np.ndarray
) -> list[int]:
    """Cut elements into contiguous blocks, the largest as small as possible; return ``0 = c_0 < … < c_blocks = L``.

    ``cuttable[i]``: whether a block may end after element i. Ties go to the lexicographically smallest bounds.
    """
    prefix = prefix_sums(weights)
    places = [0, *(np.flatnonzero(np.asarray(cuttable)[: len(weights) - 1]) + 1).tolist(), len(weights)]
    load = prefix[places].tolist()
    mean, largest = -(-load[-1] // blocks), int(np.diff(load).max())
    low, high = max(mean, largest), min(mean + largest, load[-1])
    while low < high:
        middle = (low + high) // 2
        suffices, other = _filled(load, blocks, middle)
        low, high = (low, other) if suffices else (other, high)
    return [places[i] for i in _earliest(load, blocks, low)]


def smallest_largest_on(
    weights: Sequence[np.ndarray], cuttable: Sequence[bool] | np.ndarray, ends: Sequence[np.ndarray] = ()
) -> list[int] | None:
    """Return ``smallest_largest`` where block s counts with ``weights[s]``, (L,); None where no cut keeps the ends.

    ``ends[s][i]`` is the last bound of block s if it begins with element i. Without ``ends`` it ends anywhere.
    Ties: each bound from the last one on is the earliest that leaves the blocks before it their smallest largest.
    """
    marks = [tuple(row.tolist()) for row in weights]
    if ends:
        marks = [(*mark, *end.tolist()) for mark, end in zip(marks, ends, strict=True)]
    kinds = {mark: s for s, mark in enumerate(marks)}
    places = np.asarray([0, *(np.flatnonzero(np.asarray(cuttable)) + 1), len(weights[0])])
    times = []
    for s in kinds.values():
        load = np.concatenate(([0], np.cumsum(weights[s])))[places]
        time = load[None, :] - load[:, None]
        times.append(np.where(places[None, :] > ends[s][places][:, None], NEVER_NS, time) if ends else time)
    count, free = len(weights), np.zeros((len(kinds), len(places), len(places)), dtype=np.int64)
    hops = np.zeros((count + 1, len(places)), dtype=np.int64)
    rooms, flights = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    kind_of = np.asarray([list(kinds).index(mark) for mark in marks])
    value, before = run_worker(np.stack(times), free, free, kind_of, rooms, flights, hops)
    if value[-1, -1] >= NEVER_NS:
        return None
    bounds = [len(places) - 1]
    for s in range(count, 0, -1):
        bounds.append(int(before[s, bounds[-1]]))
    return [int(places[i]) for i in reversed(bounds)]


def moved_cuts(cuts: Sequence[int], most: int | None = None) -> Iterator[list[int]]:
    """Yield the cuts with a run of neighbours moved by one place, the short runs first, up to ``most`` of them long."""
    inner = len(cuts) - 2
    for length in range(1, (inner if most is None else min(most, inner)) + 1):
        for first in range(1, inner - length + 2):
            for way in (-1, 1):
                near = list(cuts)
                for at in range(first, first + length):
                    near[at] += way
                if all(a < b for a, b in pairwise(near)):
                    yield near


def _filled(load: list[int], blocks: int, most: int) -> tuple[bool, int]:
    """Return whether ``blocks`` blocks of at most ``most``, filled one by one, hold all elements.

    No element is larger than ``most``. The second value is the largest block, or, if they do not hold all, the least
    ``most`` that fills them differently.
    """
    start, largest, other = 0, 0, load[-1]
    for _block in range(blocks):
        end = bisect_right(load, load[start] + most)
        largest = max(largest, load[end - 1] - load[start])
        if end == len(load):
            return True, largest
        other = min(other, load[end] - load[start])
        start = end - 1
    return False, other


def _earliest(load: list[int], blocks: int, most: int) -> list[int]:
    """Return the lexicographically smallest bounds with ``blocks`` non-empty blocks of at most ``most``."""
    bounds = [len(load) - 1]
    for left in range(blocks - 1, -1, -1):
        end = bounds[-1]
        start = end - 1
        while start > left and load[end] - load[start - 1] <= most:
            start -= 1
        bounds.append(start if left else 0)
    return bounds[::-1]


def _weights(problem: Problem, batch: Batch, by: By) -> np.ndarray:
    if by == "layers":
        return np.ones(problem.num_layers, dtype=np.int64)
    if by == "parameters":
        return np.diff(static_sums(problem).parameters)
    return _layer_times(problem, batch, problem.devices[0].kind)


def _layer_times(problem: Problem, batch: Batch, kind: str) -> np.ndarray:
    return np.diff(problem.costs(kind, batch.most_rows).passes_ns)
