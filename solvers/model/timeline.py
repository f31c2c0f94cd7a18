"""``Timeline``: the simulation's result. Times of every operation and transfer; memory and idle time per device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class Track:
    """Operations of devices with the same order, as in ``schedule.Row``, with their times: int64 of shape (n,)."""

    devices: tuple[int, ...]
    operations: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray


@dataclass(frozen=True, eq=False)
class Transfers:
    """One entry per micro-batch over an edge: the sending stage number, 0 forward or 1 backward, times."""

    stage: np.ndarray
    direction: np.ndarray
    micro_batch: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray


class Interval(NamedTuple):
    """A bucket's all-reduce, an optimizer step (bucket -1), or a tied sum: its lowest stage and the tie's number."""

    stage: int
    bucket: int
    start_ns: int
    end_ns: int


class Breakdown(NamedTuple):
    """A device's memory at its peak, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    versions: int
    activations: int
    buffers: int
    workspace: int
    context: int

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(self)


class DeviceUse(NamedTuple):
    """One device's share of the time; the three add up to the time per global batch."""

    busy_ns: int
    communication_ns: int
    idle_ns: int
    memory: Breakdown


@dataclass(frozen=True, eq=False)
class Timeline:
    """One global batch, or some rounds of a periodic plan in one run.

    ``memory_curve(device)`` gives (times_ns, bytes), both int64, bytes from each time on; ``activations_curve`` gives
    the activations among them. ``uses`` are shares of one global batch: the times within ``window_ns`` (first and last
    nanosecond), divided by its ``window_rounds`` global batches. ``rounds``: the number of simulated global batches.
    """

    time_per_global_batch_ns: int
    fill_ns: int
    drain_ns: int
    tracks: tuple[Track, ...]
    transfers: Transfers
    reductions: tuple[Interval, ...]
    updates: tuple[Interval, ...]
    uses: dict[int, DeviceUse]
    memory_curve: Callable[[int], tuple[np.ndarray, np.ndarray]]
    activations_curve: Callable[[int], tuple[np.ndarray, np.ndarray]]
    window_ns: tuple[int, int] = (0, 0)
    rounds: int = 1
    window_rounds: int = 1
    ties: tuple[Interval, ...] = ()

    @property
    def peak_memory_bytes(self) -> int:
        """Return the largest peak of any device."""
        return max(use.memory.total for use in self.uses.values())

    @property
    def bubble(self) -> float:
        """Return the share of the used devices' time in which they do not compute."""
        busy = sum(use.busy_ns for use in self.uses.values())
        return 1.0 - busy / (self.time_per_global_batch_ns * len(self.uses))
