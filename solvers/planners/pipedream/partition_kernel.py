"""PipeDream's dynamic program for one level of the hierarchy, as a compiled loop."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.grid.row_kernel import divided


@inner
def replicated_ns(work: int, reduce_ns: int, machines: int, released: bool) -> int:
    """Return T^k: a stage's time on so many machines; ``reduce_ns`` is 2 |w| / B_k.

    The paper overlaps computation and reduction; the released optimizer adds them, the reduction as
    4 (m - 1) |w| / (B m), and divides both by m (R-35).
    """
    if work >= NEVER_NS or (machines > 1 and reduce_ns >= NEVER_NS):
        return NEVER_NS
    if released:
        return divided(work + divided(2 * (machines - 1) * reduce_ns, machines), machines)
    return divided(max(work, (machines - 1) * reduce_ns), machines)


@compiled
def run_level(
    work: np.ndarray,
    reduce_ns: np.ndarray,
    boundary_ns: np.ndarray,
    stashed_bytes: np.ndarray,
    places: np.ndarray,
    machines: int,
    room_bytes: int,
    starts: int,
    released: bool,
    inside: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute A^k and where it splits, for layers [places[i], places[j]) on m machines of one level.

    ``work``, ``reduce_ns`` and ``stashed_bytes`` are (n, n) by places; the first ``starts`` places may be i. Returns
    value (starts, n, machines + 1) and choice (starts, n, machines + 1, 2): the place of the last split and the
    machines after it; place -1 where the layers are one replicated stage. Released (R-35): the machines of a stage
    after a split share its transfers, in and out. The reduction of one replicated stage is shared by the ``inside``
    machines that make up each of its machines. Ties: one stage, then the earliest split, then the fewest machines after
    it.
    """
    n = len(places)
    value = np.full((starts, n, machines + 1), NEVER_NS, dtype=np.int64)
    choice = np.full((starts, n, machines + 1, 2), -1, dtype=np.int64)
    for i in range(starts):
        for j in range(i + 1, n):
            for m in range(1, machines + 1):
                best, split, following = NEVER_NS, -1, -1
                after = machines - m if released else machines
                if divided(after, m) * stashed_bytes[i, j] <= room_bytes:
                    shared = divided(reduce_ns[i, j], inside) if released else reduce_ns[i, j]
                    best = replicated_ns(work[i, j], shared, m, released)
                for s in range(i + 1, j):
                    for last in range(1, m):
                        before = value[i, s, m - last]
                        if before >= best:
                            continue
                        under_way = machines - m + (0 if released else last)
                        if divided(under_way, last) * stashed_bytes[s, j] > room_bytes:
                            continue
                        hop = boundary_ns[s]
                        if released:
                            hop = divided(max(boundary_ns[s], boundary_ns[j]), last)
                        slowest = max(before, hop, replicated_ns(work[s, j], reduce_ns[s, j], last, released))
                        if slowest < best:
                            best, split, following = slowest, s, last
                value[i, j, m] = best
                choice[i, j, m, 0] = split
                choice[i, j, m, 1] = following
    return value, choice
