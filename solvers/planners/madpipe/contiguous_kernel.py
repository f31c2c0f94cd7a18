"""A search for a contiguous allocation of a period whose stages fit in memory under 1F1B* (MadPipe section 4.1).

Labels V (the delay from the end of a stage's forward to the start of its backward) go from the last boundary to the
first. V (+) x never falls when V grows, so for each boundary and number of processors left the smallest label
is enough: O(n² P) for n elements and P processors.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.costs.infinity import NEVER_NS


class Line(NamedTuple):
    """A chain for the kernels: the arrays of ``madpipe.chain.Chain``."""

    load_ns: np.ndarray
    fixed_bytes: np.ndarray
    kept_bytes: np.ndarray
    work_bytes: np.ndarray
    hop_ns: np.ndarray
    available_bytes: int
    most_in_flight: int


@inner
def groups_of(delay: int, period: int) -> int:
    """Return ceil(delay / period): the number of groups that a delay fills."""
    return (delay + period - 1) // period


@inner
def then(delay: int, more: int, period: int) -> int:
    """Compute x (+) y: what comes next begins a new group where it does not fit in the last one."""
    filled = groups_of(delay, period)
    if filled == groups_of(delay + more, period):
        return delay + more
    return period * filled + more


@compiled
def contiguous(line: Any, period: int) -> np.ndarray:
    """Return boundary before, boundary after and variant of each stage in order, (m, 3).

    If several allocations exist, one with the fewest processors is returned; if none exists, an empty array.
    """
    n = line.load_ns.shape[1] - 1
    processors = line.hop_ns.shape[0]
    best = np.full((n + 1, processors + 1), NEVER_NS, dtype=np.int64)
    after = np.zeros((n + 1, processors + 1), dtype=np.int64)
    variant = np.zeros((n + 1, processors + 1), dtype=np.int64)
    best[n, processors] = 0
    _fill(line, period, best, after, variant)
    for left in range(processors - 1, -1, -1):
        if best[0, left] != NEVER_NS:
            stages = np.empty((processors - left, 3), dtype=np.int64)
            k = 0
            for s in range(processors - left):
                stages[s, 0], stages[s, 1], stages[s, 2] = k, after[k, left + s], variant[k, left + s]
                k = after[k, left + s]
            return stages
    return np.empty((0, 3), dtype=np.int64)


@loop
def _fill(line: Any, period: int, best: np.ndarray, after: np.ndarray, variant: np.ndarray) -> None:
    n = line.load_ns.shape[1] - 1
    processors = line.hop_ns.shape[0]
    for k in range(n - 1, -1, -1):
        for j in range(k + 1, n + 1):
            if line.load_ns[0, j] - line.load_ns[0, k] > period:
                break
            for r in range(line.load_ns.shape[0]):
                load = line.load_ns[r, j] - line.load_ns[r, k]
                each = line.kept_bytes[r, k, j]
                room = line.available_bytes - line.fixed_bytes[k, j] - line.work_bytes[r, k, j]
                if load > period or each > room:
                    continue
                for left in range(processors):
                    delay = best[j, left + 1]
                    if delay == NEVER_NS or line.hop_ns[left, k] > period or (left == 0 and k > 0):
                        continue
                    group = max(1, groups_of(delay + load, period))
                    if group > line.most_in_flight or group * each > room:
                        continue
                    delay = then(then(delay, load, period), line.hop_ns[left, k], period)
                    if delay < best[k, left]:
                        best[k, left], after[k, left], variant[k, left] = delay, j, r
