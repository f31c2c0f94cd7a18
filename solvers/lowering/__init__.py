"""From a plan's orders to one program per rank, refused when it would hang or corrupt (EXECUTOR.md, C and G.1).

Each operation becomes an instruction; F is followed by its sends, so are B and I; a receive is posted before the later
of the previous operation of the same stage and direction and the second operation before the one that needs it. So a
stage has at most one receive ahead per direction, never M, and it is posted early enough to overlap with two
operations. Buckets of the all-reduce are armed before a stage's last backward (after it, where the plan does not
overlap them); at the end come, for each stage in the order of their last backwards, the waits and the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import KINDS, WORDS, Held, Instruction, Program
from penstock.solvers.allocation import Allocation
from penstock.solvers.kernels.lowering import Wiring, emit
from penstock.solvers.lowering.checks import Transport, check, codes_of
from penstock.solvers.lowering.layout import layouts
from penstock.solvers.lowering.wiring import wire
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders

__all__ = ["Lowered", "check_programs", "lower", "lower_arrays"]


@dataclass(frozen=True, eq=False)
class Lowered:
    """Programs of all ranks as arrays: ``layouts`` without instructions, ``codes`` (N, 4) int32 with rank r's from
    ``starts[r]`` on: word (index in ``WORDS``), stage, micro-batch, channel.
    """

    layouts: tuple[Program, ...]
    codes: np.ndarray
    starts: np.ndarray

    def program(self, rank: int) -> Program:
        """One rank's program."""
        codes = self.codes[self.starts[rank] : self.starts[rank + 1]].tolist()
        return replace(
            self.layouts[rank], prologue=tuple(Instruction(WORDS[w], stage, m, c) for w, stage, m, c in codes)
        )


def lower(
    problem: Problem,
    allocation: Allocation,
    orders: Orders,
    *,
    transport: Transport = "gloo",
    overlap: bool | None = None,
) -> list[Program]:
    """One program per used device, ranks numbered in the order of the devices' indices. All in the prologue.

    ``overlap``: whether the all-reduce overlaps with the last backward; None: as the request has it.
    Raises InvalidPlan when the orders do not cover each micro-batch of each replica exactly once, when ranks would
    wait for each other (naming both and their next instructions), when rows do not tile, and for ``nccl`` also when
    a pair's messages have another order on both ends or sends that wait for their receives would hang;
    UnsupportedRequest for plans that no executor here trains.
    """
    lowered = lower_arrays(problem, allocation, orders, transport=transport, overlap=overlap)
    return [lowered.program(rank) for rank in range(len(lowered.layouts))]


def lower_arrays(
    problem: Problem,
    allocation: Allocation,
    orders: Orders,
    *,
    transport: Transport = "gloo",
    overlap: bool | None = None,
) -> Lowered:
    """As ``lower``, for large plans: 16 bytes per instruction, programs made when asked for."""
    programs = layouts(problem, allocation)
    wiring = wire(programs)
    operations = _operations_of_ranks(problem, programs, wiring, orders)
    early = problem.rules.overlap_all_reduce if overlap is None else overlap
    nothing = np.empty((0, 4), dtype=np.int32)
    sizes = [emit(wiring, rank, rows, early, nothing) for rank, rows in enumerate(operations)]
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    codes = np.empty((int(starts[-1]), 4), dtype=np.int32)
    for rank, rows in enumerate(operations):
        emit(wiring, rank, rows, early, codes[starts[rank] : starts[rank + 1]])
    check(wiring, codes, starts, [p.device for p in programs], transport)
    return Lowered(tuple(programs), codes, starts)


def check_programs(programs: Sequence[Program], *, transport: Transport = "gloo") -> None:
    """The checks of ``lower`` on programs from elsewhere, one per rank in order. Raises InvalidPlan."""
    codes, starts = codes_of(programs)
    check(wire(programs), codes, starts, [p.device for p in programs], transport)


def _operations_of_ranks(
    problem: Problem, programs: Sequence[Program], wiring: Wiring, orders: Orders
) -> list[np.ndarray]:
    """Each rank's operations, of shape (n, 3) int32; rows of devices that hold no stage must be empty."""
    rank_of = {program.device: program.rank for program in programs}
    found: dict[int, np.ndarray] = {}
    for row in orders.rows:
        operations = np.ascontiguousarray(row.operations, dtype=np.int32)
        for device in row.devices:
            name = problem.devices[device].name
            rank = rank_of.get(name)
            if rank is None:
                raise InvalidPlan(f"device {name!r} has a row of {len(operations)} operations but holds no stage")
            if rank in found:
                raise InvalidPlan(f"device {name!r} is in two rows")
            _check_row(programs[rank], wiring, operations)
            for one in programs[rank].stages:
                _check_counts(programs[rank], one, operations)
            found[rank] = operations
    missing = [program.device for program in programs if program.rank not in found]
    if missing:
        raise InvalidPlan(f"the schedule has no row for {missing}, which hold stages")
    return [found[rank] for rank in range(len(programs))]


def _check_row(program: Program, wiring: Wiring, operations: np.ndarray) -> None:
    """Kinds, stages and micro-batches are ones that the rank has at all."""
    held = wiring.held_of[program.rank]
    kind, stage, m = operations.T
    bad = (kind < 0) | (kind >= len(KINDS)) | (stage < 0) | (stage >= len(held))
    bad |= (m < 0) | (m >= program.num_micro_batches)
    bad[~bad] = held[stage[~bad]] < 0
    if bad.any():
        i = int(np.argmax(bad))
        kinds = KINDS[kind[i]] if 0 <= kind[i] < len(KINDS) else f"kind {kind[i]}"
        raise InvalidPlan(
            f"rank {program.rank} ({program.device}) has {stage[i]}{kinds}{m[i]} at position {i} of its row; it holds "
            f"stages {[one.stage for one in program.stages]} and there are {program.num_micro_batches} micro-batches"
        )


def _check_counts(program: Program, held: Held, operations: np.ndarray) -> None:
    """Each of the replica's micro-batches has one forward, and one backward whole or in halves."""
    first, last = held.micro_batches
    turns = len(held.ranks) if held.dispatch == "round_robin" else 1
    mine = operations[operations[:, 1] == held.stage]
    own = (mine[:, 2] >= first) & (mine[:, 2] <= last) & ((mine[:, 2] - first) % turns == held.replica % turns)
    who = f"rank {program.rank} ({program.device}) runs {held.stage}"
    if not own.all():
        kind, _, m = mine[np.argmin(own)]
        raise InvalidPlan(
            f"{who}{KINDS[kind]}{m}, which is replica {(m - first) % turns}'s; it is replica {held.replica}"
        )
    number = len(KINDS)
    count = np.bincount(mine[:, 2] * number + mine[:, 0], minlength=(last + 1) * number).reshape(-1, number)
    f, b, i, w, r = count[first + held.replica % turns : last + 1 : turns].T
    for letter, good in (("F", f == 1), ("B", b + i == 1), ("W", w == i), ("R", r <= 1)):
        if not good.all():
            m = int(np.argmin(good)) * turns + first + held.replica % turns
            times = int(count[m, KINDS.index(letter)])
            raise InvalidPlan(f"{who}{letter}{m} {times} times; a replica runs each of its micro-batches once")
