"""The dynamic program over stages on devices in a row (``row_partition``), as a compiled loop."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner
from penstock.solvers.costs.infinity import NEVER_NS


@inner
def divided(total: int, parts: int) -> int:
    """Return ceil(total / parts)."""
    return -(-total // parts)


@compiled
def run_placed(
    time_ns: np.ndarray,
    base_bytes: np.ndarray,
    flight_bytes: np.ndarray,
    reduced_bytes: np.ndarray,
    update_ns: np.ndarray,
    replicas: np.ndarray,
    set_of: np.ndarray,
    in_flight: np.ndarray,
    room_bytes: np.ndarray,
    reduce_slope: np.ndarray,
    reduce_fixed: np.ndarray,
    every: np.ndarray,
    turns: bool,
    hop_slope: np.ndarray,
    hop_fixed: np.ndarray,
    boundary_bytes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest largest load of layers [0, j) on q devices, ``replicas[r]`` of them in the last stage.

    n places, V devices, R replica counts, C kinds of device sets. ``time_ns``, ``base_bytes`` and ``flight_bytes`` are
    (C, n, n); ``set_of``, ``in_flight``, ``room_bytes``, ``reduce_slope`` and ``reduce_fixed`` (V, R) by a stage's
    first device. ``hop_slope`` and ``hop_fixed`` (V, R, R) are by the receiving stage's first device, the sender's
    replicas and the receiver's. ``reduced_bytes`` (n, n) and ``update_ns`` (R, n, n) are a step's, once in ``every[r]``
    micro-batches; with ``turns`` a stage's replicas share the micro-batches.

    Returns value (n, V + 1, R) and choice (n, V + 1, R, 2): the place before the last stage and the replica count
    before it. Ties: the earliest place, then the fewest replicas before.
    """
    n, devices, counts = len(boundary_bytes), set_of.shape[0], len(replicas)
    value = np.full((n, devices + 1, counts), NEVER_NS, dtype=np.int64)
    choice = np.full((n, devices + 1, counts, 2), -1, dtype=np.int64)
    for p in range(devices):
        for r in range(counts):
            kind = set_of[p, r]
            if kind < 0 or reduce_slope[p, r] == np.inf:
                continue
            q = p + replicas[r]
            shared = replicas[r] if turns else 1
            for i in range(n - 1):
                before, count = (0, -1) if i == 0 else (NEVER_NS, -1)
                if (i == 0) != (p == 0):
                    continue
                if i > 0:
                    for c in range(counts):
                        if value[i, p, c] >= before:
                            continue
                        hop = NEVER_NS
                        if hop_slope[p, c, r] != np.inf:
                            hop = int(np.ceil(boundary_bytes[i] * hop_slope[p, c, r])) + hop_fixed[p, c, r]
                        reached = max(value[i, p, c], hop)
                        if reached < before:
                            before, count = reached, c
                for j in range(i + 1, n):
                    if before >= value[j, q, r] or time_ns[kind, i, j] >= NEVER_NS:
                        continue
                    if base_bytes[kind, i, j] + in_flight[p, r] * flight_bytes[kind, i, j] > room_bytes[p, r]:
                        continue
                    step = update_ns[r, i, j]
                    if replicas[r] > 1 and reduced_bytes[i, j] > 0:
                        step += int(np.ceil(reduced_bytes[i, j] * reduce_slope[p, r])) + reduce_fixed[p, r]
                    load = divided(time_ns[kind, i, j], shared) + divided(step, every[r])
                    largest = max(before, load)
                    if largest < value[j, q, r]:
                        value[j, q, r] = largest
                        choice[j, q, r, 0] = i
                        choice[j, q, r, 1] = count
    return value, choice
