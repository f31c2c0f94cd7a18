"""Costs of an allocation as arrays for the simulator's kernels: computed once, used for every order of it.

Micro-batches from ``cut`` on are of row class 1 (one row less), the others of class 0. A *flow* is the transfers of one
stage in one direction (0 forward, 1 backward) in one row class; they have the indices from ``flow_offset[flow]`` on, in
the order of sending. A *user* of resources is a flow, a chain of buckets (``num_flows + chain``), or a tie
(``num_flows + num_chains + tie``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.schemas.program import INPUT as INPUT_GRADIENT
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.reductions import Chains, Reductions, all_reductions, make_chains
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.costs.ties import TiedSum, Ties, tie_arrays, tied_sums
from penstock.solvers.costs.transfer import Transfer
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.update_rules import UpdateRule

DURATION, INPUT, OUTPUT, FLOW, CHANNEL, FLOW_NS, OTHER, STAGE = range(8)
"""Columns of an operation's costs, by (stage or slot, kind, row class).

INPUT and OUTPUT are the places of micro-batch 0's input and output in ``arrived``; FLOW, CHANNEL and FLOW_NS are the
output's flow, channel and transfer time (-1, 0, 0 where nothing travels). OTHER is the stage that receives the output,
STAGE the operation's stage.
"""

NOWHERE = -(2**62)
"""No input to wait for, no output to pass on."""

LINES = 2 * (STEP + 1)
"""Lines of a slot: operation kinds times row classes."""


@Fields.register
class FlowTables(NamedTuple):
    """Arrays for kernels; S stages, F flows, U users of resources. ``places``: entries of ``arrived``.

    The entries are each stage's inputs from the previous and from the next stage; where steps wait for their buckets,
    also the last micro-batches of rounds, once these are reduced.
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


@dataclass(frozen=True, eq=False)
class Tables:
    """Costs of every stage, edge, bucket and tie of one allocation.

    ``operations`` and ``operations_apart`` are (S, 6, 2, 8) by operation kind (STEP the last), row class and column:
    without and with separate recomputation. ``periodic``: rounds end with a step in the rows.
    """

    problem: Problem
    allocation: Allocation
    graph: StepGraph
    periodic: bool
    flows: FlowTables
    chains: Chains
    reductions: Reductions
    sums: tuple[TiedSum, ...]
    ties: Ties
    operations: np.ndarray
    operations_apart: np.ndarray
    resource_ids: tuple[int, ...]
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
    graph = StepGraph(problem, allocation)
    every = update_every or (allocation.num_micro_batches,) * len(allocation.stages)
    chains = make_chains(problem, allocation, graph.reductions, [rows for rows, _count in graph.classes], every)
    sums = tied_sums(problem, allocation, rule)
    flows, resource_ids = _flow_tables(graph, sums, bool(update_every))
    together, apart = _durations(graph)
    waits = np.asarray([bool(update_every) and bool(each) for _group, each in graph.reductions])
    return Tables(
        problem=problem,
        allocation=allocation,
        graph=graph,
        periodic=bool(update_every),
        flows=flows,
        chains=chains,
        reductions=all_reductions(chains),
        sums=sums,
        ties=tie_arrays(allocation, sums, every, bool(update_every)),
        operations=_operation_table(flows, together, waits),
        operations_apart=_operation_table(flows, apart, waits),
        resource_ids=resource_ids,
        unreachable=_unreachable(graph, sums),
    )


def _sent(graph: StepGraph) -> Iterator[tuple[tuple[int, int, int], Transfer]]:
    """Yield the transfers with their (stage, direction, row class), in this order."""
    for s, ways in enumerate(graph.moves):
        for direction, moves in enumerate(ways):
            yield from (((s, direction, c), move) for c, move in enumerate(moves) if move is not None)


