"""The least round trip of a micro-batch over each cut, wherever the stages on both sides are (BOUNDS section 12).

Neighbouring stages have no device in common, so each device of a stage sends its slice to others. In modes that count
links, the slice leaves it by its links inside the node and out of the node, at most as fast as all of them together.
In a network other than nodes with one cable each, one row over one link counts. In modes of a paper all rows go over
the quickest link, as often in parallel as the mode has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.model.micro_batches import Batch, largest_slice
from penstock.solvers.model.problem import Problem, per_problem

SURE = 1 - 1e-12
"""A factor that keeps floating point below the exact value."""


@per_problem
def transfers_of(problem: Problem) -> Transfers:
    """Return the transfers of a problem, from one pass over its network."""
    return Transfers(problem)


@dataclass(frozen=True, eq=False)
class Transfers:
    """The transfers of a problem; for a number of micro-batches, of the smallest size."""

    problem: Problem

    def round_trip_ns(self, batch: Batch, replicas: int, most: int) -> np.ndarray:
        """Return (L + 1,) ns over the cut before each layer, 0 at both ends, from ``replicas`` to ``most`` replicas."""
        if self._fastest == 0:
            return np.zeros(self.problem.num_layers + 1, dtype=np.int64)
        out, back = self._ns_per_byte(batch, replicas, most)
        ways = (self.problem.forward_bytes, out), (self.problem.backward_bytes, back)
        each = [np.where(sent > 0, np.floor(sent * (rate * SURE)) + self._latency_ns, 0) for sent, rate in ways]
        return np.pad(np.sum(each, axis=0).astype(np.int64), 1)

    def _ns_per_byte(self, batch: Batch, replicas: int, most: int) -> tuple[float, float]:
        """Return ns per byte of a sample, to the next stage and back from it."""
        rows, fed = batch.least_rows, min(self.problem.num_devices, batch.most_rows)
        if self._counts_links:
            rate = 1 / self._fastest if self._egress == 0 else largest_slice(rows, replicas) / self._egress
            return 1e9 * rate, 1e9 * rate
        senders = min(most, fed)
        parts = {"madpipe": (1, 1), "dapple": (senders, fed)}.get(
            self.problem.rules.transfer, (senders * fed, senders * fed)
        )
        out, back = (1e9 * rows / (self._fastest * each) for each in parts)
        return out, back

    @cached_property
    def _counts_links(self) -> bool:
        return self.problem.rules.shared or self.problem.rules.transfer == "nic"

    @cached_property
    def _fastest(self) -> int:
        """Return the bytes per second that no two devices exceed; 0 where nothing connects any."""
        network = self.problem.network
        if network.matrix_bytes_per_s is not None:
            return int(network.matrix_bytes_per_s.max(initial=0))
        inside = [fabric.bandwidth_bytes_per_s for fabric in network.insides if fabric is not None]
        return max([*inside, *(cable.bandwidth_bytes_per_s for cable in network.cables)], default=0)

    @cached_property
    def _latency_ns(self) -> int:
        """Return the least latency of a route, if it counts and no matrix states it."""
        network = self.problem.network
        if not self._counts_links or network.matrix_bytes_per_s is not None:
            return 0
        inside = [fabric.latency_ns for fabric in network.insides if fabric is not None]
        return min([*inside, *(cable.latency_ns for cable in network.cables)], default=0)

    @cached_property
    def _egress(self) -> int:
        """Return the most bytes per second that a device sends, or receives, in all; 0 if unknown."""
        network = self.problem.network
        if not Links(self.problem).leaf_nodes:
            return 0
        nodes, out = set(network.node_names), 0
        for cable in network.cables:
            ends = len(nodes & {cable.a, cable.b})
            # A channel belongs to the device, but on a cable from node to node it may be the other device's.
            out = max(out, (0, cable.lane_bytes_per_s, cable.bandwidth_bytes_per_s)[ends])
        inside = 0
        for fabric, devices in zip(network.insides, self.problem.nodes(), strict=True):
            if fabric is not None and len(devices) > 1:
                links = len(devices) - 1 if fabric.form == "pairs" else 1
                inside = max(inside, links * fabric.bandwidth_bytes_per_s)
        return inside + out
