"""Check of weight versions for ``verify``: every version that an operation uses exists, and is still kept.

Version v of a stage's weights is the result of v optimizer steps; ``docs/running.md`` has the version that each rule
uses. A lane's row is walked with a counter of its steps. The version that a forward uses has to be alive until the last
gradient operation of its micro-batch: among the newest ``copies`` of the counter, or, under weight stashing, one of at
most ``copies`` in use.
"""

from __future__ import annotations

import numpy as np

from penstock.schemas.program import FORWARD, RECOMPUTE
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.unroll import Unrolled
from penstock.solvers.model.update_rules import UpdateRule, group_of, version_used, weight_copies


def copies_held(rule: UpdateRule, allocation: Allocation, s: int, operations: np.ndarray) -> int:
    """Return the copies of a stage's weights that a lane keeps; ``operations``: its operations of the stage, in order.

    Under weight stashing each micro-batch in flight on the lane may have begun with a different version.
    """
    if rule == "weight_stashing":
        return max(1, _most_in_flight(operations))
    return weight_copies(rule, allocation, s, 0)


def _most_in_flight(operations: np.ndarray) -> int:
    """Return the most micro-batches whose forward has begun and whose last gradient operation has not ended."""
    begins, ends = _spans(operations)
    return int((np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins)).max(initial=0))


def _spans(operations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the forwards, and of each micro-batch's last gradient operation, both sorted."""
    kinds, _stages, batches = operations.T
    begins = np.flatnonzero(kinds == FORWARD)
    gradients = np.flatnonzero((kinds != FORWARD) & (kinds != RECOMPUTE) & (kinds != STEP))
    last = np.full(int(batches.max(initial=0)) + 1, -1, dtype=np.int64)
    last[batches[gradients]] = gradients
    return begins, np.sort(last[last >= 0])


def check_versions(names: list[str], allocation: Allocation, run: Unrolled, rule: UpdateRule) -> list[str]:
    """Return faults of steps and versions in the rows of a run; ``allocation``: of one global batch."""
    faults = []
    for row in run.orders.rows:
        for s in np.unique(row.operations[:, 1]).tolist():
            where = f"stage {s} on {names[row.devices[0]]}"
            operations = row.operations[row.operations[:, 1] == s]
            every = run.orders.update_every[s]
            wrong_steps = _check_steps(where, operations, every, run.allocation.num_micro_batches // every)
            faults += wrong_steps or _check_uses(where, operations, every, rule, allocation, s)
    return faults


def _check_steps(where: str, operations: np.ndarray, every: int, rounds: int) -> list[str]:
    """Check for one step of each complete round, between its last gradients and the next round's first."""
    kinds, _stages, batches = operations.T
    places = np.flatnonzero(kinds == STEP)
    if batches[places].tolist() != [(t + 1) * every - 1 for t in range(rounds)]:
        return [
            f"{where[0].upper()}{where[1:]} does not step once, in order, after each of {rounds} rounds of {every} "
            "micro-batches."
        ]
    gradients = np.flatnonzero((kinds != FORWARD) & (kinds != RECOMPUTE) & (kinds != STEP))
    number = batches[gradients] // every
    steps_before = np.searchsorted(places, gradients)
    wrong = np.flatnonzero(number != steps_before)
    if not wrong.size:
        return []
    i = wrong[0]
    when = "before the step of round" if number[i] > steps_before[i] else "after the step of round"
    which = int(number[i]) - 1 if number[i] > steps_before[i] else int(number[i])
    return [f"{where[0].upper()}{where[1:]} makes gradients of round {int(number[i])} {when} {which}."]


def _check_uses(
    where: str, operations: np.ndarray, every: int, rule: UpdateRule, allocation: Allocation, s: int
) -> list[str]:
    copies = copies_held(rule, allocation, s, operations)
    kinds, _stages, batches = operations.T
    newest = np.cumsum(kinds == STEP)
    if version_used(rule, group_of(allocation, s), 0) is None:
        alive = _most_alive(operations, newest)
        return [f"{alive} weight versions are in use at once in {where}, which keeps {copies}."] * (alive > copies)
    runs = np.flatnonzero(kinds != STEP)
    used = [version_used(rule, group_of(allocation, s), t) for t in range(int(batches.max(initial=0)) // every + 1)]
    version = np.asarray(used, dtype=np.int64)[batches[runs] // every]
    missing = np.flatnonzero(version > newest[runs])
    if missing.size:
        i = missing[0]
        return [
            f"Micro-batch {int(batches[runs[i]])} uses weight version {int(version[i])} in {where}, where only "
            f"{int(newest[runs[i]])} steps have been made."
        ]
    dead = np.flatnonzero(version <= newest[runs] - copies)
    if dead.size:
        i = dead[0]
        return [
            f"Micro-batch {int(batches[runs[i]])} uses weight version {int(version[i])} in {where}, which keeps "
            f"{copies} of {int(newest[runs[i]]) + 1}."
        ]
    return []


def _most_alive(operations: np.ndarray, newest: np.ndarray) -> int:
    """Return, for weight stashing, the most versions alive at once: the newest, and micro-batches' in flight."""
    kinds, _stages, batches = operations.T
    count = int(newest[-1]) + 1 if len(newest) else 1
    last_use = np.searchsorted(newest, np.arange(count), side="right") - 1
    version_of = np.zeros(int(batches.max(initial=0)) + 1, dtype=np.int64)
    version_of[batches[kinds == FORWARD]] = newest[kinds == FORWARD]
    uses = np.flatnonzero((kinds != RECOMPUTE) & (kinds != STEP))
    np.maximum.at(last_use, version_of[batches[uses]], uses)
    first_use = np.searchsorted(newest, np.arange(count))
    return int((np.arange(1, count + 1) - np.searchsorted(np.sort(last_use), first_use)).max())
