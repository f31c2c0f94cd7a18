"""One pass over the rows: is every operation there once, on a lane that runs it, after those it needs there?

``marks[base + m]`` collects a bit per operation kind that a slot has already named for micro-batch m.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.kernels.compiled import compiled, loop

GOOD, FOREIGN, DUPLICATE, EARLY = 0, 1, 2, 3
F_BIT, B_BIT, I_BIT, W_BIT, R_BIT = 1, 2, 4, 8, 16


@compiled
def scan_rows(flows: Any, lanes: Any, seen: np.ndarray) -> tuple[int, int]:
    """(GOOD, 0), or what is wrong and the number of the operation.

    Fills ``row``, ``first_gradient`` and ``last_gradient`` of the lanes; ``seen`` (slots, 5) counts the operations.
    """
    slot_base = _slot_bases(flows, lanes)
    marks = np.zeros(slot_base[-1], dtype=np.uint8)
    return _scan(flows, lanes, seen, slot_base, marks)


@loop
def _scan(flows: Any, lanes: Any, seen: np.ndarray, slot_base: np.ndarray, marks: np.ndarray) -> tuple[int, int]:
    count = flows.base.size - 1
    operations = lanes.operations
    for lane in range(lanes.lane_start.size - 1):
        for i in range(lanes.lane_start[lane], lanes.lane_start[lane + 1]):
            kind, s = operations[i, 0], operations[i, 1]
            if kind < 0 or kind > 4 or s < 0 or s >= count:
                return FOREIGN, i
            slot = lanes.slot_of[lane, s]
            m = operations[i, 2] - flows.first[s]
            if slot < 0 or m < 0 or m >= flows.base[s + 1] - flows.base[s]:
                return FOREIGN, i
            turns = lanes.slot_replicas[slot]
            if turns > 1 and operations[i, 2] % turns != lanes.slot_replica[slot]:
                return FOREIGN, i
            known = marks[slot_base[slot] + m]
            if known & (1 << kind) or (kind == 1 and known & I_BIT) or (kind == 2 and known & B_BIT):
                return DUPLICATE, i
            if kind != 0 and not known & F_BIT:
                return EARLY, i
            if (kind == 3 and not known & I_BIT) or (kind == 4 and known & (B_BIT | I_BIT)):
                return EARLY, i
            marks[slot_base[slot] + m] = known | (1 << kind)
            seen[slot, kind] += 1
            lanes.row[i] = (slot * 5 + kind) * 2 + (1 if operations[i, 2] >= flows.cut else 0)
            if kind == 1 or kind == 3:
                lanes.last_gradient[slot] = i
            if kind != 0 and kind != 4 and lanes.first_gradient[slot] < 0:
                lanes.first_gradient[slot] = i
    return GOOD, 0


@compiled
def find_missing(flows: Any, lanes: Any, slot: int, s: int, apart: bool) -> tuple[int, int]:
    """The first missing operation of a slot as (micro-batch, kind)."""
    count = flows.base[s + 1] - flows.base[s]
    marks = np.zeros(count, dtype=np.uint8)
    lane = lanes.slot_lane[slot]
    for i in range(lanes.lane_start[lane], lanes.lane_start[lane + 1]):
        if lanes.operations[i, 1] == s:
            marks[lanes.operations[i, 2] - flows.first[s]] |= 1 << lanes.operations[i, 0]
    for m in range(count):
        number = m + flows.first[s]
        if number % lanes.slot_replicas[slot] != lanes.slot_replica[slot]:
            continue
        if not marks[m] & F_BIT:
            return number, 0
        if not marks[m] & (B_BIT | I_BIT):
            return number, 1
        if marks[m] & I_BIT and not marks[m] & W_BIT:
            return number, 3
        if apart and not marks[m] & R_BIT:
            return number, 4
    return -1, -1


@compiled
def _slot_bases(flows: Any, lanes: Any) -> np.ndarray:
    slots = lanes.slot_lane.size
    bases = np.zeros(slots + 1, dtype=np.int64)
    for s in range(flows.base.size - 1):
        for slot in range(lanes.slot_start[s], lanes.slot_start[s + 1]):
            bases[slot + 1] = bases[slot] + flows.base[s + 1] - flows.base[s]
    return bases
