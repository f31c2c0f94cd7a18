"""Instructions between a rank's operations: reductions, ties, the norm, steps, averaging, and weight versions.

A flushed step ends with all of them. Buckets are armed before the last backward of all stages that hold their layers
(after it, where the plan does not overlap them). Then come, for each stage in the order of its last gradients, the
waits and the step. Where replicas share optimizer states, a step gathers the parameters that others have stepped, so
all ranks step the last layers first. With ties or the norm all waits come first, so that no rank steps, or enters one
collective, while another rank is blocked in the other. Under elastic averaging the reference is pulled before the
step and the update pushed after it (ALGORITHMS A.6). In a periodic plan a stage steps where ``unroll`` puts its step,
and a VERSION instruction sets a forward's weight version where its age changes (ALGORITHMS 5.1).

Parameters that are gathered once a step are gathered before everything else, in the order of layers on every rank, so
that no two wait for each other, and released after the last backward of all stages that hold them. Buckets whose
gradients are summed within passes have no instructions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECOMPUTE,
    WEIGHT,
    WITHIN_PASSES,
    WORDS,
    Program,
    RankStage,
)
from penstock.solvers.lowering.rows import RankRow
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.update_rules import PERIODIC_RULES, UpdateRule, group_of, version_used

_WORD = {word: number for number, word in enumerate(WORDS)}


class Update(NamedTuple):
    """An instruction before the operation at ``position`` (the number of operations: at the end)."""

    position: int
    word: str
    stage: int
    number: int = 0


def table_of(updates: list[Update]) -> np.ndarray:
    """Return (k, 4) int64 for the kernel: position, word, stage, number; at equal positions in the given order."""
    rows = [(each.position, _WORD[each.word], each.stage, each.number) for each in updates]
    return np.asarray(sorted(rows, key=lambda row: row[0]), dtype=np.int64).reshape(-1, 4)


def flushed_updates(
    program: Program, operations: np.ndarray, *, early: bool, norm: bool, late: bool, divided: bool = False
) -> list[Update]:
    """Return a flushed step's updates. ``early``: buckets are armed before the last backward; ``late``: at the end.

    ``divided``: ranks share the layers' tensors, and have parts of some gradients.
    """
    averaging = program.update_rule == "elastic_averaging"
    within = program.sharding in WITHIN_PASSES
    if within and np.isin(operations[:, 0], (INPUT, WEIGHT)).any():
        raise UnsupportedRequest(
            f"with sharding {program.sharding} a layer's gradients are summed right after its backward, but "
            "this schedule splits backwards",
            remedy="plan with a schedule that does not split backwards, such as 1f1b",
        )
    apart, end = averaging or within, len(operations)
    last = {stage.stage: _last_gradients(operations, stage.stage) for stage in program.stages}
    ready: dict[int, int] = {}
    armed: list[tuple[int, int, Update]] = []
    for stage in program.stages:
        for k, (low, high, group) in enumerate(stage.buckets):
            at = max(last[one.stage] for one in program.stages if one.first <= high and low <= one.last)
            ready[stage.stage] = max(at, ready.get(stage.stage, -1))
            if group >= 0 and not apart:
                position = end if late else at if early else at + 1
                armed.append((position, group if late else 0, Update(position, "REDUCE", stage.stage, k)))
    updates = [update for _, _, update in sorted(armed, key=lambda each: each[:2])]
    if program.sharding == "parameters_kept":
        updates += _gathered(program, last)
    order = sorted(ready, key=lambda s: (ready[s], s))
    if program.shard_states and not averaging:  # replicas gather the stepped parameters: all of them in one order
        order = sorted(ready, key=lambda s: -program.stage(s).buckets[0][1])
    waits = {s: [Update(end, "WAIT_REDUCE", s, k) for k in _reduced(program.stage(s), apart)] for s in order}
    ties = _ties(program)
    if ties or norm:
        updates += [wait for s in order for wait in waits.pop(s)]
        updates += [Update(end, "REDUCE_SHARED", s, k) for k, s in ties.items()]
    parts = {s: [Update(end, "REDUCE_PARTS", s)] if divided else [] for s in order}
    if norm:
        updates += [part for s in order for part in parts.pop(s)]
    if norm:
        lowest = min(stage.stage for stage in program.stages)
        updates += [Update(end, "NORM", lowest), Update(end, "WAIT_NORM", lowest)]
    for s in order:
        averaged = range(len(program.stage(s).buckets)) if averaging else ()
        updates += [Update(end, "AVG_PULL", s, k) for k in averaged]
        updates += [*waits.get(s, ()), *parts.get(s, ()), Update(end, "STEP", s)]
        updates += [Update(end, "AVG_PUSH", s, k) for k in averaged]
    return updates


def _gathered(program: Program, last: dict[int, int]) -> list[Update]:
    """Return where each bucket's parameters are gathered, and where they are released.

    ``last``: the last gradient of each stage.
    """
    gathered, freed = [], []
    for stage in program.stages:
        for k, (low, high, group) in enumerate(stage.buckets):
            if group >= 0:
                gathered.append((low, Update(0, "UNSHARD", stage.stage, k)))
                after = max(last[one.stage] for one in program.stages if one.first <= high and low <= one.last) + 1
                freed.append(Update(after, "RESHARD", stage.stage, k))
    return [update for _, update in sorted(gathered, key=lambda each: each[0])] + freed


def periodic_updates(
    program: Program, row: RankRow, allocation: Allocation, *, early: bool, divided: bool = False
) -> list[Update]:
    """Return the updates of a pattern's run. Raises InvalidPlan where a version is dead or does not exist yet.

    ``divided``: as for ``flushed_updates``.
    """
    updates: list[tuple[tuple[int, int, int], Update]] = []
    ties = _ties(program)
    for stage in program.stages:
        s = stage.stage
        steps = row.steps[row.steps[:, 1] == s, 0]
        gradients = _gradients(row.operations, s)
        rounds = row.operations[gradients, 2] // stage.update_every
        last = np.full(len(steps), -1)
        last[rounds] = gradients
        for t, (at, position) in enumerate(zip(last.tolist(), steps.tolist(), strict=True)):
            armed = at if early else at + 1
            buckets = list(_reduced(stage, apart=False))
            updates += [((armed, s, 3 * t), Update(armed, "REDUCE", s, k)) for k in buckets]
            due = [Update(position, "WAIT_REDUCE", s, k) for k in buckets]
            due += [Update(position, "REDUCE_SHARED", s, k) for k, lowest in ties.items() if lowest == s]
            due += [Update(position, "REDUCE_PARTS", s)] if divided else []
            updates += [((position, s, 3 * t + 1), each) for each in (*due, Update(position, "STEP", s))]
        for update in _versions(program, stage, row, steps, group_of(allocation, s)):
            updates.append(((update.position, s, 3 * len(steps)), update))
    return [update for _, update in sorted(updates, key=lambda each: each[0])]


def count_versions(operations: np.ndarray, steps: np.ndarray, stage: int) -> int:
    """Return weight stashing's most versions alive at once, the newest included (PipeDream, section 3.3)."""
    kinds, stages, batches = operations.T
    places = np.flatnonzero(stages == stage)
    versions = np.searchsorted(steps[steps[:, 1] == stage, 0], places, side="right")
    last = {int(batches[i]): int(i) for i in places if kinds[i] != RECOMPUTE}
    version_of: dict[int, int] = {}
    most = 1
    for i, newest in zip(places.tolist(), versions.tolist(), strict=True):
        m = int(batches[i])
        if kinds[i] == FORWARD:
            version_of[m] = newest
        most = max(most, len({newest, *version_of.values()}))
        if last[m] == i:
            version_of.pop(m, None)
    return most


