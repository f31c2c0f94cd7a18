"""One pass over a lane's row: every operation must be there once, on a lane that runs it, and after its inputs there.

``marks[base + m]`` collects a bit for each operation kind that a slot has already had for micro-batch m.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.judge.operation_tables import LINES
from penstock.solvers.model.schedule import STEP

never_negative(__name__)

GOOD, FOREIGN, DUPLICATE, EARLY, OUT_OF_ROUND = 0, 1, 2, 3, 4
F_BIT, B_BIT, I_BIT, W_BIT, R_BIT = 1, 2, 4, 8, 16


@Fields.register
class Scan(NamedTuple):
    """The arrays that the scans of all lanes read (K slots, S stages) and fill.

    Read, by stage: the ``first`` of its micro-batches and the number of its ``batches``; by slot: its replica's number
    and count, and where its ``marks`` begin. Filled: each operation's ``row`` and ``batch``, by slot and round the
    first and last gradient (from ``round_start`` on), and by slot how often each kind was ``seen`` (K, 5).
    ``periodic``: stage s steps in the rows after ``every[s]`` micro-batches; ``stepped`` counts a slot's steps.
    """

    first: np.ndarray
    batches: np.ndarray
    slot_replica: np.ndarray
    slot_replicas: np.ndarray
    slot_base: np.ndarray
    marks: np.ndarray
    row: np.ndarray
    batch: np.ndarray
    first_gradient: np.ndarray
    last_gradient: np.ndarray
    periodic: bool
    every: np.ndarray
    round_start: np.ndarray
    stepped: np.ndarray
    seen: np.ndarray


@compiled
def scan_lane(scan: Scan, operations: np.ndarray, slot_of: np.ndarray, begin: int, cut: int) -> tuple[int, int]:
    """Return (GOOD, 0), or the fault and the number of the operation within the row.

    ``slot_of`` has the lane's slot of each stage, -1 for other lanes' stages; ``begin`` is the number of the lane's
    first operation.
    """
    return _scan(scan, operations, slot_of, begin, cut)


@loop
def _scan(scan: Scan, operations: np.ndarray, slot_of: np.ndarray, begin: int, cut: int) -> tuple[int, int]:
    for i in range(operations.shape[0]):
        kind, s = operations[i, 0], operations[i, 1]
        if kind < 0 or kind > (STEP if scan.periodic else STEP - 1) or s < 0 or s >= slot_of.size:
            return FOREIGN, i
        slot = slot_of[s]
        m = operations[i, 2] - scan.first[s]
        if slot < 0 or m < 0 or m >= scan.batches[s]:
            return FOREIGN, i
        place = scan.round_start[slot]
        if scan.periodic:
            update_round = m // scan.every[s]
            place += update_round
            if (kind == STEP and not _may_step(scan, slot, s, m)) or (
                0 < kind < 4 and update_round != scan.stepped[slot]
            ):
                return OUT_OF_ROUND, i
            if kind == STEP:
                scan.stepped[slot] += 1
                _note(scan, slot, kind, operations[i, 2], begin + i, cut)
                continue
        turns = scan.slot_replicas[slot]
        if turns > 1 and operations[i, 2] % turns != scan.slot_replica[slot]:
            return FOREIGN, i
        bits = scan.marks[scan.slot_base[slot] + m]
        if bits & (1 << kind) or (kind == 1 and bits & I_BIT) or (kind == 2 and bits & B_BIT):
            return DUPLICATE, i
        if kind != 0 and not bits & F_BIT:
            return EARLY, i
        if (kind == 3 and not bits & I_BIT) or (kind == 4 and bits & (B_BIT | I_BIT)):
            return EARLY, i
        scan.marks[scan.slot_base[slot] + m] = bits | (1 << kind)
        scan.seen[slot, kind] += 1
        _note(scan, slot, kind, operations[i, 2], begin + i, cut)
        if kind == 1 or kind == 3:
            scan.last_gradient[place] = begin + i
        if kind != 0 and kind != 4 and scan.first_gradient[place] < 0:
            scan.first_gradient[place] = begin + i
    return GOOD, 0


@inner
def _note(scan: Scan, slot: int, kind: int, m: int, i: int, cut: int) -> None:
    scan.row[i] = slot * LINES + kind * 2 + (1 if m >= cut else 0)
    scan.batch[i] = m


@inner
def _may_step(scan: Scan, slot: int, s: int, m: int) -> bool:
    """Return whether ``m`` is the last of the next round, and the lane has finished the round's gradients."""
    done = (scan.stepped[slot] + 1) * scan.every[s]
    turns = scan.slot_replicas[slot]
    gradients = scan.seen[slot, 1] + scan.seen[slot, 3]
    return m + 1 == done and gradients == (done - scan.slot_replica[slot] + turns - 1) // turns


@compiled
def find_missing(scan: Scan, slot: int, s: int, apart: bool) -> tuple[int, int]:
    """Return the first missing operation of a slot of stage ``s`` as (micro-batch, kind)."""
    for m in range(scan.batches[s]):
        number = m + scan.first[s]
        if number % scan.slot_replicas[slot] != scan.slot_replica[slot]:
            continue
        bits = scan.marks[scan.slot_base[slot] + m]
        if not bits & F_BIT:
            return number, 0
        if not bits & (B_BIT | I_BIT):
            return number, 1
        if bits & I_BIT and not bits & W_BIT:
            return number, 3
        if apart and not bits & R_BIT:
            return number, 4
    return -1, -1
