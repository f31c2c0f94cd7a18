"""A topology of hosts that were measured in pairs: a link per host where that explains the pairs, or a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from penstock.executor.links.link_peer import Host, Link
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.topology import (
    ClusterTopology,
    Device,
    MeasuredCollective,
    MeasuredMatrix,
    Node,
)
from penstock.schemas.topology import Link as Cable

STAR_ERROR = 0.15
"""The largest relative difference between measured pairs and one link per host."""

Pairs = Mapping[tuple[int, int], Link]


def topology_of_hosts(
    hosts: Sequence[Host],
    pairs: Pairs,
    *,
    collectives: tuple[MeasuredCollective, ...] | None = None,
) -> ClusterTopology:
    """Build a topology of hosts with their devices, linked as measured; ``pairs`` by the places of the hosts.

    Where one link per host to a switch explains all pairs within ``STAR_ERROR``, the topology has these links, which
    the devices of a host share. Otherwise it has a matrix of all ordered pairs of devices. Raises InvalidDocument for
    two hosts of one name, a host without devices, or several devices in a host without a fabric.
    """
    _refuse_odd(hosts)
    nodes = tuple(
        Node(
            name=host.name,
            devices=tuple(Device(id=one.id, kind=one.kind, memory_bytes=one.memory_bytes) for one in host.devices),
            fabric=host.fabric if len(host.devices) > 1 else None,
        )
        for host in hosts
    )
    if len(hosts) == 1:
        return ClusterTopology(name="measured", nodes=nodes, links_from="measured", collectives=collectives)
    cables = star_of(hosts, pairs)
    if cables is not None:
        assumption = f"one link per host explains every measured pair within {STAR_ERROR:.0%}"
        return ClusterTopology(
            name="measured",
            nodes=nodes,
            switches=("switch",),
            links=cables,
            assumptions=(assumption,),
            links_from="measured",
            collectives=collectives,
        )
    return ClusterTopology(
        name="measured",
        nodes=nodes,
        matrix=_matrix(hosts, pairs),
        assumptions=("each pair of hosts was measured alone: devices that share a host's link may get less",),
        links_from="measured",
        collectives=collectives,
    )


def star_of(hosts: Sequence[Host], pairs: Pairs) -> tuple[Cable, ...] | None:
    """Return one link per host to a switch, if that explains all pairs.

    A pair gets the smaller bandwidth of its two links, so a host's link has the largest bandwidth of its pairs. A pair
    gets the sum of its links' latencies, which are solved for the hosts by least squares.
    """
    numbers = range(len(hosts))
    bandwidth = [max(pairs[a, b].bandwidth_bytes_per_s for a, b in pairs if i in (a, b)) for i in numbers]
    latency_ns = _shares_of_latency(len(hosts), pairs)
    for a, b in permutations(numbers, 2):
        link = pairs[a, b]
        explained = min(bandwidth[a], bandwidth[b])
        if abs(explained / link.bandwidth_bytes_per_s - 1) > STAR_ERROR:
            return None
        if abs(latency_ns[a] + latency_ns[b] - link.latency_ns) > STAR_ERROR * max(1, link.latency_ns):
            return None
    return tuple(
        Cable(a=hosts[i].name, b="switch", bandwidth_bytes_per_s=bandwidth[i], latency_ns=latency_ns[i])
        for i in numbers
    )


def _shares_of_latency(count: int, pairs: Pairs) -> list[int]:
    if count == 2:
        half = round((pairs[0, 1].latency_ns + pairs[1, 0].latency_ns) / 4)
        return [half, half]
    of_host = [sum(link.latency_ns for pair, link in pairs.items() if i in pair) / 2 for i in range(count)]
    everything = sum(of_host) / (2 * (count - 1))
    return [max(0, round((total - everything) / (count - 2))) for total in of_host]


def _matrix(hosts: Sequence[Host], pairs: Pairs) -> MeasuredMatrix:
    places = [(i, device.id) for i, host in enumerate(hosts) for device in host.devices]

    def between(a: int, b: int) -> tuple[int, int]:
        if a == b:
            fabric = hosts[a].fabric
            return (0, 0) if fabric is None else (fabric.bandwidth_bytes_per_s, fabric.latency_ns)
        return pairs[a, b].bandwidth_bytes_per_s, pairs[a, b].latency_ns

    return MeasuredMatrix(
        devices=tuple(device for _, device in places),
        bandwidth_bytes_per_s=tuple(tuple(between(a, b)[0] for b, _ in places) for a, _ in places),
        latency_ns=tuple(tuple(between(a, b)[1] for b, _ in places) for a, _ in places),
    )


def _refuse_odd(hosts: Sequence[Host]) -> None:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise InvalidDocument(f"two hosts have the name {name!r}", remedy="give each peer its own --name")
    for host in hosts:
        if not host.devices:
            raise InvalidDocument(f"host {host.name!r} has no device", remedy="penstock probe --serve --cpu-devices")
        if len(host.devices) > 1 and host.fabric is None:
            raise InvalidDocument(
                f"nothing was measured between the {len(host.devices)} devices of {host.name!r}",
                remedy="give the peer's --fabric, such as '12 GB/s'",
            )