def _versions(program: Program, stage: RankStage, row: RankRow, steps: np.ndarray, group: int) -> list[Update]:
    """Return VERSION instructions where the age of the forwards' weights changes; the first forward has the newest."""
    rule = _periodic(program.update_rule)
    places = np.flatnonzero((row.operations[:, 1] == stage.stage) & (row.operations[:, 0] != RECOMPUTE))
    if version_used(rule, group, 0) is None:
        return []
    settled = version_used(rule, group, 1)
    assert settled is not None
    used = row.operations[places, 2] // stage.update_every + (settled - 1)
    age = np.searchsorted(steps, places, side="right") - used
    wrong = np.flatnonzero((age < 0) | (age >= stage.versions))
    if wrong.size:
        i = int(wrong[0])
        kind, _, m = row.operations[places[i]].tolist()
        what = f"{stage.stage}{WORDS[kind]}{m} of rank {program.rank} ({program.device})"
        if age[i] < 0:
            raise InvalidPlan(f"{what} needs weights from {-age[i]} updates that have not run yet")
        raise InvalidPlan(
            f"{what} needs weights {age[i]} updates old, but {rule} updates keep {stage.versions} versions",
            remedy="more micro-batches per update than are in flight",
        )
    forwards = row.operations[places, 0] == FORWARD
    updates, before = [], 0
    for position, d in zip(places[forwards].tolist(), age[forwards].tolist(), strict=True):
        if d != before:
            updates.append(Update(position, "VERSION", stage.stage, d))
            before = d
    return updates


def _periodic(rule: str) -> UpdateRule:
    return next(each for each in PERIODIC_RULES if each == rule)


def _ties(program: Program) -> dict[int, int]:
    """Return the ties that a rank sums, by number, each with the lowest of its stages that hold it."""
    lowest = {}
    for k, tie in enumerate(program.shared):
        users = [one.stage for one in program.stages if any(one.first <= layer <= one.last for layer in tie.layers)]
        if users:
            lowest[k] = min(users)
    return lowest


def _reduced(stage: RankStage, apart: bool) -> range | list[int]:
    return [] if apart else [k for k, (_, _, group) in enumerate(stage.buckets) if group >= 0]


def _gradients(operations: np.ndarray, stage: int) -> np.ndarray:
    """Return the indices of a stage's backwards, whole ones and weight halves."""
    return np.flatnonzero((operations[:, 1] == stage) & np.isin(operations[:, 0], (BACKWARD, WEIGHT)))


def _last_gradients(operations: np.ndarray, stage: int) -> int:
    return int(_gradients(operations, stage)[-1])
