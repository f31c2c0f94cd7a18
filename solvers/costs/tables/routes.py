"""The network as arrays for kernels: a route per pair of devices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.model.network import Route
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
    network = problem.network
    size = problem.num_devices
    route_of = np.full((size, size), -1, dtype=np.int32)
    routes: list[Route] = []
    groups = [[d] for d in range(size)]
    if network.matrix_bytes_per_s is None and not network.has_cards:
        groups = [list(group) for group in problem.nodes()]
    for a, group in enumerate(groups):
        for u in group:
            for v in group:
                if u != v:
                    _enter(route_of, routes, [u], [v], network.route(u, v))
        for b, other in enumerate(groups):
            if a != b:
                _enter(route_of, routes, group, other, network.route(group[0], other[0]))
    start = np.concatenate(([0], np.cumsum([len(r.resources) for r in routes]))).astype(np.int64)
    bandwidth = np.asarray([r.bandwidth_bytes_per_s for r in network.resources], dtype=np.float64)
    return Routes(
        route_of=route_of,
        start=start,
        resource=np.asarray([r for route in routes for r in route.resources], dtype=np.int64),
        bandwidth=bandwidth,
        narrowest=np.asarray([min(bandwidth[r] for r in route.resources) for route in routes], dtype=np.float64),
        latency_ns=np.asarray([route.latency_ns for route in routes], dtype=np.int64),
    )


def _enter(table: np.ndarray, routes: list[Route], sources: list[int], targets: list[int], route: Route | None) -> None:
    if route is not None:
        table[np.ix_(sources, targets)] = len(routes)
        routes.append(route)
