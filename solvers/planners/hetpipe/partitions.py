"""HetPipe's virtual workers [1]_ (ALGORITHMS 7.9): pipelines without replicas, data parallel with each other.

Every virtual worker has a separate partition of the chain. It is contiguous and has the smallest largest load of a
device (its computation, and what it receives and sends), for the best order of the worker's devices. Micro-batches go
to the workers in proportion to their speed. Nothing is stale: gradients are reduced among all workers once per step
(the synchronous variant that SPP compares with). So one weight version is enough, and position p of k keeps k - p
micro-batches in flight.

A policy assigns devices to workers (the paper's section 8): ``node`` takes neighbouring devices of as few nodes as
possible, ``equal`` takes the same number from every node, ``hybrid`` pairs the fastest nodes with the slowest and takes
equally from each pair.

.. [1] Park et al., HetPipe (USENIX ATC 2020), sections 4 to 6 and 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import factorial, prod
from typing import Literal, NamedTuple

import numpy as np

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.transfer import round_trips_ns
from penstock.solvers.grid.block_kernel import run_worker
from penstock.solvers.grid.places import side_by_side
from penstock.solvers.grid.slice_costs import Layers
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, stages_on
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.pins import by_layers, last_ends
from penstock.solvers.model.problem import Problem, per_problem

Policy = Literal["node", "equal", "hybrid"]
POLICIES: tuple[Policy, ...] = ("node", "equal", "hybrid")
MAX_ORDERED = 8
MAX_ORDERS = 2_520
"""Limit up to which all orders of a worker's kinds are tried: eight devices of four kinds, two each."""


Hold = Literal["all", "one", "any"]
"""The requirement on a stage's memory.

``all``: all k - p micro-batches in flight, ``one``: one micro-batch (recomputing where the request allows), ``any``:
no requirement.
"""
HOLDS: tuple[Hold, ...] = ("all", "one", "any")


class Worker(NamedTuple):
    """A virtual worker's stages, and the largest load of its devices per micro-batch."""

    stages: tuple[Stage, ...]
    load_ns: int


def groupings(problem: Problem, policy: Policy) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way of a policy to assign all devices to two or more workers of one size.

    The largest workers come first.
    """
    nodes = [node for node in problem.nodes() if node]
    if policy == "node":
        yield from _neighbours(nodes)
    elif policy == "equal":
        yield from _spread(nodes, [nodes])
    elif len(nodes) > 2 and len(nodes) % 2 == 0:
        ranked = sorted(range(len(nodes)), key=lambda n: (_node_ns(problem, nodes[n]), n))
        half = len(nodes) // 2
        pairs = [[nodes[a], nodes[b]] for a, b in zip(ranked[:half], reversed(ranked[half:]), strict=True)]
        yield from _spread(nodes, pairs)


def groupings_for_pins(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield workers with equally many of the devices that each set of pins allows; no workers without pins."""
    alike: dict[tuple[bool, ...], list[int]] = {}
    for device in (device for node in problem.nodes() for device in node) if problem.pins else ():
        alike.setdefault(sorts_of(problem)[device].pinned, []).append(device)
    if alike:
        sets = [tuple(devices) for devices in alike.values()]
        yield from _spread(sets, [sets])


