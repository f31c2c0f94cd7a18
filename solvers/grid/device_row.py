"""Devices in a row: the memory of stages on neighbouring devices, and the links between them, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.device_line import Affine, affine_all_reduce, affine_transfer, server_classes
from penstock.solvers.model.problem import Problem

EVERY_COUNT = 32

Signature = tuple[tuple[int, int, int, int], ...]


class Run(NamedTuple):
    """Neighbours in the row on one node: positions ``low`` … ``high`` - 1."""

    node: int
    low: int
    high: int


def replica_counts(problem: Problem) -> tuple[int, ...]:
    """Return the numbers of replicas to try: all on up to ``EVERY_COUNT`` devices, else a selection.

    The selection has small numbers, powers of two, whole nodes times powers of two, and the largest two.
    """
    total = problem.num_devices
    if total <= EVERY_COUNT:
        return tuple(range(1, total + 1))
    largest = max(len(node) for node in problem.nodes())
    doubled = [2**e for e in range(total.bit_length()) if 2**e <= total]
    nodes = [largest * 2**e for e in range(total.bit_length()) if largest * 2**e <= total]
    return tuple(sorted({1, 2, 3, 4, *doubled, *nodes, total - 1, total}))


class DeviceRow:
    """The devices in their order; arrays are by a stage's first position p and its number of replicas r (V, R).

    ``kinds`` numbers an entry of ``kind_names``, -1 where the row ends before the stage; ``room_bytes`` is the smallest
    device's free memory. An all-reduce takes ``slope`` ns per byte and ``fixed`` ns, and so does a transfer from the r'
    devices before p to the r devices from p on, (V, R, R) by r' and r; infinite where no link connects them.
    ``keeping``: stages lie where the pins allow it; otherwise devices change places afterwards.
    """

    def __init__(self, problem: Problem, devices: tuple[int, ...], keeping: bool = False) -> None:
        self._problem = problem
        self.devices = devices
        self.keeping = keeping
        self.num_devices = len(devices)
        self.replicas = np.asarray([r for r in replica_counts(problem) if r <= len(devices)], dtype=np.int64)
        self._class_of = server_classes(problem)
        self._index = {d: i for node in problem.nodes() for i, d in enumerate(node)}
        self._runs, self._run_of = _runs([problem.devices[d].node for d in devices])
        self._reductions: dict[Signature, Affine] = {}
        self._hops: dict[tuple[Signature, int], Affine] = {}
        shape = (self.num_devices, len(self.replicas))
        self.kind_names: list[tuple[str, ...]] = []
        self.kinds = np.full(shape, -1, dtype=np.int64)
        self.room_bytes, self.reduce_fixed = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        self.reduce_slope = np.zeros(shape)
        self.hop_slope = np.full((*shape, shape[1]), np.inf)
        self.hop_fixed = np.zeros((*shape, shape[1]), dtype=np.int64)
        for p in range(self.num_devices):
            for r, count in enumerate(self.replicas.tolist()):
                if p + count <= self.num_devices:
                    self._enter(p, r, devices[p : p + count])

    def _enter(self, p: int, r: int, stage: tuple[int, ...]) -> None:
        problem = self._problem
        kinds = tuple(sorted({problem.devices[d].kind for d in stage}))
        if kinds not in self.kind_names:
            self.kind_names.append(kinds)
        self.kinds[p, r] = self.kind_names.index(kinds)
        self.room_bytes[p, r] = free_bytes(problem, stage)
        self.reduce_slope[p, r], self.reduce_fixed[p, r] = self._reduction(p, stage)[:2]
        for before, count in enumerate(self.replicas.tolist()):
            if count <= p:
                hop = self._hop(p, count, len(stage))
                self.hop_slope[p, before, r], self.hop_fixed[p, before, r] = hop[:2]

    def _signature(self, first: int, count: int) -> Signature:
        """Return a key for the costs of ``count`` neighbours in the row: equal keys have equal costs.

        It has the servers by class and in order of appearance, and the positions of their devices.
        """
        labels: dict[int, int] = {}
        marks = []
        for node, low, high in self._runs[self._run_of[first] : self._run_of[first + count - 1] + 1]:
            begin = max(low, first)
            position = self._index[self.devices[begin]]
            label = labels.setdefault(node, len(labels))
            marks.append((label, self._class_of[node], position, min(high, first + count) - begin))
        return tuple(marks)

    def _reduction(self, p: int, devices: tuple[int, ...]) -> Affine:
        mark = self._signature(p, len(devices))
        if mark not in self._reductions:
            self._reductions[mark] = affine_all_reduce(self._problem, devices)
        return self._reductions[mark]

    def _hop(self, p: int, before: int, count: int) -> Affine:
        mark = (self._signature(p - before, before + count), before)
        if mark not in self._hops:
            self._hops[mark] = affine_transfer(self._problem, self.devices[p - before : p], self.devices[p : p + count])
        return self._hops[mark]


def _runs(nodes: Sequence[int]) -> tuple[list[Run], list[int]]:
    """Return each run of equal numbers, and the run of each place."""
    runs: list[Run] = []
    run_of: list[int] = []
    for node, group in groupby(range(len(nodes)), key=nodes.__getitem__):
        places = list(group)
        run_of += [len(runs)] * len(places)
        runs.append(Run(node, places[0], places[-1] + 1))
    return runs, run_of
