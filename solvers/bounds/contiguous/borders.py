"""Groups of devices and the cables through which all passes that leaves or reaches them (BOUNDS section 3).

A group is a node, or the nodes below a switch. The load of cables with several channels, or of several cables together,
counts in bytes: in a time t they carry no more than t times their bandwidths, for any use.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Problem

if TYPE_CHECKING:
    import networkx as nx


class Border(NamedTuple):
    """All devices in groups: ``sizes``, and ``widths`` in bytes per second of the cables around each together.

    ``full``: whether some of these cables carries both directions at once, each at its bandwidth. ``narrowest``: the
    bytes per second of the narrowest channel. ``nodes``: whether the groups are the nodes.
    """

    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    full: bool
    narrowest: int
    nodes: bool

    @property
    def widest(self) -> int:
        """Return the bytes per second around the group with the widest cables."""
        return max(self.widths)


def borders_of(problem: Problem) -> list[Border]:
    """Return the nodes, then the groups of nodes below switches, level by level; empty if no cables are shared."""
    network = problem.network
    if not problem.rules.shared or network.matrix_bytes_per_s is not None:
        return []
    borders = [_border(network, groups, by_node) for groups, by_node in _partitions(network)]
    return [border for border in borders if border is not None]


Groups = list[frozenset[str]]


def _partitions(network: Network) -> Iterator[tuple[Groups, bool]]:
    """Yield the places of each group's devices, where there are several groups, and whether these are the nodes."""
    places_of_nodes: list[set[str]] = [set() for _ in network.node_names]
    for device, node in enumerate(network.node_of):
        places_of_nodes[node].add(network.place(device))
    by_node = [frozenset(each) for each in places_of_nodes if each]
    if len(by_node) > 1:
        yield by_node, True
    branches = _branches(network)
    for depth in range(1, max(map(len, branches.values()), default=0)):
        # A place that is less deep is a separate group.
        top = {place: way[: depth + 1] for place, way in branches.items()}
        in_order = sorted(top, key=lambda place: top[place])
        groups = [frozenset(members) for _way, members in groupby(in_order, key=lambda place: top[place])]
        holding = [group for group in groups if any(group & places for places in by_node)]
        whole = all(any(places <= group for group in holding) for places in by_node)
        if whole and 1 < len(holding) < len(by_node):
            yield holding, False


def _branches(network: Network) -> dict[str, tuple[str, ...]]:
    """Return the path to each place from the middle of its part of the tree, both ends included."""
    import networkx as nx  # takes as long to load as a small request to be read

    paths: dict[str, tuple[str, ...]] = {}
    for place in sorted(network.tree.nodes):
        if place not in paths:
            longest = _farthest(network.tree, _farthest(network.tree, place)[-1])
            middle = longest[len(longest) // 2]
            ways = nx.single_source_shortest_path(network.tree, middle)
            paths |= {end: tuple(way) for end, way in ways.items()}
    return paths


def _farthest(tree: nx.Graph, start: str) -> list[str]:
    """Return the longest path from a place."""
    import networkx as nx

    return max(nx.single_source_shortest_path(tree, start).values(), key=lambda way: (len(way), way))


def _border(network: Network, groups: Groups, nodes: bool) -> Border | None:
    """Return the border of groups of places; None if no group has a cable."""
    number_of = {name: number for number, group in enumerate(groups) for name in group}
    sizes, widths = [0] * len(groups), [0] * len(groups)
    around: set[int] = set()
    for device in range(len(network.device_names)):
        sizes[number_of[network.place(device)]] += 1
    for a, b, number in network.tree.edges(data="cable"):
        ends = {number_of.get(a, -1), number_of.get(b, -1)}
        cable = network.cables[number]
        if len(ends) == 2:
            around.add(number)
            for end in ends - {-1}:
                widths[end] += cable.lanes * cable.lane_bytes_per_s
    cables = [network.cables[number] for number in around]
    if max(widths, default=0) == 0:
        return None
    narrowest = min(cable.lane_bytes_per_s for cable in cables)
    return Border(tuple(sizes), tuple(widths), any(cable.full_duplex for cable in cables), narrowest, nodes)
