"""A search for an allocation of a period with one special processor, memory counted at that period (section 4.2).

Labels go from the last boundary to the first. A label at boundary k with p normal processors left has the special
processor's load t_P, its memory m_P, its largest single micro-batch x, and the delay V. All four are better when
smaller (m_P and m_P + x, to be exact), so for each boundary and p the Pareto-minimal labels are enough: the search is
exact, without the paper's grid.

With ``tight`` the special processor holds at least sum (g_i - 1) a_i + max a_i, and no two of its stages are
neighbours. Without, it holds the paper's sum (g_i - 1) a_i, and its stages may be neighbours.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.planners.madpipe.contiguous_kernel import groups_of, then

EXISTS, NONE, TOO_MANY = 1, 0, -1
SPECIAL = 2
"""The number added to a stage's variant when it is on the special processor."""
FIRST_ROOM = 1 << 12
LOAD, RESIDENT, PEAK, DELAY = range(4)
"""The columns of a label: t_P, m_P, m_P + x, V."""


class Rounding(NamedTuple):
    """Steps to whose multiples labels are rounded up, which is safe and makes fewer labels; 1: exact."""

    load_ns: int
    bytes: int
    delay_ns: int


class Question(NamedTuple):
    """The question to decide: whether an allocation of a period exists, with ``tight`` memory.

    A transfer at each boundary takes ``hop_ns`` (n + 1,); ``_fill_needs`` fills ``needs``.
    """

    period: int
    tight: bool
    rounding: Any
    hop_ns: np.ndarray
    needs: np.ndarray


class Labels(NamedTuple):
    """Labels (count, 4) and their ``origin`` (count, 3): parent, boundary, and variant and kind of the stage before.

    Labels of boundary k with p normal processors left go from ``begin[k, p]`` up to ``end[k, p]``.
    """

    value: np.ndarray
    origin: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class Fresh(NamedTuple):
    """New labels of one boundary, their origin, and a ``cursor``.

    The cursor counts the labels and says where to continue: boundary after the stage, variant and kind, label.
    """

    value: np.ndarray
    origin: np.ndarray
    cursor: np.ndarray


@compiled
def special(line: Any, period: int, tight: bool, rounding: Any, cap: int) -> tuple[int, int, np.ndarray]:
    """Return (EXISTS, NONE or TOO_MANY labels; number of labels; stages (m, 3)).

    A stage is two boundaries and its variant, with SPECIAL added on the special processor.
    """
    n = line.load_ns.shape[1] - 1
    normals = line.hop_ns.shape[0] - 1
    hop = np.zeros(n + 1, dtype=np.int64)
    for k in range(1, n):
        hop[k] = line.hop_ns[:, k].max()
    labels = Labels(
        np.zeros((FIRST_ROOM, 4), dtype=np.int64),
        np.zeros((FIRST_ROOM, 3), dtype=np.int32),
        np.zeros((n + 1, normals + 2), dtype=np.int64),
        np.zeros((n + 1, normals + 2), dtype=np.int64),
    )
    labels.end[n, normals] = 1
    labels.origin[0, 0], labels.origin[0, 1] = -1, n
    count = 1
    fresh = Fresh(
        np.empty((FIRST_ROOM, 4), dtype=np.int64),
        np.empty((FIRST_ROOM, 3), dtype=np.int32),
        np.zeros(4, dtype=np.int64),
    )
    question = Question(period, tight, rounding, hop, np.full((2, n + 1, normals + 1), NEVER_NS, dtype=np.int64))
    _fill_needs(line, question)
    for k in range(n - 1, -1, -1):
        if hop[k] > period:
            continue
        for p in range(normals, -1, -1):
            fresh.cursor[:] = 0
            fresh.cursor[1] = k + 1
            while not _extend(line, question, labels, fresh, k, p):
                kept = _filter(line, question, labels, fresh, k, p)
                if kept > len(fresh.value) // 2:
                    if len(fresh.value) > cap:
                        return TOO_MANY, count, np.empty((0, 3), dtype=np.int64)
                    fresh = Fresh(_longer(fresh.value, kept), _longer(fresh.origin, kept), fresh.cursor)
                fresh.cursor[0] = kept
            if k == 0 and fresh.cursor[0] > 0:
                return EXISTS, count, _trace(labels.origin, fresh.origin[0])
            labels.begin[k, p] = labels.end[k, p] = count
            if fresh.cursor[0] == 0:
                continue
            kept = _filter(line, question, labels, fresh, k, p)
            if count + kept > cap:
                return TOO_MANY, count, np.empty((0, 3), dtype=np.int64)
            while count + kept > len(labels.value):
                labels = Labels(_longer(labels.value, count), _longer(labels.origin, count), labels.begin, labels.end)
            labels.value[count : count + kept] = fresh.value[:kept]
            labels.origin[count : count + kept] = fresh.origin[:kept]
            count += kept
            labels.end[k, p] = count
    return NONE, count, np.empty((0, 3), dtype=np.int64)


