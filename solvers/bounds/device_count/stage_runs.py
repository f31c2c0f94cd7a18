"""What a stage costs at least: runs of layers on a number of replicas, for one number of micro-batches.

Numbers of replicas with equally large slices count as the fewest of them. Times are of the quickest kind of device,
memory is that of the largest device. A stage recomputes whole or not at all; its recomputation, which may run while a
gradient is awaited, is work but no part of a micro-batch's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.slices import row_classes

UNLIMITED = 2**40
"""Micro-batches in flight where they take no memory."""


class Runs(NamedTuple):
    """Runs of up to W layers on ``replicas``, (L, W): row i, column n - 1 stands for n layers from i on.

    ``way_ns`` of a micro-batch there and back, ``work_ns`` of a step, and ``again_ns`` of its recomputation; ``flying``
    and ``flying_again``: most micro-batches in flight without and with recomputation, 0 where there can be none.
    """

    replicas: int
    way_ns: np.ndarray
    work_ns: np.ndarray
    again_ns: np.ndarray
    flying: np.ndarray
    flying_again: np.ndarray


def replica_numbers(problem: Problem, batch: Batch) -> list[int]:
    """The fewest replicas for each size of the slices, of every size of micro-batches."""
    counts = np.arange(1, min(problem.num_devices, batch.most_rows) + 1)
    found: set[int] = set()
    for rows in {batch.most_rows, batch.least_rows}:
        _slices, first = np.unique(-(-rows // counts), return_index=True)
        found.update(counts[first].tolist())
    return sorted(found)


def runs_within(problem: Problem, batch: Batch, replicas: int, most: int, time_ns: int) -> Runs:
    """All runs whose work of a step takes less than ``time_ns``; longer ones have no room for a micro-batch.

    ``most``: replicas that optimizer states may be shared by, where slices are as large.
    """
    classes = row_classes(problem.global_batch_size, batch.num_micro_batches)
    slices = [-(-rows // replicas) for rows, _count in classes]
    counts = [count for _rows, count in classes]
    forward = [_least(problem, "forward_ns", rows) for rows in slices]
    backward = [_least(problem, "backward_ns", rows) for rows in slices]
    way = _prefix(np.min([f + b for f, b in zip(forward, backward, strict=True)], axis=0))
    work = _prefix(_weighted([f + b for f, b in zip(forward, backward, strict=True)], counts))
    again = _prefix(_weighted(forward, counts))
    width = _width(work, time_ns)
    starts = np.arange(problem.num_layers)[:, None]
    ends = starts + np.arange(1, width + 1)
    inside = ends <= problem.num_layers
    ends = np.minimum(ends, problem.num_layers)
    allowed = inside & _ends_at_cut(problem, ends) & _begins_at_cut(problem)[:, None]
    stash = _prefix(_least(problem, "stash_bytes", min(slices)))
    room = _room(problem, most, starts, ends)
    inputs = _inputs(problem, min(slices))[:, None]
    taken = inputs * problem.memory.count_buffers
    kept = stash[ends] - stash[starts]
    gradients = _prefix(np.max(backward, axis=0))
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


def _least(problem: Problem, name: str, rows: int) -> np.ndarray:
    """(L,) of any kind of device."""
    kinds = {device.kind for device in problem.devices}
    return np.asarray(np.min([np.diff(getattr(problem.costs(kind, rows), name)) for kind in kinds], axis=0))


def _prefix(values: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(values)))


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
    """Bytes beside parameters, gradients and optimizer states on the device with most of them."""
    rules = problem.memory
    largest = max(problem.capacity_bytes(d) - device.context_bytes for d, device in enumerate(problem.devices))
    parameters = problem.parameter_bytes[ends] - problem.parameter_bytes[starts]
    trainable = problem.trainable_bytes[ends] - problem.trainable_bytes[starts]
    states = trainable * rules.state_factor
    if rules.shard_states:
        states = -(-states // replicas)
    return np.asarray(largest - parameters - trainable * rules.gradient_factor - states)


def _inputs(problem: Problem, rows: int) -> np.ndarray:
    """(L,) bytes of an input, by a stage's first layer."""
    return np.concatenate(([0], problem.forward_bytes * rows))


def _fitting(room: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Micro-batches of ``each`` bytes that there is room for."""
    number = np.where(each > 0, room // np.maximum(1, each), UNLIMITED)
    return np.asarray(np.where(room >= 0, np.minimum(number, UNLIMITED), 0))
