"""PipeDream's dynamic program on the devices in a row, with the request's exact costs.

As the paper's program (``planners/pipedream/hierarchy.py``), it minimises the largest load of a stage per micro-batch,
transfers between stages included, over contiguous stages on contiguous devices. It differs from [1]_ where the paper
simplifies. A stage's time is its slices' time on its slowest device. Transfers and all-reduces take the routes between
the stage's devices, and an all-reduce is spread over the micro-batches of an update. Memory counts the micro-batches in
flight (NOAM: ceil(devices from the stage on / replicas)) with the weight versions that the update rule keeps.

O(L^2 V R + L V R^2) time for V devices and R replica counts.

.. [1] Narayanan et al., PipeDream (SOSP 2019), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.infinity import NEVER_NS, UNLIMITED
from penstock.solvers.grid.device_row import DeviceRow
from penstock.solvers.grid.row_kernel import run_placed
from penstock.solvers.grid.slice_costs import Layers
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.pins import last_ends
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.update_rules import UpdateRule


class RatedAllocation(NamedTuple):
    """An allocation, and the search's time per micro-batch of its slowest stage or transfer."""

    allocation: Allocation
    value_ns: int


Mark = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a search. ``turns``: replicas take micro-batches in turn; ``recompute``: every stage recomputes.

    ``lenient``: one micro-batch in flight has to fit, not NOAM's number of them.
    """

    update_rule: UpdateRule = "synchronous"
    turns: bool = False
    recompute: bool = False
    lenient: bool = False
    straight: bool = False


def placed(
    problem: Problem, row: DeviceRow, layers: Layers, batch: Batch, settings: Settings, most: int | None = None
) -> list[RatedAllocation]:
    """Return the best plan for every number of devices from the front of the row and replicas of the last stage.

    Ascending by value, then by devices used, the first ``most`` of them. Empty where nothing fits.
    """
    counts = row.replicas[:1] if settings.straight else row.replicas
    fed = batch.most_rows if settings.turns else max(1, batch.replicas_fed(problem.min_slice))
    kinds = row.kinds[:, : len(counts)]
    usable = (kinds >= 0) & (settings.turns | (counts[None, :] <= fed))
    sets, set_of = _sets(problem, row, counts, usable)
    tables = [
        layers.costs(row.kind_names[kind], batch, replicas, settings.turns, settings.recompute)
        for kind, replicas, _ends in sets
    ]
    pinned = np.stack([_broken(layers, ends) for _kind, _replicas, ends in sets])
    stashing = settings.update_rule == "weight_stashing"
    every = np.full(len(counts), batch.num_micro_batches, dtype=np.int64)
    if stashing:
        every = counts if settings.turns else np.ones_like(counts)
    versions = layers.trained_bytes if stashing else 0
    fixed = layers.trained_bytes if settings.update_rule == "double_buffered" else 0
    after = row.num_devices - np.arange(row.num_devices)
    flight = np.ones_like(kinds) if settings.lenient else -(-after[:, None] // counts[None, :])
    value, choice = run_placed(
        np.stack([each.time_ns for each in tables]),
        np.where(pinned, UNLIMITED, np.stack([each.base_bytes + fixed - versions for each in tables])),
        np.stack([each.flight_bytes + versions for each in tables]),
        layers.owned_bytes,
        layers.updates_ns(counts),
        counts,
        set_of,
        flight,
        _first(row.room_bytes, counts),
        _first(row.reduce_slope, counts),
        _first(row.reduce_fixed, counts),
        every,
        settings.turns,
        _first(row.hop_slope[:, : len(counts)], counts),
        _first(row.hop_fixed[:, : len(counts)], counts),
        layers.boundary_bytes * batch.most_rows,
    )
    ends = [(int(value[-1, q, r]), q, r) for q in range(1, row.num_devices + 1) for r in range(len(counts))]
    possible = sorted(end for end in ends if end[0] < NEVER_NS)
    return [RatedAllocation(_trace(row, layers, batch, settings, choice, q, r), best) for best, q, r in possible[:most]]


def _first(table: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the entries of the first replica counts, in the memory layout that the kernel needs."""
    return np.ascontiguousarray(table[..., : len(counts)])


def _sets(problem: Problem, row: DeviceRow, counts: np.ndarray, usable: np.ndarray) -> tuple[list[Mark], np.ndarray]:
    """Return the distinct (kinds, replicas, ends) of all stages, and each one's number by first device and replicas.

    ``ends``: the last end of a stage from each layer on that the pins allow (``pins.last_ends``); empty: any.
    """
    number_of: dict[Mark, int] = {}
    set_of = np.full(usable.shape, -1, dtype=np.int64)
    for p, r in zip(*np.nonzero(usable), strict=True):
        devices = row.devices[p : p + int(counts[r])]
        ends = tuple(last_ends(problem, devices).tolist()) if row.keeping else ()
        mark = (int(row.kinds[p, r]), int(counts[r]), ends)
        set_of[p, r] = number_of.setdefault(mark, len(number_of))
    return list(number_of), set_of


def _broken(layers: Layers, ends: tuple[int, ...]) -> np.ndarray:
    """Return (n, n): whether a stage between two places has layers that the pins forbid on its devices."""
    places = layers.places
    last = np.asarray(ends)[places] if ends else np.full(len(places), places[-1])
    return np.asarray(places[None, :] > last[:, None])


def _trace(
    row: DeviceRow, layers: Layers, batch: Batch, settings: Settings, choice: np.ndarray, q: int, r: int
) -> Allocation:
    stages: list[Stage] = []
    j = len(layers.places) - 1
    while r >= 0:
        start, before = (int(v) for v in choice[j, q, r])
        first, last = int(layers.places[start]), int(layers.places[j]) - 1
        devices = row.devices[q - int(row.replicas[r]) : q]
        stages.append(
            Stage(
                first,
                last,
                devices,
                "round_robin" if settings.turns and len(devices) > 1 else "rows",
                ((first, last),) if settings.recompute else (),
            )
        )
        j, q, r = start, q - len(devices), before
    return single_pipeline(tuple(reversed(stages)), batch.num_micro_batches)
