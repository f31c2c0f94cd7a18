"""Cost of collectives on a ring: the all-reduce of replicas, flat or hierarchical (ALGORITHMS 1.6), and its halves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from penstock.solvers.costs.transfer import transfer_ns
from penstock.solvers.model.degrees import Operation
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Problem


def all_reduce_ns(problem: Problem, size_bytes: int, devices: Sequence[int]) -> int:
    """Return the time of a ring all-reduce over ``devices`` (SPP equation 1; hierarchical over nodes)."""
    k = len(devices)
    if k == 1 or size_bytes == 0:
        return 0
    network = problem.network
    mode = problem.rules.all_reduce
    nodes = network.nodes_of(devices)
    if mode == "hierarchical" and 1 < len(nodes) < k:
        return _hierarchical_ns(problem, size_bytes, devices)
    if mode == "dapple" and len(nodes) == 1:
        return transfer_ns(2 * (k - 1) * size_bytes, k * network.ring_bandwidth(devices) * (k // 2))
    return ring_of(network, devices).all_reduce_ns(size_bytes)


class Ring(NamedTuple):
    """Devices, the bandwidth from one to the next (over several cards: of all rings), and the longest latency."""

    size: int
    bytes_per_s: int
    latency_ns: int

    def all_reduce_ns(self, size_bytes: int) -> int:
        """Return the time of an all-reduce of ``size_bytes``."""
        return self._rounds_ns(2, size_bytes)

    def time_ns(self, operation: Operation, size_bytes: int, count: int = 1) -> int:
        """Return the time of ``count`` collectives that move ``size_bytes`` together.

        ``size_bytes`` is the whole tensor of an all-gather, a reduce-scatter (each half of an all-reduce) and an
        all-reduce, and what one device sends in all of an all-to-all or of point-to-point sends to its neighbour.
        """
        if self.size == 1 or size_bytes == 0:
            return 0
        if operation == "send":
            return transfer_ns(size_bytes, self.bytes_per_s) + count * self.latency_ns
        return self._rounds_ns(2 if operation == "all_reduce" else 1, size_bytes, count)

    def _rounds_ns(self, rounds: int, size_bytes: int, count: int = 1) -> int:
        """Return the time in which every part of the tensor goes ``rounds`` times around the ring."""
        steps = rounds * (self.size - 1)
        moved = transfer_ns(steps * size_bytes, self.size * self.bytes_per_s)
        return moved + count * steps * self.latency_ns


def _hierarchical_ns(problem: Problem, size_bytes: int, devices: Sequence[int]) -> int:
    insides, outside = _rings(problem.network, tuple(devices))
    return max((ring.all_reduce_ns(size_bytes) for ring in insides), default=0) + outside.all_reduce_ns(size_bytes)


@lru_cache(maxsize=2**12)
def _rings(network: Network, devices: tuple[int, ...]) -> tuple[tuple[Ring, ...], Ring]:
    """Return the distinct rings within nodes, and the ring across nodes over all cards that the devices use."""
    groups: dict[int, list[int]] = {}
    for device in devices:
        groups.setdefault(network.node_of[device], []).append(device)
    insides = dict.fromkeys(ring_of(network, group) for group in groups.values() if len(group) > 1)
    leaders = ring_of(network, [group[0] for group in groups.values()])
    return tuple(insides), leaders._replace(bytes_per_s=network.bandwidth_across(devices))


def ring_of(network: Network, devices: Sequence[int]) -> Ring:
    """Return the ring over several devices in the order of the network."""
    latency = max(_latency(network, u, v) for u, v, _parts in network.ring(devices))
    return Ring(len(devices), network.ring_bandwidth(devices), latency)


def _latency(network: Network, u: int, v: int) -> int:
    route = network.route(u, v)
    return 0 if route is None else route.latency_ns


def ring_resources(problem: Problem, devices: Sequence[int]) -> tuple[int, ...]:
    """Return every network resource that the ring of the devices uses, in both directions."""
    used: set[int] = set()
    for u, v, _parts in problem.network.ring(devices):
        for a, b in ((u, v), (v, u)):
            route = problem.network.route(a, b)
            if route is not None:
                used.update(route.resources)
    return tuple(sorted(used))
