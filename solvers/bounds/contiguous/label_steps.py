"""The label search's arithmetic: a label with a channel or a stage before it (BOUNDS section 3)."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.contiguous.grid_kernel import Grid, Reach
from penstock.solvers.bounds.windows_kernel import APART, FREE, SERIAL, window_span
from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.fields import Fields

SAME_RUN, TO_OTHER_NODE, TO_SPANNING, FROM_SPANNING, AMONG_SPANNING = range(5)
"""Positions of a stage and the next: in one node, each in a different node, or one of them in several."""

GOOD_PART = 8
"""Reciprocal of the part of the limit from which a step's transfers over a cut are computed in detail."""


@Fields.register
class Pieces(NamedTuple):
    """Stages by [variant, replicas, first layer, layer after], int64 ns; each the least over all placements.

    ``limit``: micro-batches in flight, at most all of them; 0 where there is no such stage. ``after`` [in one node or
    spanning, replicas, first, after]: the part of the all-reduce after the last backward, and the update. ``sent`` (2,
    L + 1): bytes of a sample before each layer, forward and backward. ``rate`` [way, sender's replicas, receiver's]: ns
    per such byte. ``spread_rate`` [near, one's replicas, other's]: the same for a stage in a node and one across nodes,
    with ``near`` devices in that node. ``latency_ns`` and ``channel``: by way. ``least_forward`` and ``least_backward``
    [devices, layers]: one pass through the layers before, with that many devices; ``least_work`` (L + 1,): their ns
    times devices. ``shape`` [replicas, devices of the node run]: numbers below ``shapes`` of the possible pairs, else
    -1. ``spans``: whether stages that a node could hold count apart when they span nodes.

    If backwards may be split, ``backward`` is the input gradient's time, ``weight`` the least of a weight gradient,
    which may run later, and ``work`` the part of ``whole_work`` that is due before a stage's last input gradient ends.
    If backwards are whole, ``weight`` is 0 and both are the same. ``carried`` [replicas, first, after]: the least ns
    from a stage's possible begin until its devices' links have carried all of its transfers; 0 where links may not
    belong to one device.
    """

    forward: np.ndarray
    backward: np.ndarray
    work: np.ndarray
    whole_work: np.ndarray
    weight: np.ndarray
    limit: np.ndarray
    after: np.ndarray
    carried: np.ndarray
    sent: np.ndarray
    rate: np.ndarray
    spread_rate: np.ndarray
    latency_ns: np.ndarray
    channel: np.ndarray
    least_forward: np.ndarray
    least_backward: np.ndarray
    least_work: np.ndarray
    shape: np.ndarray
    shapes: int
    batches: int
    devices: int
    node_size: int
    spans: bool


