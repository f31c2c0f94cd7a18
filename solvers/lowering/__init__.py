"""Lowering of a plan to one program per rank; programs that would hang or corrupt are refused (EXECUTOR C.2, G.1).

Each operation becomes an instruction; F, B and I are followed by their sends. A receive is posted before the later of
the previous operation of the same stage and direction and the second operation before the one that needs it. So a
stage has at most one receive ahead per direction, never M, and it is posted early enough to overlap with two
operations. ``updates`` adds reductions, steps and averaging; ``loops`` handles long runs of periodic plans.

Where that order does not suit NCCL, whose sends wait and whose messages have no tags, receives are posted as their
messages are sent (``receives``), and all-reduces at the end, in one order of their groups.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`.
Start reading at this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import WORDS, Instruction, Program, Transport
from penstock.solvers.lowering.checks import check, codes_of
from penstock.solvers.lowering.kernels import Wiring, emit
from penstock.solvers.lowering.loops import Length, folded, length
from penstock.solvers.lowering.meshes import of_gpus, refuse_untrained
from penstock.solvers.lowering.rank_parts import layouts
from penstock.solvers.lowering.receives import posted_as_sent
from penstock.solvers.lowering.rows import RankRow, rows_of_ranks
from penstock.solvers.lowering.transports import TransportChoice, transports_to_try
from penstock.solvers.lowering.updates import count_versions, flushed_updates, periodic_updates, table_of
from penstock.solvers.lowering.wiring import wire
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.model.schedule import Orders, Pattern, Schedule
from penstock.solvers.model.unroll import run_of
from penstock.solvers.model.update_rules import PERIODIC_RULES, UpdateRule

__all__ = ["Lowered", "check_programs", "lower", "lower_arrays"]

_RUN = ("prologue", "body", "repeat", "body_batches", "epilogue")
"""The fields of a program that depend on its instructions."""


@dataclass(frozen=True, eq=False)
class Lowered:
    """Programs of all ranks as arrays.

    ``layouts``: the programs without instructions. ``codes`` (N, 4) int32, rank r's from ``starts[r]`` on: word (index
    in ``WORDS``), stage, micro-batch, channel. ``span``: the part of a run that these are.
    """

    layouts: tuple[Program, ...]
    codes: np.ndarray
    starts: np.ndarray
    span: Length | None = None

    def programs(self) -> list[Program]:
        """Return all programs. Ranks with the same instructions, as most replicas, share one copy of them."""
        by_digest: dict[bytes, dict[str, Any]] = {}
        programs = []
        for rank, layout in enumerate(self.layouts):
            mark = blake2b(self.codes[self.starts[rank] : self.starts[rank + 1]].tobytes()).digest()
            if mark not in by_digest:
                program = self.program(rank)
                by_digest[mark] = {name: getattr(program, name) for name in _RUN}
            programs.append(replace(layout, **by_digest[mark]))
        return programs

    def program(self, rank: int) -> Program:
        """Return one rank's program."""
        codes = self.codes[self.starts[rank] : self.starts[rank + 1]]
        if self.span is not None:
            return folded(self.layouts[rank], codes, self.span)
        return replace(
            self.layouts[rank], prologue=tuple(Instruction(WORDS[w], stage, m, c) for w, stage, m, c in codes.tolist())
        )


def lower(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    *,
    update_rule: UpdateRule = "synchronous",
    transport: TransportChoice = "auto",
    overlap: bool | None = None,
    batches: int = 1,
    norm: bool = False,
    staleness: int = 0,
) -> list[Program]:
    """Lower a plan to one program per used device, or per pipeline's share of it.

    Ranks are numbered in the order of the devices' indices. Where GPUs share layers, devices are model-parallel groups,
    and each of their GPUs has a program (``meshes``).

    ``batches``: global batches that a program of a periodic plan trains before it is flushed. ``norm``: with the norm
    of all gradients. ``staleness`` of elastic averaging. ``overlap``: whether the all-reduce overlaps with the last
    backward; None: as in the request. ``transport``: see ``transports``; the programs list the transports for which
    they were checked.

    Raises InvalidPlan when the orders do not cover each micro-batch of each replica exactly once, when ranks would
    wait for each other (naming both and their next instructions), when rows do not tile, a version of the weights is
    dead, and for ``nccl`` also when no order of receives and all-reduces suits all ranks. Raises UnsupportedRequest for
    plans that no executor trains, and for ``nccl`` if the plan needs tags.
    """
    lowered = lower_arrays(
        problem,
        allocation,
        schedule,
        update_rule=update_rule,
        transport=transport,
        overlap=overlap,
        batches=batches,
        norm=norm,
        staleness=staleness,
    )
    return of_gpus(lowered.programs(), problem)


