"""Cost of collectives: all-reduces, flat or hierarchical (ALGORITHMS 1.6), their halves, all-to-alls and ring sends.

Where a collective of a group's span was measured, that is its time (``measured_collectives``); else a ring's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from penstock.solvers.costs.measured_collectives import Measured, measured_of
from penstock.solvers.costs.transfer import transfer_ns
from penstock.solvers.model.degrees import Operation
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Problem


def all_reduce_ns(problem: Problem, size_bytes: int, devices: Sequence[int]) -> int:
    """Return the time in which ``devices`` exchange the gradients of ``size_bytes`` of parameters.

    It is the time of an all-reduce, measured or a ring's (SPP equation 1), of the bytes that ``exchange`` of the memory
    rules states.
    """
    if len(devices) == 1:
        return 0
    return group_of(problem, tuple(devices)).time_ns("all_reduce", problem.memory.exchanged_bytes(size_bytes))


class Ring(NamedTuple):
    """Devices, their narrowest bandwidth, and the longest latency from one to the next."""

    size: int
    bytes_per_s: int
    latency_ns: int

    def rounds_ns(self, rounds: int, size_bytes: int, count: int = 1) -> int:
        """Return the time in which every part of ``count`` tensors goes ``rounds`` times around the ring."""
        steps = rounds * (self.size - 1)
        return transfer_ns(steps * size_bytes, self.size * self.bytes_per_s) + count * steps * self.latency_ns


class Group(NamedTuple):
    """Several devices that take part in collectives.

    ``levels``: the rings of an all-reduce and its halves, one level after another, the rings of a level concurrently;
    ``ring``: all devices, as all-to-alls and sends use them.
    """

    ring: Ring
    levels: tuple[tuple[Ring, ...], ...]
    measured: Measured

    def time_ns(self, operation: Operation, size_bytes: int, count: int = 1) -> int:
        """Return the time of ``count`` equal collectives that move ``size_bytes`` together.

        ``size_bytes`` is the whole tensor of an all-gather, a reduce-scatter (each half of an all-reduce) and an
        all-reduce, and what one device sends in all of an all-to-all or of point-to-point sends to its neighbour.
        """
        if size_bytes == 0:
            return 0
        for measured, curves in self.measured:
            if measured == operation:
                return count * sum(curve.time_ns(-(-size_bytes // count)) for curve in curves)
        return self.computed_ns(operation, size_bytes, count)

    def computed_ns(self, operation: Operation, size_bytes: int, count: int = 1) -> int:
        """Return the time of such collectives from bandwidths and latencies alone."""
        if operation == "send":
            return transfer_ns(size_bytes, self.ring.bytes_per_s) + count * self.ring.latency_ns
        if operation == "all_to_all":
            return self.ring.rounds_ns(1, size_bytes, count)
        rounds = 2 if operation == "all_reduce" else 1
        return sum(max(ring.rounds_ns(rounds, size_bytes, count) for ring in level) for level in self.levels)


@lru_cache(maxsize=2**13)
def group_of(problem: Problem, devices: tuple[int, ...]) -> Group:
    """Return the group of several devices, as the request has all-reduces: flat, hierarchical, or as in DAPPLE."""
    network, mode = problem.network, problem.rules.all_reduce
    ring, nodes = ring_of(network, devices), network.nodes_of(devices)
    levels: tuple[tuple[Ring, ...], ...] = ((ring,),)
    if mode == "hierarchical" and 1 < len(nodes) < len(devices):
        levels = _levels(network, devices)
    elif mode == "dapple" and len(nodes) == 1:
        levels = ((Ring(ring.size, ring.bytes_per_s * (ring.size // 2), 0),),)
    return Group(ring, levels, measured_of(problem, devices))


@lru_cache(maxsize=2**13)
def _levels(network: Network, devices: tuple[int, ...]) -> tuple[tuple[Ring, ...], ...]:
    """Return the distinct rings within nodes, and the ring across nodes, over all cards that the devices use."""
    groups: dict[int, list[int]] = {}
    for device in devices:
        groups.setdefault(network.node_of[device], []).append(device)
    insides = dict.fromkeys(ring_of(network, group) for group in groups.values() if len(group) > 1)
    outside = ring_of(network, [group[0] for group in groups.values()])
    return tuple(insides), (outside._replace(bytes_per_s=network.bandwidth_across(devices)),)


def ring_of(network: Network, devices: Sequence[int]) -> Ring:
    """Return the ring over several devices in the order of the network."""
    return _ring_of(network, tuple(devices))


@lru_cache(maxsize=2**13)
def _ring_of(network: Network, devices: tuple[int, ...]) -> Ring:
    latency = max(_latency(network, u, v) for u, v, _parts in network.ring(devices))
    return Ring(len(devices), network.ring_bandwidth(devices), latency)


def _latency(network: Network, u: int, v: int) -> int:
    route = network.route(u, v)
    return 0 if route is None else route.latency_ns


def ring_resources(problem: Problem, devices: Sequence[int]) -> tuple[int, ...]:
    """Return every network resource that the ring of the devices uses, in both directions; none of one device."""
    return () if len(devices) == 1 else _ring_resources(problem.network, tuple(devices))


@lru_cache(maxsize=2**13)
def _ring_resources(network: Network, devices: tuple[int, ...]) -> tuple[int, ...]:
    used: set[int] = set()
    for u, v, _parts in network.ring(devices):
        for a, b in ((u, v), (v, u)):
            route = network.route(a, b)
            if route is not None:
                used.update(route.resources)
    return tuple(sorted(used))
