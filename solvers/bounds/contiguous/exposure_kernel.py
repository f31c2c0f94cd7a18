"""The part of a stage's all-reduces after its last backward, for every stage of a chain (ALGORITHMS 1.6)."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import loop


@loop
def exposures(
    trainable_bytes: np.ndarray,
    lead_ns: np.ndarray,
    bucket_bytes: int,
    bucket_ns: np.ndarray,
    exposed: np.ndarray,
) -> None:
    """Write the time for layers [i, j) to ``exposed[i, j]``; ``trainable_bytes`` and ``lead_ns`` are prefix sums.

    ``bucket_ns[i, j]``: an all-reduce of the bytes of layers [i, j). Buckets are filled from the last layer down
    (``costs.buckets``); a bucket of layers [b, …] may begin when the backward has come down to b.
    """
    layers = trainable_bytes.size - 1
    for stop in range(1, layers + 1):
        high, busy_ns = stop, 0
        start = np.int64(2**62)
        for low in range(stop - 1, -1, -1):
            size = trainable_bytes[high] - trainable_bytes[low]
            total, earliest = busy_ns, start
            if size > 0:
                total += bucket_ns[low, high]
                earliest = min(start, busy_ns + lead_ns[low])
            exposed[low, stop] = max(0, total + lead_ns[low] - earliest) if total > 0 else 0
            if size >= bucket_bytes:
                high, busy_ns, start = low, total, earliest
