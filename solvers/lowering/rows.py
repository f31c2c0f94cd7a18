"""The operations of each rank, and where its stages step: from the rows of orders, or from a pattern unrolled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import KINDS, Program, RankStage
from penstock.solvers.lowering.rank_parts import own_micro_batches
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP, Orders


class RankRow(NamedTuple):
    """A rank's ``operations`` (n, 3) int32; ``steps`` (k, 2): (operation after the step, stage), in order."""

    operations: np.ndarray
    steps: np.ndarray


def rows_of_ranks(problem: Problem, programs: Sequence[Program], orders: Orders) -> list[RankRow]:
    """Return each rank's operations. Raises InvalidPlan where they are not each of its micro-batches once.

    Rows of devices that hold no stage have to be empty; under elastic averaging a device has a row for each pipeline.
    """
    rank_of = {(program.device, stage.stage): program.rank for program in programs for stage in program.stages}
    used = {program.device for program in programs}
    rows: dict[int, RankRow] = {}
    for row in orders.rows:
        operations = np.ascontiguousarray(row.operations, dtype=np.int32)
        for device in row.devices:
            name = problem.devices[device].name
            if name not in used:
                raise InvalidPlan(f"device {name!r} has a row of {len(operations)} operations but holds no stage")
            rank = _rank_of(programs, rank_of, name, operations)
            if rank in rows:
                raise InvalidPlan(f"device {name!r} is in two rows")
            rows[rank] = _checked(programs[rank], operations)
    missing = [program.device for program in programs if program.rank not in rows]
    if missing:
        raise InvalidPlan(f"the schedule has no row for {missing}, which hold stages")
    return [rows[rank] for rank in range(len(programs))]


def _rank_of(
    programs: Sequence[Program], rank_of: dict[tuple[str, int], int], device: str, operations: np.ndarray
) -> int:
    """Return the rank of a row: of a device's ranks, the rank that holds the stage of the row's first operation."""
    if len(operations) and (rank := rank_of.get((device, int(operations[0, 1])))) is not None:
        return rank
    return next(program.rank for program in programs if program.device == device)


def _checked(program: Program, row: np.ndarray) -> RankRow:
    stepping = row[:, 0] == STEP
    operations = np.ascontiguousarray(row[~stepping]) if stepping.any() else row
    _check_operations(program, operations)
    for stage in program.stages:
        _check_counts(program, stage, operations)
    places = np.flatnonzero(stepping)
    return RankRow(operations, np.stack((places - np.arange(len(places)), row[places, 1]), axis=1))


def _check_operations(program: Program, operations: np.ndarray) -> None:
    """Check that kinds, stages and micro-batches exist on the rank."""
    numbers = [one.stage for one in program.stages]
    kind, stage, m = operations.T
    count = program.batches * program.num_micro_batches
    bad = (kind < 0) | (kind >= len(KINDS)) | ~np.isin(stage, numbers) | (m < 0) | (m >= count)
    if bad.any():
        i = int(np.argmax(bad))
        kinds = KINDS[kind[i]] if 0 <= kind[i] < len(KINDS) else f"kind {kind[i]}"
        raise InvalidPlan(
            f"rank {program.rank} ({program.device}) has {stage[i]}{kinds}{m[i]} at position {i} of its row; the "
            "rank holds "
            f"stages {numbers} and there are {count} micro-batches"
        )


def _check_counts(program: Program, stage: RankStage, operations: np.ndarray) -> None:
    """Check that each of the replica's micro-batches has one forward, and one backward, whole or in halves."""
    numbers = own_micro_batches(program, stage)
    turns = numbers.step
    mine = operations[operations[:, 1] == stage.stage]
    good = (mine[:, 2] >= numbers.start) & (mine[:, 2] < numbers.stop) & ((mine[:, 2] - numbers.start) % turns == 0)
    who = f"rank {program.rank} ({program.device}) runs {stage.stage}"
    if not good.all():
        kind, _, m = mine[np.argmin(good)]
        whose = f"replica {m % turns}, but the rank is replica {stage.replica}" if turns > 1 else "another pipeline"
        raise InvalidPlan(f"{who}{KINDS[kind]}{m}, which belongs to {whose}")
    number = len(KINDS)
    count = np.bincount(mine[:, 2] * number + mine[:, 0], minlength=numbers.stop * number).reshape(-1, number)
    f, b, i, w, r = count[numbers.start : numbers.stop : turns].T
    for letter, right in (("F", f == 1), ("B", b + i == 1), ("W", w == i), ("R", r <= 1)):
        if not right.all():
            m = int(np.argmin(right)) * turns + numbers.start
            times = int(count[m, KINDS.index(letter)])
            raise InvalidPlan(f"{who}{letter}{m} {times} times; a replica runs each of its micro-batches once")
