"""The most promising configurations with their cuts moved one place at a time, while their estimate improves.

The parts come from times and bytes of layers alone. The throughput model also counts all-reduces and transfers, and
the memory estimate counts the tensors at the cuts.
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
    """A configuration with its estimate.

    ``missing_bytes``: what its tightest place certainly lacks (at most 0: it may fit); ``buffers_missing_bytes``:
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
    """Return a configuration with its estimated time and memory."""
    allocation = allocation_of(shape, bounds, places)
    least, most = (max(missing_bytes(problem, shape, bounds, places, careful)) for careful in (False, True))
    return RatedCut(period_ns(problem, shape, allocation, links), least, most, shape, layout, allocation)


def rank(rated: RatedCut) -> tuple[object, ...]:
    """Return a sort key: what fits before what does not, the faster before the slower.

    Ties go to fewer devices, then by cuts.
    """
    used = rated.shape.depth * rated.shape.width
    starts = tuple(stage.first for stage in rated.allocation.stages)
    return max(0, rated.missing_bytes), rated.period_ns, used, rated.shape, rated.layout, starts


def improved_cuts(problem: Problem, start: RatedCut) -> RatedCut:
    """Return the configuration after local search: take the first better move, try at most ``MAX_MOVES``."""
    stages = start.allocation.stages
    places = tuple(stage.devices for stage in stages[: start.shape.depth])
    links = Links(problem, places)
    best, left = start, MAX_MOVES
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


def _needs(rated: RatedCut) -> tuple[int, int, int]:
    return max(0, rated.missing_bytes), max(0, rated.buffers_missing_bytes), rated.period_ns


def _moves(problem: Problem, allocation: Allocation) -> Iterator[tuple[int, ...]]:
    """Yield the bounds with one cut moved by one place, to the left or right, no part left empty."""
    places = cut_places(problem).tolist()
    cuts = [*(places.index(stage.first) for stage in allocation.stages), len(places) - 1]
    yield from (tuple(places[cut] for cut in near) for near in moved_cuts(cuts, 1))
