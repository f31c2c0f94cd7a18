"""The cuts of a chain over devices in a given order whose largest part is smallest, as compiled loops."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import compiled, loop
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
    """Return the smallest largest load of layers [0, j) on p devices, one stage each; n places, k devices, C kinds.

    ``time_ns``, ``base_bytes`` and ``flight_bytes`` are (C, n, n); ``kind_of``, ``room_bytes`` and ``in_flight`` (k,)
    by position. ``hop_ns`` (k + 1, n): the transfers in front of position p, if it begins at a place. A device's load
    is its computation and its transfers on both sides. Returns value and the place before the last stage, both
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


@loop
def shorten_longest(
    time_ns: np.ndarray, size_bytes: np.ndarray, room_bytes: np.ndarray, largest_ns: np.ndarray, before: np.ndarray
) -> None:
    """Fill in the smallest longest part of the first i devices up to every place, and where the last part begins.

    ``time_ns`` (N, P), ``size_bytes`` (C, N, P): prefix sums; ``room_bytes`` (C, N). Fills ``largest_ns`` and
    ``before`` (N + 1, P), ``NEVER_NS`` where no parts fit. Ties: parts begin as late as they can.
    """
    count, places = time_ns.shape
    kinds = room_bytes.shape[0]
    for p in range(places):
        largest_ns[0, p] = NEVER_NS
    largest_ns[0, 0] = 0
    for i in range(count):
        for p in range(places):
            best = NEVER_NS
            for q in range(p - 1, -1, -1):
                part = time_ns[i, p] - time_ns[i, q]
                fits = part < best
                for k in range(kinds):
                    fits = fits and size_bytes[k, i, p] - size_bytes[k, i, q] <= room_bytes[k, i]
                if not fits:
                    break
                if largest_ns[i, q] < best:
                    best = max(largest_ns[i, q], part)
                    before[i + 1, p] = q
            largest_ns[i + 1, p] = best
