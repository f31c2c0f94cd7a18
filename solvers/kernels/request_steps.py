"""The label search's arithmetic: a label with a channel or a stage before it (BOUNDS section 3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.kernels.compiled import inner, loop
from penstock.solvers.kernels.windows import APART, FREE, SERIAL, own

SAME_RUN, TO_OTHER_NODE, TO_SPANNING, FROM_SPANNING, AMONG_SPANNING = range(5)
"""How the stage before lies to the one behind: in one node, each in a node of its own, or one of them in several."""


class Pieces(NamedTuple):
    """Stages by [variant, replicas, first layer, layer behind], int64 ns; each the least over all placements.

    ``limit``: micro-batches in flight, at most the number that there are; 0 where there is no such stage. ``after``
    [in one node or spanning, replicas, first, behind]: what of the all-reduce is left after the last backward, and the
    update. ``sent`` (2, L + 1): bytes of a sample before each layer, forward and backward; ``rate`` [way, sender's
    replicas, receiver's]: ns per such byte; ``latency_ns`` and ``channel`` by way. ``least_forward``,
    ``least_backward`` and ``least_work`` (ns times devices) are prefix sums over layers (L + 1,). ``spans``: whether
    stages that a node could hold count apart when they span nodes.
    """

    forward: np.ndarray
    backward: np.ndarray
    work: np.ndarray
    limit: np.ndarray
    after: np.ndarray
    sent: np.ndarray
    rate: np.ndarray
    latency_ns: np.ndarray
    channel: np.ndarray
    least_forward: np.ndarray
    least_backward: np.ndarray
    least_work: np.ndarray
    batches: int
    devices: int
    node_size: int
    spans: bool


@inner
def _reached(grid_forward: np.ndarray, grid_backward: np.ndarray, forward: int, backward: int) -> int:
    """The last grid point that rates are not below."""
    j = 0
    while j + 1 < grid_forward.size and grid_forward[j + 1] <= forward and grid_backward[j + 1] <= backward:
        j += 1
    return j


@loop
def put(
    pieces: Pieces,
    grid_forward: np.ndarray,
    grid_backward: np.ndarray,
    label: np.ndarray,
    first: int,
    stop: int,
    replicas: int,
    variant: int,
    where: int,
    fresh: np.ndarray,
) -> None:
    """The label with a stage before it."""
    points, batches = grid_forward.size, pieces.batches
    forward = pieces.forward[variant, replicas, first, stop]
    backward = pieces.backward[variant, replicas, first, stop]
    work = pieces.work[variant, replicas, first, stop]
    limit = pieces.limit[variant, replicas, first, stop]
    after = pieces.after[where, replicas, first, stop]
    around = label[3 * points]
    turn = forward + around + backward
    trip = max(turn + after, forward + label[3 * points + 1])
    late = 0
    if limit < batches:
        late = (batches - 1) // limit * turn + (batches - 1) % limit * forward
    i = _reached(grid_forward, grid_backward, forward, backward)
    for j in range(points):
        m = max(i, j)
        ahead = max(grid_forward[j], forward)
        ends = max(own(forward, backward, around, limit, ahead, grid_backward[j], batches), work)
        fresh[j] = max(ends, forward + backward + label[m])
        ends = max(own(forward, backward, around, limit, ahead, 0, batches), work)
        ends = max(ends, forward + backward + max(label[points + m], label[i]))
        fresh[points + j] = ends
        last = max((batches - 1) * ahead, late) + trip
        fresh[2 * points + j] = max(ends + after, forward + label[2 * points + m], last)
    fresh[3 * points] = turn
    fresh[3 * points + 1] = trip


@loop
def hop(
    pieces: Pieces,
    grid_forward: np.ndarray,
    grid_backward: np.ndarray,
    label: np.ndarray,
    at: int,
    way: int,
    source: int,
    target: int,
    fresh: np.ndarray,
) -> None:
    """The label with the channel before it."""
    points, batches = grid_forward.size, pieces.batches
    home = way
    if way == TO_SPANNING:
        home = FROM_SPANNING
    elif way == FROM_SPANNING:
        home = TO_SPANNING
    out, back = 0, 0
    if pieces.sent[0, at] > 0:
        out = int(np.ceil(pieces.sent[0, at] * pieces.rate[way, source, target])) + pieces.latency_ns[way]
    if pieces.sent[1, at] > 0:
        back = int(np.ceil(pieces.sent[1, at] * pieces.rate[home, target, source])) + pieces.latency_ns[home]
    channel = pieces.channel[way] if out > 0 and back > 0 else FREE
    inside = label[3 * points]
    trip = out + label[3 * points + 1]
    i = 0 if channel == FREE else _reached(grid_forward, grid_backward, out, back)
    for j in range(points):
        m = max(i, j)
        ahead, behind, own_behind = grid_forward[j], grid_backward[j], 0
        if channel == SERIAL:
            ahead = max(ahead, out)
            ends = own(out, back, inside, batches, ahead, behind, batches)
            early = own(out, back, inside, batches, ahead, 0, batches)
        else:
            if channel == APART:
                ahead, behind, own_behind = max(ahead, out), max(behind, back), back
            ends = (batches - 1) * max(ahead, behind) + out + inside + back
            early = (batches - 1) * max(ahead, own_behind) + out + inside + back
        fresh[j] = max(ends, out + back + label[m])
        early = max(early, out + back + max(label[points + m], label[i]))
        fresh[points + j] = early
        fresh[2 * points + j] = max(early, out + label[2 * points + m], (batches - 1) * ahead + trip)
    fresh[3 * points] = out + inside + back
    fresh[3 * points + 1] = trip
