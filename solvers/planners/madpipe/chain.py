"""``Chain``: what MadPipe's searches see of a request, for one micro-batch size and one number of replicas.

Symbols (section 4.1): u_F, u_B -> ``forward_ns``, ``load_ns``; U(k, l) -> ``load_ns[l] - load_ns[k - 1]``;
C(k) -> ``hop_ns[:, k]``, there and back; Mem(k, l, g) -> ``bytes_of``; M -> ``available_bytes``; P -> ``processors``.
Layers that no cut may separate are one element of the chain; ``cuts[i]`` is the first layer after boundary i.

Differs from the paper: a stage may recompute its activations (``again``), which is a second variant of every stage
with its own load; a device's workspace, context, optimizer states and both directions' buffers count, as the judge
counts them; each pair of neighbouring processors has its own C; no stage keeps more than ``most_in_flight``
micro-batches, because two weight versions are enough only if the update period M is at least that less one.
``of_layers`` makes the paper's own model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.transfer import transfer, transfer_ns
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.slices import largest_slice
from penstock.solvers.schedules.support.stage_line import ALL_BUFFERS

Group = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Chain:
    """n elements, n + 1 boundaries, R variants of a stage (``again[r]``: it recomputes), P processors.

    ``load_ns`` (R, n + 1) and ``forward_ns`` (n + 1,) are prefix sums; a stage between boundaries k < l holds
    ``fixed_bytes[k, l]`` always, ``kept_bytes[r, k, l]`` for each micro-batch in flight, ``work_bytes[r, k, l]``
    while it computes. ``hop_ns[q, k]``: C of boundary k when the stage after it is on processor q. All int64.
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
        """n."""
        return len(self.cuts) - 1

    @property
    def processors(self) -> int:
        """P."""
        return len(self.hop_ns)

    def load(self, first: int, after: int, variant: int = 0) -> int:
        """U of the stage between two boundaries."""
        return int(self.load_ns[variant, after] - self.load_ns[variant, first])

    def bytes_of(self, first: int, after: int, variant: int, in_flight: int) -> int:
        """Mem(first + 1, after, g)."""
        each = in_flight * int(self.kept_bytes[variant, first, after])
        return int(self.fixed_bytes[first, after]) + each + int(self.work_bytes[variant, first, after])

    def least_period_ns(self) -> int:
        """No allocation has a smaller period: all work shared evenly, or the longest element."""
        loads = self.load_ns[0]
        return max(1, -(-int(loads[-1]) // self.processors), int(np.diff(loads).max()))

    def longest_period_ns(self) -> int:
        """At this period everything is in group 1 and every stage holds one micro-batch."""
        hops = self.hop_ns[self.hop_ns < NEVER_NS]
        slowest = int(hops.max()) if hops.size else 0
        return int(self.load_ns[-1, -1]) + min(self.processors - 1, self.size) * slowest + 1

    @classmethod
    def of(cls, problem: Problem, batch: Batch, groups: Sequence[Group], halves: int = ALL_BUFFERS) -> Chain:
        """The chain of a request on processors ``groups``, each of as many devices, all of one kind.

        ``halves``: which buffers count, as in ``stage_line.buffer_bytes``.
        """
        cuts = (0, *(int(i) + 1 for i in np.flatnonzero(problem.cuttable)), problem.num_layers)
        width, rows = len(groups[0]), batch.most_rows
        share = largest_slice(rows, width)
        again = {"never": (False,), "always": (True,), "auto": (False, True)}[problem.recompute]
        costs = problem.costs(problem.devices[groups[0][0]].kind, share)
        at = np.asarray(cuts)
        forward = costs.forward_ns[at]
        plain = forward + costs.backward_ns[at]
        stash = _between(costs.stash_bytes[at])
        work = _largest([int(part.max()) for part in np.split(costs.workspace_bytes, at[1:-1])])
        inputs = _crossing(problem, cuts, problem.forward_bytes, share)[:, None]
        received = inputs * problem.memory.count_buffers
        devices = [d for group in groups for d in group]
        return cls(
            cuts=cuts,
            again=again,
            forward_ns=forward,
            load_ns=np.stack([plain + forward if each else plain for each in again]),
            fixed_bytes=_static(problem, cuts, width) + _buffers(problem, cuts, share, halves),
            kept_bytes=np.stack([inputs + 0 * stash if each else received + stash for each in again]),
            work_bytes=np.stack([work + stash if each else work for each in again]),
            hop_ns=_hops(problem, cuts, groups, rows),
            available_bytes=min(problem.capacity_bytes(d) - problem.devices[d].context_bytes for d in devices),
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
        """Section 4.1's model: 3 W, the inputs a_0 … a_{L-1} of the layers, twice the activation at each boundary."""
        count = len(forward_ns)
        forward = np.concatenate(([0], np.cumsum(np.asarray(forward_ns, dtype=np.int64))))
        backward = np.concatenate(([0], np.cumsum(np.asarray(backward_ns, dtype=np.int64))))
        weights = np.concatenate(([0], np.cumsum(3 * np.asarray(weight_bytes, dtype=np.int64))))
        inputs = np.asarray(activation_bytes, dtype=np.int64)
        kept = np.concatenate(([0], np.cumsum(inputs[:count])))
        border = 2 * inputs
        border[[0, count]] = 0
        hop = np.asarray([2 * transfer_ns(int(a), bandwidth_bytes_per_s) for a in inputs], dtype=np.int64)
        hop[[0, count]] = 0
        return cls(
            cuts=tuple(range(count + 1)),
            again=(False,),
            forward_ns=forward,
            load_ns=(forward + backward)[None],
            fixed_bytes=_between(weights) + border[:, None] + border[None, :],
            kept_bytes=_between(kept)[None],
            work_bytes=np.zeros((1, count + 1, count + 1), dtype=np.int64),
            hop_ns=np.tile(hop, (processors, 1)),
            available_bytes=memory_bytes,
            most_in_flight=2**31,
        )


def _between(prefix: np.ndarray) -> np.ndarray:
    """(n + 1, n + 1): the sum between any two boundaries; meaningless below the diagonal."""
    return np.asarray(prefix[None, :] - prefix[:, None])


def _largest(values: Sequence[int]) -> np.ndarray:
    """(n + 1, n + 1): the largest element between any two boundaries."""
    table = np.zeros((len(values) + 1, len(values) + 1), dtype=np.int64)
    each = np.asarray(values, dtype=np.int64)
    for k in range(len(values)):
        table[k, k + 1 :] = np.maximum.accumulate(each[k:])
    return table


def _crossing(problem: Problem, cuts: tuple[int, ...], per_sample: np.ndarray, rows: int) -> np.ndarray:
    """(n + 1,): what ``rows`` samples send over each boundary; nothing at the ends."""
    sizes = np.zeros(len(cuts), dtype=np.int64)
    sizes[1:-1] = per_sample[np.asarray(cuts[1:-1], dtype=np.int64) - 1] * rows
    return sizes


def _static(problem: Problem, cuts: tuple[int, ...], width: int) -> np.ndarray:
    """(n + 1, n + 1): weights in two versions, gradients, optimizer states (``memory.static_bytes``)."""
    at = np.asarray(cuts)
    weights, trained = _between(problem.parameter_bytes[at]), _between(problem.trainable_bytes[at])
    for _name, layers, size in problem.shared_parameters:
        uses = _between(np.asarray([sum(layer < cut for layer in layers) for cut in cuts]))
        first = (at[:, None] <= layers[0]) & (layers[0] < at[None, :])
        copied = size * ((uses > 0) & ~first)
        weights, trained = weights + copied, trained + copied
    rules = problem.memory
    states = trained * rules.state_factor
    if rules.shard_states:
        states = -(-states // width)
    return np.asarray(weights + trained + trained * rules.gradient_factor + states)


def _buffers(problem: Problem, cuts: tuple[int, ...], rows: int, halves: int) -> np.ndarray:
    """(n + 1, n + 1): ``stage_line.buffer_bytes`` of every stage."""
    border = _crossing(problem, cuts, problem.forward_bytes + problem.backward_bytes, rows)
    certain = _crossing(problem, cuts, problem.backward_bytes, rows)[None, :]
    both = border[:, None] + border[None, :]
    return np.asarray(certain + (both - certain) * halves // ALL_BUFFERS) * problem.memory.count_buffers


def _hops(problem: Problem, cuts: tuple[int, ...], groups: Sequence[Group], rows: int) -> np.ndarray:
    """(P, n + 1): both ways over each boundary between processors q - 1 and q, by the judge's own transfers.

    Pairs whose widest and narrowest boundaries take the same times are alike, so each sort of pair is asked once, and
    for each size of boundary once.
    """
    inner = cuts[1:-1]
    table = np.zeros((len(groups), len(cuts)), dtype=np.int64)
    if not inner:
        return table
    known: dict[tuple[int, ...], np.ndarray] = {}
    sizes = [(int(problem.forward_bytes[c - 1]), int(problem.backward_bytes[c - 1])) for c in inner]
    cut_of = dict(zip(sizes, inner, strict=True))
    probes = [cut_of[size] for size in (max(sizes, key=sum), min(sizes, key=sum))]
    for q in range(1, len(groups)):
        pair = groups[q - 1], groups[q]
        alike = tuple(_both_ways_ns(problem, cut, *pair, rows) for cut in probes)
        if alike not in known:
            each = {size: _both_ways_ns(problem, cut, *pair, rows) for size, cut in cut_of.items()}
            known[alike] = np.asarray([each[size] for size in sizes], dtype=np.int64)
        table[q, 1:-1] = known[alike]
    return table


def _both_ways_ns(problem: Problem, cut: int, source: Group, target: Group, rows: int) -> int:
    pair = _pair(problem, cut, source, target)
    moves = transfer(problem, pair, 0, rows, 0), transfer(problem, pair, 1, rows, 1)
    return min(NEVER_NS, sum(0 if move is None else move.duration_ns for move in moves))


def _pair(problem: Problem, cut: int, source: Group, target: Group) -> Allocation:
    return single_pipeline((Stage(0, cut - 1, source), Stage(cut, problem.num_layers - 1, target)), 1)
