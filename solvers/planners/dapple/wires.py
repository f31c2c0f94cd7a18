"""The network as arrays for the search's kernel: a route per pair of devices, and which servers are interchangeable."""

from __future__ import annotations

import numpy as np

from penstock.solvers.model.network import Network, Route
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.dapple.kernel_arrays import Lines


def lines(problem: Problem) -> Lines:
    """Routes between all devices; those between two servers whose devices share their wires are looked up once."""
    network = problem.network
    size = problem.num_devices
    route_of = np.full((size, size), -1, dtype=np.int32)
    routes: list[Route] = []
    groups = [[d] for d in range(size)]
    if network.matrix_bytes_per_s is None and not any(network.has_own_nic):
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
    return Lines(
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


def server_classes(problem: Problem) -> tuple[int, ...]:
    """A class number per server: servers of one class can change places without changing any cost."""
    nodes = problem.nodes()
    heads: list[int] = []
    classes = []
    for n in range(len(nodes)):
        found = next((c for c, head in enumerate(heads) if _alike(problem, nodes, head, n)), len(heads))
        if found == len(heads):
            heads.append(n)
        classes.append(found)
    return tuple(classes)


def _alike(problem: Problem, nodes: tuple[tuple[int, ...], ...], a: int, b: int) -> bool:
    def devices(n: int) -> list[tuple[str, int, int]]:
        return [(d.kind, d.memory_bytes, d.context_bytes) for d in (problem.devices[i] for i in nodes[n])]

    network = problem.network
    if devices(a) != devices(b) or network.insides[a] != network.insides[b]:
        return False
    if any(network.has_own_nic[d] for d in (*nodes[a], *nodes[b])):
        return _alike_by_matrix(network.dense_bandwidth(), nodes[a], nodes[b])
    if network.matrix_bytes_per_s is not None:
        return _alike_by_matrix(network.matrix_bytes_per_s, nodes[a], nodes[b])
    return _cables(network, a, b) == _cables(network, b, a)


def _cables(network: Network, a: int, b: int) -> list[tuple[str, int, int, bool]]:
    """Cables of server a, the far end named; what runs to b is named alike from either side."""
    mine, its = network.node_names[a], network.node_names[b]
    found = []
    for cable in network.cables:
        if mine in (cable.a, cable.b):
            far = cable.b if cable.a == mine else cable.a
            found.append(("" if far == its else far, *cable[2:]))
    return sorted(found)


def _alike_by_matrix(table: np.ndarray, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    swapped = np.arange(len(table))
    swapped[list(a)], swapped[list(b)] = b, a
    return bool(np.array_equal(table[np.ix_(swapped, swapped)], table))
