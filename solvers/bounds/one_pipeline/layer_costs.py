"""The least cost of a layer by the number of devices that hold it, each computing a slice of every micro-batch.

Numbers of devices are grouped in ranges, the *options*, each with the least values of its members.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.bounds.one_pipeline.slice_times import LeastTimes, Slices, least_of
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.costs.stage import least_update_ns
from penstock.solvers.model.micro_batches import num_micro_batches
from penstock.solvers.model.problem import Problem

LESS = 1 - 1e-12
SINGLE = 4
"""Largest number of devices with a separate range; above, there are two ranges to each doubling."""


class Numbers(NamedTuple):
    """Numbers of micro-batches from ``least`` to ``most``."""

    least: int
    most: int

    def rows(self, global_batch_size: int) -> tuple[int, int]:
        """Return the samples of the smallest and of the largest micro-batch."""
        return global_batch_size // self.most, -(-global_batch_size // self.least)


class DeviceRange(NamedTuple):
    """A layer is held by ``least`` to ``most`` devices."""

    least: int
    most: int


def numbers_of(problem: Problem) -> list[Numbers]:
    """Return all numbers of micro-batches that the request allows, consecutive ones as one range."""
    batch = problem.global_batch_size
    if not problem.micro_batch_sizes:
        return [Numbers(1, max(1, batch // problem.min_slice))]
    numbers = sorted({num_micro_batches(batch, size) for size in problem.micro_batch_sizes})
    fed = [number for number in numbers if batch // number >= problem.min_slice] or numbers
    return [Numbers(number, number) for number in fed]


def options_of(devices: int) -> list[DeviceRange]:
    """Return ranges that cover 1 to ``devices``."""
    ends = list(range(1, SINGLE + 1))
    while ends[-1] < devices:
        size = ends[-1]
        ends += [size + size // 2, 2 * size]
    ends = sorted({min(end, devices) for end in ends})
    return [DeviceRange(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


class Holding:
    """The costs that do not depend on the micro-batches, and the layers' times by option."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.slices = Slices(problem)
        self.links = Links(problem)
        self.options = options_of(problem.num_devices)

    def times(self, numbers: Numbers, option: DeviceRange) -> LeastTimes:
        """Return each layer's least times."""
        batch = self.problem.global_batch_size
        least_rows, most_rows = numbers.rows(batch)
        times = []
        for k in range(option.least, option.most + 1):
            least, most = -(-least_rows // k), -(-most_rows // k)
            times.append(self.slices.times(least, most, max(batch, numbers.least * k * least)))
        return least_of(times)

    @cached_property
    def update_ns(self) -> np.ndarray:
        """Each layer's least update time (L,), ns."""
        return np.diff(least_update_ns(self.problem))

    @cached_property
    def after_ns(self) -> np.ndarray:
        """The all-reduce of a layer's bytes over n devices or more, and its update, in ns: (devices + 1, L).

        The bucket that holds a layer's last bytes ends with it or with a lower layer, so it is not ready before the
        layer's last gradient.
        """
        size = np.diff(self.problem.owned_bytes)
        table = np.zeros((self.problem.num_devices + 1, len(size)), dtype=np.int64)
        for k in range(2, len(table)):
            table[k] = np.min([self._reduced(size, k, spanning) for spanning in (False, True)], axis=0)
        return np.asarray(_or_more(table) + self.update_ns)

    def _reduced(self, size: np.ndarray, replicas: int, spanning: bool) -> np.ndarray:
        rate, latency_ns = self.links.ring(replicas, spanning)
        if rate == np.inf:
            return np.where(size > 0, FAR_NS, 0)
        computed = np.where(size > 0, floored(size * rate) + latency_ns, 0)
        return self.links.or_measured(computed, size, replicas, spanning)

    @cached_property
    def widest_cable(self) -> int:
        """The bandwidth of the fastest link of any node, bytes per second."""
        return max(cable.bandwidth_bytes_per_s for cable in self.problem.network.cables)

    @cached_property
    def full_duplex(self) -> bool:
        """True if any cable may be used in both directions at once."""
        return any(cable.full_duplex for cable in self.problem.network.cables)


def floored(values: np.ndarray) -> np.ndarray:
    """Return whole ns, reduced by the possible rounding error of the floats."""
    return np.minimum(FAR_NS, np.floor(values * LESS)).astype(np.int64)


def _or_more(table: np.ndarray) -> np.ndarray:
    """Return the least of each row and those after it."""
    return np.asarray(np.minimum(FAR_NS, np.minimum.accumulate(table[::-1], axis=0)[::-1]))


def overlap(before: DeviceRange, after: DeviceRange) -> bool:
    """Return True if two layers may be on the same devices."""
    return before.least <= after.most and after.least <= before.most
