"""Costs of an allocation as arrays for the simulator's kernels: computed once, used for every order of it.

Micro-batches from ``cut`` on are of row class 1 (one row less), the others of class 0. A *flow* is what one stage
sends in one direction (0 forward, 1 backward) in one row class; its transfers have the indices from
``flow_offset[flow]`` on, in the order of sending. A *user* of resources is a flow, a chain of buckets
(``num_flows + chain``), or a tie (``num_flows + num_chains + tie``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, RECOMPUTE, WEIGHT
from penstock.schemas.program import INPUT as INPUT_GRADIENT
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.buckets import Bucket
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import Static, static_bytes, step_bytes
from penstock.solvers.costs.reductions import (
    Chains,
    ReductionGroup,
    Reductions,
    all_reductions,
    group_buckets,
    make_chains,
    reduction_groups,
)
from penstock.solvers.costs.stage import StageCosts, input_bytes, recomputed_inputs, stage_costs, stage_rows, update_ns
from penstock.solvers.costs.ties import TiedSum, Ties, tie_arrays, tied_sums
from penstock.solvers.costs.transfer import Transfer, boundary_bytes, message_bytes, transfer
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.update_rules import UpdateRule

DURATION, INPUT, OUTPUT, FLOW, CHANNEL, FLOW_NS, OTHER, STAGE = range(8)
"""Columns of what an operation needs and makes, by (stage or slot, kind, row class): its duration; where in
``arrived`` its micro-batch 0 looks for its input and puts its output; flow, channel and transfer time of that output
(-1, 0, 0 where nothing travels); the stage that receives, and its own."""

NOWHERE = -(2**62)
"""No input to wait for, no output to pass on."""

LINES = 2 * (STEP + 1)
"""Lines of a slot: operation kinds times row classes."""


@Fields.register
class FlowTables(NamedTuple):
    """Arrays for kernels; S stages, F flows, U users of resources. ``places``: entries of ``arrived``.

    They are what stages receive from the previous and from the next one, and where steps wait for their buckets also
    the last micro-batches of rounds that are reduced.
    """

    cut: int
    places: int
    first: np.ndarray
    base: np.ndarray
    previous: np.ndarray
    next: np.ndarray
    flow_of: np.ndarray
    flow_stage: np.ndarray
    flow_direction: np.ndarray
    flow_ns: np.ndarray
    flow_first: np.ndarray
    flow_offset: np.ndarray
    resource_start: np.ndarray
    resources: np.ndarray
    watch_start: np.ndarray


class StageMemory(NamedTuple):
    """Bytes of one micro-batch on the busiest replica of a stage."""

    stash: int
    workspace: int
    rebuilt_inside: int
    rebuilt_whole: int
    received_input: int
    received_gradient: int
    sent_output: int
    sent_gradient: int


@dataclass(frozen=True, eq=False)
class Tables:
    """Costs of every stage, edge, bucket and tie of one allocation.

    ``operations`` and ``operations_apart`` are (S, 6, 2, 8) by operation kind (STEP the last), row class and column:
    without and with recomputation as an operation of its own. ``memory[s][c]`` is per row class. ``periodic``: rounds
    end with a step in the rows.
    """

    problem: Problem
    allocation: Allocation
    rows: tuple[int, ...]
    periodic: bool
    flows: FlowTables
    chains: Chains
    reductions: Reductions
    sums: tuple[TiedSum, ...]
    ties: Ties
    operations: np.ndarray
    operations_apart: np.ndarray
    resource_ids: tuple[int, ...]
    update_ns: tuple[int, ...]
    static: tuple[Static, ...]
    step_bytes: tuple[int, ...]
    memory: tuple[tuple[StageMemory, ...], ...]
    unreachable: tuple[str, ...]


@lru_cache(maxsize=32)
def cost_tables(
    problem: Problem,
    allocation: Allocation,
    overlap: bool,
    update_every: tuple[int, ...] = (),
    rule: UpdateRule = "synchronous",
) -> Tables:
    """Return the tables of an allocation; ``overlap``: whether all-reduces overlap the last backward.

    ``update_every`` as in ``Orders``.
    """
    if problem.rules.overlap_all_reduce != overlap:
        problem = replace(problem, rules=replace(problem.rules, overlap_all_reduce=overlap))
    classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)
    rows = tuple(size for size, _count in classes)
    stages = allocation.stages
    moves = _transfers(problem, allocation, rows)
    groups = reduction_groups(allocation)
    made = tuple(group_buckets(problem, group) for group in groups)
    every = update_every or (allocation.num_micro_batches,) * len(stages)
    chains = make_chains(problem, allocation, groups, made, rows, every)
    sums = tied_sums(problem, allocation, rule)
    flows, resource_ids = _flow_tables(problem, allocation, classes, moves, made, sums, bool(update_every))
    together, apart = _durations(problem, stages, rows)
    waits = np.asarray([bool(update_every) and bool(each) for each in made])
    return Tables(
        problem=problem,
        allocation=allocation,
        rows=rows,
        periodic=bool(update_every),
        flows=flows,
        chains=chains,
        reductions=all_reductions(chains),
        sums=sums,
        ties=tie_arrays(allocation, sums, every, bool(update_every)),
        operations=_operation_table(flows, together, waits),
        operations_apart=_operation_table(flows, apart, waits),
        resource_ids=resource_ids,
        update_ns=tuple(update_ns(problem, stage) for stage in stages),
        static=tuple(static_bytes(problem, stage) for stage in stages),
        step_bytes=tuple(step_bytes(problem, stage) for stage in stages),
        memory=tuple(
            tuple(_stage_memory(problem, allocation, s, c, size, moves) for c, size in enumerate(rows))
            for s in range(len(stages))
        ),
        unreachable=_unreachable(problem, allocation, moves, groups, made, sums),
    )


Moves = dict[tuple[int, int, int], Transfer]
Made = tuple[tuple[Bucket, ...], ...]
RowClasses = tuple[tuple[int, int], ...]


def _transfers(problem: Problem, allocation: Allocation, rows: tuple[int, ...]) -> Moves:
    """Return the transfers by (stage, direction, row class); no entry where nothing is sent."""
    found: Moves = {}
    for s in range(len(allocation.stages)):
        for direction in (0, 1):
            for c, size in enumerate(rows):
                move = transfer(problem, allocation, s, size, direction)
                if move is not None:
                    found[s, direction, c] = move
    return found


def _flow_tables(
    problem: Problem,
    allocation: Allocation,
    classes: RowClasses,
    moves: Moves,
    made: Made,
    sums: tuple[TiedSum, ...],
    periodic: bool,
) -> tuple[FlowTables, tuple[int, ...]]:
    stages = allocation.stages
    count = len(stages)
    cut = classes[0][1]
    batches = [allocation.micro_batches(s) for s in range(count)]
    sizes = np.asarray([len(each) for each in batches], dtype=np.int64)
    flow_of = np.full(count * 4, -1, dtype=np.int32)
    keys: list[tuple[int, int, int]] = []
    firsts, offsets, used = [], [0], []
    for key, move in sorted(moves.items()):
        s, direction, c = key
        low = max(batches[s].start, cut if c else 0)
        high = batches[s].stop if c else min(batches[s].stop, cut)
        flow_of[(s * 2 + direction) * 2 + c] = len(keys)
        keys.append(key)
        firsts.append(low)
        offsets.append(offsets[-1] + max(0, high - low))
        used.append(_resources(problem, allocation, key, move))
    used += [each[0].resources if each else () for each in made]
    used += [each.resources for each in sums]
    ids = sorted({r for each in used for r in each})
    compact = {r: i for i, r in enumerate(ids)}
    flat = [compact[r] for each in used for r in each]
    return FlowTables(
        cut=cut,
        places=(3 if periodic and any(made) else 2) * int(sizes.sum()),
        first=_ints([each.start for each in batches]),
        base=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        previous=_small([-1 if (p := allocation.previous(s)) is None else p for s in range(count)]),
        next=_small([-1 if (n := allocation.next(s)) is None else n for s in range(count)]),
        flow_of=flow_of,
        flow_stage=_small([s for s, _d, _c in keys]),
        flow_direction=_small([d for _s, d, _c in keys]),
        flow_ns=_ints([moves[key].duration_ns for key in keys]),
        flow_first=_ints(firsts),
        flow_offset=_ints(offsets),
        resource_start=_starts([len(each) for each in used]),
        resources=_small(flat),
        watch_start=_starts(np.bincount(_ints(flat), minlength=len(ids)).tolist()),
    ), tuple(ids)


def _resources(problem: Problem, allocation: Allocation, key: tuple[int, int, int], move: Transfer) -> tuple[int, ...]:
    """Return the network's own resources, or the private channel of the edge (numbered by its lower stage)."""
    s, direction, _c = key
    if problem.rules.shared:
        return move.resources
    edge = s if direction == 0 else s - 1
    if problem.rules.channel == "half":
        return (edge,)
    return (2 * edge + direction,) if problem.rules.channel == "full" else ()


