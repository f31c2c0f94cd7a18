"""Whether an allocation of a period exists with one special processor, memory counted at that period (section 4.2).

Labels go from the last boundary to the first. One at boundary k with p normal processors left has the special
processor's load t_P, its memory m_P, its largest single micro-batch x, and the delay V. All four are better when
smaller (m_P and m_P + x, to be exact), so of each boundary and p the Pareto-minimal labels are enough: the answer is
exact, without the paper's grid.

With ``tight`` the special processor holds at least sum (g_i - 1) a_i + max a_i, and no two of its stages are
neighbours; without, the paper's sum (g_i - 1) a_i, and neighbours may be.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.planners.madpipe.contiguous_kernel import groups_of, then

FOUND, NONE, TOO_MANY = 1, 0, -1
SPECIAL = 2
"""Added to a stage's variant when it is on the special processor."""
FIRST_ROOM = 1 << 12
LOAD, HELD, PEAK, DELAY = range(4)
"""Columns of a label: t_P, m_P, m_P + x, V."""


class Rounding(NamedTuple):
    """Labels rounded up to multiples of these, which is safe and makes fewer of them; 1: exact."""

    load_ns: int
    bytes: int
    delay_ns: int


@compiled
def special(line: Any, period: int, tight: bool, rounding: Any, cap: int) -> tuple[int, int, np.ndarray]:
    """(FOUND, NONE or TOO_MANY labels; labels made; stages (m, 3) as boundaries and variant, SPECIAL added)."""
    n = line.load_ns.shape[1] - 1
    normals = line.hop_ns.shape[0] - 1
    hop = np.zeros(n + 1, dtype=np.int64)
    for k in range(1, n):
        hop[k] = line.hop_ns[:, k].max()
    labels = np.zeros((FIRST_ROOM, 4), dtype=np.int64)
    made = np.zeros((FIRST_ROOM, 3), dtype=np.int32)
    begin = np.zeros((n + 1, normals + 2), dtype=np.int64)
    end = np.zeros((n + 1, normals + 2), dtype=np.int64)
    begin[n, normals], end[n, normals] = 0, 1
    made[0, 0], made[0, 1], made[0, 2] = -1, n, 0
    count = 1
    fresh = np.empty((FIRST_ROOM, 4), dtype=np.int64)
    origin = np.empty((FIRST_ROOM, 3), dtype=np.int32)
    state = np.zeros(4, dtype=np.int64)
    needs = np.full((2, n + 1, normals + 1), NEVER_NS, dtype=np.int64)
    _fill_needs(line, period, tight, hop, needs)
    for k in range(n - 1, -1, -1):
        if hop[k] > period:
            continue
        for p in range(normals, -1, -1):
            state[:] = 0
            state[1], state[2] = k + 1, 0
            while True:
                complete = _extend(line, period, tight, rounding, hop[k], needs, labels, made, begin, end, k, p,
                                   fresh, origin, state)  # fmt: skip
                if k == 0 and state[0] > 0:
                    return FOUND, count, _trace(made, origin[0])
                if complete:
                    break
                kept = _filter(period, line.available_bytes, fresh, origin, state[0], labels, begin[k, p + 1],
                               end[k, p + 1], made)  # fmt: skip
                if kept > len(fresh) // 2:
                    if len(fresh) > cap:
                        return TOO_MANY, count, np.empty((0, 3), dtype=np.int64)
                    fresh = _longer(fresh, kept)
                    wider = np.empty((len(fresh), 3), dtype=np.int32)
                    wider[:kept] = origin[:kept]
                    origin = wider
                state[0] = kept
            begin[k, p] = end[k, p] = count
            if state[0] == 0:
                continue
            kept = _filter(period, line.available_bytes, fresh, origin, state[0], labels, begin[k, p + 1],
                           end[k, p + 1], made)  # fmt: skip
            if count + kept > cap:
                return TOO_MANY, count, np.empty((0, 3), dtype=np.int64)
            while count + kept > len(labels):
                labels = _longer(labels, count)
                longer = np.empty((len(labels), 3), dtype=np.int32)
                longer[:count] = made[:count]
                made = longer
            labels[count : count + kept] = fresh[:kept]
            made[count : count + kept] = origin[:kept]
            count += kept
            end[k, p] = count
    return NONE, count, np.empty((0, 3), dtype=np.int64)