@loop
def put(
    pieces: Pieces,
    grid: Grid,
    reach: Reach,
    label: np.ndarray,
    first: int,
    stop: int,
    replicas: int,
    variant: int,
    where: int,
    left: int,
    below_ns: int,
    fresh: np.ndarray,
) -> bool:
    """Put a stage before a label, with ``left`` devices for the layers before; return False where it takes too long."""
    points, few, batches = grid.forward.size, grid.early_forward.size, pieces.batches
    forward = pieces.forward[variant, replicas, first, stop]
    backward = pieces.backward[variant, replicas, first, stop]
    work = pieces.work[variant, replicas, first, stop]
    limit = pieces.limit[variant, replicas, first, stop]
    rest = pieces.after[where, replicas, first, stop]
    after = pieces.weight[variant, replicas, first, stop] + rest
    done = pieces.whole_work[variant, replicas, first, stop] + rest
    later = batches * pieces.weight[variant, replicas, first, stop] + rest
    carried = pieces.carried[replicas, first, stop]
    ends, gone = points + few, points + 2 * few
    around = label[gone]
    turn = forward + around + backward
    trip = max(turn + after, forward + label[gone + 1])
    fresh[gone], fresh[gone + 1] = turn, trip
    for j in range(points):
        most = min(limit, grid.limit[j])
        end = max(window_span(forward, backward, around, most, grid.forward[j], grid.backward[j], batches), work)
        fresh[j] = max(end, forward + backward + label[reach.whole[j]])
        if j == 0 and fresh[0] + pieces.least_forward[left, first] + pieces.least_backward[left, first] >= below_ns:
            return False
    for j in range(few):
        most = min(limit, grid.early_limit[j])
        end = max(window_span(forward, backward, around, most, grid.early_forward[j], 0, batches), work)
        following = max(label[points + reach.early[j]], label[reach.joined[j]])
        fresh[points + j] = max(end, forward + backward + following)
        last = (batches - 1) * max(grid.early_forward[j], forward)
        if most < batches:
            last = max(last, (batches - 1) // most * turn + (batches - 1) % most * forward)
        # Before the first backward there are only forwards, of the micro-batches that may be in flight. They count with
        # the quicker size, as do their transfers.
        idle = max(0, forward + around - most * forward)
        end = max(fresh[points + j] + after, done, carried, batches * (forward + backward) + idle + later)
        fresh[ends + j] = max(end, forward + label[ends + reach.early[j]], last + trip)
        if j == 0 and not may_be_below(pieces, grid, fresh, first, left, below_ns):
            return False
    return True


@inner
def may_be_below(pieces: Pieces, grid: Grid, label: np.ndarray, first: int, left: int, below_ns: int) -> bool:
    """Return whether the layers before may be added, at their quickest on ``left`` devices, without reaching the limit.

    One of their stages has at least an even share of the work. Its forwards end a round trip before its last backward,
    and its first forward a round trip before its backwards: half its work and the round trip are within the end.
    """
    points, few = grid.forward.size, grid.early_forward.size
    ahead = pieces.least_forward[left, first]
    if label[points + few] + ahead >= below_ns or label[0] + ahead + pieces.least_backward[left, first] >= below_ns:
        return False
    return first == 0 or (
        pieces.least_work[first] < below_ns * left
        and pieces.least_work[first] // (2 * left) + label[points + 2 * few] < below_ns
    )


@inner
def times_of_hop(pieces: Pieces, at: int, way: int, source: int, target: int, near: int) -> tuple[int, int, int]:
    """Return the times out and back, and how they exclude each other.

    ``near``: devices of the stage across nodes that are in the other's node.
    """
    home = way
    there, here = pieces.rate[way, source, target], pieces.rate[way, target, source]
    if way == TO_SPANNING:
        home = FROM_SPANNING
        there = pieces.spread_rate[near, source, target]
        here = there
    elif way == FROM_SPANNING:
        home = TO_SPANNING
        there = pieces.spread_rate[near, target, source]
        here = there
    out, back = 0, 0
    if pieces.sent[0, at] > 0:
        out = int(np.ceil(pieces.sent[0, at] * there)) + pieces.latency_ns[way]
    if pieces.sent[1, at] > 0:
        back = int(np.ceil(pieces.sent[1, at] * here)) + pieces.latency_ns[home]
    return out, back, pieces.channel[way] if out > 0 and back > 0 else FREE


@inner
def most_near(pieces: Pieces, spread: int, run: int) -> int:
    """Return the most devices of a stage of ``spread`` across nodes that are in a node with ``run`` others."""
    return max(0, min(spread - 1, pieces.node_size - run, pieces.spread_rate.shape[0] - 1))


@inner
def near_matters(pieces: Pieces, at: int, inside: int, spread: int, limit_ns: int) -> bool:
    """Return whether the transfers of a step to a stage across nodes may take a good part of the limit.

    If not, as many of its devices count as near as there is room for, and labels do not distinguish their number.
    """
    out, back, _channel = times_of_hop(pieces, at, TO_SPANNING, inside, spread, 0)
    return GOOD_PART * pieces.batches * (out + back) >= limit_ns


@loop
def hop(
    pieces: Pieces,
    grid: Grid,
    reach: Reach,
    label: np.ndarray,
    out: int,
    back: int,
    channel: int,
    fresh: np.ndarray,
) -> None:
    """Put a channel before a label."""
    points, few, batches = grid.forward.size, grid.early_forward.size, pieces.batches
    ends, gone = points + few, points + 2 * few
    inside = label[gone]
    trip = out + label[gone + 1]
    trip_ns = out + inside + back
    fresh[gone], fresh[gone + 1] = trip_ns, trip
    for j in range(points):
        ahead, following = grid.forward[j], grid.backward[j]
        if channel == SERIAL:
            end = window_span(out, back, inside, batches, ahead, following, batches)
        else:
            if channel == APART:
                ahead, following = max(ahead, out), max(following, back)
            end = (batches - 1) * max(ahead, following) + trip_ns
        fresh[j] = max(end, out + back + label[reach.whole[j]])
    for j in range(few):
        ahead, following = grid.early_forward[j], 0
        if channel == SERIAL:
            end = window_span(out, back, inside, batches, ahead, 0, batches)
        else:
            if channel == APART:
                following = back
            end = (batches - 1) * max(ahead, following, out if channel == APART else 0) + trip_ns
        if channel != FREE:
            ahead = max(ahead, out)
        after_it = max(label[points + reach.early[j]], label[reach.joined[j]])
        fresh[points + j] = max(end, out + back + after_it)
        fresh[ends + j] = max(fresh[points + j], out + label[ends + reach.early[j]], (batches - 1) * ahead + trip)