def _flow_tables(graph: StepGraph, sums: tuple[TiedSum, ...], periodic: bool) -> tuple[FlowTables, tuple[int, ...]]:
    allocation, buckets = graph.allocation, [each for _group, each in graph.reductions]
    count = len(allocation.stages)
    cut = graph.classes[0][1]
    batches = [allocation.micro_batches(s) for s in range(count)]
    sizes = np.asarray([len(each) for each in batches], dtype=np.int64)
    flow_of = np.full(count * 4, -1, dtype=np.int32)
    keys: list[tuple[int, int, int]] = []
    durations, firsts, offsets, used = [], [], [0], []
    for (s, direction, c), move in _sent(graph):
        low = max(batches[s].start, cut if c else 0)
        high = batches[s].stop if c else min(batches[s].stop, cut)
        flow_of[(s * 2 + direction) * 2 + c] = len(keys)
        keys.append((s, direction, c))
        durations.append(move.duration_ns)
        firsts.append(low)
        offsets.append(offsets[-1] + max(0, high - low))
        used.append(graph.channels(s, direction, c))
    used += [each[0].resources if each else () for each in buckets]
    used += [each.resources for each in sums]
    ids = sorted({r for each in used for r in each})
    compact = {r: i for i, r in enumerate(ids)}
    flat = [compact[r] for each in used for r in each]
    return FlowTables(
        cut=cut,
        places=(3 if periodic and any(buckets) else 2) * int(sizes.sum()),
        first=_ints([each.start for each in batches]),
        base=prefix_sums(sizes),
        previous=_small([-1 if (p := allocation.previous(s)) is None else p for s in range(count)]),
        next=_small([-1 if (n := allocation.next(s)) is None else n for s in range(count)]),
        flow_of=flow_of,
        flow_stage=_small([s for s, _d, _c in keys]),
        flow_direction=_small([d for _s, d, _c in keys]),
        flow_ns=_ints(durations),
        flow_first=_ints(firsts),
        flow_offset=_ints(offsets),
        resource_start=prefix_sums([len(each) for each in used]),
        resources=_small(flat),
        watch_start=prefix_sums(np.bincount(_ints(flat), minlength=len(ids))),
    ), tuple(ids)


def _durations(graph: StepGraph) -> tuple[np.ndarray, np.ndarray]:
    """Return (S, 6, 2): the durations of operations without and with separate recomputation."""
    together = np.zeros((len(graph.costs), STEP + 1, 2), dtype=np.int64)
    apart = np.zeros_like(together)
    for s, costs in enumerate(graph.costs):
        for c in (0, 1):
            together[s, :STEP, c] = costs[-c].durations_ns()
            apart[s, :STEP, c] = costs[-c].durations_ns(apart=True)
    together[:, STEP] = apart[:, STEP] = np.asarray(graph.update_ns)[:, None]
    return together, apart


def _operation_table(flows: FlowTables, duration_ns: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """Return the table (S, 6, 2, 8) with the columns above; steps of stages in ``waits`` wait for their buckets."""
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


def _unreachable(graph: StepGraph, sums: tuple[TiedSum, ...]) -> tuple[str, ...]:
    """Return a sentence for each edge, group and tie whose devices are not connected."""
    allocation, devices = graph.allocation, graph.problem.devices
    sentences = []
    for (s, direction, c), move in _sent(graph):
        if move.duration_ns >= NEVER_NS and c == 0:
            other = allocation.next(s) if direction == 0 else allocation.previous(s)
            sentences.append(f"Nothing connects the devices of stage {s} with those of stage {other}.")
    for group, each in graph.reductions:
        if any(bucket.duration_ns >= NEVER_NS for bucket in each):
            names = ", ".join(devices[d].name for d in group.devices)
            replicas = " and ".join(f"stage {s}" for s in group.stages)
            sentences.append(f"Nothing connects the replicas of {replicas}: {names}.")
    for tie in sums:
        if tie.duration_ns >= NEVER_NS:
            names = ", ".join(devices[d].name for d in tie.devices)
            sentences.append(f"Nothing connects the copies of the tied parameter {tie.name!r}: {names}.")
    return tuple(sentences)


def _ints(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def _small(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)
