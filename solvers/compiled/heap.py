"""Binary min-heaps of (first, second) keys in slices of flat arrays, for the event kernel."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import inner
from penstock.solvers.compiled.indices import never_negative

never_negative(__name__)

LAST = 2**63 - 1
"""The largest key."""


@inner
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


@inner
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


@inner
def push_time(time: np.ndarray, code: np.ndarray, size: int, t: int, what: int) -> None:
    """Add (t, what) to a heap by ``time`` alone; entries of one time come out in any order."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if time[parent] <= t:
            break
        time[i] = time[parent]
        code[i] = code[parent]
        i = parent
    time[i] = t
    code[i] = what


@inner
def pop_time(time: np.ndarray, code: np.ndarray, size: int) -> None:
    """Remove the first entry of a heap by ``time`` alone: its hole sinks to a leaf, the last entry rises into it."""
    last = size - 1
    t, what = time[last], code[last]
    time[last] = LAST
    hole, child = 0, 1
    while child < last:
        child += 1 if time[child + 1] < time[child] else 0
        time[hole] = time[child]
        code[hole] = code[child]
        hole, child = child, 2 * child + 1
    while hole > 0 and time[(hole - 1) >> 1] > t:
        parent = (hole - 1) >> 1
        time[hole] = time[parent]
        code[hole] = code[parent]
        hole = parent
    if hole < last:
        time[hole] = t
        code[hole] = what
