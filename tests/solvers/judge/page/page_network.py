"""Section 2.3 of docs/theory/judge.md in plain Python: resources, routes and the spanning tree."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from itertools import count, pairwise

from penstock.solvers.model.network import Cable, Network

Pair = tuple[int, int]


class Rings:
    """Section 2.3 for a set of devices, given each device's node and card, and the width of a pair."""

    network: Network

    def node(self, device: int) -> int:
        """Return the node of a device."""
        raise NotImplementedError

    def card(self, device: int) -> Hashable:
        """Return the card through which a device leaves its node."""
        raise NotImplementedError

    def width(self, u: int, v: int) -> int:
        """Return bw(u, v)."""
        raise NotImplementedError

    def together(self, pairs: Sequence[Pair]) -> int:
        """Return the width of several pairs that share some bytes evenly."""
        raise NotImplementedError

    def hops(self, devices: Sequence[int]) -> list[list[Pair]]:
        """List the pairs from each node to the next; empty for a single node."""
        order = sorted(devices, key=lambda d: (self.node(d), d))
        nodes = list(dict.fromkeys(map(self.node, order)))
        links = []
        for place, here in enumerate(nodes if len(nodes) > 1 else ()):
            there = nodes[(place + 1) % len(nodes)]
            outs, ins = ([d for d in order if self.node(d) == node] for node in (here, there))
            first = [
                [d for d in each if all(self.card(e) != self.card(d) for e in each if e < d)] for each in (outs, ins)
            ]
            if self.network.matrix_bytes_per_s is not None or first == [outs[:1], ins[:1]]:
                first = [outs[-1:], ins[:1]]
            number = next(n for n in count(1) if n % len(first[0]) == n % len(first[1]) == 0)
            links.append([(first[0][i % len(first[0])], first[1][i % len(first[1])]) for i in range(number)])
        return links

    def ring(self, devices: Sequence[int]) -> list[Pair]:
        """Return ring(D)."""
        order = sorted(devices, key=lambda d: (self.node(d), d))
        hops = self.hops(devices)
        if not hops:
            return list(zip(order, order[1:] + order[:1], strict=True))
        inside = [(u, v) for u, v in pairwise(order) if self.node(u) == self.node(v)]
        return inside + [pair for hop in hops for pair in hop]

    def across(self, devices: Sequence[int]) -> int:
        """Return across(D)."""
        if self.network.matrix_bytes_per_s is not None:
            first = [d for d in devices if d == next(e for e in devices if self.node(e) == self.node(d))]
            return min(self.width(u, v) for u in first for v in first if u != v)
        return min(map(self.together, self.hops(devices)))

    def ring_width(self, devices: Sequence[int]) -> int:
        """Return ringbw(D)."""
        far = self.network.matrix_bytes_per_s is not None
        near = [self.width(u, v) for u in devices for v in devices if u != v and (far or self.node(u) == self.node(v))]
        return min([*near, *([] if far else map(self.together, self.hops(devices)))])


