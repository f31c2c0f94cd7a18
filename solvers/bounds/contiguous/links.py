"""The least times of transfers and ring all-reduces over all placements, by the number of devices that they join.

A stage is *in a node* or spans several. Between two stages in one node, bytes go at most as fast as inside any node. If
some pair of their devices is in different nodes, a mode that counts the narrowest pair goes at most as fast as between
any two nodes. In mode ``nic`` the bytes that cross into or out of a node are counted. If a node has several cards, a
pair of devices uses one of them, and ``whole`` is the bandwidth of all together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

import numpy as np

from penstock.solvers.bounds.contiguous.borders import Border, borders_of
from penstock.solvers.bounds.contiguous.label_steps import (
    AMONG_SPANNING,
    FROM_SPANNING,
    SAME_RUN,
    TO_OTHER_NODE,
    TO_SPANNING,
)
from penstock.solvers.bounds.windows_kernel import APART, FREE, SERIAL
from penstock.solvers.costs.measured_collectives import measured_by_span
from penstock.solvers.model.micro_batches import largest_slice, slice_bounds
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Problem

WAYS = 5
MOST_NEAR = 16
"""The largest node for which the devices of a neighbouring stage across nodes that are in this node are counted."""


@dataclass(frozen=True, eq=False)
class Links:
    """The best links of a problem, inside any node and between any two: bytes per second and ns."""

    problem: Problem

    @cached_property
    def nic(self) -> bool:
        """True if transfers are counted link by link."""
        return self.problem.rules.shared or self.problem.rules.transfer == "nic"

    @cached_property
    def node_size(self) -> int:
        """The number of devices of the largest node."""
        return max(len(node) for node in self.problem.nodes())

    @property
    def spans(self) -> bool:
        """True if stages that a node could hold count separately when they span nodes."""
        return self.nic and self.between[0] > 0

    @cached_property
    def inside(self) -> tuple[int, int]:
        """The largest bandwidth and least latency between two devices of a node; bandwidth 0 without such a pair."""
        return self._best(True)

    @cached_property
    def between(self) -> tuple[int, int]:
        """The largest bandwidth and least latency between two devices in different nodes."""
        return self._best(False)

    @cached_property
    def whole(self) -> float:
        """The largest bandwidth of all channels between two nodes; infinite where devices have separate cables."""
        network = self.problem.network
        if not network.has_cards:
            return self.between[0]
        if any(network.has_own_nic):
            return np.inf
        cables = tuple(cable._replace(lanes=1) for cable in network.cables)
        names = network.device_names, network.node_names, network.node_of
        return self._best(False, Network(*names, network.insides, cables))[0]

    @cached_property
    def card(self) -> float:
        """The largest bandwidth of one card: the channel of a cable, or a cable."""
        network = self.problem.network
        return max(cable.lane_bytes_per_s for cable in network.cables) if network.has_cards else self.between[0]

    def _best(self, same_node: bool, network: Network | None = None) -> tuple[int, int]:
        network = network or self.problem.network
        everything = range(self.problem.num_devices)
        if network.matrix_bytes_per_s is None:
            pairs = network.spanning_pairs(everything)
        else:
            pairs = [(u, v) for u, v in product(everything, everything) if u != v]
        fastest, nearest = 0, 0
        for u, v in pairs:
            route = network.route(u, v)
            if route is not None and (network.node_of[u] == network.node_of[v]) == same_node:
                nearest = min(nearest, route.latency_ns) if fastest else route.latency_ns
                fastest = max(fastest, network.bandwidth(u, v))
        return fastest, nearest

    @cached_property
    def borders(self) -> list[Border]:
        """The groups of devices for which the load of the cables around them is counted."""
        return borders_of(self.problem)

    @cached_property
    def leaf_nodes(self) -> bool:
        """True if all traffic that leaves a node uses one cable, which belongs to the node."""
        network = self.problem.network
        ends = [end for cable in network.cables for end in (cable.a, cable.b)]
        plain = network.matrix_bytes_per_s is None and not any(network.has_own_nic)
        return plain and all(ends.count(name) <= 1 for name in network.node_names)

    @cached_property
    def own_cables(self) -> bool:
        """True if each node has one device, and one cable of one channel that all of the device's traffic uses."""
        network = self.problem.network
        plain = all(cable.lanes == 1 for cable in network.cables) and not network.has_cards
        return self.problem.rules.shared and self.node_size == 1 and self.leaf_nodes and plain and self.between[0] > 0

    @cached_property
    def one_way(self) -> bool:
        """True if all traffic from one node to another uses the same cables."""
        return self.problem.network.matrix_bytes_per_s is None and not any(self.problem.network.has_own_nic)

    @cached_property
    def _widest_cable(self) -> int:
        return max(cable.bandwidth_bytes_per_s for cable in self.problem.network.cables)

    def rates(self, rows: tuple[int, ...], most: int) -> np.ndarray:
        """Return (WAYS, most + 1, most + 1) ns per byte of a sample, by sender's and receiver's replicas; inf: none.

        The value is the least over the sizes ``rows`` of micro-batches.
        """
        table = np.full((WAYS, most + 1, most + 1), np.inf)
        r, to = np.ogrid[1 : most + 1, 1 : most + 1]
        for way in range(WAYS):
            fastest = (self.inside if way == SAME_RUN else self.between)[0]
            if fastest == 0:
                continue
            rates = self._by_link(way, rows, most) if self.nic else self._by_pair(way, min(rows) / fastest, r, to)
            table[way, 1:, 1:] = 1e9 * np.where((way == SAME_RUN) & (r + to > self.node_size), np.inf, rates)
        return table * (1 - 1e-12)

    def _by_pair(self, way: int, whole: float, r: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return rates of private networks that count pairs of replicas; ``whole``: time of all rows on one link."""
        if self.problem.rules.transfer == "spp":
            return np.asarray(whole / (r * to))
        parts = r if self.problem.rules.transfer == "dapple" and way != SAME_RUN else np.ones_like(r)
        return np.asarray(np.broadcast_to(whole / parts, (r.size, to.size)))

    def _by_link(self, way: int, rows: tuple[int, ...], most: int) -> np.ndarray:
        rates = np.full((most, most), np.inf)
        for r, to in product(range(1, most + 1), repeat=2):
            if way != SAME_RUN or r + to <= self.node_size:
                rates[r - 1, to - 1] = min(self._nic_rows_per_bandwidth(way, r, to, size) for size in rows)
        return rates

    def _nic_rows_per_bandwidth(self, way: int, r: int, to: int, rows: int) -> float:
        pair = _widest_pair(r, to, rows)
        inside, between = self.inside[0], self.between[0]
        if way == SAME_RUN:
            return min(self._rows_inside(node, r, to, rows, pair) for node in self._nodes_for(r + to))
        whole = rows / self.whole if way == TO_OTHER_NODE and self.one_way else 0.0
        if way == TO_OTHER_NODE and self.leaf_nodes and self.problem.network.has_cards:
            whole = max(whole, largest_slice(rows, r) / self.card, largest_slice(rows, to) / self.card)
        fastest = between if way == TO_OTHER_NODE else max(inside, between)
        if way in (TO_SPANNING, FROM_SPANNING) and self.leaf_nodes:
            in_node, spread = (r, to) if way == TO_SPANNING else (to, r)
            near = max(0, min(spread - 1, self.node_size - in_node))
            whole = max(0, rows - near * largest_slice(rows, spread)) / self._widest_cable
        if self.leaf_nodes and self.node_size == 1:
            # All that a device sends or receives passes its node's cable.
            whole = max(whole, largest_slice(rows, min(r, to)) / self._widest_cable)
        return max(pair / fastest, whole)

    def spread_rates(self, rates: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
        """Return (near, node + 1, most + 1) ns per byte of a sample between a stage in a node and one across nodes.

        Indexed by the most devices of the latter in that node, and by the devices of both; in either direction. One row
        if that makes no difference. ``rates``, ``rows``: the result of ``rates``, and its sizes.
        """
        most = rates.shape[-1] - 1
        plain = rates[TO_SPANNING, : min(self.node_size, most) + 1][None]
        counts = self.spans and self.leaf_nodes and 1 < self.node_size <= MOST_NEAR
        if not counts:
            return plain
        spread, fastest = np.arange(1, most + 1), max(self.inside[0], self.between[0])
        table = np.full((self.node_size, *plain.shape[1:]), np.inf)
        for r in range(1, plain.shape[1]):
            for near in range(self.node_size):
                there = np.minimum(near, spread - 1)
                each = []
                for size in rows:
                    slices = -(-size // spread)
                    pairs = np.asarray([_widest_pair(r, to, size) for to in spread.tolist()])
                    each.append(np.maximum(pairs / fastest, np.maximum(0, size - there * slices) / self._widest_cable))
                table[near, r, 1:] = 1e9 * np.min(each, axis=0)
        return table * (1 - 1e-12)

    def _nodes_for(self, devices: int) -> list[int]:
        return [node for node, members in enumerate(self.problem.nodes()) if len(members) >= devices]

    def _rows_inside(self, node: int, r: int, to: int, rows: int, pair: int) -> float:
        inside = self.problem.network.insides[node]
        if self.problem.network.matrix_bytes_per_s is not None or inside is None:
            return pair / self.inside[0]
        slices = max(largest_slice(rows, r), largest_slice(rows, to))
        return {"pairs": pair, "ports": slices, "bus": rows}[inside.form] / inside.bandwidth_bytes_per_s

    def latencies(self) -> np.ndarray:
        """Return (WAYS,) ns."""
        if not self.nic:
            return np.zeros(WAYS, dtype=np.int64)
        near, far = self.inside[1], self.between[1]
        either = min(near, far) if self.inside[0] else far
        return np.asarray([near, far, either, either, either], dtype=np.int64)

    def channels(self) -> np.ndarray:
        """Return (WAYS,) how both directions exclude each other at least; in a shared network the links decide."""
        rules, network = self.problem.rules, self.problem.network
        if not rules.shared:
            return np.full(WAYS, {"half": SERIAL, "full": APART, "none": FREE}[rules.channel])
        if network.matrix_bytes_per_s is not None:
            return np.full(WAYS, APART)
        near = [
            APART if fabric.full_duplex and fabric.form != "bus" else SERIAL for fabric in network.insides if fabric
        ]
        far = [APART if cable.full_duplex else SERIAL for cable in network.cables]
        either = APART if APART in near + far else SERIAL
        kinds = {SAME_RUN: APART if APART in near else SERIAL, TO_OTHER_NODE: APART if APART in far else SERIAL}
        return np.asarray([kinds.get(way, either) for way in range(AMONG_SPANNING + 1)])

    def or_measured(self, computed_ns: np.ndarray, sizes: np.ndarray, replicas: int, spanning: bool) -> np.ndarray:
        """Return the least time of all-reduces of these sizes, where ``computed_ns`` is at most a ring's time.

        A measurement holds for all groups in one node. Across nodes, and of cells, some groups were not measured, so
        that the ring's time counts as well where it is less.
        """
        sure = not spanning and self.problem.real is None
        moved = np.floor(sizes * float(self.problem.memory.exchange))
        for span, operations in measured_by_span(self.problem).items():
            if span.devices_per_node * span.nodes != replicas or (span.nodes > 1) != spanning:
                continue
            for curves in (curves for operation, curves in operations if operation == "all_reduce"):
                measured_ns = np.where(sizes > 0, np.sum([curve.least_ns(moved) for curve in curves], axis=0), 0)
                computed_ns = measured_ns if sure else np.minimum(computed_ns, measured_ns)
        return computed_ns

    def ring(self, replicas: int, spanning: bool) -> tuple[float, int]:
        """Return (ns per byte of parameters, ns) of an exchange of ``replicas`` devices on a ring; inf: impossible.

        They are in one node or across nodes.
        """
        rate, latency_ns = self._ring(replicas, spanning)
        return rate * float(self.problem.memory.exchange), latency_ns

    def _ring(self, replicas: int, spanning: bool) -> tuple[float, int]:
        """Return (ns per byte, ns) of an all-reduce of ``replicas`` devices on a ring."""
        k, mode = replicas, self.problem.rules.all_reduce
        if k == 1:
            return 0.0, 0
        bandwidth, latency = self.between if spanning else self.inside
        if bandwidth == 0 or (not spanning and k > self.node_size):
            return np.inf, 0
        fewest = max(2, -(-k // self.node_size))
        width = self._across(k, fewest) if spanning else bandwidth
        flat = 2e9 * (k - 1) / (k * width), 2 * (k - 1) * latency
        if not spanning:
            return (flat[0] / (k // 2), 0) if mode == "dapple" else flat
        if mode != "hierarchical":
            return flat
        costs = [flat] if k <= len(self.problem.nodes()) else []
        for nodes in range(fewest, min(k - 1, len(self.problem.nodes())) + 1):
            most = -(-k // nodes)
            rate = 2e9 * (nodes - 1) / (nodes * self._across(k, nodes))
            wait = 2 * (nodes - 1) * latency
            if self.inside[0]:
                rate += 2e9 * (most - 1) / (most * self.inside[0])
                wait += 2 * (most - 1) * self.inside[1]
            costs.append((rate, wait))
        return min(rate for rate, _ in costs), min(wait for _, wait in costs)

    def _across(self, replicas: int, nodes: int) -> float:
        """Return the most bytes per second from node to node: of the cards in the node with the fewest devices."""
        return min(self.whole, self.card * (replicas // nodes)) if self.problem.network.has_cards else self.between[0]


@lru_cache(maxsize=2**16)
def _widest_pair(r: int, to: int, rows: int) -> int:
    """Return the rows of the largest part that one replica sends to one other."""
    edges = {slice_bounds(rows, count, i)[1] for count in (r, to) for i in range(count)}
    return max(high - low for low, high in pairwise(sorted({0, *edges})))
