"""The free devices of a topology, and the topology restricted to some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from penstock.convert.requests import devices_of, network_of
from penstock.importers.cluster.hostlist import expand
from penstock.schemas.errors import Conflict, Fault, InvalidDocument, meant
from penstock.schemas.topology import ClusterTopology, Link, MeasuredMatrix, Node
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Device

MOST_FAULTS = 20


class Cluster:
    """A topology written out, as documents and as the solver sees it; both number devices in the same way."""

    def __init__(self, topology: ClusterTopology) -> None:
        self.topology = topology.expanded()
        self.devices: tuple[Device, ...] = devices_of(self.topology)
        self.network: Network = network_of(self.topology)
        self.number_of: Mapping[str, int] = {device.name: number for number, device in enumerate(self.devices)}

    @cached_property
    def _by_node(self) -> dict[str, list[int]]:
        names = [node.name for node in self.topology.nodes]
        numbers: dict[str, list[int]] = {name: [] for name in names}
        for number, device in enumerate(self.devices):
            numbers[names[device.node]].append(number)
        return numbers

    def free(self, free: Sequence[str] | None, busy: Sequence[str] | None) -> frozenset[int]:
        """Return the numbers of free devices, from hostlists and device ids.

        Raises InvalidDocument for names that the topology lacks, Conflict where no device is free.
        """
        every = frozenset(range(len(self.devices)))
        numbers = self._named(free, "free") if free is not None else every - self._named(busy or (), "busy")
        if not numbers:
            raise Conflict(
                f"no device of {self.topology.name!r} is free: {_reason(free, busy)}",
                remedy="wait until a job has ended, or name the nodes that are free",
            )
        return numbers

    def _named(self, texts: Sequence[str], where: str) -> frozenset[int]:
        numbers: set[int] = set()
        unknown: dict[Fault, str] = {}
        for place, text in enumerate(texts):
            for name in [text] if text in self.number_of else expand(text):
                if name in self._by_node:
                    numbers.update(self._by_node[name])
                elif name in self.number_of:
                    numbers.add(self.number_of[name])
                else:
                    fault = Fault(f"/{where}/{place}", f"{name!r} is neither a node nor a device", "unknown-node")
                    unknown[fault] = name
        if unknown:
            self._refuse(unknown, where)
        return frozenset(numbers)

    def _refuse(self, unknown: Mapping[Fault, str], where: str) -> None:
        count = len(unknown)
        first = self.topology.nodes[0].name
        raise InvalidDocument(
            f"{where!r} names {count} node{'s' if count > 1 else ''} that the topology {self.topology.name!r} lacks"
            + (f"; the first {MOST_FAULTS} follow" if count > MOST_FAULTS else ""),
            faults=tuple(unknown)[:MOST_FAULTS],
            remedy=meant(
                next(iter(unknown.values())),
                self._by_node,
                f"nodes are named like {first!r}, devices {first + '/0'!r}",
            ),
        )

    def part(self, devices: Iterable[int]) -> ClusterTopology:
        """Return the topology of these devices alone, node by node in their order, with the switches that join them."""
        kept: dict[str, list[int]] = {}
        for number in devices:
            kept.setdefault(self.topology.nodes[self.devices[number].node].name, []).append(number)
        nodes = tuple(self._node(name, numbers) for name, numbers in kept.items())
        ids = {device.id for node in nodes for device in node.devices}
        if self.topology.matrix is not None:
            matrix = _part_of(self.topology.matrix, [device.id for node in nodes for device in node.devices])
            return self.topology.model_copy(update={"nodes": nodes, "matrix": matrix})
        links, switches = _joined(self.topology.links, set(kept), ids, {device.name for device in self.devices})
        return self.topology.model_copy(update={"nodes": nodes, "links": links, "switches": switches})

    def _node(self, name: str, numbers: Sequence[int]) -> Node:
        node = self.topology.nodes[self.devices[numbers[0]].node]
        wanted = {self.devices[number].name for number in numbers}
        return node.model_copy(update={"devices": tuple(device for device in node.devices if device.id in wanted)})


def _reason(free: Sequence[str] | None, busy: Sequence[str] | None) -> str:
    if free is not None:
        return "the list of free nodes is empty"
    return f"all are listed as busy: {', '.join(map(repr, (busy or ())[:3]))}"


def _part_of(matrix: MeasuredMatrix, ids: Sequence[str]) -> MeasuredMatrix:
    rows = [matrix.devices.index(name) for name in ids]

    def chosen(table: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(table[row][column] for column in rows) for row in rows)

    return MeasuredMatrix(
        devices=tuple(ids),
        bandwidth_bytes_per_s=chosen(matrix.bandwidth_bytes_per_s),
        latency_ns=None if matrix.latency_ns is None else chosen(matrix.latency_ns),
    )


def _joined(
    links: Sequence[Link], nodes: set[str], ids: set[str], devices: set[str]
) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """Return the links and switches that are needed: drop other devices, and whatever then has a single cable.

    A switch stays next to a node connected to it, even alone: a node without a fabric uses its own cable internally.
    """
    gone, kept = devices - ids, nodes | ids
    left = [link for link in links if link.a not in gone and link.b not in gone]
    while True:
        ends = Counter(end for link in left for end in (link.a, link.b))
        loose = {end for end, count in ends.items() if count == 1} - kept
        following = [link for link in left if loose.isdisjoint((link.a, link.b)) or {link.a, link.b} & kept]
        if len(following) == len(left):
            break
        left = following
    places = dict.fromkeys(end for link in left for end in (link.a, link.b) if end not in nodes and end not in ids)
    return tuple(left), tuple(places)
