"""The chain's costs between any two places where it may be cut, as arrays for ``placed``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.slices import largest_slice


class SliceCosts(NamedTuple):
    """(n, n) between two places: time of a micro-batch's slice, what a device holds anyway, and per micro-batch."""

    time_ns: np.ndarray
    base_bytes: np.ndarray
    flight_bytes: np.ndarray


def between(prefix: np.ndarray) -> np.ndarray:
    """(n, n): sums between two places."""
    return np.asarray(prefix[None, :] - prefix[:, None], dtype=np.int64)


class Layers:
    """Arrays by places: ``places`` (n,), ``boundary_bytes`` (n,) per sample; the others (n, n) between two places."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.places = np.asarray([0, *(np.flatnonzero(problem.cuttable) + 1), problem.num_layers], dtype=np.int64)
        inner = self.places[1:-1] - 1
        half = not problem.rules.shared and problem.rules.channel == "half"
        forward, backward = problem.forward_bytes[inner], problem.backward_bytes[inner]
        self.boundary_bytes = np.zeros(len(self.places), dtype=np.int64)
        self.boundary_bytes[1:-1] = forward + backward if half else np.maximum(forward, backward)
        self._input_bytes = np.zeros(len(self.places), dtype=np.int64)
        self._input_bytes[1:-1] = forward
        self._both_bytes = np.zeros(len(self.places), dtype=np.int64)
        self._both_bytes[1:-1] = forward + backward
        self.update_ns = self._between(problem.update_ns)
        copies = self._copies()
        self.parameter_bytes = self._between(problem.parameter_bytes) + copies
        self.trainable_bytes = self._between(problem.trainable_bytes) + copies
        self._known: dict[tuple[tuple[str, ...], int, int, bool], SliceCosts] = {}

    def costs(self, kinds: tuple[str, ...], batch: Batch, replicas: int, turns: bool, recompute: bool) -> SliceCosts:
        """Of the largest micro-batch on ``replicas`` devices of these kinds, the slowest (ALGORITHMS 1.7, 1.8)."""
        rows = batch.most_rows if turns else largest_slice(batch.most_rows, replicas)
        sharers = replicas if self._problem.memory.shard_states else 1
        mark = (kinds, rows, sharers, recompute)
        if mark not in self._known:
            self._known[mark] = self._costs(*mark)
        return self._known[mark]

    def _costs(self, kinds: tuple[str, ...], rows: int, sharers: int, recompute: bool) -> SliceCosts:
        memory = self._problem.memory
        time, stash, workspace = (np.zeros((len(self.places),) * 2, dtype=np.int64) for _ in range(3))
        for kind in kinds:
            costs = self._problem.costs(kind, rows)
            again = costs.forward_ns if recompute else 0
            time = np.maximum(time, self._between(costs.forward_ns + costs.backward_ns + again))
            stash = np.maximum(stash, self._between(costs.stash_bytes))
            workspace = np.maximum(workspace, self._widest(costs.workspace_bytes))
        states = -(-self.trainable_bytes * memory.state_factor // sharers)
        base = self.parameter_bytes + self.trainable_bytes * memory.gradient_factor + states + workspace
        flight = np.zeros_like(stash) if recompute else stash
        if recompute:
            base = base + stash
        if memory.count_buffers:
            base = base + rows * (self._both_bytes[:, None] + self._both_bytes[None, :])
        if memory.count_buffers or recompute:
            flight = flight + rows * self._input_bytes[:, None]
        return SliceCosts(time, base, flight)

    def _between(self, prefix: np.ndarray) -> np.ndarray:
        return between(prefix[self.places])

    def _widest(self, values: np.ndarray) -> np.ndarray:
        """The largest value of the layers between two places."""
        found = np.zeros((len(self.places),) * 2, dtype=np.int64)
        largest = np.maximum.reduceat(values, self.places[:-1])
        for i in range(len(largest)):
            found[i, i + 1 :] = np.maximum.accumulate(largest[i:])
        return found

    def _copies(self) -> np.ndarray:
        """Bytes of tied weights that layers between two places hold a copy of (``memory.weight_bytes``)."""
        low, high = self.places[:, None], self.places[None, :]
        copies: np.ndarray = np.zeros((len(self.places), len(self.places)), dtype=np.int64)
        for _name, tied, size in self._problem.shared_parameters:
            below = np.searchsorted(np.asarray(sorted(tied)), self.places)
            holds = below[None, :] > below[:, None]
            owns = (low <= tied[0]) & (tied[0] < high)
            copies += np.where(holds & ~owns, size, 0)
        return copies
