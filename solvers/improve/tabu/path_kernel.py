"""One critical path of a judged run, and the neighbouring operations on it that may change places."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.judge.operation_tables import DURATION, FLOW, LINES, STAGE
from penstock.solvers.model.schedule import STEP

KINDS = STEP + 1


@Fields.register
class Search(NamedTuple):
    """The search's arrays in addition to the judge's; N operations, K slots, L lanes, M micro-batches.

    ``place`` (K, 2, M): the positions of a slot's forward and of its B or I of a micro-batch, -1: none. ``weight``
    (K,): what one micro-batch in flight counts. ``room`` (L,): the most that a lane may have in flight. ``level``
    (N,): the weight in flight after each operation. ``until`` (2^k,): the move up to which a pair may not change
    places back. ``random`` (1,) uint64.
    """

    place: np.ndarray
    weight: np.ndarray
    room: np.ndarray
    level: np.ndarray
    until: np.ndarray
    random: np.ndarray
    candidates: np.ndarray


class ClockedOrder(NamedTuple):
    """The times of one order by the judge's clock."""

    start: np.ndarray
    sent: np.ndarray
    order: np.ndarray


@inner
def draw(search: Search, below: int) -> int:
    """Draw a number from 0 to ``below`` - 1 (xorshift*)."""
    x = search.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    search.random[0] = x
    return int((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % below


@inner
def change(kind: int, weight: int) -> int:
    """Return the weight that an operation adds to its lane's weight in flight."""
    if kind == FORWARD:
        return weight
    return -weight if kind in (BACKWARD, WEIGHT) else 0


@loop
def prepare(lanes: Any, search: Search) -> None:
    """Fill ``place``, ``level`` and the lanes' last gradients for the order that ``lanes`` has now."""
    for slot in range(search.place.shape[0]):
        for m in range(search.place.shape[2]):
            search.place[slot, 0, m] = search.place[slot, 1, m] = -1
    for lane in range(lanes.lane_start.size - 1):
        level = 0
        for i in range(lanes.lane_start[lane], lanes.lane_start[lane + 1]):
            slot, kind = lanes.row[i] // LINES, lanes.row[i] // 2 % KINDS
            level += change(kind, search.weight[slot])
            search.level[i] = level
            mark(lanes, search, i)
            if kind in (BACKWARD, WEIGHT):
                lanes.last_gradient[lanes.round_start[slot]] = i


@inner
def mark(lanes: Any, search: Search, i: int) -> None:
    slot, kind = lanes.row[i] // LINES, lanes.row[i] // 2 % KINDS
    if kind == FORWARD:
        search.place[slot, 0, lanes.batch[i]] = i
    elif kind in (BACKWARD, INPUT):
        search.place[slot, 1, lanes.batch[i]] = i


@inner
def may_swap(lanes: Any, search: Search, i: int) -> bool:
    """Return whether operations i and i + 1 of a lane may change places.

    Operations of a stage that depend on each other keep their order, and the lane stays within its ``room``.
    """
    a, b = lanes.row[i], lanes.row[i + 1]
    first, second = a // 2 % KINDS, b // 2 % KINDS
    if first == STEP or second == STEP:
        return False
    if a // LINES == b // LINES and (first == second or lanes.batch[i] == lanes.batch[i + 1]):
        return False
    if a // LINES == b // LINES and first != FORWARD and second != FORWARD and first != WEIGHT and second != WEIGHT:
        return first == RECOMPUTE or second == RECOMPUTE
    if second != FORWARD:
        return True
    slot = b // LINES
    lane = lanes.slot_lane[slot]
    before = search.level[i - 1] if i > lanes.lane_start[lane] else 0
    return before + search.weight[slot] <= search.room[lane]


@loop
def critical_swaps(flows: Any, lanes: Any, search: Search, run: ClockedOrder, last: int) -> int:
    """Follow a critical path back from an operation; write the swaps on it to ``candidates``, return how many.

    Where a transfer has waited, they include the swaps by which its sender runs sooner or the transfer before it later.
    """
    count, i = 0, last
    while i >= 0 and run.start[i] > 0:
        lane = lanes.slot_lane[lanes.row[i] // LINES]
        before = i - 1 if i > lanes.lane_start[lane] else -1
        tight = before >= 0 and _end(lanes, run, before) == run.start[i]
        maker = _maker(flows, lanes, search, run, i)
        flow = lanes.table[lanes.row[maker], FLOW] if maker >= 0 else -1
        sent = _sent(flows, run, flow, lanes.batch[maker]) if flow >= 0 else -1
        if maker >= 0:
            arrival = sent + flows.flow_ns[flow] if flow >= 0 else _end(lanes, run, maker)
            if arrival != run.start[i]:
                maker = -1
        if tight and (maker < 0 or draw(search, 2) == 0):
            count = _add(lanes, search, before, count)
            i = before
            continue
        if maker < 0:
            break
        i = maker
        if flow >= 0 and sent > _end(lanes, run, maker):
            count = _advance(lanes, search, maker, count)
            other = _transfer_before(flows, lanes, search, run, flow, sent)
            if other >= 0:
                lane = lanes.slot_lane[lanes.row[other] // LINES]
                if other + 1 < lanes.lane_start[lane + 1]:
                    count = _add(lanes, search, other, count)
                if draw(search, 2) == 0:
                    i = other
    return count


@inner
def _end(lanes: Any, run: ClockedOrder, i: int) -> int:
    return run.start[i] + lanes.table[lanes.row[i], DURATION]


@inner
def _add(lanes: Any, search: Search, i: int, count: int) -> int:
    if count < search.candidates.size and may_swap(lanes, search, i):
        search.candidates[count] = i
        return count + 1
    return count


@inner
def _advance(lanes: Any, search: Search, i: int, count: int) -> int:
    """Add the swap by which operation i comes sooner."""
    lane = lanes.slot_lane[lanes.row[i] // LINES]
    return _add(lanes, search, i - 1, count) if i > lanes.lane_start[lane] else count


@inner
def _maker(flows: Any, lanes: Any, search: Search, run: ClockedOrder, i: int) -> int:
    """Return the operation of another stage whose output operation i reads, the last of its replicas; -1: none."""
    row, m = lanes.row[i], lanes.batch[i]
    s, kind = lanes.table[row, STAGE], row // 2 % KINDS
    way, other = 0, -1
    if kind == FORWARD:
        other = flows.previous[s]
    elif kind in (BACKWARD, INPUT):
        way, other = 1, flows.next[s]
    if other < 0:
        return -1
    latest = -1
    for slot in range(lanes.slot_start[other], lanes.slot_start[other + 1]):
        j = search.place[slot, way, m]
        if j >= 0 and (latest < 0 or _end(lanes, run, j) > _end(lanes, run, latest)):
            latest = j
    return latest


@inner
def _sent(flows: Any, run: ClockedOrder, flow: int, m: int) -> int:
    """Return when a flow's transfer of a micro-batch started."""
    low, high = flows.flow_offset[flow], flows.flow_offset[flow + 1]
    at = low + m - flows.flow_first[flow]
    if run.order[at] != m:
        for k in range(low, high):
            if run.order[k] == m:
                at = k
    return run.sent[at]


@inner
def _transfer_before(flows: Any, lanes: Any, search: Search, run: ClockedOrder, flow: int, sent: int) -> int:
    """Return the operation that sent the same edge's transfer which ended when this one started; -1: none."""
    s, direction = flows.flow_stage[flow], flows.flow_direction[flow]
    low = s if direction == 0 else flows.previous[s]
    for way in range(2):
        sender = low if way == 0 else flows.next[low]
        for row_class in range(2):
            each = flows.flow_of[(sender * 2 + way) * 2 + row_class]
            if each < 0:
                continue
            at, high = flows.flow_offset[each], flows.flow_offset[each + 1]
            while at < high:
                middle = (at + high) // 2
                if run.sent[middle] + flows.flow_ns[each] < sent:
                    at = middle + 1
                else:
                    high = middle
            if at < flows.flow_offset[each + 1] and run.sent[at] + flows.flow_ns[each] == sent:
                for slot in range(lanes.slot_start[sender], lanes.slot_start[sender + 1]):
                    j = search.place[slot, way, run.order[at]]
                    if j >= 0:
                        return j
    return -1
