"""The bytes that samples hold of a layer over time, at a price: memory in the label search (BOUNDS section 11).

A sample's activations of a layer are there from its forward to the end of its backward, while it passes through all
later layers; or they are computed once more. At a price of a byte for a nanosecond, both cost a device's time, and so
does each copy of parameters and optimizer states. Devices hold at most their memory for the duration of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.one_pipeline.layer_costs import DeviceRange
from penstock.solvers.bounds.one_pipeline.load import kinds_of, least_per_sample
from penstock.solvers.bounds.one_pipeline.slice_times import LeastTimes
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.stage_table import static_sums
from penstock.solvers.model.problem import Problem

SURE = 1e-9
"""A relative error that floating point stays far below; held bytes are lowered by it, available bytes raised."""
TRIED = np.geomspace(1 / 64, 4, 13)
"""Prices, in units of the price at which a sample's forward costs as much as the bytes that it keeps of all layers."""


class HeldBytes(NamedTuple):
    """The memory of all samples of a step: bytes times ns (L,) that a layer keeps, and holds at least during its
    backward.

    * ``again_ns`` (L,): its forward once more.
    * ``static`` [option, L]: bytes of parameters and optimizer states of all holders.
    * ``room``: bytes of all devices.
    * ``ways``: whether samples may keep a layer, and whether they may compute it again.
    """

    kept: np.ndarray
    rebuilt: np.ndarray
    again_ns: np.ndarray
    static: np.ndarray
    room: int
    ways: tuple[bool, bool]

    def cost_ns(self, price: float) -> np.ndarray:
        """Return (L,) ns of a device that a layer's samples cost at least beyond their work, not rounded."""
        keep, again = self.kept * price, self.rebuilt * price + self.again_ns
        return np.minimum(keep, again) if all(self.ways) else keep if self.ways[0] else again

    def priced(self, price: float, time_ns: int) -> np.ndarray:
        """Return [option, L] ns of a device, rounded down, in a step of ``time_ns``."""
        cost_ns = self.cost_ns(price) + price * time_ns * self.static
        return np.asarray(np.floor(cost_ns * (1 - SURE))).astype(np.int64)

    def most_ns(self, price: float, time_ns: int) -> int:
        """Return the price of all bytes that devices can hold in a step of ``time_ns``, in ns, rounded up."""
        return int(np.ceil(price * time_ns * self.room * (1 + SURE))) + 1

    def best_price(self, work_ns: int, devices: int) -> float:
        """Return the price at which all work and all held bytes need the longest step; 0 where memory is ample."""
        total = float(self.kept.sum())
        unit = float(self.again_ns.sum()) / total if total > 0 else 0.0
        room = max(0.0, float(self.room) - float(self.static[0].sum()))
        best, best_price = work_ns / devices, 0.0
        for price in (TRIED * unit).tolist():
            needed = (work_ns + float(self.cost_ns(price).sum())) / (devices + price * room)
            if needed > best * (1 + SURE):
                best, best_price = needed, price
        return best_price


def held_bytes(problem: Problem, options: list[DeviceRange], least: LeastTimes, *, split: bool) -> HeldBytes:
    """Return the bytes that samples hold.

    ``least``: each layer's least times. ``split``: whether weight gradients may wait.
    """
    batch = problem.global_batch_size
    kept = batch * least_kept(problem)
    through = least.forward + (least.gradient if split else least.backward)
    later = np.concatenate((np.cumsum(through[::-1])[::-1][1:], [0]))
    return HeldBytes(
        kept=kept * (least.forward + least.backward + later),
        rebuilt=kept * least.backward,
        again_ns=batch * _least(problem, "forward_ns"),
        static=static_bytes(problem, options),
        room=sum(max(0, free_bytes(problem, (device,))) for device in range(problem.num_devices)),
        ways=(problem.recompute != "always" or problem.within is not None, problem.recompute != "never"),
    )


def static_bytes(problem: Problem, options: list[DeviceRange], *, gradients: bool = False) -> np.ndarray:
    """Return [option, L] bytes of parameters and optimizer states, and of ``gradients``, of all holders of a layer."""
    fewest = np.asarray([[option.least] for option in options])
    sums = static_sums(problem)
    each = np.diff(sums.parameters)
    if gradients:
        each = each + np.diff(sums.gradients)
    if problem.memory.shard_states:
        return np.asarray(fewest * each + np.diff(problem.owned_bytes) * problem.memory.state_factor)
    return np.asarray(fewest * (each + np.diff(sums.optimizer)))


def least_kept(problem: Problem) -> np.ndarray:
    """Return (L,) the least bytes that a sample keeps of a layer, over all sizes of slices and kinds of devices."""
    return _least(problem, "stash_bytes")


def _least(problem: Problem, name: str) -> np.ndarray:
    """Return (L,) the least of a measured value per sample, over all sizes of slices and kinds of devices."""
    values = []
    for kind in kinds_of(problem):
        speed = kind[1] if name.endswith("_ns") else 1.0
        each = least_per_sample(problem, kind, lambda point: getattr(point, name))
        values.append([float(value) / speed for value in each])
    return np.asarray(np.min(values, axis=0)) * (1 - SURE)