def _durations(problem: Problem, stages: tuple[Stage, ...], rows: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    together = np.zeros((len(stages), STEP + 1, 2), dtype=np.int64)
    apart = np.zeros_like(together)
    for s, stage in enumerate(stages):
        for c in (0, 1):
            cost = stage_costs(problem, stage, rows[min(c, len(rows) - 1)])
            for table, again in ((together, cost.recompute_ns), (apart, 0)):
                table[s, FORWARD, c] = cost.forward_ns
                table[s, BACKWARD, c] = cost.backward_ns + again
                table[s, INPUT_GRADIENT, c] = cost.backward_ns - cost.weight_ns + again
                table[s, WEIGHT, c] = cost.weight_ns
                table[s, RECOMPUTE, c] = cost.recompute_ns
                table[s, STEP, c] = update_ns(problem, stage)
    return together, apart


def _operation_table(flows: FlowTables, duration_ns: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """(S, 6, 2, 8): see the columns; steps of stages in ``waits`` wait for their buckets."""
    count = len(duration_ns)
    table = np.zeros((count, STEP + 1, 2, 8), dtype=np.int64)
    table[..., DURATION] = duration_ns
    table[..., [INPUT, OUTPUT]] = NOWHERE
    table[..., [FLOW, OTHER]] = -1
    table[..., STAGE] = np.arange(count)[:, None, None]
    place = flows.base[:-1] - flows.first
    total = int(flows.base[-1])
    for way, kinds in ((0, (FORWARD,)), (1, (BACKWARD, INPUT_GRADIENT))):
        source, other = (flows.previous, flows.next) if way == 0 else (flows.next, flows.previous)
        takes, gives = np.flatnonzero(source >= 0), np.flatnonzero(other >= 0)
        flow = flows.flow_of.reshape(count, 2, 2)[:, way]
        for kind in kinds:
            table[takes, kind, :, INPUT] = (way * total + place[takes])[:, None]
            table[gives, kind, :, OUTPUT] = (way * total + place[other[gives]])[:, None]
            table[:, kind, :, OTHER] = other[:, None]
            table[:, kind, :, FLOW] = flow
            table[:, kind, :, CHANNEL] = (2 * np.arange(count) + way)[:, None]
            if flows.flow_ns.size:
                sends = flow >= 0
                table[:, kind, :, FLOW_NS] = np.where(sends, flows.flow_ns[flow], 0)
    if waits.any():
        table[waits, STEP, :, INPUT] = (2 * total + place[waits])[:, None]
    return table


def _stage_memory(problem: Problem, allocation: Allocation, s: int, c: int, rows: int, moves: Moves) -> StageMemory:
    stage = allocation.stages[s]
    cost = stage_costs(problem, stage, rows)
    plain = stage_costs(problem, stage.plain, rows) if stage.recomputes else cost
    received_input = _buffer(problem, allocation, s, allocation.previous(s), rows, (0, c), moves)
    return StageMemory(
        stash=cost.kept_bytes + _handed_input(problem, allocation, s, rows, received_input),
        workspace=plain.workspace_bytes,
        rebuilt_inside=cost.workspace_bytes - plain.workspace_bytes,
        rebuilt_whole=_rebuilt(problem, stage, rows, plain, cost),
        received_input=received_input,
        received_gradient=_buffer(problem, allocation, s, allocation.next(s), rows, (1, c), moves),
        sent_output=_buffer(problem, allocation, s, s, rows, (0, c), moves),
        sent_gradient=_buffer(problem, allocation, s, s, rows, (1, c), moves),
    )


def _handed_input(problem: Problem, allocation: Allocation, s: int, rows: int, received: int) -> int:
    """Return the input bytes that a stage recomputing its first layers keeps if one of the same device passes it on.

    A received input is a buffer; without buffers ``kept_bytes`` includes it.
    """
    stage = allocation.stages[s]
    begins = any(first == stage.first for first, _last in stage.recompute)
    if not begins or received or not problem.memory.count_buffers or allocation.previous(s) is None:
        return 0
    return input_bytes(problem, stage.first, stage_rows(stage, rows))


def _rebuilt(problem: Problem, stage: Stage, rows: int, plain: StageCosts, cost: StageCosts) -> int:
    """Return the bytes that recomputing everything at once adds to those kept."""
    return plain.kept_bytes - cost.kept_bytes + recomputed_inputs(problem, stage, stage_rows(stage, rows))


def _buffer(
    problem: Problem,
    allocation: Allocation,
    holder: int,
    sender: int | None,
    rows: int,
    way: tuple[int, int],
    moves: Moves,
) -> int:
    """Return the bytes of a send or receive buffer on ``holder`` for what ``sender`` sends; 0 where nothing is sent.

    A receiver of an encoded message has buffers for the message and for the decoded tensors.
    """
    direction, c = way
    if sender is None or not problem.memory.count_buffers or (sender, direction, c) not in moves:
        return 0
    cut = allocation.stages[sender].last if direction == 0 else allocation.stages[sender].first - 1
    share = stage_rows(allocation.stages[holder], rows)
    size = boundary_bytes(problem, cut, share, direction)
    coded = allocation.stages[sender].coded[1 - direction]
    return size + message_bytes(problem, cut, share, direction, coded=True) if coded and holder != sender else size


def _unreachable(
    problem: Problem,
    allocation: Allocation,
    moves: Moves,
    groups: tuple[ReductionGroup, ...],
    made: Made,
    sums: tuple[TiedSum, ...],
) -> tuple[str, ...]:
    """Return a sentence for each edge, group and tie whose devices are not connected."""
    sentences = []
    for (s, direction, c), move in sorted(moves.items()):
        if move.duration_ns >= NEVER_NS and c == 0:
            other = allocation.next(s) if direction == 0 else allocation.previous(s)
            sentences.append(f"Nothing connects the devices of stage {s} with those of stage {other}.")
    for group, each in zip(groups, made, strict=True):
        if any(bucket.duration_ns >= NEVER_NS for bucket in each):
            names = ", ".join(problem.devices[d].name for d in group.devices)
            replicas = " and ".join(f"stage {s}" for s in group.stages)
            sentences.append(f"Nothing connects the replicas of {replicas}: {names}.")
    for tie in sums:
        if tie.duration_ns >= NEVER_NS:
            names = ", ".join(problem.devices[d].name for d in tie.devices)
            sentences.append(f"Nothing connects the copies of the tied parameter {tie.name!r}: {names}.")
    return tuple(sentences)


def _ints(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def _small(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def _starts(lengths: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(_ints(lengths)))).astype(np.int64)
