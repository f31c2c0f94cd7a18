"""Costs of stages for the partition: by number of replicas, for any run of layers, as differences of prefix sums.

Times are equal to the times of ``costs`` on the slowest kind of device. Transfers and all-reduces are taken between
neighbours on the line, as if no other device used their links. The simulator gives the published time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.buckets import inner_ns
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.stage import step_ns
from penstock.solvers.costs.tables.device_line import Affine, affine_all_reduce
from penstock.solvers.costs.tables.stage_table import LayerSums, crossing_bytes, layer_sums, static_sums
from penstock.solvers.model.micro_batches import Batch, largest_slice
from penstock.solvers.model.pins import devices_allowed
from penstock.solvers.model.problem import Problem

MOST_CHOICES = 24
"""Limit on the numbers of replicas that are tried."""


def replica_choices(problem: Problem, batch: Batch) -> np.ndarray:
    """Return the numbers of replicas to try, ascending, thinned to ``MOST_CHOICES``.

    Of the numbers with equally large slices it is the least.
    """
    rows = batch.most_rows
    most = max(1, min(problem.num_devices, batch.replicas_fed(problem.min_slice)))
    slices = np.unique(-(-rows // np.arange(1, most + 1)))
    counts = np.unique(-(-rows // slices))
    if len(counts) <= MOST_CHOICES:
        return np.asarray(counts)
    wanted = np.unique(np.geomspace(1, counts[-1], MOST_CHOICES).round().astype(np.int64))
    return np.unique(counts[np.searchsorted(counts, wanted)])


class Band(NamedTuple):
    """The costs of runs on one number of replicas, (L, W) each.

    - ``time_ns``: a micro-batch; ``after_ns``: all-reduce and update.
    - ``fits``: whether memory holds the run; ``again``: whether it has to recompute for that.
    - ``flying``: the most micro-batches in flight that it then holds.
    """

    time_ns: np.ndarray
    after_ns: np.ndarray
    fits: np.ndarray
    again: np.ndarray
    flying: np.ndarray


@dataclass(frozen=True, eq=False)
class Pieces:
    """The costs for one number of micro-batches.

    Arrays are by choice of replicas (K,) and layer; times are in ns of one micro-batch.
    """

    problem: Problem
    batch: Batch
    line: tuple[int, ...]

    def band(self, k: int, width: int, depth: np.ndarray) -> Band:
        """Return the costs of runs of up to ``width`` layers.

        ``depth`` (L,): the number of stages from a stage that begins with a layer on; as many micro-batches are in
        flight. Runs beyond the last layer do not fit, nor do runs for which pins allow fewer devices than the choice
        has replicas.
        """
        problem, rule = self.problem, self.problem.recompute
        starts = np.arange(problem.num_layers)[:, None]
        ends = starts + np.arange(1, width + 1)
        inside = ends <= problem.num_layers
        ends = np.minimum(ends, problem.num_layers)
        if problem.pins:
            inside = inside & (devices_allowed(problem)[starts, ends] >= self.replicas[k])
        flying = np.minimum(depth, self.batch.num_micro_batches)[:, None]
        received = self.input_bytes[k][:, None]
        stash = self._sums[k].kept_bytes[ends] - self._sums[k].kept_bytes[starts]
        static = static_sums(problem, int(self.replicas[k])).total
        room = self.room_bytes - (static[ends] - static[starts]) - self._sums[k].workspace_bytes.max()
        room = room - 4 * received if problem.memory.count_buffers else room
        most, most_again = _most(room, stash + received), _most(room - stash, received)
        plain = inside & (most >= flying) & (rule != "always")
        again = inside & (most_again >= flying) & ~plain & (rule != "never")
        work = np.where(again, self.again_ns[k][ends], self.plain_ns[k][ends])
        work -= np.where(again, self.again_ns[k][starts], self.plain_ns[k][starts])
        size = problem.owned_bytes[ends] - problem.owned_bytes[starts]
        line = self.reduction[k]
        inner = inner_ns(problem)
        update = step_ns(problem, starts, ends, int(self.replicas[k])) + inner[ends] - inner[starts]
        reduced = np.where(size > 0, np.maximum(1, size) * line.ns_per_byte + line.fixed_ns, 0) + update
        return Band(work, reduced, plain | again, again, np.where(again, most_again, most))

    @cached_property
    def replicas(self) -> np.ndarray:
        """The choices of replicas (K,), ascending."""
        return replica_choices(self.problem, self.batch)

    @cached_property
    def plain_ns(self) -> np.ndarray:
        """The prefix sums (K, L + 1) of forward and backward."""
        return np.stack([sums.forward_ns + sums.backward_ns for sums in self._sums])

    @cached_property
    def again_ns(self) -> np.ndarray:
        """The prefix sums (K, L + 1) with recomputation."""
        return np.asarray(self.plain_ns + np.stack([sums.forward_ns for sums in self._sums]))

    @cached_property
    def hop_ns(self) -> np.ndarray:
        """The round trip (K, L) over the cut before each layer, between two stages alike; 0 before layer 0."""
        per_sample = self.problem.forward_bytes + self.problem.backward_bytes
        cards = self.problem.network.cards_at(self.problem.devices[self.line[0]].node)
        lanes = np.maximum(1, self.replicas * cards // self._node_size)
        time = per_sample[None, :] * self.batch.most_rows * 1e9 / (self._between * lanes[:, None])
        return np.pad(np.ceil(time).astype(np.int64), ((0, 0), (1, 0)))

    @cached_property
    def reduction(self) -> list[Affine]:
        """The all-reduce (K,) over as many neighbours on the line as there are replicas."""
        return [affine_all_reduce(self.problem, self.line[:count]) for count in self.replicas.tolist()]

    @cached_property
    def input_bytes(self) -> np.ndarray:
        """The received input (K, L) of a stage, by its first layer."""
        slices = -(-self.batch.most_rows // self.replicas)
        return np.asarray(slices[:, None] * crossing_bytes(self.problem, 0)[None, :-1])

    @cached_property
    def room_bytes(self) -> int:
        """The free memory of the smallest device, without its context."""
        return free_bytes(self.problem, self.line)

    @cached_property
    def _sums(self) -> list[LayerSums]:
        """The layer sums (K,) of a slice on the slowest kind of device."""
        kinds = sorted({device.kind for device in self.problem.devices})
        return [layer_sums(self.problem, kinds, largest_slice(self.batch.most_rows, r)) for r in self.replicas.tolist()]

    @cached_property
    def _node_size(self) -> int:
        return max(len(node) for node in self.problem.nodes())

    @cached_property
    def _between(self) -> float:
        """The bytes per second from one node to the next on the line, or within the only node."""
        size = self._node_size if self._node_size < len(self.line) else 1
        network = self.problem.network
        return float(max(1, network.bandwidth(self.line[0], self.line[size]))) if len(self.line) > 1 else np.inf


def _most(room: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Return the number of micro-batches of ``each`` bytes that fit into the free memory; -1 where it is negative."""
    return np.where(room < 0, -1, room // np.maximum(1, each))
