"""Fit the latency and bandwidth of links to the measured times of messages.

Messages are grouped by what they pass through: a node's fabric, the same links, or a pair of a measured matrix. Two
sizes that differ enough give latency and bandwidth by least squares; one size gives only the factor of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from penstock.calibration.observations import MessageTime
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.model.problem import Problem

SIZES_APART = 1.5
"""Sizes whose ratio is smaller cannot tell latency from bandwidth."""


class Path(NamedTuple):
    """The links or the fabric that a group of messages passes through, with their planned latency and bandwidth."""

    kind: str
    key: Hashable
    latency_ns: int
    bandwidth_bytes_per_s: int
    hops: int


class Change(NamedTuple):
    """The change of a path: a factor on its bandwidth, and its new latency."""

    path: Path
    bandwidth_factor: float
    latency_ns: float
    messages: int


def changes(problem: Problem, topology: ClusterTopology, messages: Iterable[MessageTime]) -> list[Change]:
    """Return the change of each path that the messages took; other paths stay as they are."""
    groups: dict[tuple[str, Hashable], tuple[Path, list[MessageTime]]] = {}
    for message in messages:
        path = _path(problem, topology, message)
        if path is not None:
            groups.setdefault((path.kind, path.key), (path, []))[1].append(message)
    return [_change(path, sent) for path, sent in groups.values()]


def _path(problem: Problem, topology: ClusterTopology, message: MessageTime) -> Path | None:
    network = problem.network
    route = network.route(message.source, message.target)
    if route is None:
        return None
    bandwidth = network.bandwidth(message.source, message.target)
    about = route.latency_ns, bandwidth
    if topology.matrix is not None:
        names = (network.device_names[message.source], network.device_names[message.target])
        return Path("matrix", names, *about, 1)
    node, other = network.node_of[message.source], network.node_of[message.target]
    if node == other:
        return Path("fabric", None if topology.uniform else network.node_names[node], *about, 1)
    if topology.uniform:
        return Path("nic", None, *about, len(route.resources))
    ends = frozenset(frozenset(network.resources[r].ends) for r in route.resources)
    return Path("links", ends, *about, len(route.resources))


def _change(path: Path, messages: Sequence[MessageTime]) -> Change:
    times: dict[int, list[int]] = defaultdict(list)
    for message in messages:
        times[message.bytes].append(message.time_ns)
    sizes = np.array(sorted(times), dtype=np.float64)
    times_ns = np.array([median(times[int(size)]) for size in sizes])
    if sizes[-1] >= SIZES_APART * sizes[0]:
        weighted = np.column_stack((np.ones_like(sizes), sizes)) / times_ns[:, None]
        (latency_ns, slope), *_ = np.linalg.lstsq(weighted, np.ones_like(times_ns), rcond=None)
        if latency_ns >= 0 and slope > 0:
            return Change(path, 1e9 / slope / path.bandwidth_bytes_per_s, float(latency_ns), len(messages))
    planned = path.latency_ns + 1e9 * sizes / path.bandwidth_bytes_per_s
    factor = float(np.median(times_ns / np.maximum(planned, 1.0)))
    return Change(path, 1 / factor, factor * path.latency_ns, len(messages))


def changed(topology: ClusterTopology, changes: Sequence[Change]) -> ClusterTopology:
    """Return the topology with the changes; each element of a path takes its share of the latency."""
    by_kind: dict[str, dict[Any, Change]] = defaultdict(dict)
    for change in changes:
        by_kind[change.path.kind][change.path.key] = change
    updates: dict[str, Any] = {}
    if topology.uniform is not None:
        parts = {kind: _element(getattr(topology.uniform, kind), by_kind[kind].get(None)) for kind in ("fabric", "nic")}
        updates["uniform"] = topology.uniform.model_copy(update=parts)
    elif topology.matrix is not None:
        updates["matrix"] = _matrix(topology.matrix, by_kind["matrix"])
    else:
        updates["nodes"] = tuple(
            node.model_copy(update={"fabric": _element(node.fabric, by_kind["fabric"].get(node.name))})
            for node in topology.nodes
        )
        updates["links"] = tuple(_element(link, _widest(link, by_kind["links"].values())) for link in topology.links)
    return topology.model_copy(update=updates)


def _element(element: Any, change: Change | None) -> Any:
    """Return a fabric or a link with its change applied."""
    if element is None or change is None:
        return element
    return element.model_copy(update=_numbers(element.bandwidth_bytes_per_s, change))


def _numbers(bandwidth_bytes_per_s: int, change: Change) -> dict[str, int]:
    return {
        "bandwidth_bytes_per_s": max(1, round(bandwidth_bytes_per_s * change.bandwidth_factor)),
        "latency_ns": round(change.latency_ns / change.path.hops),
    }


def _widest(link: Any, changes: Iterable[Change]) -> Change | None:
    """Return the change of the path on which a link was fastest: on the others something else was the bottleneck."""
    over = [change for change in changes if frozenset((link.a, link.b)) in change.path.key]  # type: ignore[operator]
    return max(over, key=lambda change: change.bandwidth_factor, default=None)


def _matrix(matrix: Any, changes: dict[Any, Change]) -> Any:
    number = {name: i for i, name in enumerate(matrix.devices)}
    bandwidth = [list(row) for row in matrix.bandwidth_bytes_per_s]
    latency = [list(row) for row in matrix.latency_ns or [[0] * len(number)] * len(number)]

    for names, change in changes.items():
        u, v = number[names[0]], number[names[1]]
        numbers = _numbers(bandwidth[u][v], change)
        bandwidth[u][v], latency[u][v] = numbers["bandwidth_bytes_per_s"], numbers["latency_ns"]
    return matrix.model_copy(
        update={
            "bandwidth_bytes_per_s": tuple(map(tuple, bandwidth)),
            "latency_ns": tuple(map(tuple, latency)),
        }
    )
