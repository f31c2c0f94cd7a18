"""The chain's costs between any two places where it may be cut, as arrays for ``row_partition``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.buckets import inner_ns
from penstock.solvers.costs.stage import step_ns
from penstock.solvers.costs.tables.stage_table import StageTable, between, crossing_bytes, cut_places, static_between
from penstock.solvers.model.micro_batches import Batch, largest_slice
from penstock.solvers.model.problem import Problem


class SliceCosts(NamedTuple):
    """Costs (n, n) between two places: a slice's time, a device's constant bytes, and its bytes per micro-batch."""

    time_ns: np.ndarray
    base_bytes: np.ndarray
    flight_bytes: np.ndarray


class Layers:
    """Arrays by places: ``places`` (n,), ``boundary_bytes`` (n,) per sample; the others (n, n) between two places."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.places = cut_places(problem)
        half = not problem.rules.shared and problem.rules.channel == "half"
        forward, backward = (crossing_bytes(problem, direction)[self.places] for direction in (0, 1))
        self.boundary_bytes = forward + backward if half else np.maximum(forward, backward)
        static = static_between(problem, self.places)
        self.trained_bytes, self.owned_bytes = static.trainable, static.owned
        self._by_mark: dict[tuple[tuple[str, ...], int, int, bool], SliceCosts] = {}

    def updates_ns(self, replicas: np.ndarray) -> np.ndarray:
        """Return (R, n, n): the time of one step on each number of replicas, with sums within model-parallel groups."""
        first, stop = self.places[:, None], self.places[None, :]
        inner = between(inner_ns(self._problem)[self.places])
        return np.stack([step_ns(self._problem, first, stop, each) + inner for each in replicas.tolist()])

    def costs(self, kinds: tuple[str, ...], batch: Batch, replicas: int, turns: bool, recompute: bool) -> SliceCosts:
        """Return the costs of the largest micro-batch on the slowest of ``replicas`` devices (ALGORITHMS 1.7, 1.8)."""
        rows = batch.most_rows if turns else largest_slice(batch.most_rows, replicas)
        sharers = replicas if self._problem.memory.shard_states else 1
        mark = (kinds, rows, sharers, recompute)
        if mark not in self._by_mark:
            self._by_mark[mark] = self._costs(*mark)
        return self._by_mark[mark]

    def _costs(self, kinds: tuple[str, ...], rows: int, sharers: int, recompute: bool) -> SliceCosts:
        table = StageTable(self._problem, kinds, rows, self.places, sharers)
        return SliceCosts(table.work_ns(recompute), table.held_bytes(recompute), table.flight_bytes(recompute))
