"""The network as resources and routes: a maximum spanning tree over nodes, switches and devices, or a matrix.

A *resource* is whatever one transfer at a time may use: one direction of a full-duplex link, a half-duplex link, a
device pair's channel, a port, a bus. A *route* lists the resources between two devices in order. The bottleneck of the
tree's path equals the widest path's bottleneck in the whole graph, lanes counted together.

The *lanes* of a cable are equal cards, each a separate resource, and device i of a node has lane i modulo their
number. A transfer passes one lane: the sender's in the first half of the path, the receiver's in the second, and on a
cable in the middle the lane of the device with the lower number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    import networkx as nx

MAX_DENSE_DEVICES = 2048
_D = TypeVar("_D")


class Cable(NamedTuple):
    """An undirected link between two named places; ``lanes``: the number of its equal cards."""

    a: str
    b: str
    bandwidth_bytes_per_s: int
    latency_ns: int
    full_duplex: bool
    lanes: int = 1

    @property
    def lane_bytes_per_s(self) -> int:
        """Return the bandwidth of one lane."""
        return max(min(1, self.bandwidth_bytes_per_s), self.bandwidth_bytes_per_s // self.lanes)


class Inside(NamedTuple):
    """A node's fabric."""

    form: Literal["pairs", "ports", "bus"]
    bandwidth_bytes_per_s: int
    latency_ns: int
    full_duplex: bool


class Route(NamedTuple):
    """The route from one device to another."""

    resources: tuple[int, ...]
    latency_ns: int


class Ways(NamedTuple):
    """Routes of one latency: ``resources`` (sources, targets, n)."""

    resources: np.ndarray
    latency_ns: int


class Resource(NamedTuple):
    """Part of the network that one transfer at a time may use; ``ends``: its two ends, for all lanes."""

    name: str
    bandwidth_bytes_per_s: int
    ends: tuple[str, str]


class _Path(NamedTuple):
    """The path from one place to another: the resources of each cable, one for each lane."""

    cables: tuple[tuple[int, ...], ...]
    latency_ns: int


