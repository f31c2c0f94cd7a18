"""The operations of each rank, and where its stages step: from the rows of orders, or from a pattern unrolled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import KINDS, Held, Program
from penstock.solvers.lowering.rank_parts import own_micro_batches
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP, Orders


class RankRow(NamedTuple):
    """``operations`` of shape (n, 3) int32; ``steps`` (k, 2): before which operation which stage steps, in order."""

    operations: np.ndarray
    steps: np.ndarray


def rows_of_ranks(problem: Problem, programs: Sequence[Program], orders: Orders) -> list[RankRow]:
    """Each rank's operations. Raises InvalidPlan where they are not each of its micro-batches once.

    Rows of devices that hold no stage have to be empty; under elastic averaging a device has a row for each pipeline.
    """
    rank_of = {(program.device, held.stage): program.rank for program in programs for held in program.stages}
    used = {program.device for program in programs}
    found: dict[int, RankRow] = {}
    for row in orders.rows:
        operations = np.ascontiguousarray(row.operations, dtype=np.int32)
        for device in row.devices:
            name = problem.devices[device].name
            if name not in used:
                raise InvalidPlan(f"device {name!r} has a row of {len(operations)} operations but holds no stage")
            rank = _rank_of(programs, rank_of, name, operations)
            if rank in found:
                raise InvalidPlan(f"device {name!r} is in two rows")
            found[rank] = _checked(programs[rank], operations)
    missing = [program.device for program in programs if program.rank not in found]
    if missing:
        raise InvalidPlan(f"the schedule has no row for {missing}, which hold stages")
    return [found[rank] for rank in range(len(programs))]


def _rank_of(
    programs: Sequence[Program], rank_of: dict[tuple[str, int], int], device: str, operations: np.ndarray
) -> int:
    """Return the rank of a row: where a device has several, the one that holds the stage of its first operation."""
    if len(operations) and (rank := rank_of.get((device, int(operations[0, 1])))) is not None:
        return rank
    return next(program.rank for program in programs if program.device == device)


def _checked(program: Program, row: np.ndarray) -> RankRow:
    stepping = row[:, 0] == STEP
    operations = np.ascontiguousarray(row[~stepping]) if stepping.any() else row
    _check_operations(program, operations)
    for held in program.stages:
        _check_counts(program, held, operations)
    places = np.flatnonzero(stepping)
    return RankRow(operations, np.stack((places - np.arange(len(places)), row[places, 1]), axis=1))


def _check_operations(program: Program, operations: np.ndarray) -> None:
    """Check that kinds, stages and micro-batches exist on the rank."""
    held = [one.stage for one in program.stages]
    kind, stage, m = operations.T
    count = program.batches * program.num_micro_batches
    bad = (kind < 0) | (kind >= len(KINDS)) | ~np.isin(stage, held) | (m < 0) | (m >= count)
    if bad.any():
        i = int(np.argmax(bad))
        kinds = KINDS[kind[i]] if 0 <= kind[i] < len(KINDS) else f"kind {kind[i]}"
        raise InvalidPlan(
            f"rank {program.rank} ({program.device}) has {stage[i]}{kinds}{m[i]} at position {i} of its row; it holds "
            f"stages {held} and there are {count} micro-batches"
        )


def _check_counts(program: Program, held: Held, operations: np.ndarray) -> None:
    """Check that each of the replica's micro-batches has one forward, and one backward, whole or in halves."""
    own = own_micro_batches(program, held)
    turns = own.step
    mine = operations[operations[:, 1] == held.stage]
    good = (mine[:, 2] >= own.start) & (mine[:, 2] < own.stop) & ((mine[:, 2] - own.start) % turns == 0)
    who = f"rank {program.rank} ({program.device}) runs {held.stage}"
    if not good.all():
        kind, _, m = mine[np.argmin(good)]
        whose = f"replica {m % turns}'s; it is replica {held.replica}" if turns > 1 else "another pipeline's"
        raise InvalidPlan(f"{who}{KINDS[kind]}{m}, which is {whose}")
    number = len(KINDS)
    count = np.bincount(mine[:, 2] * number + mine[:, 0], minlength=own.stop * number).reshape(-1, number)
    f, b, i, w, r = count[own.start : own.stop : turns].T
    for letter, right in (("F", f == 1), ("B", b + i == 1), ("W", w == i), ("R", r <= 1)):
        if not right.all():
            m = int(np.argmin(right)) * turns + own.start
            times = int(count[m, KINDS.index(letter)])
            raise InvalidPlan(f"{who}{letter}{m} {times} times; a replica runs each of its micro-batches once")
