"""Costs for the search's kernel: all-reduces, stages and their memory.

The numbers are equal to the numbers of ``costs``; bytes become ns in float64, rounded up.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import math

import numpy as np

from penstock.solvers.compiled.decorators import plain
from penstock.solvers.planners.dapple.kernel_arrays import Layers, Settings

NO, PLAIN, RECOMPUTING = range(3)


@plain
def rounded_up(value: float) -> int:
    """Return the smallest integer that is not below ``value``, a product or quotient in float64.

    The result is never below the exact product or quotient, rounded up.
    """
    return math.ceil(value * (1.0 + 4.4e-16))


@plain
def devices_between(node_device: np.ndarray, low: np.ndarray, high: np.ndarray, out: np.ndarray) -> int:
    """Write the devices ``low[n]`` … ``high[n] - 1`` of every server to ``out``; return their number."""
    count = 0
    for n in range(len(low)):
        for i in range(low[n], high[n]):
            out[count] = node_device[n, i]
            count += 1
    return count


@plain
def moved(rate: float, lag: int, size: int) -> int:
    """Return the time in ns for ``size`` bytes of a sample at a hop's rate."""
    return 0 if size == 0 else lag + rounded_up(rate * size)


@plain
def reduced(rate: float, fixed: int, size: int, backward: int, bucket: int, overlap: bool) -> int:
    """Return the time by which a stage's all-reduce outlasts its last backward, in ns.

    With overlap, the last backward hides a part of the all-reduce. The first layers' bucket is ready only at the end,
    so one bucket always remains (ALGORITHMS 7.1).
    """
    if size == 0 or rate == 0.0:
        return 0
    buckets = (size + bucket - 1) // bucket
    whole = rounded_up(rate * size) + fixed * buckets
    if not overlap:
        return whole
    return max(whole - backward, rounded_up(rate * min(size, bucket)) + fixed)


@plain
def stage_times(
    layers: Layers,
    settings: Settings,
    i: int,
    j: int,
    replicas: int,
    mask: int,
    room: int,
    widest: np.ndarray,
    flying: int,
) -> tuple[int, int, int]:
    """Return (forward, backward with recomputation, NO | PLAIN | RECOMPUTING) of layers [i, j) on a set's slowest kind.

    ``widest[kind]``: the largest workspace of the layers. The memory test is ``micro_batches_that_fit >= flying``;
    ``lenient`` leaves the buffers out of it.
    """
    share = layers.share_of[replicas]
    forward, backward, stash, work, rebuilt = 0, 0, 0, 0, 0
    for kind in range(len(widest)):
        if (mask >> kind) & 1:
            kept = layers.kept_bytes[kind, share, j] - layers.kept_bytes[kind, share, i]
            forward = max(forward, layers.forward_ns[kind, share, j] - layers.forward_ns[kind, share, i])
            backward = max(backward, layers.backward_ns[kind, share, j] - layers.backward_ns[kind, share, i])
            stash = max(stash, kept)
            work = max(work, widest[kind])
            rebuilt = max(rebuilt, widest[kind] + kept)
    resident = layers.fixed_bytes[i, j]
    states = layers.state_bytes[i, j]
    resident += (states + replicas - 1) // replicas if settings.sharded else states
    received, kept_input = 0, 0
    if i > 0 and not settings.buffers:
        kept_input = layers.sent_bytes[i - 1] * layers.rows[share]
    if settings.buffers and not settings.lenient:
        rows = layers.rows[share]
        if i > 0:
            received = layers.sent_bytes[i - 1] * rows
            resident += received + layers.returned_bytes[i - 1] * rows
        if j < len(layers.cut) - 1:
            resident += (layers.sent_bytes[j - 1] + layers.returned_bytes[j - 1]) * rows
    if settings.recompute < 2 and resident + work + flying * (stash + received) <= room:
        return forward, backward, PLAIN
    if settings.recompute == 0:
        return forward, backward, NO
    return (
        forward,
        backward + forward,
        (RECOMPUTING if resident + rebuilt + flying * (received + kept_input) <= room else NO),
    )