@dataclass(frozen=True, eq=False)
class Network:
    """Devices are numbered as in the problem; ``node_of[d]`` numbers their nodes."""

    device_names: tuple[str, ...]
    node_names: tuple[str, ...]
    node_of: tuple[int, ...]
    insides: tuple[Inside | None, ...]
    cables: tuple[Cable, ...]
    matrix_bytes_per_s: np.ndarray | None = None
    matrix_latency_ns: np.ndarray | None = None
    resources: list[Resource] = field(default_factory=list)
    _ids: dict[tuple[str, str, str], int] = field(default_factory=dict)
    _routes: dict[tuple[int, int], Route | None] = field(default_factory=dict)
    _paths: dict[tuple[str, str], _Path | None] = field(default_factory=dict)
    _narrowest: dict[tuple[int, ...], int] = field(default_factory=dict)

    def route(self, source: int, target: int) -> Route | None:
        """Return resources and summed latency from one device to another; None where nothing connects them."""
        key = (source, target)
        if key not in self._routes:
            self._routes[key] = self._find_route(source, target)
        return self._routes[key]

    def keeping(self, devices: Sequence[int]) -> Network:
        """Return the network with these devices alone; places without devices still forward what they did before."""
        nodes = sorted({self.node_of[device] for device in devices})
        passed = Counter(end for cable in self.cables for end in (cable.a, cable.b))
        gone = set(self.device_names) - {self.device_names[device] for device in devices}
        gone |= {name for node, name in enumerate(self.node_names) if node not in nodes and passed[name] == 1}
        index = np.ix_(devices, devices)
        return Network(
            device_names=tuple(self.device_names[device] for device in devices),
            node_names=tuple(self.node_names[node] for node in nodes),
            node_of=tuple(nodes.index(self.node_of[device]) for device in devices),
            insides=tuple(self.insides[node] for node in nodes),
            cables=tuple(cable for cable in self.cables if cable.a not in gone and cable.b not in gone),
            matrix_bytes_per_s=None if self.matrix_bytes_per_s is None else self.matrix_bytes_per_s[index],
            matrix_latency_ns=None if self.matrix_latency_ns is None else self.matrix_latency_ns[index],
        )

    def bandwidth(self, source: int, target: int) -> int:
        """Return the bytes per second of the narrowest resource between two devices, 0 where nothing connects them."""
        route = self.route(source, target)
        if route is None:
            return 0
        return min(self.resources[r].bandwidth_bytes_per_s for r in route.resources)

    def ring_bandwidth(self, devices: Sequence[int]) -> int:
        """Return the bytes per second of a ring over the devices, or of rings that share its bytes evenly.

        There is one ring over devices in one node; over several, every card that the devices use has a ring.
        """
        key = tuple(devices)
        if key not in self._narrowest:
            self._narrowest[key] = self._find_narrowest(devices)
        return self._narrowest[key]

    def _find_narrowest(self, devices: Sequence[int]) -> int:
        if self.matrix_bytes_per_s is not None:
            index = np.asarray(devices)
            block = self.matrix_bytes_per_s[np.ix_(index, index)]
            return int(block[~np.eye(len(devices), dtype=bool)].min())
        return min((*self._within_nodes(devices), *map(self._shared_bandwidth, self._hops(self._in_order(devices)))))

    def _within_nodes(self, devices: Sequence[int]) -> Iterator[int]:
        """Return the fabrics of the nodes that hold several of the devices."""
        first_of: dict[int, int] = {}
        for device in devices:
            other = first_of.setdefault(self.node_of[device], device)
            if other != device:
                yield self.bandwidth(other, device)

    def bandwidth_across(self, devices: Sequence[int]) -> int:
        """Return the bytes per second of the rings from node to node, if devices in several nodes share the bytes."""
        if self.matrix_bytes_per_s is not None:
            return self.ring_bandwidth(list({self.node_of[device]: device for device in reversed(devices)}.values()))
        return min(map(self._shared_bandwidth, self._hops(self._in_order(devices))))

    def _in_order(self, devices: Sequence[int]) -> list[list[int]]:
        """Return the devices node by node, in the order of rings."""
        return list(self._by_node(sorted(devices, key=lambda d: (self.node_of[d], d))).values())

    def _hops(self, groups: list[list[int]]) -> list[list[tuple[int, int]]]:
        """Return the pairs that pass bytes from each node to the next: every card of both, each equally often."""
        if len(groups) == 1:
            return []
        if not self.has_cards:
            return [[(out[-1], into[0])] for out, into in zip(groups, groups[1:] + groups[:1], strict=True)]
        cards = [list({self._card(d): d for d in reversed(group)}.values())[::-1] for group in groups]
        return [
            [(out[i % len(out)], into[i % len(into)]) for i in range(lcm(len(out), len(into)))]
            for out, into in zip(cards, cards[1:] + cards[:1], strict=True)
        ]

    def cards_at(self, node: int) -> int:
        """Return the number of cards by which the devices of a node leave it; links that all share count as one."""
        return len({self._card(device) for device, of in enumerate(self.node_of) if of == node})

    def keeps_lanes(self, swap: Mapping[int, int]) -> bool:
        """Return whether devices that share a lane still share one after exchanging devices, and no others do."""
        laned = [cable for cable in self.cables if cable.lanes > 1]
        number = self.number_in_node
        if all(number[u] % cable.lanes == number[v] % cable.lanes for u, v in swap.items() for cable in laned):
            return True
        hosts = set(self.node_names)
        leaves = all((cable.a in hosts) != (cable.b in hosts) for cable in laned)
        if not leaves or any(self.tree.degree(self.node_names[self.node_of[u]]) > 1 for u in swap):
            return False
        nodes = {self.node_of[u] for u in swap}
        touched = [d for d, node in enumerate(self.node_of) if node in nodes]
        cards = {(self.node_of[d], self._card(d)) for d in touched}
        moved = {
            (self.node_of[d], self._card(d), self.node_of[e], self._card(e)) for d in touched for e in (swap.get(d, d),)
        }
        return len(moved) == len(cards)

    def _card(self, device: int) -> object:
        """Return the card by which a device leaves its node."""
        if device in self._wired_devices:
            return self.device_names[device]
        return self.number_in_node[device] % self._lanes_of[self.node_names[self.node_of[device]]]

    def _shared_bandwidth(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Return the bytes per second of all pairs together if each carries an equal part; 0 where one has no route."""
        routes = [self.route(u, v) for u, v in pairs]
        if any(route is None for route in routes):
            return 0
        load = Counter(resource for route in routes if route is not None for resource in route.resources)
        return min(self.resources[r].bandwidth_bytes_per_s * len(pairs) // count for r, count in load.items())

    def spanning_pairs(self, devices: Sequence[int]) -> list[tuple[int, int]]:
        """Return ordered pairs that include the narrowest of all pairs: within nodes, and between node leaders."""
        by_node = self._by_node(devices)
        pairs = [(u, v) for group in by_node.values() for u in group for v in group if u != v]
        if any(d in self._wired_devices for d in devices):
            return pairs + [(u, v) for u in devices for v in devices if self.node_of[u] != self.node_of[v]]
        leaders = [group[0] for group in by_node.values()]
        return pairs + [(u, v) for u in leaders for v in leaders if u != v]

    def _by_node(self, devices: Iterable[int]) -> dict[int, list[int]]:
        devices_of: dict[int, list[int]] = {}
        for device in devices:
            devices_of.setdefault(self.node_of[device], []).append(device)
        return devices_of

    def walk(self) -> tuple[int, ...]:
        """Return all nodes in the order of a walk through the tree, small branches first; a switch's nodes together.

        Where bandwidths are given as a matrix, nodes are in the order of their numbers.
        """
        if self.matrix_bytes_per_s is not None:
            return tuple(range(len(self.node_names)))
        order, number_of = [], {name: number for number, name in enumerate(self.node_names)}
        children: dict[str, list[str]] = {}
        for place, (_root, parent, _depth) in self._parents.items():
            children.setdefault(place, [])
            if parent is not None:
                children.setdefault(parent, []).append(place)
        size = self._branch_sizes()
        waiting = [place for place, (_root, parent, _depth) in self._parents.items() if parent is None][::-1]
        while waiting:
            place = waiting.pop()
            if place in number_of:
                order.append(number_of[place])
            waiting += sorted(children[place], key=lambda each: size[each])[::-1]
        return tuple(order)

    def _branch_sizes(self) -> dict[str, int]:
        """Return the number of places at and below each place of the tree."""
        size = dict.fromkeys(self._parents, 1)
        for place, (_root, parent, _depth) in sorted(self._parents.items(), key=lambda each: -each[1][2]):
            if parent is not None:
                size[parent] += size[place]
        return size

    def ring(self, devices: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the neighbouring pairs of an all-reduce: device by device, by every card to the next node.

        The third number says among how many pairs, those from a node to the next, the bytes are shared.
        """
        groups = self._in_order(devices)
        hops = self._hops(groups) or [[(groups[0][-1], groups[0][0])]]
        return [
            pair
            for group, hop in zip(groups, hops, strict=True)
            for pair in (*((u, v, 1) for u, v in pairwise(group)), *((u, v, len(hop)) for u, v in hop))
        ]

    def nodes_of(self, devices: Iterable[int]) -> set[int]:
        """Return the nodes that hold any of the devices."""
        return {self.node_of[d] for d in devices}

    def dense_bandwidth(self) -> np.ndarray:
        """Return the bandwidth of all ordered pairs as an int64 matrix (V, V), diagonal 0; at most 2,048 devices."""
        size = len(self.device_names)
        assert size <= MAX_DENSE_DEVICES
        if self.matrix_bytes_per_s is not None:
            return self.matrix_bytes_per_s
        table = np.zeros((size, size), dtype=np.int64)
        for u in range(size):
            for v in range(size):
                if u != v:
                    table[u, v] = self.bandwidth(u, v)
        return table

    @cached_property
    def has_own_nic(self) -> tuple[bool, ...]:
        """Return whether each device has a separate link out of its node."""
        return tuple(d in self._wired_devices for d in range(len(self.device_names)))

    @cached_property
    def has_cards(self) -> bool:
        """Return whether devices of one node may leave it by different cards: separate cables, or lanes."""
        if self.matrix_bytes_per_s is not None:
            return False
        return bool(self._wired_devices) or any(cable.lanes > 1 for cable in self.cables)

    @cached_property
    def number_in_node(self) -> tuple[int, ...]:
        """Return the number of each device within its node."""
        count: Counter[int] = Counter()
        numbers = []
        for node in self.node_of:
            numbers.append(count[node])
            count[node] += 1
        return tuple(numbers)

    @cached_property
    def _numbers(self) -> np.ndarray:
        return np.asarray(self.number_in_node)

    @cached_property
    def _lanes_of(self) -> Mapping[str, int]:
        """Return the most lanes of a cable of the tree at each place."""
        lanes = dict.fromkeys(self.tree.nodes, 1)
        for a, b, number in self.tree.edges(data="cable"):
            for end in (a, b):
                lanes[end] = max(lanes[end], self.cables[number].lanes)
        return lanes

    @cached_property
    def _wired_devices(self) -> frozenset[int]:
        ends = {cable.a for cable in self.cables} | {cable.b for cable in self.cables}
        return frozenset(d for d, name in enumerate(self.device_names) if name in ends)

    @cached_property
    def tree(self) -> nx.Graph:
        """Return the spanning tree of widest cables over nodes and switches; ``cable`` is the cable's number."""
        import networkx as nx  # takes as long to load as a small request to be read

        graph = nx.Graph()
        graph.add_nodes_from(self.node_names)
        for i, cable in enumerate(self.cables):
            edge = graph.get_edge_data(cable.a, cable.b)
            if edge is None or edge["weight"] < cable.bandwidth_bytes_per_s:
                graph.add_edge(cable.a, cable.b, weight=cable.bandwidth_bytes_per_s, cable=i)
        return nx.maximum_spanning_tree(graph)

    @cached_property
    def _parents(self) -> dict[str, tuple[str, str | None, int]]:
        """Return the root, the parent and the depth of each place of the tree."""
        import networkx as nx

        places: dict[str, tuple[str, str | None, int]] = {}
        for root in self.tree.nodes:
            if root in places:
                continue
            places[root] = (root, None, 0)
            for parent, child in nx.bfs_edges(self.tree, root):
                places[child] = (root, parent, places[parent][2] + 1)
        return places

    def way_up(self, device: int) -> Iterator[frozenset[str]]:
        """Yield the ends of each cable of the tree from a device's place to the root."""
        place = self.place(device)
        while (parent := self._parents[place][1]) is not None:
            yield frozenset((place, parent))
            place = parent

    def _find_route(self, source: int, target: int) -> Route | None:
        if self.matrix_bytes_per_s is not None:
            bandwidth = int(self.matrix_bytes_per_s[source, target])
            latency = 0 if self.matrix_latency_ns is None else int(self.matrix_latency_ns[source, target])
            pair = (self.device_names[source], self.device_names[target])
            return Route((self._resource(pair, bandwidth),), latency) if bandwidth else None
        node = self.node_of[source]
        inside = self.insides[node]
        if node == self.node_of[target]:
            return self._route_inside(node, inside, source, target) if inside is not None else None
        return self._route_between(source, target)

    def place(self, device: int) -> str:
        """Return the place of a device in the tree: at its cable, if it has a separate one, or at its node."""
        return self.device_names[device] if device in self._wired_devices else self.node_names[self.node_of[device]]

    def _route_inside(self, node: int, inside: Inside, source: int, target: int) -> Route:
        u, v = self.device_names[source], self.device_names[target]
        if inside.form == "bus":
            names = [(self.node_names[node], "bus")]
        elif inside.form == "ports" and inside.full_duplex:
            names = [(u, "out"), (v, "in")]
        elif inside.form == "ports":
            names = [(u, "port"), (v, "port")]
        else:
            names = [(u, v) if inside.full_duplex else (min(u, v), max(u, v))]
        return Route(tuple(self._resource(name, inside.bandwidth_bytes_per_s) for name in names), inside.latency_ns)

    def _route_between(self, source: int, target: int) -> Route | None:
        path = self._path(self.place(source), self.place(target))
        if path is None:
            return None
        nearest = _nearest(path, source, min(source, target), target)
        number = self.number_in_node
        used = (lanes[number[d] % len(lanes)] for lanes, d in zip(path.cables, nearest, strict=True))
        return Route(tuple(used), path.latency_ns)

    def _path(self, start: str, goal: str) -> _Path | None:
        key = (start, goal)
        if key not in self._paths:
            self._paths[key] = self._find_path(start, goal)
        return self._paths[key]

    def ways(self, sources: Sequence[int], targets: Sequence[int]) -> Ways | None:
        """Return the routes from the devices of one place to the devices of another; None if nothing connects them."""
        path = self._path(self.place(sources[0]), self.place(targets[0]))
        if path is None:
            return None
        out, into = np.asarray(sources)[:, None], np.asarray(targets)[None, :]
        used = [
            np.asarray(lanes)[self._numbers[nearest] % len(lanes)]
            for lanes, nearest in zip(path.cables, _nearest(path, out, np.minimum(out, into), into), strict=True)
        ]
        shape = (len(sources), len(targets))
        return Ways(np.stack([np.broadcast_to(each, shape) for each in used], axis=-1), path.latency_ns)

    def _find_path(self, start: str, goal: str) -> _Path | None:
        parents = self._parents
        if start not in parents or goal not in parents or parents[start][0] != parents[goal][0]:
            return None
        up, down = [start], [goal]
        while up[-1] != down[-1]:
            deeper = up if parents[up[-1]][2] >= parents[down[-1]][2] else down
            parent = parents[deeper[-1]][1]
            assert parent is not None
            deeper.append(parent)
        places = up + down[-2::-1]
        cables, latency = [], 0
        for a, b in pairwise(places):
            cable = self.cables[self.tree.edges[a, b]["cable"]]
            ends = (a, b) if cable.full_duplex else (min(a, b), max(a, b))
            cables.append(self._lanes(cable, ends))
            latency += cable.latency_ns
        return _Path(tuple(cables), latency)

    def _lanes(self, cable: Cable, ends: tuple[str, str]) -> tuple[int, ...]:
        if cable.lanes == 1:
            return (self._resource(ends, cable.bandwidth_bytes_per_s),)
        return tuple(self._resource(ends, cable.lane_bytes_per_s, f", lane {lane}") for lane in range(cable.lanes))

    def _resource(self, ends: tuple[str, str], bandwidth_bytes_per_s: int, lane: str = "") -> int:
        key = (*ends, lane)
        if key not in self._ids:
            self._ids[key] = len(self.resources)
            self.resources.append(Resource(f"{ends[0]}→{ends[1]}{lane}", bandwidth_bytes_per_s, ends))
        return self._ids[key]


def _nearest(path: _Path, source: _D, middle: _D, target: _D) -> list[_D]:
    """Return, for each cable of a path, the device whose lane a transfer takes."""
    half, odd = divmod(len(path.cables), 2)
    return [source] * half + [middle] * odd + [target] * half
