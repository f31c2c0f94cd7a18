"""``Chain``: a request as MadPipe's searches need it, for one micro-batch size and one number of replicas.

Symbols (section 4.1):

- u_F: ``forward_ns``; u_B: ``load_ns``.
- U(k, l): ``load_ns[l] - load_ns[k - 1]``.
- C(k): ``hop_ns[:, k]``, a round trip.
- Mem(k, l, g): ``bytes_of``; M: ``available_bytes``.
- P: ``processors``.

Layers that no cut may separate are one element of the chain; ``cuts[i]`` is the first layer after boundary i.

Differences from the paper: a stage may recompute its activations (``again``), which is a second variant of every stage
with a different load. A device's workspace, context, optimizer states and both directions' buffers count, as they do in
the simulator. Each pair of neighbouring processors has a separate C. No stage keeps more than ``most_in_flight``
micro-batches, because two weight versions are enough only if the update period M is at least that less one.
``of_layers`` builds the paper's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.stage_table import StageTable, between, crossing_bytes, cut_places, layer_sums
from penstock.solvers.costs.transfer import round_trips_ns, transfers_ns
from penstock.solvers.model.micro_batches import Batch, largest_slice
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.schedules.support.stage_line import ALL_BUFFERS

Group = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain of n elements, n + 1 boundaries, R variants of a stage (``again[r]``: it recomputes) and P processors.

    ``load_ns`` (R, n + 1) and ``forward_ns`` (n + 1,) are prefix sums. A stage between boundaries k < l holds
    ``fixed_bytes[k, l]`` always, ``kept_bytes[r, k, l]`` for each micro-batch in flight, ``work_bytes[r, k, l]``
    while it computes. ``hop_ns[q, k]``: C of boundary k when the stage after it is on processor q. All are int64.
    """

    cuts: tuple[int, ...]
    again: tuple[bool, ...]
    forward_ns: np.ndarray
    load_ns: np.ndarray
    fixed_bytes: np.ndarray
    kept_bytes: np.ndarray
    work_bytes: np.ndarray
    hop_ns: np.ndarray
    available_bytes: int
    most_in_flight: int

    @property
    def size(self) -> int:
        """The number of elements n."""
        return len(self.cuts) - 1

    @property
    def processors(self) -> int:
        """The number of processors P."""
        return len(self.hop_ns)

    def load(self, first: int, after: int, variant: int = 0) -> int:
        """Return U of the stage between two boundaries."""
        return int(self.load_ns[variant, after] - self.load_ns[variant, first])

    def bytes_of(self, first: int, after: int, variant: int, in_flight: int) -> int:
        """Return Mem(first + 1, after, g)."""
        each = in_flight * int(self.kept_bytes[variant, first, after])
        return int(self.fixed_bytes[first, after]) + each + int(self.work_bytes[variant, first, after])

    def least_period_ns(self) -> int:
        """Return a bound on the period of every allocation: all work shared evenly, or the longest element."""
        loads = self.load_ns[0]
        return max(1, -(-int(loads[-1]) // self.processors), int(np.diff(loads).max()))

    def longest_period_ns(self) -> int:
        """Return a period at which everything is in group 1 and every stage holds one micro-batch."""
        hops = self.hop_ns[self.hop_ns < NEVER_NS]
        slowest = int(hops.max()) if hops.size else 0
        return int(self.load_ns[-1, -1]) + min(self.processors - 1, self.size) * slowest + 1

    @classmethod
    def of(cls, problem: Problem, batch: Batch, groups: Sequence[Group], halves: int = ALL_BUFFERS) -> Chain:
        """Build the chain of a request on processors ``groups``, each of the same number of devices, all of one kind.

        ``halves``: which buffers count, as in ``stage_line.buffer_bytes``.
        """
        places = cut_places(problem)
        cuts = tuple(places.tolist())
        width, rows = len(groups[0]), batch.most_rows
        share = largest_slice(rows, width)
        again = {"never": (False,), "always": (True,), "auto": (False, True)}[problem.recompute]
        kind = problem.devices[groups[0][0]].kind
        sums = layer_sums(problem, (kind,), share)
        table = StageTable(problem, (kind,), share, places, width)
        forward = sums.forward_ns[places]
        plain = forward + sums.backward_ns[places]
        work, stash = table.workspace_bytes, table.kept_bytes
        devices = [d for group in groups for d in group]
        return cls(
            cuts=cuts,
            again=again,
            forward_ns=forward,
            load_ns=np.stack([plain + forward if each else plain for each in again]),
            fixed_bytes=table.static.total + table.static.trainable + _buffers(problem, places, share, halves),
            kept_bytes=np.stack([table.flight_bytes(each) for each in again]),
            work_bytes=np.stack([work + stash if each else work for each in again]),
            hop_ns=_hops(problem, cuts, groups, rows),
            available_bytes=free_bytes(problem, devices),
            most_in_flight=batch.num_micro_batches + 1,
        )

    @classmethod
    def of_layers(
        cls,
        forward_ns: Sequence[int],
        backward_ns: Sequence[int],
        weight_bytes: Sequence[int],
        activation_bytes: Sequence[int],
        *,
        bandwidth_bytes_per_s: int,
        memory_bytes: int,
        processors: int,
    ) -> Chain:
        """Build section 4.1's model.

        It counts 3 W, the inputs a_0 … a_{L-1} of the layers, and twice the activation at each boundary.
        """
        count = len(forward_ns)
        forward = prefix_sums(forward_ns)
        backward = prefix_sums(backward_ns)
        weights = 3 * prefix_sums(weight_bytes)
        inputs = np.asarray(activation_bytes, dtype=np.int64)
        kept = prefix_sums(inputs[:count])
        border = 2 * inputs
        border[[0, count]] = 0
        hop = 2 * transfers_ns(inputs, bandwidth_bytes_per_s)
        hop[[0, count]] = 0
        return cls(
            cuts=tuple(range(count + 1)),
            again=(False,),
            forward_ns=forward,
            load_ns=(forward + backward)[None],
            fixed_bytes=between(weights) + border[:, None] + border[None, :],
            kept_bytes=between(kept)[None],
            work_bytes=np.zeros((1, count + 1, count + 1), dtype=np.int64),
            hop_ns=np.tile(hop, (processors, 1)),
            available_bytes=memory_bytes,
            most_in_flight=2**31,
        )


def _buffers(problem: Problem, places: np.ndarray, rows: int, halves: int) -> np.ndarray:
    """Return ``stage_line.buffer_bytes`` of every stage, (n + 1, n + 1)."""
    certain = crossing_bytes(problem, 1, rows)[places]
    border = certain + crossing_bytes(problem, 0, rows)[places]
    both = border[:, None] + border[None, :]
    return np.asarray(certain + (both - certain) * halves // ALL_BUFFERS) * problem.memory.count_buffers


def _hops(problem: Problem, cuts: tuple[int, ...], groups: Sequence[Group], rows: int) -> np.ndarray:
    """Return the round trips over each boundary between processors q - 1 and q, (P, n + 1).

    The simulator counts the same transfers.
    Pairs whose widest and narrowest boundaries take the same times are alike, so each sort of pair is costed once.
    """
    inner = [cut - 1 for cut in cuts[1:-1]]
    table = np.zeros((len(groups), len(cuts)), dtype=np.int64)
    if not inner:
        return table
    sizes = problem.forward_bytes + problem.backward_bytes
    probes = [max(inner, key=lambda cut: int(sizes[cut])), min(inner, key=lambda cut: int(sizes[cut]))]
    hops_of: dict[bytes, np.ndarray] = {}
    for q in range(1, len(groups)):
        pair = groups[q - 1], groups[q]
        alike = round_trips_ns(problem, probes, *pair, rows).tobytes()
        if alike not in hops_of:
            hops_of[alike] = round_trips_ns(problem, inner, *pair, rows)
        table[q, 1:-1] = hops_of[alike]
    return table