class Links(Rings):
    """Resources, routes, and the spanning tree."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.bandwidth: dict[Hashable, int] = {}
        self.cable_ends = {name for cable in network.cables for name in (cable.a, cable.b)}
        self.tree = self._tree()
        self.route = cache(self._route)

    def node(self, device: int) -> int:
        """Return the node of a device."""
        return self.network.node_of[device]

    def width(self, u: int, v: int) -> int:
        """Return bw(u, v)."""
        route = self.route(u, v)
        return min((self.bandwidth[each] for each in route[0]), default=0) if route else 0

    def card(self, device: int) -> Hashable:
        """Return the card through which a device leaves its node."""
        if self.network.device_names[device] in self.cable_ends:
            return ("own", device)
        place = self.network.node_names[self.node(device)]
        return self.number(device) % max([cable.lanes for edge, cable in self.tree.items() if place in edge], default=1)

    def number(self, device: int) -> int:
        """Return the number of a device in its node."""
        return self.network.node_of[:device].count(self.node(device))

    def together(self, pairs: Sequence[Pair]) -> int:
        """Return the width of several pairs that share some bytes evenly."""
        routes = [self.route(u, v) for u, v in pairs]
        if None in routes:
            return 0
        used = [resource for route in routes if route for resource in route[0]]
        return min(self.bandwidth[each] * len(pairs) // used.count(each) for each in used)

    def _resource(self, width: int, *name: Hashable) -> Hashable:
        self.bandwidth[name] = width
        return name

    def _route(self, u: int, v: int) -> tuple[list[Hashable], int] | None:
        network = self.network
        if network.matrix_bytes_per_s is not None:
            width, latency = int(network.matrix_bytes_per_s[u][v]), int(network.matrix_latency_ns[u][v])
            return ([self._resource(width, "pair", u, v)], latency) if width else None
        if self.node(u) == self.node(v):
            return self._inside(u, v)
        path = self._path(self._place(u), self._place(v))
        if path is None:
            return None
        used = []
        for at, (a, b) in enumerate(path, 1):
            cable = self.tree[frozenset((a, b))]
            ends = (a, b) if cable.full_duplex else tuple(sorted((a, b)))
            nearest = {-1: u, 0: min(u, v), 1: v}[(2 * at > len(path) + 1) - (2 * at < len(path) + 1)]
            lane = self.number(nearest) % cable.lanes
            used.append(self._resource(cable.bandwidth_bytes_per_s // cable.lanes, "cable", *ends, lane))
        return used, sum(self.tree[frozenset(step)].latency_ns for step in path)

    def _inside(self, u: int, v: int) -> tuple[list[Hashable], int] | None:
        node, fabric = self.node(u), self.network.insides[self.node(u)]
        if fabric is None:
            name = self.network.node_names[node]
            ending = [cable for cable in self.network.cables if name in (cable.a, cable.b)]
            if not ending:
                return None
            widest = max(ending, key=lambda cable: cable.bandwidth_bytes_per_s)
            return [self._resource(widest.bandwidth_bytes_per_s // widest.lanes, "bus", node)], widest.latency_ns
        names: list[tuple[Hashable, ...]]
        if fabric.form == "bus":
            names = [("bus", node)]
        elif fabric.form == "ports":
            names = [("out", u), ("in", v)] if fabric.full_duplex else [("port", u), ("port", v)]
        else:
            names = [("pair", u, v)] if fabric.full_duplex else [("pair", *sorted((u, v)))]
        return [self._resource(fabric.bandwidth_bytes_per_s, *name) for name in names], fabric.latency_ns

    def _place(self, device: int) -> str:
        name = self.network.device_names[device]
        return name if name in self.cable_ends else self.network.node_names[self.node(device)]

    def _tree(self) -> dict[frozenset[str], Cable]:
        cables = self.network.cables
        widest = {}
        for cable in cables:
            edge = frozenset((cable.a, cable.b))
            if edge not in widest or cable.bandwidth_bytes_per_s > widest[edge].bandwidth_bytes_per_s:
                widest[edge] = cable
        named = [name for cable in cables for name in (cable.a, cable.b)]
        places = dict.fromkeys([*self.network.node_names, *named])
        ordered = dict.fromkeys(edge for place in places for edge in widest if place in edge)
        part = {place: place for place in places}
        tree = {}
        for edge in sorted(ordered, key=lambda edge: -widest[edge].bandwidth_bytes_per_s):
            one, other = (part[place] for place in (widest[edge].a, widest[edge].b))
            if one != other:
                tree[edge] = widest[edge]
                part = {place: one if root == other else root for place, root in part.items()}
        return tree

    def _path(self, source: str, target: str) -> list[tuple[str, str]] | None:
        ways: dict[str, list[tuple[str, str]]] = {source: []}
        todo = [source]
        while todo:
            place = todo.pop()
            for edge in self.tree:
                for other in edge - {place} if place in edge else ():
                    if other not in ways:
                        ways[other] = [*ways[place], (place, other)]
                        todo.append(other)
        return ways.get(target)