@compiled
def _longer(rows: np.ndarray, count: int) -> np.ndarray:
    longer = np.empty((2 * len(rows), rows.shape[1]), dtype=rows.dtype)
    longer[:count] = rows[:count]
    return longer


@compiled
def _trace(origin: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the stages from first to last.

    ``origin`` rows are parent, boundary and the variant and kind of the stage before.
    """
    stages = np.empty((origin[0, 1], 3), dtype=np.int64)
    count, parent, boundary, how = 0, last[0], last[1], last[2]
    while parent >= 0:
        stages[count, 0], stages[count, 1], stages[count, 2] = boundary, origin[parent, 1], how
        count += 1
        parent, boundary, how = origin[parent, 0], origin[parent, 1], origin[parent, 2]
    return stages[:count].copy()


@loop
def _fill_needs(line: Any, question: Question) -> None:
    """Compute the least ns and bytes that the layers before each boundary need of the special processor.

    They are for p normal processors. The delay at a boundary is at least the load after it, which gives each stage the
    fewest micro-batches it can have.
    """
    n = line.load_ns.shape[1] - 1
    variants = line.load_ns.shape[0]
    period, hop, needs = question.period, question.hop_ns, question.needs
    normals = needs.shape[2] - 1
    available = line.available_bytes
    for p in range(normals + 1):
        needs[0, 0, p], needs[1, 0, p] = 0, 0
    for j in range(1, n + 1):
        after = line.load_ns[0, n] - line.load_ns[0, j]
        for k in range(j - 1, -1, -1):
            if line.load_ns[0, j] - line.load_ns[0, k] > period:
                break
            if hop[k] > period:
                continue
            for r in range(variants):
                load = line.load_ns[r, j] - line.load_ns[r, k]
                group = max(1, groups_of(after + load, period))
                each = line.kept_bytes[r, k, j]
                fixed, work = line.fixed_bytes[k, j], line.work_bytes[r, k, j]
                if load > period or group > line.most_in_flight:
                    continue
                if fixed + work + group * each <= available:
                    for p in range(1, normals + 1):
                        needs[0, j, p] = min(needs[0, j, p], needs[0, k, p - 1])
                        needs[1, j, p] = min(needs[1, j, p], needs[1, k, p - 1])
                resident = fixed + (group - 1) * each
                if resident + work + (each if question.tight else 0) <= available:
                    for p in range(0 if k == 0 else 1, normals + 1):
                        needs[0, j, p] = min(needs[0, j, p], needs[0, k, p] + load)
                        needs[1, j, p] = min(needs[1, j, p], needs[1, k, p] + resident)


@loop
def _extend(line: Any, question: Question, labels: Labels, fresh: Fresh, k: int, p: int) -> bool:
    """Add labels of boundary k with p normal processors left to ``fresh``; return False when it is full.

    At the first boundary one label is enough.
    """
    n, variants = line.load_ns.shape[1] - 1, line.load_ns.shape[0]
    cursor = fresh.cursor
    while cursor[1] <= n and line.load_ns[0, cursor[1]] - line.load_ns[0, k] <= question.period:
        while cursor[2] < 2 * variants:
            if not _extend_by_stage(line, question, labels, fresh, k, p):
                return False
            if k == 0 and cursor[0] > 0:
                return True
            cursor[2], cursor[3] = cursor[2] + 1, 0
        cursor[1], cursor[2] = cursor[1] + 1, 0
    return True


@inner
def _extend_by_stage(line: Any, question: Question, labels: Labels, fresh: Fresh, k: int, p: int) -> bool:
    """Add labels of the stage, its variant and kind of processor at the cursor.

    Returns False when ``fresh`` is full.
    """
    variants, available, period = line.load_ns.shape[0], line.available_bytes, question.period
    cursor = fresh.cursor
    j, is_special, r = cursor[1], cursor[2] >= variants, cursor[2] % variants
    before = p if is_special else p + 1
    load = line.load_ns[r, j] - line.load_ns[r, k]
    each, fixed, work = line.kept_bytes[r, k, j], line.fixed_bytes[k, j], line.work_bytes[r, k, j]
    if (is_special and p == 0 and k > 0) or before >= labels.begin.shape[1] - 1:
        return True
    if load > period or fixed + work > available:
        return True
    rest_kept, rest_fixed = line.kept_bytes[variants - 1, 0, k], line.fixed_bytes[0, k]
    for i in range(max(labels.begin[j, before], cursor[3]), labels.end[j, before]):
        busy, resident, delay = labels.value[i, LOAD], labels.value[i, RESIDENT], labels.value[i, DELAY]
        largest = labels.value[i, PEAK] - resident
        group = max(1, groups_of(delay + load, period))
        if group > line.most_in_flight:
            continue
        if not is_special:
            if fixed + work + group * each > available:
                continue
        else:
            if question.tight and labels.origin[i, 2] >= SPECIAL:
                continue
            busy += load
            resident += fixed + (group - 1) * each
            largest = max(largest, work + each if question.tight else work)
            if busy > period or resident + largest > available:
                continue
        if busy + question.needs[0, k, p] > period or resident + question.needs[1, k, p] > available:
            continue
        delay = then(then(delay, load, period), question.hop_ns[k], period)
        if k > 0:
            filled = max(0, groups_of(delay, period) - 1)
            if filled > line.most_in_flight or rest_fixed + filled * rest_kept > p * available + available - resident:
                continue
        place = cursor[0]
        if place == len(fresh.value):
            cursor[3] = i
            return False
        _write(question, available, fresh.value, place, busy, resident, largest, delay)
        fresh.origin[place, 0], fresh.origin[place, 1] = i, k
        fresh.origin[place, 2] = r + (SPECIAL if is_special else 0)
        cursor[0] = place + 1
        if k == 0:
            return True
    return True


@inner
def _write(
    question: Question,
    available: int,
    fresh: np.ndarray,
    place: int,
    busy: int,
    resident: int,
    largest: int,
    delay: int,
) -> None:
    """Write a label, rounded up within what is allowed: no load above the period, no delay into another group."""
    period, rounding = question.period, question.rounding
    peak = min(available, _up(resident + largest, rounding.bytes))
    full = max(0, groups_of(delay, period) - 1) * period
    fresh[place, LOAD] = min(period, _up(busy, rounding.load_ns))
    fresh[place, RESIDENT] = min(peak, _up(resident, rounding.bytes))
    fresh[place, PEAK] = peak
    fresh[place, DELAY] = full + min(period, _up(delay - full, rounding.delay_ns))


@inner
def _up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


@compiled
def _filter(line: Any, question: Question, labels: Labels, fresh: Fresh, k: int, p: int) -> int:
    """Keep the Pareto-minimal labels of ``fresh`` and return their number.

    They are compared with each other and with the labels with one more processor left.
    A label after a special stage is no better than an equal one after a normal stage. Labels are compared in the
    order of a sum that no dominating label exceeds, so most dominated labels are dropped at once.
    """
    count, low, high = fresh.cursor[0], labels.begin[k, p + 1], labels.end[k, p + 1]
    value, origin = fresh.value, fresh.origin
    key = np.empty(count, dtype=np.float64)
    _sums(value, count, 1.0 / question.period, 1.0 / max(1, line.available_bytes), key)
    order = np.argsort(key, kind="mergesort")
    better = np.empty((count + high - low, 5), dtype=np.int64)
    kept = np.empty(count, dtype=np.int64)
    size = _undominated(fresh, order, labels, low, high, better, kept)
    keep = np.sort(kept[:size])
    for i in range(size):
        for c in range(4):
            value[i, c] = value[keep[i], c]
        for c in range(3):
            origin[i, c] = origin[keep[i], c]
    return size


@loop
def _sums(fresh: np.ndarray, count: int, per_ns: float, per_byte: float, key: np.ndarray) -> None:
    for i in range(count):
        key[i] = (fresh[i, LOAD] + fresh[i, DELAY]) * per_ns + (fresh[i, RESIDENT] + fresh[i, PEAK]) * per_byte


@loop
def _undominated(
    fresh: Fresh, order: np.ndarray, labels: Labels, low: int, high: int, better: np.ndarray, kept: np.ndarray
) -> int:
    """Write the places of undominated labels into ``kept``; ``better`` is scratch for the labels to compare with."""
    count = 0
    for i in range(low, high):
        for c in range(4):
            better[count, c] = labels.value[i, c]
        better[count, 4] = 1 if labels.origin[i, 2] >= SPECIAL else 0
        count += 1
    size = 0
    for place in range(len(order)):
        i = order[place]
        busy, resident = fresh.value[i, LOAD], fresh.value[i, RESIDENT]
        peak, delay = fresh.value[i, PEAK], fresh.value[i, DELAY]
        after_special = 1 if fresh.origin[i, 2] >= SPECIAL else 0
        dominated = False
        for j in range(count):
            if (
                better[j, 0] <= busy
                and better[j, 1] <= resident
                and better[j, 2] <= peak
                and better[j, 3] <= delay
                and better[j, 4] <= after_special
            ):
                dominated = True
                break
        if not dominated:
            better[count, 0], better[count, 1], better[count, 2], better[count, 3] = busy, resident, peak, delay
            better[count, 4] = after_special
            count += 1
            kept[size] = i
            size += 1
    return size
