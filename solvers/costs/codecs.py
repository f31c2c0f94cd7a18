"""The edges of a plan that encode their tensors: edges where, by simulation, encoding saves more than it costs.

WPipe, appendix A.3: compression halves the bytes sent, and is slower where transfers are short. The gain of an edge
depends on the other edges, so two searches start from no edge and from all: one adds the edges that make the plan
faster, the other drops the edges without which it is no slower. The order of operations is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem

Edges = frozenset[int]
"""Edges by the number of the stage before them."""

Judge = Callable[[Allocation], int | None]
"""Time per global batch of an allocation; None where it does not fit."""


def with_codecs(allocation: Allocation, edges: Edges) -> Allocation:
    """Return the allocation with the codec on these edges and no others."""
    stages = enumerate(allocation.stages)
    return allocation.having(replace(each, coded=(allocation.previous(s) in edges, s in edges)) for s, each in stages)


def codable_edges(problem: Problem, allocation: Allocation) -> tuple[int, ...]:
    """Return the edges with tensors that the codec can encode, between devices of known conversion speed."""
    rows = most_rows(problem, allocation)
    edges = []
    for s, stage in enumerate(allocation.stages):
        other = allocation.next(s)
        if other is None or problem.encodable[stage.last][0] == 0 or transfer(problem, allocation, s, rows, 0) is None:
            continue
        kinds = {problem.devices[d].kind for d in (*stage.devices, *allocation.stages[other].devices)}
        if kinds <= problem.codec_speeds.keys():
            edges.append(s)
    return tuple(edges)


def best_codecs(problem: Problem, allocation: Allocation, value_ns: int, judge: Judge) -> Edges:
    """Return the edges that should encode; no edge if encoding does not beat ``value_ns``, the time without it."""
    edges = codable_edges(problem, allocation)
    times: dict[Edges, int | None] = {frozenset(): value_ns}

    def time_ns(chosen: Edges) -> int | None:
        if chosen not in times:
            times[chosen] = judge(with_codecs(allocation, chosen))
        return times[chosen]

    added: Edges = frozenset()
    for edge in edges:
        now, then = time_ns(added), time_ns(added | {edge})
        if then is not None and now is not None and then < now:
            added |= {edge}
    kept = frozenset(edges)
    for edge in edges:
        now, then = time_ns(kept), time_ns(kept - {edge})
        if then is not None and (now is None or then <= now):
            kept -= {edge}
    tried = [(time, len(chosen), sorted(chosen)) for chosen in (added, kept) if (time := time_ns(chosen)) is not None]
    return frozenset(min(tried)[2])