@compiled
def _longer(labels: np.ndarray, count: int) -> np.ndarray:
    longer = np.empty((2 * len(labels), 4), dtype=np.int64)
    longer[:count] = labels[:count]
    return longer


@compiled
def _trace(made: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The stages from the first to the last; ``made`` rows are parent, boundary and how the stage before it is held."""
    stages = np.empty((made[0, 1], 3), dtype=np.int64)
    count, parent, boundary, how = 0, last[0], last[1], last[2]
    while parent >= 0:
        stages[count, 0], stages[count, 1], stages[count, 2] = boundary, made[parent, 1], how
        count += 1
        parent, boundary, how = made[parent, 0], made[parent, 1], made[parent, 2]
    return stages[:count].copy()


@loop
def _fill_needs(line: Any, period: int, tight: bool, hop: np.ndarray, needs: np.ndarray) -> None:
    """What the layers before each boundary need at least of the special processor, with p normal ones: ns and bytes.

    The delay at a boundary is at least the load after it, which gives each stage the fewest micro-batches it can have.
    """
    n = line.load_ns.shape[1] - 1
    variants = line.load_ns.shape[0]
    normals = needs.shape[2] - 1
    available = line.available_bytes
    for p in range(normals + 1):
        needs[0, 0, p], needs[1, 0, p] = 0, 0
    for j in range(1, n + 1):
        behind = line.load_ns[0, n] - line.load_ns[0, j]
        for k in range(j - 1, -1, -1):
            if line.load_ns[0, j] - line.load_ns[0, k] > period:
                break
            if hop[k] > period:
                continue
            for r in range(variants):
                load = line.load_ns[r, j] - line.load_ns[r, k]
                group = max(1, groups_of(behind + load, period))
                each = line.kept_bytes[r, k, j]
                fixed, work = line.fixed_bytes[k, j], line.work_bytes[r, k, j]
                if load > period or group > line.most_in_flight:
                    continue
                if fixed + work + group * each <= available:
                    for p in range(1, normals + 1):
                        needs[0, j, p] = min(needs[0, j, p], needs[0, k, p - 1])
                        needs[1, j, p] = min(needs[1, j, p], needs[1, k, p - 1])
                held = fixed + (group - 1) * each
                if held + work + (each if tight else 0) <= available:
                    for p in range(0 if k == 0 else 1, normals + 1):
                        needs[0, j, p] = min(needs[0, j, p], needs[0, k, p] + load)
                        needs[1, j, p] = min(needs[1, j, p], needs[1, k, p] + held)


@loop
def _extend(
    line: Any,
    period: int,
    tight: bool,
    rounding: Any,
    hop: int,
    needs: np.ndarray,
    labels: np.ndarray,
    made: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    k: int,
    p: int,
    fresh: np.ndarray,
    origin: np.ndarray,
    state: np.ndarray,
) -> bool:
    """Labels of boundary k with p normal processors left into ``fresh``; False when it is full.

    ``state``: how many there are; then where to go on: boundary after the stage, variant and kind, label.
    """
    n = line.load_ns.shape[1] - 1
    variants = line.load_ns.shape[0]
    count, room = state[0], len(fresh)
    available = line.available_bytes
    rest_kept = line.kept_bytes[variants - 1, 0, k]
    rest_fixed = line.fixed_bytes[0, k]
    for j in range(state[1], n + 1):
        if line.load_ns[0, j] - line.load_ns[0, k] > period:
            break
        for choice in range(state[2] if j == state[1] else 0, 2 * variants):
            is_special, r = choice >= variants, choice % variants
            if is_special and p == 0 and k > 0:
                continue
            load = line.load_ns[r, j] - line.load_ns[r, k]
            each, fixed, work = line.kept_bytes[r, k, j], line.fixed_bytes[k, j], line.work_bytes[r, k, j]
            if load > period or fixed + work > available:
                continue
            before = p if is_special else p + 1
            if before >= begin.shape[1] - 1:
                continue
            start = begin[j, before]
            if j == state[1] and choice == state[2]:
                start = max(start, state[3])
            how = r + (SPECIAL if is_special else 0)
            for i in range(start, end[j, before]):
                delay = labels[i, DELAY]
                group = max(1, groups_of(delay + load, period))
                busy, held, largest = labels[i, LOAD], labels[i, HELD], labels[i, PEAK] - labels[i, HELD]
                if group > line.most_in_flight:
                    continue
                if not is_special:
                    if fixed + work + group * each > available:
                        continue
                else:
                    if tight and made[i, 2] >= SPECIAL:
                        continue
                    busy += load
                    held += fixed + (group - 1) * each
                    largest = max(largest, work + each if tight else work)
                    if busy > period or held + largest > available:
                        continue
                if busy + needs[0, k, p] > period or held + needs[1, k, p] > available:
                    continue
                delay = then(then(delay, load, period), hop, period)
                if k > 0:
                    filled = max(0, groups_of(delay, period) - 1)
                    if filled > line.most_in_flight:
                        continue
                    if rest_fixed + filled * rest_kept > p * available + available - held:
                        continue
                if count == room:
                    state[0], state[1], state[2], state[3] = count, j, choice, i
                    return False
                _write(fresh, count, busy, held, largest, delay, period, available, rounding)
                origin[count, 0], origin[count, 1], origin[count, 2] = i, k, how
                count += 1
                if k == 0:
                    state[0] = count
                    return True
    state[0] = count
    return True


@inner
def _write(
    fresh: np.ndarray,
    place: int,
    busy: int,
    held: int,
    largest: int,
    delay: int,
    period: int,
    available: int,
    rounding: Any,
) -> None:
    """A label, rounded up within what is allowed: no load above the period, no delay into another group."""
    peak = min(available, _up(held + largest, rounding.bytes))
    full = max(0, groups_of(delay, period) - 1) * period
    fresh[place, LOAD] = min(period, _up(busy, rounding.load_ns))
    fresh[place, HELD] = min(peak, _up(held, rounding.bytes))
    fresh[place, PEAK] = peak
    fresh[place, DELAY] = full + min(period, _up(delay - full, rounding.delay_ns))


@inner
def _up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


@compiled
def _filter(
    period: int,
    available: int,
    fresh: np.ndarray,
    origin: np.ndarray,
    count: int,
    labels: np.ndarray,
    low: int,
    high: int,
    made: np.ndarray,
) -> int:
    """Keep the Pareto-minimal labels of ``fresh``, also against those with one more processor left; how many stay.

    A label after a special stage is no better than an equal one after a normal stage. Labels are looked at in the
    order of a sum that no dominating label exceeds, so that most are found dominated at once.
    """
    key = np.empty(count, dtype=np.float64)
    _sums(fresh, count, 1.0 / period, 1.0 / max(1, available), key)
    order = np.argsort(key, kind="mergesort")
    better = np.empty((count + high - low, 5), dtype=np.int64)
    kept = np.empty(count, dtype=np.int64)
    size = _undominated(fresh, origin, order, labels, low, high, made, better, kept)
    keep = np.sort(kept[:size])
    for i in range(size):
        for c in range(4):
            fresh[i, c] = fresh[keep[i], c]
        for c in range(3):
            origin[i, c] = origin[keep[i], c]
    return size


@loop
def _sums(fresh: np.ndarray, count: int, per_ns: float, per_byte: float, key: np.ndarray) -> None:
    for i in range(count):
        key[i] = (fresh[i, LOAD] + fresh[i, DELAY]) * per_ns + (fresh[i, HELD] + fresh[i, PEAK]) * per_byte


@loop
def _undominated(
    fresh: np.ndarray,
    origin: np.ndarray,
    order: np.ndarray,
    labels: np.ndarray,
    low: int,
    high: int,
    made: np.ndarray,
    better: np.ndarray,
    kept: np.ndarray,
) -> int:
    """The places of labels that nothing dominates into ``kept``; ``better`` is a scratch of labels to compare with."""
    known = 0
    for i in range(low, high):
        for c in range(4):
            better[known, c] = labels[i, c]
        better[known, 4] = 1 if made[i, 2] >= SPECIAL else 0
        known += 1
    size = 0
    for place in range(len(order)):
        i = order[place]
        busy, held, peak, delay = fresh[i, LOAD], fresh[i, HELD], fresh[i, PEAK], fresh[i, DELAY]
        after_special = 1 if origin[i, 2] >= SPECIAL else 0
        dominated = False
        for j in range(known):
            if (
                better[j, 0] <= busy
                and better[j, 1] <= held
                and better[j, 2] <= peak
                and better[j, 3] <= delay
                and better[j, 4] <= after_special
            ):
                dominated = True
                break
        if not dominated:
            better[known, 0], better[known, 1], better[known, 2], better[known, 3] = busy, held, peak, delay
            better[known, 4] = after_special
            known += 1
            kept[size] = i
            size += 1
    return size
