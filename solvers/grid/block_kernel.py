"""HetPipe's partition of a chain over one virtual worker's devices in a given order, as a compiled loop."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import compiled
from penstock.solvers.costs.infinity import NEVER_NS


@compiled
def run_worker(
    time_ns: np.ndarray,
    base_bytes: np.ndarray,
    flight_bytes: np.ndarray,
    kind_of: np.ndarray,
    room_bytes: np.ndarray,
    in_flight: np.ndarray,
    hop_ns: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Smallest largest load of layers [0, j) on the first p devices, one stage each; n places, k devices, C kinds.

    ``time_ns``, ``base_bytes`` and ``flight_bytes`` are (C, n, n); ``kind_of``, ``room_bytes`` and ``in_flight`` (k,)
    by position; ``hop_ns`` (k + 1, n) is what position p receives and sends in front of it at a place. A device's load
    is its computation, what it receives and what it sends. Returns value and the place before the last stage, both
    (k + 1, n). Ties: the earliest place.
    """
    count, n = len(kind_of), time_ns.shape[1]
    value = np.full((count + 1, n), NEVER_NS, dtype=np.int64)
    before = np.full((count + 1, n), -1, dtype=np.int64)
    value[0, 0] = 0
    for p in range(count):
        kind = kind_of[p]
        for i in range(p, n - 1):
            if value[p, i] >= NEVER_NS:
                continue
            for j in range(i + 1, n):
                if base_bytes[kind, i, j] + in_flight[p] * flight_bytes[kind, i, j] > room_bytes[p]:
                    continue
                load = max(value[p, i], time_ns[kind, i, j] + hop_ns[p, i] + hop_ns[p + 1, j])
                if load < value[p + 1, j]:
                    value[p + 1, j] = load
                    before[p + 1, j] = i
    return value, before
