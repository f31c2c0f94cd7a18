"""A stage's gradients in buckets, as its last backward makes them ready for the all-reduce (ALGORITHMS 1.6).

Where GPUs of a cell hold copies of each other's parameters, a bucket is first summed in parts inside the cells, then
each part among the cells of a stage, and at last its parameters are gathered inside the cells. One bucket takes the
time of all three, also on a stage of one cell.

In a shared network a bucket of a large layer takes its links piece by piece, so that messages pass between two pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.collectives import all_reduce_ns, ring_resources
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import owned_of
from penstock.solvers.costs.stage import stage_rows
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.problem import Problem

PIECES = 16
"""The most pieces in which a bucket takes shared links (``docs/theory/judge.md``, 3.6)."""


class Bucket(NamedTuple):
    """A part of a stage's gradients: layers [first, last].

    In a shared network it is a piece of a bucket, with its part of the bytes and of the time; the pieces, one after the
    other, take the time of the whole. ``bytes``: the bytes that a GPU sums with GPUs of other devices.
    """

    first: int
    last: int
    bytes: int
    duration_ns: int
    resources: tuple[int, ...]


def buckets(problem: Problem, stage: Stage) -> tuple[Bucket, ...]:
    """Return the stage's gradient buckets as they take links: each of ``whole_buckets`` in ``pieces``."""
    return tuple(piece for whole in whole_buckets(problem, stage) for piece in pieces(problem, whole))


def whole_buckets(problem: Problem, stage: Stage) -> tuple[Bucket, ...]:
    """Return the stage's gradient buckets in the order in which the last backward completes them: last layers first."""
    inner = inner_ns(problem)
    if stage.replicas == 1 and inner[stage.first] == inner[stage.last + 1]:
        return ()
    resources = ring_resources(problem, stage.devices) if problem.rules.shared else ()
    sums = (bucket_bytes(problem, stage.first, stage.last), inner)
    owned, summed = (each[stage.first : stage.last + 2].tolist() for each in sums)
    buckets_so_far: list[Bucket] = []
    high = stage.last - stage.first
    for low in range(high, -1, -1):
        size, inside = owned[high + 1] - owned[low], summed[high + 1] - summed[low]
        if size >= problem.rules.bucket_bytes or (low == 0 and size + inside > 0):
            duration_ns = inside + all_reduce_ns(problem, size, stage.devices)
            buckets_so_far.append(Bucket(stage.first + low, stage.first + high, size, duration_ns, resources))
            high = low - 1
    return tuple(buckets_so_far)


def pieces(problem: Problem, whole: Bucket) -> Iterator[Bucket]:
    """Yield the parts in which a bucket takes shared links: each of ``bucket_bytes`` or more, all alike."""
    count = min(PIECES, whole.bytes // problem.rules.bucket_bytes) if problem.rules.shared else 1
    if count < 2 or whole.duration_ns >= NEVER_NS:
        yield whole
        return
    first, last, size, duration_ns, resources = whole
    for k in range(count):
        share, share_ns = ((k + 1) * n // count - k * n // count for n in (size, duration_ns))
        yield Bucket(first, last, share, share_ns, resources)


def leads_ns(problem: Problem, stage: Stage, rows: int, chain: Sequence[Bucket]) -> list[tuple[int, int]]:
    """Return how long before the end of a stage's last B, and of its last W, each bucket is ready.

    ``rows``: size of the last micro-batch. Without overlap a bucket is ready only when the operation has ended.
    """
    if not problem.rules.overlap_all_reduce:
        return [(0, 0)] * len(chain)
    costs = problem.costs(problem.devices[stage.devices[0]].kind, stage_rows(stage, rows))
    backward, weight, first = costs.backward_ns, costs.weight_ns, stage.first
    return [(int(backward[b.first] - backward[first]), int(weight[b.first] - weight[first])) for b in chain]


def exposed_ns(chain: Sequence[Bucket], leads: Sequence[int]) -> int:
    """Return how long buckets that run one after the other last beyond an operation's end, each ready before it."""
    longest, after = 0, 0
    for bucket, lead in zip(reversed(chain), reversed(leads), strict=True):
        after += bucket.duration_ns
        longest = max(longest, after - lead)
    return longest


def bucket_bytes(problem: Problem, first: int, last: int) -> np.ndarray:
    """Return prefix sums (L + 1,) of the gradient bytes in the buckets of layers ``first`` to ``last``.

    A parameter tied to layers of other stages is in no bucket: it is reduced separately (``ties``).
    """
    sums = problem.owned_bytes
    for _name, layers, size in problem.shared_parameters:
        if first <= layers[0] <= last and not first <= min(layers) <= max(layers) <= last:
            layer_bytes = int(sums[layers[0] + 1] - sums[layers[0]])
            sums = sums - np.where(np.arange(len(sums)) > layers[0], min(owned_of(problem, size), layer_bytes), 0)
    return sums


def inner_ns(problem: Problem) -> np.ndarray:
    """Return prefix sums (L + 1,) of the ns in which cells sum gradients and gather parameters among their GPUs."""
    return np.zeros(problem.num_layers + 1, dtype=np.int64) if problem.copies is None else problem.copies.reduce_ns


def stage_all_reduce_ns(problem: Problem, stage: Stage) -> int:
    """Return the time of one all-reduce over all of the stage's gradients, tied ones included (A_s, SPP equation 1)."""
    i, j = stage.first, stage.last + 1
    inner, owned = inner_ns(problem), problem.owned_bytes
    return int(inner[j] - inner[i]) + all_reduce_ns(problem, int(owned[j] - owned[i]), stage.devices)
