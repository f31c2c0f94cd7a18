"""The network as arrays for kernels: a route per pair of devices."""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np

from penstock.solvers.model.network import Network, Route, Ways
from penstock.solvers.model.problem import Problem


class Routes(NamedTuple):
    """Routes: ``route_of[u, v]`` is the route's number, -1 where nothing connects the devices.

    Its resources are ``resource[start[r] : start[r + 1]]``. ``bandwidth`` (bytes/s) is per resource; ``narrowest``
    and ``latency_ns`` are per route.
    """

    route_of: np.ndarray
    start: np.ndarray
    resource: np.ndarray
    bandwidth: np.ndarray
    narrowest: np.ndarray
    latency_ns: np.ndarray


def routes_of(problem: Problem) -> Routes:
    """Return the routes between all devices; servers whose devices share their links are looked up once per pair."""
    return _routes_of(problem.network, problem.nodes())


@lru_cache(maxsize=4)
def _routes_of(network: Network, nodes: tuple[tuple[int, ...], ...]) -> Routes:
    size = len(network.node_of)
    table = _RouteTable(np.full((size, size), -1, dtype=np.int32), [], [0], [])
    groups = [[d] for d in range(size)]
    if network.matrix_bytes_per_s is None and not any(network.has_own_nic):
        groups = [list(group) for group in nodes]
    for group in groups:
        for u, v in permutations(group, 2):
            table.enter_one([u], [v], network.route(u, v))
        for other in groups:
            if network.has_cards and other is not group and len(group) + len(other) > 2:
                table.enter(group, other, network.ways(group, other))
            elif other is not group:
                table.enter_one(group, other, network.route(group[0], other[0]))
    start, resource = (np.asarray(each, dtype=np.int64) for each in (table.start, table.resource))
    bandwidth = np.asarray([r.bandwidth_bytes_per_s for r in network.resources], dtype=np.float64)
    return Routes(
        route_of=table.route_of,
        start=start,
        resource=resource,
        bandwidth=bandwidth,
        narrowest=np.minimum.reduceat(bandwidth[resource], start[:-1]) if len(resource) else np.zeros(0),
        latency_ns=np.asarray(table.latency_ns, dtype=np.int64),
    )


class _RouteTable(NamedTuple):
    """The routes so far."""

    route_of: np.ndarray
    resource: list[int]
    start: list[int]
    latency_ns: list[int]

    def enter_one(self, sources: list[int], targets: list[int], route: Route | None) -> None:
        """Add a route that all sources and targets have in common."""
        if route is not None:
            self.route_of[np.ix_(sources, targets)] = len(self.latency_ns)
            self.resource.extend(route.resources)
            self.start.append(len(self.resource))
            self.latency_ns.append(route.latency_ns)

    def enter(self, sources: list[int], targets: list[int], ways: Ways | None) -> None:
        """Add a route from each source to each target."""
        if ways is None:
            return
        many, hops = len(sources) * len(targets), ways.resources.shape[2]
        first, end = len(self.latency_ns), self.start[-1]
        self.route_of[np.ix_(sources, targets)] = np.arange(first, first + many).reshape(len(sources), len(targets))
        self.resource.extend(ways.resources.ravel().tolist())
        self.start.extend(range(end + hops, end + hops * many + 1, hops))
        self.latency_ns.extend([ways.latency_ns] * many)
