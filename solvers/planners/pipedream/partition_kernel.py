"""PipeDream's dynamic programs as compiled loops: one level of the hierarchy, and stages on devices in a row."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner
from penstock.solvers.costs.infinity import NEVER_NS

"""Longer than any time: what does not fit, or is not connected."""


@inner
def divided(total: int, parts: int) -> int:
    """ceil(total / parts)."""
    return -(-total // parts)


@inner
def replicated_ns(work: int, reduce_ns: int, machines: int, released: bool) -> int:
    """T^k: a stage's time on so many machines; ``reduce_ns`` is 2 |w| / B_k.

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
    straight: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """A^k and where it splits, for layers [places[i], places[j]) on m machines of one level.

    ``work``, ``reduce_ns`` and ``stashed_bytes`` are (n, n) by places; the first ``starts`` places may be i.
    Returns value (starts, n, machines + 1) and choice (starts, n, machines + 1, 2): the place of the last split and
    the machines after it; place -1 where the layers are one replicated stage. Released (R-35): the machines of a stage
    after a split share its transfers, in and out, and the reduction of one replicated stage is shared by the
    ``inside`` machines that make up each of its own. Ties: one stage, then the earliest split, then the fewest machines
    after it.
    """
    n = len(places)
    value = np.full((starts, n, machines + 1), NEVER_NS, dtype=np.int64)
    choice = np.full((starts, n, machines + 1, 2), -1, dtype=np.int64)
    widest = 1 if straight else machines
    for i in range(starts):
        for j in range(i + 1, n):
            for m in range(1, machines + 1):
                best, split, following = NEVER_NS, -1, -1
                after = machines - m if released else machines
                if m <= widest and divided(after, m) * stashed_bytes[i, j] <= room_bytes:
                    shared = divided(reduce_ns[i, j], inside) if released else reduce_ns[i, j]
                    best = replicated_ns(work[i, j], shared, m, released)
                for s in range(i + 1, j):
                    for last in range(1, min(widest, m - 1) + 1):
                        before = value[i, s, m - last]
                        if before >= best:
                            continue
                        under_way = machines - m + (0 if released else last)
                        if divided(under_way, last) * stashed_bytes[s, j] > room_bytes:
                            continue
                        hop = boundary_ns[s]
                        if released:
                            hop = divided(max(boundary_ns[s], boundary_ns[j]), last)
                        found = max(before, hop, replicated_ns(work[s, j], reduce_ns[s, j], last, released))
                        if found < best:
                            best, split, following = found, s, last
                value[i, j, m] = best
                choice[i, j, m, 0] = split
                choice[i, j, m, 1] = following
    return value, choice


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
    """The smallest largest load of layers [0, j) on the first q devices, whose last stage has ``replicas[r]`` of them.

    n places, V devices, R replica counts, C kinds of device sets. ``time_ns``, ``base_bytes`` and ``flight_bytes`` are
    (C, n, n); ``set_of``, ``in_flight``, ``room_bytes``, ``reduce_slope`` and ``reduce_fixed`` (V, R) by a stage's
    first device; ``hop_slope`` and ``hop_fixed`` (V, R, R) by the receiving stage's first device, the sender's and
    its own replicas. ``reduced_bytes`` (n, n) and ``update_ns`` (R, n, n) are a step's, once in ``every[r]``
    micro-batches; with ``turns`` a stage's replicas share the micro-batches.

    Returns value (n, V + 1, R) and choice (n, V + 1, R, 2): the place before the last stage and the replica count
    before it. Ties: the earliest place, then the fewest replicas before.
    """
    n, devices, counts = len(boundary_bytes), set_of.shape[0], len(replicas)
    value = np.full((n, devices + 1, counts), NEVER_NS, dtype=np.int64)
    choice = np.full((n, devices + 1, counts, 2), -1, dtype=np.int64)
    for p in range(devices):
        for r in range(counts):
            own = set_of[p, r]
            if own < 0 or reduce_slope[p, r] == np.inf:
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
                    if before >= value[j, q, r] or time_ns[own, i, j] >= NEVER_NS:
                        continue
                    if base_bytes[own, i, j] + in_flight[p, r] * flight_bytes[own, i, j] > room_bytes[p, r]:
                        continue
                    step = update_ns[r, i, j]
                    if replicas[r] > 1 and reduced_bytes[i, j] > 0:
                        step += int(np.ceil(reduced_bytes[i, j] * reduce_slope[p, r])) + reduce_fixed[p, r]
                    load = divided(time_ns[own, i, j], shared) + divided(step, every[r])
                    found = max(before, load)
                    if found < value[j, q, r]:
                        value[j, q, r] = found
                        choice[j, q, r, 0] = i
                        choice[j, q, r, 1] = count
    return value, choice
