"""Cuts of the model into several parts for each rank, such that some devices may hold each rank's parts under the pins.

Exchanging devices keeps pins only where the cut permits it: with two parts on each rank both of them have to lie in
layers that the same devices may hold. CP-SAT chooses for each block of layers its part, and for each rank the number of
devices from every set that pins treat alike, so that the busiest rank has as little work as possible. Exchanging
devices (``pins.moved``) then keeps the pins under the resulting cut, because only these sets matter there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.tables.stage_table import cut_places
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.pins import moved
from penstock.solvers.model.problem import Problem, per_problem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MOST_PAIRS = 20_000
"""The most blocks of layers times parts for which cuts are searched."""
SEARCHED = 0.3
"""Deterministic seconds of one search."""


def keeping_pins(problem: Problem, allocation: Allocation, rank_of: Sequence[int], width: int) -> Allocation:
    """Move the allocation to devices that keep the pins, and cut it again where exchanging devices is not enough.

    All pipelines are cut alike, stage s of each is on rank ``rank_of[s]``, and the stages of a rank lie on ``width``
    devices together. Raises ``UnsupportedRequest`` where no such cut keeps the pins, or the search finds no cut.
    """
    kept = moved(problem, allocation)
    if kept is None:
        bounds = pinned_bounds(problem, tuple(rank_of), width)
        kept = None if bounds is None else moved(problem, _cut_at(allocation, bounds))
    if kept is None:
        raise UnsupportedRequest(
            f"no cut was found into {len(rank_of)} parts, some of them on the same devices, that keeps the pins "
            f"({_named(problem)})",
            remedy="fewer pinned layers, or a planner of one stage per device: 'dapple' or 'relax'",
        )
    return kept


def kept_or_as_it_is(problem: Problem, allocation: Allocation) -> Allocation:
    """Return stages on single devices cut again to keep the pins; the allocation itself where no cut does."""
    if not problem.pins:
        return allocation
    try:
        return keeping_pins(problem, allocation, range(len(allocation.stages)), 1)
    except UnsupportedRequest:
        return allocation


def _named(problem: Problem) -> str:
    phrases = [
        f"layers {pin.first}–{pin.last} on {', '.join(sorted(problem.devices[d].name for d in pin.devices))}"
        for pin in problem.pins
    ]
    return "; ".join(phrases[:3]) + (" …" if len(phrases) > 3 else "")


def _cut_at(allocation: Allocation, bounds: Sequence[int]) -> Allocation:
    """Return the allocation with these parts in every pipeline, recomputing whole where a stage recomputes."""
    parts = [(first, stop - 1) for first, stop in pairwise(bounds)] * len(allocation.pipelines)
    return allocation.having(s.of_layers(*part) for s, part in zip(allocation.stages, parts, strict=True))


@per_problem
def pinned_bounds(problem: Problem, rank_of: tuple[int, ...], width: int) -> tuple[int, ...] | None:
    """Return the first layer of each part, and L; None where no such cut exists, or too much is to search.

    Times are for one sample on the first device's kind.
    """
    edges = tuple(cut_places(problem).tolist())
    if not len(rank_of) <= len(edges) - 1 <= MOST_PAIRS // len(rank_of):
        return None
    times = np.diff(problem.sample_ns[list(edges)]).tolist()
    return _Cut(problem, edges, rank_of, width).solved(times)


class _Cut:
    """The model: ``is_in[b, k]``: block b is in part k; ``used[c, r]``: rank r has devices of set c."""

    def __init__(self, problem: Problem, edges: tuple[int, ...], rank_of: tuple[int, ...], width: int) -> None:
        from ortools.sat.python import cp_model  # imports pandas: a quarter of the modules that a first plan loads

        self.model, self.rank_of, self.edges = cp_model.CpModel(), rank_of, edges
        self.is_in = self._parts()
        alike = Counter(tuple(d in pin.devices for pin in problem.pins) for d in range(problem.num_devices))
        used = self._devices(alike, width)
        for (block, part), literal in self.is_in.items():
            first, stop = edges[block], edges[block + 1]
            touched = [p for p, pin in enumerate(problem.pins) if pin.first < stop and first <= pin.last]
            for number, pinned in enumerate(alike):
                if not all(pinned[p] for p in touched):
                    self.model.add_implication(literal, used[number, rank_of[part]].negated())

    def _parts(self) -> dict[tuple[int, int], cp_model.IntVar]:
        """Put each block in one part, the same as the block before or the next part; every part has blocks."""
        blocks, parts = len(self.edges) - 1, len(self.rank_of)
        is_in = {
            (block, part): self.model.new_bool_var(f"held {block} {part}")
            for block in range(blocks)
            for part in range(max(0, parts - blocks + block), min(parts, block + 1))
        }
        for block in range(blocks):
            self.model.add_exactly_one(is_in[block, part] for part in range(parts) if (block, part) in is_in)
        for (block, part), literal in is_in.items():
            following = [is_in[pair] for pair in ((block + 1, part), (block + 1, part + 1)) if pair in is_in]
            if block < blocks - 1:
                self.model.add_bool_or(following).only_enforce_if(literal)
        return is_in

    def _devices(self, alike: Counter[tuple[bool, ...]], width: int) -> dict[tuple[int, int], cp_model.IntVar]:
        """Give each rank ``width`` devices, and no more devices of a set than exist; return ``used``."""
        ranks = sorted(set(self.rank_of))
        pairs = [(number, rank) for number in range(len(alike)) for rank in ranks]
        used = {pair: self.model.new_bool_var(f"used {pair}") for pair in pairs}
        counts = {pair: self.model.new_int_var(0, width, f"taken {pair}") for pair in pairs}
        for pair in pairs:
            self.model.add(counts[pair] <= width * used[pair])
        for rank in ranks:
            self.model.add(sum(counts[number, rank] for number in range(len(alike))) == width)
        for number, size in enumerate(alike.values()):
            self.model.add(sum(counts[number, rank] for rank in ranks) <= size)
        return used

    def solved(self, times: Sequence[int]) -> tuple[int, ...] | None:
        """Return the best cut that the search reaches: the least work on the busiest rank; None without any."""
        longest = self.model.new_int_var(0, sum(times), "longest")
        for rank in set(self.rank_of):
            of_rank = [(block, literal) for (block, part), literal in self.is_in.items() if self.rank_of[part] == rank]
            self.model.add(sum(times[block] * literal for block, literal in of_rank) <= longest)
        self.model.minimize(longest)
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = SEARCHED
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        part_of = [part for block, part in sorted(pair for pair in self.is_in if solver.value(self.is_in[pair]))]
        firsts = [self.edges[part_of.index(part)] for part in range(len(self.rank_of))]
        return (*firsts, self.edges[-1])