def lower_arrays(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    *,
    update_rule: UpdateRule = "synchronous",
    transport: TransportChoice = "auto",
    overlap: bool | None = None,
    batches: int = 1,
    norm: bool = False,
    staleness: int = 0,
) -> Lowered:
    """Lower a plan to arrays, for large plans: 16 bytes per instruction, and programs on demand.

    Arguments as for ``lower``; where GPUs share layers, the programs are per model-parallel group.
    """
    _refuse(schedule, update_rule, batches, norm, staleness)
    refuse_untrained(problem, allocation, update_rule, schedule)
    candidates = transports_to_try(problem, allocation, update_rule, transport)
    early = problem.rules.overlap_all_reduce if overlap is None else overlap
    programs = layouts(problem, allocation, update_rule, batches=batches, staleness=staleness)
    span = length(allocation, schedule, batches) if isinstance(schedule, Pattern) else None
    shown = programs if span is None else [replace(program, batches=span.short) for program in programs]
    if isinstance(schedule, Pattern):
        orders = run_of(allocation, schedule, update_rule, shown[0].batches)[1]
    else:
        orders = schedule
    rows = rows_of_ranks(problem, shown, orders)
    if update_rule == "weight_stashing":
        shown = [_with_versions(program, row) for program, row in zip(shown, rows, strict=True)]
    wiring = wire(shown)
    for transports in candidates:
        fault: InvalidPlan | None = None
        strictest = transports[-1]
        for codes, starts in _attempts(problem, shown, wiring, rows, allocation, strictest, early, norm):
            try:
                check(shown, wiring, codes, starts, strictest)
            except InvalidPlan as error:
                fault = fault or error
                continue
            lowered = tuple(replace(program, batches=batches, transports=transports) for program in shown)
            return Lowered(lowered, codes, starts, span)
    assert fault is not None
    raise fault


def check_programs(programs: Sequence[Program], *, transport: Transport = "gloo") -> None:
    """Check programs from elsewhere, one per rank in order, as ``lower`` does. Raises InvalidPlan."""
    codes, starts = codes_of(programs)
    check(programs, wire(programs), codes, starts, transport)


def _refuse(schedule: Schedule, rule: UpdateRule, batches: int, norm: bool, staleness: int) -> None:
    if isinstance(schedule, Pattern) != (rule in PERIODIC_RULES):
        kind = "periodic" if isinstance(schedule, Pattern) else "one flushed step"
        raise InvalidPlan(f"schedule {schedule.name} is {kind}, which does not fit {rule} updates")
    if isinstance(schedule, Orders) and schedule.update_every:
        raise InvalidPlan(f"schedule {schedule.name} has optimizer steps in its rows, which only patterns may have")
    if batches < 1 or (batches > 1 and rule not in PERIODIC_RULES):
        raise UnsupportedRequest(
            f"one program cannot train {batches} global batches under {rule} updates, which flush after each batch",
            remedy="batches=1, and run the program as often as there are global batches",
        )
    if norm and rule != "synchronous":
        raise UnsupportedRequest(
            f"{rule} updates have no norm of all gradients: stages step at different times, or models are several",
            remedy="synchronous updates, or neither clip_norm nor precision fp16",
        )
    if staleness and rule != "elastic_averaging":
        raise UnsupportedRequest(
            f"staleness {staleness} needs elastic averaging; {rule} updates have no reference model",
            remedy="staleness 0, or plan with update_rules: [elastic_averaging]",
        )


def _with_versions(program: Program, row: RankRow) -> Program:
    stages = [replace(one, versions=count_versions(*row, one.stage)) for one in program.stages]
    return replace(program, stages=tuple(stages))


def _attempts(
    problem: Problem,
    programs: Sequence[Program],
    wiring: Wiring,
    rows: Sequence[RankRow],
    allocation: Allocation,
    transport: Transport,
    early: bool,
    norm: bool,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all ranks' instructions and where each rank's start: first in gloo's order, then in orders for NCCL."""
    periodic = programs[0].update_rule in PERIODIC_RULES
    divided = problem.degrees.tensor > 1
    for late in (False,) if transport == "gloo" or periodic or not programs[0].groups else (False, True):
        if periodic:
            updates = [
                periodic_updates(p, r, allocation, early=early, divided=divided)
                for p, r in zip(programs, rows, strict=True)
            ]
        else:
            updates = [
                flushed_updates(p, r.operations, early=early, norm=norm, late=late, divided=divided)
                for p, r in zip(programs, rows, strict=True)
            ]
        codes, starts = _emitted(wiring, rows, [table_of(each) for each in updates])
        yield codes, starts
        if transport == "nccl":
            yield posted_as_sent(wiring, codes, starts)


def _emitted(wiring: Wiring, rows: Sequence[RankRow], updates: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    nothing = np.empty((0, 4), dtype=np.int32)
    pairs = list(zip(rows, updates, strict=True))
    sizes = [emit(wiring, rank, row.operations, table, nothing) for rank, (row, table) in enumerate(pairs)]
    starts = prefix_sums(sizes)
    codes = np.empty((int(starts[-1]), 4), dtype=np.int32)
    for rank, (row, table) in enumerate(pairs):
        emit(wiring, rank, row.operations, table, codes[starts[rank] : starts[rank + 1]])
    return codes, starts
