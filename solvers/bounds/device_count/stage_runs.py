"""Lower bounds on what a stage costs: runs of layers on a number of replicas, for one number of micro-batches.

Numbers of replicas with equally large slices count as the fewest of them. Times are those of the quickest kind of
device, memory is that of the largest device. A stage recomputes whole or not at all; its recomputation, which may run
while a gradient is awaited, counts as work but not as part of a micro-batch's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.infinity import UNLIMITED
from penstock.solvers.costs.memory import free_bytes, training_bytes
from penstock.solvers.costs.tables.stage_table import crossing_bytes, layer_sums, prefix_sums, static_sums
from penstock.solvers.model.micro_batches import Batch, row_classes
from penstock.solvers.model.problem import Problem


class Runs(NamedTuple):
    """Runs of up to W layers on ``replicas``, arrays (L, W): row i, column n - 1 is the run of n layers from i on.

    ``way_ns``: a micro-batch's round trip; ``work_ns``: the work of a step; ``again_ns``: one recomputation; ``flying``
    and ``flying_again``: the most micro-batches in flight without and with recomputation, 0 where none can be.
    """

    replicas: int
    way_ns: np.ndarray
    work_ns: np.ndarray
    again_ns: np.ndarray
    flying: np.ndarray
    flying_again: np.ndarray


def replica_numbers(problem: Problem, batch: Batch) -> list[int]:
    """Return the fewest replicas for each size of the slices, over every size of micro-batches."""
    counts = np.arange(1, min(problem.num_devices, batch.most_rows) + 1)
    found: set[int] = set()
    for rows in {batch.most_rows, batch.least_rows}:
        _slices, first = np.unique(-(-rows // counts), return_index=True)
        found.update(counts[first].tolist())
    return sorted(found)


def runs_within(problem: Problem, batch: Batch, replicas: int, most: int, time_ns: int) -> Runs:
    """Return all runs whose work per step takes less than ``time_ns``; longer ones hold no micro-batch in the tables.

    ``most``: the most replicas that may share optimizer states, among those with slices of the same size.
    """
    classes = row_classes(problem.global_batch_size, batch.num_micro_batches)
    slices = [-(-rows // replicas) for rows, _count in classes]
    counts = [count for _rows, count in classes]
    least = [layer_sums(problem, sorted({device.kind for device in problem.devices}), rows, "down") for rows in slices]
    forward, backward = [np.diff(each.forward_ns) for each in least], [np.diff(each.backward_ns) for each in least]
    way = prefix_sums(np.min([f + b for f, b in zip(forward, backward, strict=True)], axis=0))
    work = prefix_sums(_weighted([f + b for f, b in zip(forward, backward, strict=True)], counts))
    again = prefix_sums(_weighted(forward, counts))
    width = _width(work, time_ns)
    starts = np.arange(problem.num_layers)[:, None]
    ends = starts + np.arange(1, width + 1)
    inside = ends <= problem.num_layers
    ends = np.minimum(ends, problem.num_layers)
    allowed = inside & _ends_at_cut(problem, ends) & _begins_at_cut(problem)[:, None]
    stash = least[slices.index(min(slices))].kept_bytes
    room = _room(problem, most, starts, ends)
    inputs = crossing_bytes(problem, 0, min(slices))[:-1, None]
    taken = inputs * problem.memory.count_buffers
    kept = stash[ends] - stash[starts]
    gradients = prefix_sums(np.max(backward, axis=0))
    rebuilt = np.where(gradients[ends] > gradients[starts], kept, 0)
    plain, recomputed = _fitting(room, kept + taken), _fitting(room - rebuilt, inputs)
    none = np.zeros_like(plain)
    return Runs(
        replicas,
        way[ends] - way[starts],
        work[ends] - work[starts],
        again[ends] - again[starts],
        np.where(allowed & (problem.recompute != "always"), plain, none),
        np.where(allowed & (problem.recompute != "never"), recomputed, none),
    )


def _weighted(values: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    return np.asarray(sum(each * count for each, count in zip(values, counts, strict=True)))


def _width(work: np.ndarray, time_ns: int) -> int:
    stops = np.searchsorted(work, work[:-1] + time_ns, side="left") - 1
    return max(1, int((np.minimum(stops, len(work) - 1) - np.arange(len(work) - 1)).max()))


def _ends_at_cut(problem: Problem, ends: np.ndarray) -> np.ndarray:
    return np.asarray(np.append(problem.cuttable, True)[ends - 1])


def _begins_at_cut(problem: Problem) -> np.ndarray:
    return np.concatenate(([True], problem.cuttable))


def _room(problem: Problem, replicas: int, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the bytes left after parameters, gradients and optimizer states on the device with the most memory."""
    weights = static_sums(problem)
    held = (weights.parameters, weights.trainable, weights.owned)
    parameters, trainable, owned = (each[ends] - each[starts] for each in held)
    gradients, states = training_bytes(problem, trainable, owned, replicas)
    largest = max(free_bytes(problem, (d,)) for d in range(problem.num_devices))
    return np.asarray(largest - parameters - gradients - states)


def _fitting(room: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Return the number of micro-batches of ``each`` bytes that fit."""
    number = np.where(each > 0, room // np.maximum(1, each), UNLIMITED)
    return np.asarray(np.where(room >= 0, np.minimum(number, UNLIMITED), 0))
