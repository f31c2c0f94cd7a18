"""Devices in a fixed order: that order, the servers that are interchangeable, and costs linear in the bytes.

Searches that try many message sizes between the same devices use ``Affine`` costs instead of computing each size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Device, Problem, per_problem

MUCH_BYTES = 2**40
MANY_ROWS = 5040
"""Samples of a micro-batch that every small number of replicas divides evenly."""


class Affine(NamedTuple):
    """The time of a message: ``fixed_ns`` plus ``ns_per_byte``, infinite where no route connects the devices.

    ``resources``: the resources of a shared network that a transfer uses; an all-reduce has ``ring_resources``.
    """

    ns_per_byte: float
    fixed_ns: int
    resources: tuple[int, ...] = ()

    @property
    def connected(self) -> bool:
        """Return whether a route connects the devices."""
        return self.ns_per_byte < math.inf

    def time_ns(self, size_bytes: int) -> int:
        """Return the time of a message, rounded up; 0 for 0 bytes."""
        if size_bytes == 0:
            return 0
        return self.fixed_ns + math.ceil(self.ns_per_byte * size_bytes) if self.connected else NEVER_NS


def affine_all_reduce(problem: Problem, devices: tuple[int, ...]) -> Affine:
    """Return the cost of an all-reduce by its bytes: the line through a very small and a very large one.

    Where all-reduces were measured, they are on no line: the large one is of all gradients.
    """
    if len(devices) < 2:
        return Affine(0.0, 0)
    large = max(2, int(problem.owned_bytes[-1])) if problem.collectives else MUCH_BYTES
    much = all_reduce_ns(problem, large, devices)
    if much >= NEVER_NS:
        return Affine(math.inf, 0)
    little = all_reduce_ns(problem, 1, devices)
    rate = (much - little) / (large - 1)
    return Affine(rate, max(0, little - 1 - int(rate)))


def affine_transfer(
    problem: Problem, source: tuple[int, ...], target: tuple[int, ...], rows: int = MANY_ROWS
) -> Affine:
    """Return the cost of a transfer between two stages' devices, by the bytes of the whole micro-batch.

    It is the line through micro-batches of ``rows`` and 2 ``rows`` samples, over the widest cut of the model.
    """
    if problem.num_layers < 2 or int(problem.forward_bytes.max()) == 0:
        return Affine(0.0, 0)
    cut = int(problem.forward_bytes.argmax())
    pair = single_pipeline((Stage(0, cut, source), Stage(cut + 1, problem.num_layers - 1, target)), 1)
    few, many = (transfer(problem, pair, 0, size, 0) for size in (rows, 2 * rows))
    if few is None or many is None:
        return Affine(0.0, 0)
    if many.duration_ns >= NEVER_NS:
        return Affine(math.inf, 0)
    rate = (many.duration_ns - few.duration_ns) / (many.bytes - few.bytes)
    return Affine(rate, max(0, 2 * few.duration_ns - many.duration_ns), few.resources)


def device_order(problem: Problem) -> tuple[int, ...]:
    """Return all devices, node by node."""
    return tuple(device for node in problem.nodes() for device in node)


def likeness(device: Device) -> tuple[str, int, int, int, int]:
    """Return the values that distinguish a device apart from its place in the network: its kind and its memory."""
    return device.kind, device.memory_bytes, device.context_bytes, device.edge_bytes, device.group_bytes


@per_problem
def server_classes(problem: Problem) -> tuple[int, ...]:
    """Return a class number per server: servers of one class can be exchanged without changing any cost."""
    nodes = problem.nodes()
    heads: list[int] = []
    classes = []
    for n in range(len(nodes)):
        number = next((c for c, head in enumerate(heads) if _alike(problem, nodes, head, n)), len(heads))
        if number == len(heads):
            heads.append(n)
        classes.append(number)
    return tuple(classes)


def _alike(problem: Problem, nodes: tuple[tuple[int, ...], ...], a: int, b: int) -> bool:
    network = problem.network
    devices_a, devices_b = ([likeness(problem.devices[d]) for d in nodes[n]] for n in (a, b))
    if devices_a != devices_b or network.insides[a] != network.insides[b]:
        return False
    if any(network.has_own_nic[d] for d in (*nodes[a], *nodes[b])):
        return _alike_by_matrix(network.dense_bandwidth(), nodes[a], nodes[b])
    if network.matrix_bytes_per_s is not None:
        return _alike_by_matrix(network.matrix_bytes_per_s, nodes[a], nodes[b])
    return _cables(network, a, b) == _cables(network, b, a)


def _cables(network: Network, a: int, b: int) -> list[tuple[str, int, int, bool, int]]:
    """Return the cables of server a by their far ends; a cable to b has the same name from either side."""
    mine, its = network.node_names[a], network.node_names[b]
    cables = []
    for cable in network.cables:
        if mine in (cable.a, cable.b):
            far = cable.b if cable.a == mine else cable.a
            cables.append(("" if far == its else far, *cable[2:]))
    return sorted(cables)


def _alike_by_matrix(table: np.ndarray, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    swapped = np.arange(len(table))
    swapped[list(a)], swapped[list(b)] = b, a
    return bool(np.array_equal(table[np.ix_(swapped, swapped)], table))
