"""The most promising configurations with their cuts moved one place at a time, as long as their promise gets better.

The parts come from times and bytes of layers alone; the throughput model knows all-reduces and transfers as well, and
the memory estimate the tensors at the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.solvers.costs.tables.stage_table import cut_places
from penstock.solvers.grid.block_partition import moved_cuts
from penstock.solvers.grid.places import Places
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.wpipe.shape import Shape, allocation_of, missing_bytes
from penstock.solvers.planners.wpipe.throughput import Links, period_ns

MAX_MOVES = 160


class RatedCut(NamedTuple):
    """A configuration with its promise.

    ``missing_bytes``: what its tightest place lacks for certain (at most 0: it may fit); ``buffers_missing_bytes``:
    what it may lack with every buffer (at most 0: it fits).
    """

    period_ns: int
    missing_bytes: int
    buffers_missing_bytes: int
    shape: Shape
    layout: str
    allocation: Allocation


def priced(
    problem: Problem, shape: Shape, layout: str, places: Places, bounds: tuple[int, ...], links: Links
) -> RatedCut:
    """A configuration with what it promises and needs."""
    allocation = allocation_of(shape, bounds, places)
    least, most = (max(missing_bytes(problem, shape, bounds, places, careful)) for careful in (False, True))
    return RatedCut(period_ns(problem, shape, allocation, links), least, most, shape, layout, allocation)


def rank(found: RatedCut) -> tuple[object, ...]:
    """What fits before what does not, the faster before the slower; of equals fewer devices first, then by cuts."""
    used = found.shape.depth * found.shape.width
    starts = tuple(stage.first for stage in found.allocation.stages)
    return max(0, found.missing_bytes), found.period_ns, used, found.shape, found.layout, starts


def improved_cuts(problem: Problem, found: RatedCut) -> RatedCut:
    """Return the configuration after local search: the first better move is taken, at most ``MAX_MOVES`` are tried."""
    stages = found.allocation.stages
    places = tuple(stage.devices for stage in stages[: found.shape.depth])
    links = Links(problem, places)
    best, left = found, MAX_MOVES
    moved = True
    while moved and left > 0:
        moved = False
        for bounds in _moves(problem, best.allocation):
            if left == 0:
                break
            left -= 1
            other = priced(problem, best.shape, best.layout, places, bounds, links)
            if _needs(other) < _needs(best):
                best, moved = other, True
                break
    return best


def _needs(found: RatedCut) -> tuple[int, int, int]:
    return max(0, found.missing_bytes), max(0, found.buffers_missing_bytes), found.period_ns


def _moves(problem: Problem, allocation: Allocation) -> Iterator[tuple[int, ...]]:
    """Yield the bounds with one cut moved by one place, to the left or right, no part left empty."""
    places = cut_places(problem).tolist()
    cuts = [*(places.index(stage.first) for stage in allocation.stages), len(places) - 1]
    yield from (tuple(places[cut] for cut in near) for near in moved_cuts(cuts, 1))
