"""Lower bounds on what a stage costs: runs of layers on a number of replicas, for one number of micro-batches.

Numbers of replicas with equally large slices count as the fewest of them. Each class of devices has its own runs: a
stage is no quicker, and has no more memory, than any of its devices. A stage recomputes whole or not at all; its
recomputation, which may run while a gradient is awaited, counts as work but not as part of a micro-batch's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.device_count.device_classes import DeviceClass
from penstock.solvers.bounds.device_count.transfers import transfers_of
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.infinity import UNLIMITED
from penstock.solvers.costs.memory import training_bytes
from penstock.solvers.costs.tables.stage_table import crossing_bytes, layer_sums, static_sums
from penstock.solvers.model.micro_batches import Batch, row_classes
from penstock.solvers.model.problem import Problem, prefix_sums


@Fields.register
class Runs(NamedTuple):
    """The possible stages, arrays (N,) by first layer; the stages from layer i on are ``begin[i]`` to ``begin[i + 1]``.

    * ``layers``, ``replicas``; ``of``: the class of devices.
    * ``price`` of all replicas, each at 1 until they are priced.
    * ``forward_ns``, ``backward_ns``: of a micro-batch of the quicker size.
    * ``sent_ns``: its round trip over the cut after the stage.
    * ``again_ns``: its recomputation, 0 for a stage that does not recompute.
    * ``work_ns``: of a step, both sizes, recomputation included.
    * ``limit``: the most micro-batches in flight, at most M.
    * ``room``: bytes for micro-batches in flight. ``flight_bytes``: bytes of each on a stage that recomputes.
      ``rebuilt``: further bytes of a micro-batch whose activations are computed again.
    """

    begin: np.ndarray
    layers: np.ndarray
    replicas: np.ndarray
    of: np.ndarray
    price: np.ndarray
    forward_ns: np.ndarray
    backward_ns: np.ndarray
    sent_ns: np.ndarray
    again_ns: np.ndarray
    work_ns: np.ndarray
    limit: np.ndarray
    room: np.ndarray
    flight_bytes: np.ndarray
    rebuilt: np.ndarray


def runs_within(problem: Problem, batch: Batch, time_ns: int, classes: Sequence[DeviceClass]) -> Runs:
    """Return all stages whose work per step takes less than ``time_ns`` and that hold a micro-batch."""
    numbers = _replica_numbers(problem, batch)
    most = [*(number - 1 for number in numbers[1:]), problem.num_devices]
    parts = [
        _on(problem, batch, *each, time_ns, number, devices)
        for number, devices in enumerate(classes)
        for each in zip(numbers, most, strict=True)
    ]
    rows = np.concatenate(parts, axis=1)
    rows = rows[:, np.argsort(rows[0], kind="stable")]
    return Runs(np.searchsorted(rows[0], np.arange(problem.num_layers + 1)), *np.ascontiguousarray(rows[1:]))


def _replica_numbers(problem: Problem, batch: Batch) -> list[int]:
    """Return the fewest replicas for each size of the slices, over every size of micro-batches."""
    counts = np.arange(1, min(problem.num_devices, batch.most_rows) + 1)
    numbers: set[int] = set()
    for rows in {batch.most_rows, batch.least_rows}:
        _slices, first = np.unique(-(-rows // counts), return_index=True)
        numbers.update(counts[first].tolist())
    return sorted(numbers)


def _on(
    problem: Problem, batch: Batch, replicas: int, most: int, time_ns: int, number: int, devices: DeviceClass
) -> np.ndarray:
    """Return (fields, N) of the stages on one number of replicas of class ``number``, the first layer first.

    ``most``: the most replicas that may share optimizer states, among those with slices of the same size.
    """
    classes = row_classes(problem.global_batch_size, batch.num_micro_batches)
    slices = [-(-rows // replicas) for rows, _count in classes]
    counts = [count for _rows, count in classes]
    least = [layer_sums(problem, devices.kinds, rows, "down") for rows in slices]
    forward, backward = [np.diff(each.forward_ns) for each in least], [np.diff(each.backward_ns) for each in least]
    plain = _weighted([f + b for f, b in zip(forward, backward, strict=True)], counts)
    width = _width(prefix_sums(plain), time_ns)
    starts = np.arange(problem.num_layers)[:, None]
    ends = starts + np.arange(1, width + 1)
    allowed = ends <= problem.num_layers
    ends = np.minimum(ends, problem.num_layers)
    allowed = allowed & _ends_at_cut(problem, ends) & _begins_at_cut(problem)[:, None]

    def of(by_layer: np.ndarray) -> np.ndarray:
        sums = prefix_sums(by_layer)
        return np.asarray(sums[ends] - sums[starts])

    kept = least[slices.index(min(slices))].kept_bytes
    kept = kept[ends] - kept[starts]
    inputs = np.broadcast_to(crossing_bytes(problem, 0, min(slices))[:-1, None], ends.shape)
    room = devices.free_bytes - _static(problem, most, starts, ends)
    rebuilt = np.where(of(np.max(backward, axis=0)) > 0, kept, 0)
    once = of(np.min(forward, axis=0))
    of_stage, of_class = np.full_like(ends, replicas), np.full_like(ends, number)
    stage = np.broadcast_to(starts, ends.shape), ends - starts, of_stage, of_class, of_stage
    sent = transfers_of(problem).round_trip_ns(batch, replicas, most)[ends]
    ways = []  # how stages recompute: its time, the work of a step, and the most micro-batches in flight
    if problem.recompute != "always":
        limit = _fitting(room, kept + inputs * problem.memory.count_buffers)
        ways.append((np.zeros_like(once), of(plain), limit))
    if problem.recompute != "never":
        limit = _fitting(room - rebuilt, inputs)
        for _again, _work, plain_limit in ways:  # a stage that holds all micro-batches need not recompute
            limit = np.where(plain_limit < batch.num_micro_batches, limit, 0)
        ways.append((once, of(plain + _weighted(forward, counts)), limit))
    chosen = []
    for again, work, limit in ways:
        times = once, of(np.min(backward, axis=0)), sent, again, work
        most_held = np.minimum(limit, batch.num_micro_batches)
        fields = np.stack([*stage, *times, most_held, room, inputs, rebuilt])
        chosen.append(fields[:, allowed & (work < time_ns) & (limit > 0)])
    return np.concatenate(chosen, axis=1)


def _weighted(values: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    return np.asarray(sum(each * count for each, count in zip(values, counts, strict=True)))


def _width(work: np.ndarray, time_ns: int) -> int:
    stops = np.searchsorted(work, work[:-1] + time_ns, side="left") - 1
    return max(1, int((np.minimum(stops, len(work) - 1) - np.arange(len(work) - 1)).max()))


def _ends_at_cut(problem: Problem, ends: np.ndarray) -> np.ndarray:
    return np.asarray(np.append(problem.cuttable, True)[ends - 1])


def _begins_at_cut(problem: Problem) -> np.ndarray:
    return np.concatenate(([True], problem.cuttable))


def _static(problem: Problem, replicas: int, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the bytes of parameters, gradients and optimizer states on each device."""
    weights = static_sums(problem)
    sums = (weights.parameters, weights.trainable, weights.owned)
    parameters, trainable, owned = (each[ends] - each[starts] for each in sums)
    gradients, states = training_bytes(problem, trainable, owned, replicas)
    return np.asarray(parameters + gradients + states)


def _fitting(room: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Return the number of micro-batches of ``each`` bytes that fit."""
    number = np.where(each > 0, room // np.maximum(1, each), UNLIMITED)
    return np.asarray(np.where(room >= 0, np.minimum(number, UNLIMITED), 0))