def _neighbours(nodes: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield workers inside nodes, or of whole neighbouring nodes."""
    row = [device for node in nodes for device in node]
    for size in range(len(row) // 2, 0, -1):
        if len(row) % size == 0 and _fills(nodes, size):
            yield side_by_side(row, size)


def _fills(nodes: list[tuple[int, ...]], size: int) -> bool:
    """Return whether cutting the row every ``size`` devices cuts at the end of each node, or only there."""
    ends = np.cumsum([len(node) for node in nodes]).tolist()
    return all(end % size == 0 for end in ends) or set(range(size, ends[-1] + 1, size)) <= set(ends)


def _spread(nodes: list[tuple[int, ...]], parts: list[list[tuple[int, ...]]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield workers: in each part the same number, each with the same number of devices of every node."""
    most = min(len(node) for node in nodes)
    for number in range(1, most + 1):
        if number * len(parts) < 2 or any(len(node) % number for node in nodes):
            continue
        workers = [
            tuple(d for node in part for d in node[w * len(node) // number : (w + 1) * len(node) // number])
            for part in parts
            for w in range(number)
        ]
        if len({len(worker) for worker in workers}) == 1:
            yield tuple(workers)


def _node_ns(problem: Problem, node: Sequence[int]) -> int:
    """Return a sample's time on a node: the time on its slowest device, divided by its devices."""
    times = [problem.costs(problem.devices[d].kind, 1) for d in node]
    return max(int(each.forward_ns[-1] + each.backward_ns[-1]) for each in times) // len(node)


class Sort(NamedTuple):
    """A device's kind, and for each pin whether it is among the devices that may hold the layers."""

    kind: str
    pinned: tuple[bool, ...]


@per_problem
def sorts_of(problem: Problem) -> tuple[Sort, ...]:
    """Return the sorts of all devices."""
    return tuple(
        Sort(each.kind, tuple(device in pin.devices for pin in problem.pins))
        for device, each in enumerate(problem.devices)
    )


class Wire(NamedTuple):
    """The connections from one device to another and back: bytes per second, 0 where nothing connects them, and ns."""

    out_bytes_per_s: int
    back_bytes_per_s: int
    out_ns: int
    back_ns: int


class Position(NamedTuple):
    """A device as the partition needs it: its sort, its memory, and the wire to the next device of its worker."""

    sort: Sort
    room_bytes: int
    wire: Wire | None


class Partitions:
    """Partitions of one request's virtual workers; workers that look alike are partitioned once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._layers = Layers(problem)
        self._sorts = sorted(set(sorts_of(problem)))
        self._rooms = [free_bytes(problem, [device]) for device in range(problem.num_devices)]
        self._bounds_of: dict[tuple[tuple[Position, ...], Batch, Hold], tuple[list[int], int] | None] = {}
        self._costs: dict[tuple[Batch, bool], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._hops: dict[tuple[Wire, Batch], np.ndarray] = {}
        self._ends: dict[Wire, tuple[int, int]] = {}

    def allocation(self, workers: Sequence[tuple[int, ...]], batch: Batch, hold: Hold) -> Allocation | None:
        """Return the workers as pipelines, each with its share of the micro-batches.

        None where a worker cannot hold the model.
        """
        if batch.num_micro_batches < len(workers):
            return None
        outcomes = [self.worker(devices, batch, hold) for devices in workers]
        fitting = [each for each in outcomes if each is not None]
        if len(fitting) < len(outcomes):
            return None
        numbers = shares([each.load_ns for each in fitting], batch.num_micro_batches)
        pipelines, first = [], 0
        for each, number in zip(fitting, numbers, strict=True):
            pipelines.append(Pipeline(each.stages, (first, first + number - 1)))
            first += number
        return Allocation(tuple(pipelines), batch.num_micro_batches)

    def worker(self, devices: tuple[int, ...], batch: Batch, hold: Hold) -> Worker | None:
        """Return the best partition over the best order of the devices; of equals the first order."""
        best: Worker | None = None
        again = self._recomputes(hold)
        for order in orders(self._problem, devices):
            used = order[: len(self._layers.places) - 1]
            split = self._bounds(self._positions(used), batch, hold)
            if split is not None and (best is None or split[1] < best.load_ns):
                stages = stages_on(side_by_side(used, 1), split[0])
                best = Worker(tuple(stage.whole for stage in stages) if again else stages, split[1])
        return best

    def _recomputes(self, hold: Hold) -> bool:
        rule = self._problem.recompute
        return rule == "always" or (rule == "auto" and hold == "one")

    def _positions(self, used: tuple[int, ...]) -> tuple[Position, ...]:
        sorts = sorts_of(self._problem)
        return tuple(
            Position(sorts[device], self._rooms[device], None if after is None else self._wire(device, after))
            for device, after in zip(used, (*used[1:], None), strict=True)
        )

    def _wire(self, u: int, v: int) -> Wire:
        """Return everything that a transfer between single devices depends on, in every mode.

        The first two devices with such a wire represent all pairs.
        """
        network = self._problem.network
        latencies = [0 if route is None else route.latency_ns for route in (network.route(u, v), network.route(v, u))]
        wire = Wire(network.bandwidth(u, v), network.bandwidth(v, u), *latencies)
        self._ends.setdefault(wire, (u, v))
        return wire

    def _bounds(self, positions: tuple[Position, ...], batch: Batch, hold: Hold) -> tuple[list[int], int] | None:
        """Return the stages' first layers and the end, and the largest load; None where a stage does not fit."""
        mark = (positions, batch, hold)
        if mark not in self._bounds_of:
            self._bounds_of[mark] = self._find_bounds(positions, batch, hold)
        return self._bounds_of[mark]

    def _find_bounds(self, positions: tuple[Position, ...], batch: Batch, hold: Hold) -> tuple[list[int], int] | None:
        places, count = self._layers.places, len(positions)
        hops = np.zeros((count + 1, len(places)), dtype=np.int64)
        for p, position in enumerate(positions[:-1], 1):
            assert position.wire is not None
            hops[p] = self._hop_ns(position.wire, batch)
        value, before = run_worker(
            *self._slices(batch, self._recomputes(hold)),
            np.asarray([self._sorts.index(position.sort) for position in positions]),
            np.asarray([NEVER_NS if hold == "any" else position.room_bytes for position in positions]),
            np.arange(count, 0, -1) if hold == "all" else np.ones(count, dtype=np.int64),
            hops,
        )
        if value[count, -1] >= NEVER_NS:
            return None
        chosen = [len(places) - 1]
        for p in range(count, 0, -1):
            chosen.append(int(before[p, chosen[-1]]))
        return [int(places[i]) for i in reversed(chosen)], int(value[count, -1])

    def _slices(self, batch: Batch, again: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return times, bytes of a stage, and bytes per micro-batch, (C, n, n) by sort.

        Times are NEVER_NS where a pin is broken.
        """
        if (batch, again) not in self._costs:
            costs = [self._layers.costs((sort.kind,), batch, 1, False, again) for sort in self._sorts]
            time, base, flight = (np.stack(column) for column in zip(*costs, strict=True))
            time[np.stack([self._broken(sort) for sort in self._sorts])] = NEVER_NS
            self._costs[batch, again] = (time, base, flight)
        return self._costs[batch, again]

    def _broken(self, sort: Sort) -> np.ndarray:
        """Return (n, n): True where pins keep a layer of the stage between two places from devices of this sort."""
        places, problem = self._layers.places, self._problem
        alike = sorts_of(problem).index(sort)
        return np.asarray(places[None, :] > last_ends(problem, (alike,))[places][:, None])

    def _hop_ns(self, wire: Wire, batch: Batch) -> np.ndarray:
        """Return the round trip of a micro-batch over a wire at every place; NEVER_NS where nothing connects."""
        if (wire, batch) not in self._hops:
            hops_ns = np.zeros(len(self._layers.places), dtype=np.int64)
            source, target = self._ends[wire]
            cuts = (self._layers.places[1:-1] - 1).tolist()
            hops_ns[1:-1] = round_trips_ns(self._problem, cuts, (source,), (target,), batch.most_rows)
            self._hops[wire, batch] = np.minimum(NEVER_NS, hops_ns)
        return self._hops[wire, batch]


def orders(problem: Problem, devices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return orders of a worker's devices that differ in their sorts.

    If there are too many, return the fastest first and the slowest first; with pins also the order of the layers that
    they name. Devices of one sort stay in their order.
    """
    by_sort: dict[Sort, list[int]] = {}
    for device in devices:
        by_sort.setdefault(sorts_of(problem)[device], []).append(device)
    counts = tuple(len(group) for group in by_sort.values())
    groups = list(by_sort.values())
    if len(devices) <= MAX_ORDERED and _number_of_orders(counts) <= MAX_ORDERS:
        return [_merged(groups, kinds) for kinds in _arrangements(counts)]
    ranked = sorted(groups, key=lambda group: _node_ns(problem, group[:1]))
    fastest = tuple(device for group in ranked for device in group)
    sequences = [fastest, tuple(device for group in reversed(ranked) for device in group)]
    if problem.pins:
        sequences.append(by_layers(problem, devices))
    return list(dict.fromkeys(sequences))


def _number_of_orders(counts: tuple[int, ...]) -> int:
    return factorial(sum(counts)) // prod(factorial(count) for count in counts)


@lru_cache(maxsize=64)
def _arrangements(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return all sequences with ``counts[g]`` times group g, in lexicographic order."""
    if sum(counts) == 0:
        return ((),)
    sequences: list[tuple[int, ...]] = []
    for group, count in enumerate(counts):
        if count:
            fewer = (*counts[:group], count - 1, *counts[group + 1 :])
            sequences += [(group, *rest) for rest in _arrangements(fewer)]
    return tuple(sequences)


def _merged(groups: list[list[int]], kinds: tuple[int, ...]) -> tuple[int, ...]:
    turn = [iter(group) for group in groups]
    return tuple(next(turn[kind]) for kind in kinds)


def shares(loads_ns: Sequence[int], number: int) -> list[int]:
    """Return the number of micro-batches of each worker.

    Each worker gets one; each further micro-batch goes to the worker that would finish it first, and of equals to the
    first worker. So the largest number times load is as small as possible.
    """
    counts = [1] * len(loads_ns)
    for _ in range(number - len(loads_ns)):
        first = min(range(len(counts)), key=lambda w: ((counts[w] + 1) * loads_ns[w], w))
        counts[first] += 1
    return counts
