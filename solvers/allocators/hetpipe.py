"""HetPipe's virtual workers [1]_ (ALGORITHMS 7.9): pipelines without replicas, data parallel with each other.

Every virtual worker partitions the chain for itself: the contiguous partition with the smallest largest load of a
device, its computation and what it receives and sends, for the order of its devices that is best. Micro-batches go to
the workers in proportion to their speed. Nothing is stale: gradients are reduced among all workers once per step (the
synchronous variant that SPP compares with), so one weight version is enough, and position p of k keeps k - p
micro-batches in flight.

Devices are given to workers by policy (the paper's section 8): ``node`` takes neighbouring devices of as few nodes as
possible, ``equal`` takes as many from every node, ``hybrid`` pairs the fastest nodes with the slowest and takes
equally from each pair.

.. [1] Park et al., HetPipe (USENIX ATC 2020), sections 4 to 6 and 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import factorial, prod
from typing import Literal, NamedTuple

import numpy as np

from penstock.solvers.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.allocators.pipedream.layers import Layers
from penstock.solvers.batches import Batch
from penstock.solvers.costs import UNREACHABLE_NS, transfer
from penstock.solvers.kernels.hetpipe import run_worker
from penstock.solvers.kernels.pipedream import NEVER
from penstock.solvers.problem import Problem

Policy = Literal["node", "equal", "hybrid"]
POLICIES: tuple[Policy, ...] = ("node", "equal", "hybrid")
MAX_ORDERED = 8
MAX_ORDERS = 2_520
"""Orders of a worker's kinds that are all tried: eight devices of four kinds, two each."""


Hold = Literal["all", "one", "any"]
"""What a stage has to hold: all k - p micro-batches in flight, one (recomputing where the request allows), or not even
that."""
HOLDS: tuple[Hold, ...] = ("all", "one", "any")


class Worker(NamedTuple):
    """A virtual worker's stages, and the largest load of its devices per micro-batch."""

    stages: tuple[Stage, ...]
    load_ns: int


