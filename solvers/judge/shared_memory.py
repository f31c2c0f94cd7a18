"""Memory over time of a device that several pipelines share (rules: ``solvers.judge.shared_processor``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, LOOK_AHEAD
from penstock.solvers.costs.memory import Static, averaging_bytes, context_bytes
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.model.timeline import Breakdown

GRADIENTS, KEPT, BUFFERS, WORKSPACE = range(4)


class Clocks(NamedTuple):
    """Times of one iteration: operations (S, 2 M + 1), the step last; transfers (2 S, M), -1 where nothing travels."""

    start: np.ndarray
    end: np.ndarray
    sent: np.ndarray
    arrival: np.ndarray

    @property
    def makespan_ns(self) -> int:
        """Return the length of the iteration."""
        return int(self.end.max())


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """Memory of a device over time: distinct times, and from each on the bytes of each sort, (n, 4)."""

    times: np.ndarray
    sizes: np.ndarray
    static: Static
    reference_bytes: int
    pipelines: int
    context: int

    @classmethod
    def of(cls, graph: StepGraph, k: int, operations: np.ndarray, clocks: Clocks) -> DeviceMemory:
        """Return the memory of every pipeline's stage ``k``; ``operations`` (S, 2 M, 3) as lanes run them."""
        problem, stage = graph.problem, graph.allocation.stages[k]
        pipelines = graph.allocation.pipelines
        events = _Events()
        posted = np.stack([posted_ns(rows, end) for rows, end in zip(operations, clocks.end[:, :-1], strict=True)])
        for s in range(k, len(operations), len(pipelines[0].stages)):
            _add_lane(graph, s, operations[s], clocks, posted, events)
        times, sizes = events.settled()
        return cls(
            times,
            sizes,
            graph.static[k],
            averaging_bytes(problem, stage, len(pipelines)).always,
            len(pipelines),
            context_bytes(problem, stage.devices[0]),
        )

    @property
    def _constant_bytes(self) -> int:
        return self.pipelines * (self.static.parameters + self.static.optimizer) + self.reference_bytes

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (times, bytes), int64, from 0 on."""
        levels = self.sizes.sum(axis=1) + self._constant_bytes + self.context
        changed = np.append(True, levels[1:] != levels[:-1])
        return self.times[changed], levels[changed]

    def activations(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (times, bytes) of activations alone."""
        return self.times, self.sizes[:, KEPT]

    def breakdown(self) -> Breakdown:
        """Return the breakdown at the first peak."""
        gradients, kept, buffers, workspace = self.sizes[int(np.argmax(self.sizes.sum(axis=1)))].tolist()
        return Breakdown(
            parameters=self.pipelines * self.static.parameters,
            gradients=gradients,
            optimizer=self.pipelines * self.static.optimizer,
            versions=self.reference_bytes,
            activations=kept,
            buffers=buffers,
            workspace=workspace,
            context=self.context,
        )


class _Events:
    """Changes of memory: a time, a sort, and a number of bytes."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, int, np.ndarray]] = []

    def add(self, sort: int, start: np.ndarray, end: np.ndarray, size: np.ndarray) -> None:
        """Add bytes that are allocated from ``start`` to ``end``."""
        self._parts += [(start, sort, size), (end, sort, -size)]

    def settled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return distinct times from 0 on, and the bytes of each sort after all changes at each."""
        time = np.concatenate([np.zeros(1, dtype=np.int64), *(at for at, _sort, _size in self._parts)])
        change = np.zeros((len(time), 4), dtype=np.int64)
        reached = 1
        for _at, sort, size in self._parts:
            change[reached : reached + len(size), sort] = size
            reached += len(size)
        order = np.argsort(time, kind="stable")
        time, level = time[order], np.cumsum(change[order], axis=0)
        last = np.append(time[1:] != time[:-1], True)
        return time[last], level[last]


def posted_ns(operations: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return (2, M): when a row of one stage posts the receives of its forwards and backwards (decision 6).

    ``operations`` (2 M, 3) with their ends: an operation's receive is placed before the later of the previous operation
    of its kind and the second operation before it.
    """
    places = np.arange(len(operations))
    posted = np.empty((2, len(operations) // 2), dtype=np.int64)
    free = np.concatenate((np.zeros(1, dtype=np.int64), end))
    for kind in (FORWARD, BACKWARD):
        at = places[operations[:, 0] == kind]
        before = np.maximum(0, np.maximum(at - LOOK_AHEAD, np.concatenate(([0], at[:-1]))))
        posted[kind, operations[at, 2]] = free[before]
    return posted


def _add_lane(
    graph: StepGraph, s: int, operations: np.ndarray, clocks: Clocks, posted: np.ndarray, events: _Events
) -> None:
    allocation, counts = graph.allocation, [count for _rows, count in graph.classes]
    sizes = [np.repeat(each, counts) for each in zip(*graph.memory[s], strict=True)]
    stash, workspace, rebuilt, _whole = sizes[:4]
    start = np.empty((2, sum(counts)), dtype=np.int64)
    end = np.empty_like(start)
    where = (operations[:, 0], operations[:, 2])
    start[where], end[where] = clocks.start[s, :-1], clocks.end[s, :-1]
    gradients = np.asarray([graph.static[s].gradients])
    events.add(GRADIENTS, start[BACKWARD].min(keepdims=True), clocks.end[s, -1:], gradients)
    averaged = averaging_bytes(graph.problem, allocation.stages[s], len(allocation.pipelines)).at_step
    events.add(WORKSPACE, clocks.start[s, -1:], clocks.end[s, -1:], np.asarray([graph.step_bytes[s] + averaged]))
    events.add(KEPT, start[FORWARD], end[BACKWARD], stash)
    events.add(WORKSPACE, start[FORWARD], end[FORWARD], workspace)
    events.add(WORKSPACE, start[BACKWARD], end[BACKWARD], workspace + rebuilt)
    for way, (received, sent_bytes) in enumerate(zip(sizes[4:6], sizes[6:], strict=True)):
        other = allocation.next(s) if way == 0 else allocation.previous(s)
        travels = np.flatnonzero(received)
        events.add(BUFFERS, posted[s, way, travels], end[BACKWARD][travels], received[travels])
        if other is not None:
            travels = np.flatnonzero(sent_bytes)
            sent, arrival = clocks.sent[2 * s + way, travels], clocks.arrival[2 * s + way, travels]
            waits = np.maximum(0, posted[other, way, travels] - sent)
            events.add(BUFFERS, end[way][travels], arrival + waits, sent_bytes[travels])


def covered_ns(start: np.ndarray, end: np.ndarray) -> int:
    """Return the nanoseconds that are in at least one of the intervals."""
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    before = np.concatenate(([0], reached[:-1]))
    return int(np.maximum(0, reached - np.maximum(start[order], before)).sum())
