"""Binary min-heaps of (first, second) keys in slices of flat arrays, for the event kernel."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True)
def push(first: np.ndarray, second: np.ndarray, offset: int, size: int, a: int, b: int) -> None:
    """Add (a, b) to the heap of ``size`` entries that begins at ``offset``; the caller counts."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        p = offset + parent
        if first[p] < a or (first[p] == a and second[p] <= b):
            break
        first[offset + i] = first[p]
        second[offset + i] = second[p]
        i = parent
    first[offset + i] = a
    second[offset + i] = b


@numba.njit(cache=True)
def pop(first: np.ndarray, second: np.ndarray, offset: int, size: int) -> None:
    """Remove the least entry of the heap of ``size`` entries that begins at ``offset``; the caller counts."""
    last = size - 1
    a, b = first[offset + last], second[offset + last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        c = offset + child
        if child + 1 < last and (first[c + 1] < first[c] or (first[c + 1] == first[c] and second[c + 1] < second[c])):
            c += 1
            child += 1
        if first[c] > a or (first[c] == a and second[c] >= b):
            break
        first[offset + i] = first[c]
        second[offset + i] = second[c]
        i = child
    if last > 0:
        first[offset + i] = a
        second[offset + i] = b
