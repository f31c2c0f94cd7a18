"""Section 2.3 of docs/theory/judge.md in plain Python: resources, routes and the spanning tree."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache

from penstock.solvers.model.network import Cable, Network


class Links:
    """Resources, routes, and the spanning tree."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.bandwidth: dict[Hashable, int] = {}
        self.own = {name for cable in network.cables for name in (cable.a, cable.b)}
        self.tree = self._tree()
        self.route = cache(self._route)

    def node(self, device: int) -> int:
        """The node of a device."""
        return self.network.node_of[device]

    def width(self, u: int, v: int) -> int:
        """bw(u, v)."""
        route = self.route(u, v)
        return min((self.bandwidth[each] for each in route[0]), default=0) if route else 0

    def least_width(self, devices: Sequence[int]) -> int:
        """minbw(D)."""
        return min(self.width(u, v) for u in devices for v in devices if u != v)

    def ring(self, devices: Sequence[int]) -> list[tuple[int, int]]:
        """ring(D)."""
        order = sorted(devices, key=lambda d: (self.node(d), d))
        return list(zip(order, order[1:] + order[:1], strict=True))

    def has_cable(self, device: int) -> bool:
        """Whether a cable ends at the device itself."""
        return self.network.device_names[device] in self.own

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
        for a, b in path:
            cable = self.tree[frozenset((a, b))]
            ends = (a, b) if cable.full_duplex else tuple(sorted((a, b)))
            used.append(self._resource(cable.bandwidth_bytes_per_s, "cable", *ends))
        return used, sum(self.tree[frozenset(step)].latency_ns for step in path)

    def _inside(self, u: int, v: int) -> tuple[list[Hashable], int] | None:
        node, fabric = self.node(u), self.network.insides[self.node(u)]
        if fabric is None:
            name = self.network.node_names[node]
            ending = [cable for cable in self.network.cables if name in (cable.a, cable.b)]
            if not ending:
                return None
            widest = max(ending, key=lambda cable: cable.bandwidth_bytes_per_s)
            return [self._resource(widest.bandwidth_bytes_per_s, "bus", node)], widest.latency_ns
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
        return name if name in self.own else self.network.node_names[self.node(device)]

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