def groupings(problem: Problem, policy: Policy) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way of a policy to give all devices to two or more workers of one size, the largest workers first."""
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


def _neighbours(nodes: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Workers inside nodes, or of whole neighbouring nodes."""
    row = [device for node in nodes for device in node]
    for size in range(len(row) // 2, 0, -1):
        if len(row) % size == 0 and _fills(nodes, size):
            yield tuple(tuple(row[low : low + size]) for low in range(0, len(row), size))


def _fills(nodes: list[tuple[int, ...]], size: int) -> bool:
    """Whether cutting the row every ``size`` devices cuts at the end of each node, or only there."""
    ends = np.cumsum([len(node) for node in nodes]).tolist()
    return all(end % size == 0 for end in ends) or set(range(size, ends[-1] + 1, size)) <= set(ends)


def _spread(nodes: list[tuple[int, ...]], parts: list[list[tuple[int, ...]]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """In each part the same number of workers, each with as many devices of every node of the part."""
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
    """A sample's time on a node: what its slowest device takes, over its devices."""
    times = [problem.costs(problem.devices[d].kind, 1) for d in node]
    return max(int(each.forward_ns[-1] + each.backward_ns[-1]) for each in times) // len(node)


class Partitions:
    """Partitions of one request's virtual workers, those of workers that look alike made once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._layers = Layers(problem)
        self._kinds = sorted({device.kind for device in problem.devices})
        self._known: dict[tuple[tuple[int, ...], Batch, Hold], Worker | None] = {}

    def allocation(self, workers: Sequence[tuple[int, ...]], batch: Batch, hold: Hold) -> Allocation | None:
        """Every worker as a pipeline with its share of the micro-batches; None where a worker cannot hold the model."""
        if batch.num_micro_batches < len(workers):
            return None
        made = [self.worker(devices, batch, hold) for devices in workers]
        found = [each for each in made if each is not None]
        if len(found) < len(made):
            return None
        numbers = shares([each.load_ns for each in found], batch.num_micro_batches)
        pipelines, first = [], 0
        for each, number in zip(found, numbers, strict=True):
            pipelines.append(Pipeline(each.stages, (first, first + number - 1)))
            first += number
        return Allocation(tuple(pipelines), batch.num_micro_batches)

    def worker(self, devices: tuple[int, ...], batch: Batch, hold: Hold) -> Worker | None:
        """The best partition over the best order of the devices; of equals the first order."""
        mark = (devices, batch, hold)
        if mark not in self._known:
            tried = [self._in_order(order, batch, hold) for order in orders(self._problem, devices)]
            fitting = [each for each in tried if each is not None]
            self._known[mark] = min(fitting, key=lambda each: each.load_ns, default=None)
        return self._known[mark]

    def _in_order(self, order: tuple[int, ...], batch: Batch, hold: Hold) -> Worker | None:
        problem, layers = self._problem, self._layers
        used = order[: len(layers.places) - 1]
        again = problem.recompute == "always" or (problem.recompute == "auto" and hold == "one")
        costs = [layers.costs((kind,), batch, 1, False, again) for kind in self._kinds]
        hops = np.zeros((len(used) + 1, len(layers.places)), dtype=np.int64)
        for p, pair in enumerate(pairwise(used), 1):
            hops[p] = self._hops(pair, batch)
        count = len(used)
        rooms = [problem.capacity_bytes(d) - problem.devices[d].context_bytes for d in used]
        value, before = run_worker(
            np.stack([each.time_ns for each in costs]),
            np.stack([each.base_bytes for each in costs]),
            np.stack([each.flight_bytes for each in costs]),
            np.asarray([self._kinds.index(problem.devices[d].kind) for d in used]),
            np.asarray([NEVER] * count if hold == "any" else rooms),
            np.arange(count, 0, -1) if hold == "all" else np.ones(count, dtype=np.int64),
            hops,
        )
        if value[count, -1] >= NEVER:
            return None
        stages: list[Stage] = []
        j = len(layers.places) - 1
        for p in range(count, 0, -1):
            i = int(before[p, j])
            first, last = int(layers.places[i]), int(layers.places[j]) - 1
            stages.append(Stage(first, last, (used[p - 1],), recompute=((first, last),) if again else ()))
            j = i
        return Worker(tuple(reversed(stages)), int(value[count, -1]))

    def _hops(self, pair: tuple[int, int], batch: Batch) -> np.ndarray:
        """Both ways of a micro-batch between two devices at every place; NEVER where nothing connects them."""
        problem = self._problem
        found = np.zeros(len(self._layers.places), dtype=np.int64)
        for number, place in enumerate(self._layers.places.tolist()[1:-1], 1):
            ends = (Stage(0, place - 1, pair[:1]), Stage(place, problem.num_layers - 1, pair[1:]))
            two = single_pipeline(ends, batch.num_micro_batches)
            ways = [transfer(problem, two, way, batch.most_rows, way) for way in (0, 1)]
            times = [0 if way is None else way.duration_ns for way in ways]
            found[number] = NEVER if max(times) >= UNREACHABLE_NS else sum(times)
        return found


def orders(problem: Problem, devices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Orders of a worker's devices that differ in their kinds; too many: the fastest first, and the slowest first.

    Devices of one kind stay in their order.
    """
    by_kind: dict[str, list[int]] = {}
    for device in devices:
        by_kind.setdefault(problem.devices[device].kind, []).append(device)
    counts = tuple(len(own) for own in by_kind.values())
    groups = list(by_kind.values())
    if len(devices) <= MAX_ORDERED and _number_of_orders(counts) <= MAX_ORDERS:
        return [_merged(groups, kinds) for kinds in _arrangements(counts)]
    ranked = sorted(groups, key=lambda own: _node_ns(problem, own[:1]))
    fastest = tuple(device for own in ranked for device in own)
    return list(dict.fromkeys((fastest, tuple(device for own in reversed(ranked) for device in own))))


def _number_of_orders(counts: tuple[int, ...]) -> int:
    return factorial(sum(counts)) // prod(factorial(count) for count in counts)


@lru_cache(maxsize=64)
def _arrangements(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All sequences with ``counts[g]`` times group g, in lexicographic order."""
    if sum(counts) == 0:
        return ((),)
    found: list[tuple[int, ...]] = []
    for group, count in enumerate(counts):
        if count:
            fewer = (*counts[:group], count - 1, *counts[group + 1 :])
            found += [(group, *rest) for rest in _arrangements(fewer)]
    return tuple(found)


def _merged(groups: list[list[int]], kinds: tuple[int, ...]) -> tuple[int, ...]:
    turn = [iter(group) for group in groups]
    return tuple(next(turn[kind]) for kind in kinds)


def shares(loads_ns: Sequence[int], number: int) -> list[int]:
    """Micro-batches of each worker: one each, then each to the worker that would be done with it first.

    Of equals to the first. The largest number times load is as small as it can be.
    """
    found = [1] * len(loads_ns)
    for _ in range(number - len(loads_ns)):
        first = min(range(len(found)), key=lambda w: ((found[w] + 1) * loads_ns[w], w))
        found[first] += 1
    return found
