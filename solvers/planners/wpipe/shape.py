"""One point of WPipe's search space (equation 3), and the allocation for it (ALGORITHMS 5.2, 5.3).

Pipelines of ``depth`` devices, ``width`` of them side by side. With two groups it is WPipe's, device i holding the
parts i and N + i; with one it is PipeDream-2BW's, a part per device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.infinity import UNLIMITED
from penstock.solvers.costs.memory import activation_bytes, free_bytes, static_bytes, transient_bytes, weight_bytes
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.tables.stage_table import cut_places, layer_sums, static_sums
from penstock.solvers.grid.memory_cut import Demand
from penstock.solvers.grid.places import Places
from penstock.solvers.model.allocation import Allocation, single_pipeline, stages_on
from penstock.solvers.model.micro_batches import Batch, largest_slice
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.wpipe.partition import even_partition, partition
from penstock.solvers.schedules.periodic.wpipe import WarmUp, most_in_flight, warm_up

TIGHTENED = 3


class Shape(NamedTuple):
    """A shape; ``recompute``: whether the stages of each group keep their inputs only."""

    depth: int
    width: int
    batch: Batch
    policy: WarmUp
    recompute: tuple[bool, ...]

    @property
    def groups(self) -> int:
        """The number of groups: 2 for WPipe, 1 for PipeDream-2BW."""
        return len(self.recompute)

    def ahead(self, place: int) -> int:
        """Return K, the number of micro-batches of one group that a device begins before its first backward."""
        wanted = warm_up(self.depth, place, self.policy)
        return wanted if self.groups == 2 else min(wanted, self.batch.num_micro_batches)

    @property
    def slack(self) -> int:
        """The slots by which two groups' devices may run ahead of each other, at most a period's."""
        return min(self.ahead(0) - self.depth + 1, self.batch.num_micro_batches) if self.groups == 2 else 0

    def peaks(self, place: int) -> tuple[tuple[int, ...], ...]:
        """Return the micro-batches of each group in flight at each of a device's peaks."""
        if self.groups == 2:
            return most_in_flight(self.depth, place, self.policy, self.batch.num_micro_batches)
        return ((self.ahead(place),),)


def weight_copies(group: int) -> int:
    """Return the number of weight versions that a group keeps (ALGORITHMS 5.1).

    Group 0 and PipeDream-2BW's only group keep two, group 1 keeps one.
    """
    return 2 if group == 0 else 1


def cut(problem: Problem, shape: Shape, places: Places, *, even: bool = False) -> tuple[int, ...]:
    """Return the layers between the fastest parts that fit.

    They fit by an estimate with every buffer, otherwise by one without, otherwise not at all. ``even``: of two groups,
    the parts that load the devices evenly. What the partition does not count (the tensors at the cuts, tied weights) is
    subtracted from the free memory of the devices that lack it, a few times over.
    """
    demands = _demands(problem, shape, places)
    room = _room(problem, shape, places)
    where = cut_places(problem).tolist()
    for careful in () if _hopeless(demands, room) else (True, False):
        left = room.copy()
        for _ in range(TIGHTENED):
            parts = even_partition(demands[0], demands[1], left) if even else partition(demands, left)
            if parts is None:
                break
            bounds = tuple(where[part] for part in parts)
            missing = missing_bytes(problem, shape, bounds, places, careful)
            if max(missing) <= 0:
                return bounds
            left -= np.maximum(missing, 0)
    parts = partition(demands, np.full_like(room, UNLIMITED))
    assert parts is not None
    return tuple(where[part] for part in parts)


def _hopeless(demands: tuple[Demand, ...], room: np.ndarray) -> bool:
    """Return whether all devices together lack memory for all layers.

    Each layer counts in the group and on the device that need least.
    """
    least = np.min([np.diff(demand.bytes, axis=2).min(axis=1) for demand in demands], axis=0)
    return bool((least.sum(axis=1) > room.sum(axis=1)).any())


def allocation_of(shape: Shape, bounds: tuple[int, ...], places: Places) -> Allocation:
    """Return one pipeline, part p on the devices of place p mod N."""
    plain = single_pipeline(stages_on(places * shape.groups, bounds), shape.batch.num_micro_batches)
    return plain.recomputing([part for part in range(len(plain.stages)) if shape.recompute[part // shape.depth]])


def missing_bytes(
    problem: Problem, shape: Shape, bounds: tuple[int, ...], places: Places, careful: bool
) -> tuple[int, ...]:
    """Return the bytes that each place lacks at its largest peak (R-25); below 0: the bytes left.

    ``careful`` counts every buffer that may exist at once, otherwise only the buffers that certainly do.
    """
    stages = allocation_of(shape, bounds, places).stages
    rows = shape.batch.most_rows
    lacking = []
    for place, devices in enumerate(places):
        of_place = [stages[group * shape.depth + place] for group in range(shape.groups)]
        resident = sum(
            static_bytes(problem, stage).total + (weight_copies(group) - 1) * weight_bytes(problem, stage)[1]
            for group, stage in enumerate(of_place)
        )
        each = [activation_bytes(problem, stage, rows) for stage in of_place]
        resident += max(sum(n * size for n, size in zip(peak, each, strict=True)) for peak in shape.peaks(place))
        if careful:
            resident += max(transient_bytes(problem, stage, rows) for stage in of_place)
        else:
            resident += max(stage_costs(problem, stage, rows).workspace_bytes for stage in of_place)
        lacking.append(resident - free_bytes(problem, devices))
    return tuple(lacking)


def _room(problem: Problem, shape: Shape, places: Places) -> np.ndarray:
    free = [free_bytes(problem, devices) for devices in places]
    return np.tile(np.asarray(free, dtype=np.int64), (len(shape.peaks(0)), 1))


def _demands(problem: Problem, shape: Shape, places: Places) -> tuple[Demand, ...]:
    """Return the time and memory of the layers before each place to cut, on each device.

    Times are of the slowest kind.
    """
    where = cut_places(problem)
    share = largest_slice(shape.batch.most_rows, shape.width)
    moments = len(shape.peaks(0))
    demands = []
    for group in range(shape.groups):
        again = shape.recompute[group]
        sums = static_sums(problem, shape.width)
        static = (sums.total + (weight_copies(group) - 1) * sums.trainable)[where]
        time_ns = np.zeros((shape.depth, len(where)), dtype=np.int64)
        size = np.zeros((moments, shape.depth, len(where)), dtype=np.int64)
        for place, devices in enumerate(places):
            kinds = sorted({problem.devices[d].kind for d in devices})
            each = [layer_sums(problem, (kind,), share) for kind in kinds]
            loads = [(1 + again) * costs.forward_ns + costs.backward_ns for costs in each]
            time_ns[place] = max(loads, key=lambda load: int(load[-1]))[where]
            stash = max((costs.kept_bytes for costs in each), key=lambda kept: int(kept[-1]))[where]
            for moment, peak in enumerate(shape.peaks(place)):
                size[moment, place] = static + (min(peak[group], 1) if again else peak[group]) * stash
        demands.append(Demand(time_ns, size))
    return tuple(demands)
