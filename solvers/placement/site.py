"""The free hosts of a cluster as a rooted tree, and the test whether two sets of them are alike.

Two sets are alike when a mapping of one onto the other keeps hosts (kinds, memory, prices, fabric) and the cables
between them: then every plan for one is a plan for the other, with the same time. Cables above the set do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx

from penstock.solvers.costs.tables.device_line import likeness
from penstock.solvers.model.network import Cable, Network
from penstock.solvers.model.problem import Device

ROOT = ""
"""Name of the place above parts that no cable joins, or whose tree does not follow the hosts."""


@dataclass(frozen=True, slots=True)
class Host:
    """A node with free devices (numbers of the network). Hosts of one ``group`` differ by their place only."""

    name: str
    devices: tuple[int, ...]
    group: int


@dataclass(slots=True)
class Place:
    """A host or a switch of the tree: the cable to its parent, its children, and the numbers of hosts below."""

    name: str
    parent: Place | None
    cable: int
    children: list[Place] = field(default_factory=list)
    host: int | None = None
    free: int = 0
    hosts: int = 0


Chosen = tuple[tuple[int, int], ...]
"""Hosts by number, in the order of the tree, each with a number of its free devices."""


class Site:
    """Hosts with a free device, and the tree that joins them.

    Where devices have separate cables, or a matrix was measured, ``is_tree`` is False: hosts are then alike only when
    they are attached to the same places, and sets differ by their numbers of each.
    """

    def __init__(self, devices: Sequence[Device], network: Network, free: Collection[int]) -> None:
        self.devices, self.network = devices, network
        self.is_tree = network.matrix_bytes_per_s is None and not any(network.has_own_nic)
        self._numbers: dict[object, int] = {}
        self.hosts = self._hosts(free)
        self.root = self._rooted() if self.is_tree else self._flat()
        self.order = _ordered(self.root)

    def _hosts(self, free: Collection[int]) -> tuple[Host, ...]:
        by_node: dict[int, list[int]] = {}
        for device in sorted(free):
            by_node.setdefault(self.network.node_of[device], []).append(device)
        return tuple(
            Host(self.network.node_names[node], tuple(numbers), self._number(self._look(node, numbers)))
            for node, numbers in by_node.items()
        )

    def _look(self, node: int, numbers: Iterable[int]) -> object:
        """Return everything that distinguishes a host for plans, apart from its place."""
        each = [(likeness(d), d.price) for d in (self.devices[number] for number in numbers)]
        return ("host", tuple(each), self.network.insides[node])

    def _number(self, thing: object) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def _cable(self, cable: Cable | None) -> int:
        return self._number(None if cable is None else ("cable", *cable[2:]))

    def _rooted(self) -> Place:
        tree = self.network.tree
        numbers = {host.name: number for number, host in enumerate(self.hosts)}
        sizes = sorted(nx.connected_components(tree), key=lambda part: (-len(part), min(part)))
        tops = [self._grown(tree, part, numbers) for part in sizes if any(name in numbers for name in part)]
        return tops[0] if len(tops) == 1 else self._above(tops)

    def _grown(self, tree: nx.Graph, part: set[str], numbers: Mapping[str, int]) -> Place:
        top = Place(_middle(tree, part), None, self._cable(None))
        places = {top.name: top}
        for above, below in nx.bfs_edges(tree, top.name):
            cable = self.network.cables[tree.edges[above, below]["cable"]]
            places[below] = Place(below, places[above], self._cable(cable))
            places[above].children.append(places[below])
        nodes = set(self.network.node_names)
        for place in reversed(places.values()):
            place.host = numbers.get(place.name)
            place.free = (place.host is not None) + sum(child.free for child in place.children)
            place.hosts = (place.name in nodes) + sum(child.hosts for child in place.children)
        return top

    def _flat(self) -> Place:
        """Return the hosts below the places that they are attached to, as one flat level."""
        plugged: dict[str, list[tuple[str, str, int]]] = {host.name: [] for host in self.hosts}
        for cable in self.network.cables:
            for end, other in ((cable.a, cable.b), (cable.b, cable.a)):
                name, _slash, device = end.partition("/")
                if name in plugged:
                    plugged[name].append((device, other, self._cable(cable)))
        groups: dict[object, list[Place]] = {}
        for number, host in enumerate(self.hosts):
            same = tuple(sorted(plugged[host.name])) if plugged[host.name] else host.name
            place = Place(host.name, None, self._number(("plugged", same)), host=number, free=1, hosts=1)
            groups.setdefault(same, []).append(place)
        return self._above([self._above(members) for members in groups.values()])

    def _above(self, children: list[Place]) -> Place:
        top = Place(ROOT, None, self._cable(None), children)
        for child in children:
            child.parent = top
        top.free, top.hosts = (sum(getattr(child, name) for child in children) for name in ("free", "hosts"))
        return top

    def whole_hosts(self, hosts: Collection[int]) -> Chosen:
        """Return the hosts with all their free devices, in the order of the tree."""
        wanted = set(hosts)
        return tuple((host, len(self.hosts[host].devices)) for host in self.order if host in wanted)

    def devices_of(self, chosen: Chosen) -> tuple[int, ...]:
        """Return the devices of a set, host by host."""
        return tuple(device for host, count in chosen for device in self.hosts[host].devices[:count])

    def alike(self, chosen: Chosen) -> int:
        """Return the class number of a set: sets with the same number are alike."""
        counts = dict(chosen)
        below: dict[int, int] = {}
        for host in counts:
            place: Place | None = self._place_of[host]
            while place is not None:
                below[id(place)] = below.get(id(place), 0) + 1
                place = place.parent
        top = self.root
        while self._content(top, counts) is None:
            inside = [child for child in top.children if id(child) in below]
            if len(inside) != 1:
                break
            top = inside[0]
        return self._shape(top, counts, below)

    def _shape(self, place: Place, counts: Mapping[int, int], below: Mapping[int, int]) -> int:
        inside = Counter(
            (child.cable, self._shape(child, counts, below)) for child in place.children if id(child) in below
        )
        name = place.cable if not self.is_tree and place.host is not None else None
        return self._number((name, self._content(place, counts), tuple(sorted(inside.items()))))

    def _content(self, place: Place, counts: Mapping[int, int]) -> tuple[int, int] | None:
        if place.host is None or place.host not in counts:
            return None
        return self.hosts[place.host].group, counts[place.host]

    def newly_broken(self, chosen: Chosen) -> int:
        """Return the number of entirely free switches of whose hosts the set uses some but not all."""
        used: Counter[int] = Counter()
        leaves: dict[int, Place] = {}
        for host, _count in chosen:
            leaf = self._place_of[host].parent
            if leaf is not None:
                used[id(leaf)] += 1
                leaves[id(leaf)] = leaf
        return sum(leaf.free == leaf.hosts and used[key] < leaf.free for key, leaf in leaves.items())

    @cached_property
    def _place_of(self) -> dict[int, Place]:
        return {place.host: place for place in places_of(self.root) if place.host is not None}


def places_of(top: Place) -> list[Place]:
    """Return a place and all below it, parents first."""
    places, waiting = [], [top]
    while waiting:
        place = waiting.pop()
        places.append(place)
        waiting += reversed(place.children)
    return places


def _ordered(root: Place) -> tuple[int, ...]:
    """Return the hosts in the order of a walk through the tree."""
    return tuple(place.host for place in places_of(root) if place.host is not None)


def _middle(tree: nx.Graph, part: set[str]) -> str:
    """Return the place that remains when leaves are removed repeatedly."""
    degree = {name: tree.degree[name] for name in part}
    ends = sorted(name for name, count in degree.items() if count <= 1)
    left = len(part)
    while left > 2:
        left -= len(ends)
        following = []
        for end in ends:
            degree[end] = 0
            for other in tree[end]:
                degree[other] -= degree[other] > 0
                if degree[other] == 1:
                    following.append(other)
        ends = sorted(following)
    return ends[0]
