"""A building block of a V once for each micro-batch, then moved together where the pipeline fills and drains.

Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024: repeat, squeeze, reorder. Every operation
takes one unit. Weight gradients run in the units that a rank has left, the upper chunk's first. What fills the pipeline
(before the first gradient of the lower chunk on rank 0) and what drains it (after rank 0's last forward) moves to the
first free unit after its inputs at which no rank keeps more than before. What drains it does so twice, the second time
with the weight gradients in the units left over. From 2 p micro-batches on the orders equal the authors' ``zbv_greedy``
(github.com/sail-sg/zero-bubble-pipeline-parallelism), operation by operation. With fewer micro-batches the authors can
leave the drain as it is, which is longer.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

PERIOD = 6
"""The length of a period: F, I and W of both chunks, a unit each."""
FORWARD_DOWN, FORWARD_UP, INPUT_UP, INPUT_DOWN, WEIGHTS = range(5)
"""The kinds in the order that a micro-batch takes; ``WEIGHTS`` are both chunks', in the order of their inputs'."""

Starts = list[list[list[int]]]
"""The unit of each operation: [rank][kind][micro-batch]."""


class Placed(NamedTuple):
    """An operation at a unit, and whether it is part of the fill, of the drain, or of neither."""

    unit: int
    rank: int
    kind: int
    number: int
    fills: bool
    drains: bool


class Occupancy(NamedTuple):
    """The state before a unit: weight gradients that wait, and chunks of micro-batches that are kept."""

    waiting: int
    kept: int


def reordered(block: Sequence[Sequence[int]], number: int) -> Starts:
    """Return the units of forwards and of gradients of inputs, four kinds on each rank, for ``number`` micro-batches.

    ``block[r]``: the first micro-batch's units of the four kinds on rank r.
    """
    starts = [[[first + PERIOD * m for m in range(number)] for first in kinds[:WEIGHTS]] for kinds in block]
    moved = _with_weights(starts)
    _move_together(moved)
    starts = [of_rank[:WEIGHTS] for of_rank in _squeezed(moved)]
    _move_drain(starts, max(max(_kept(of_rank)) for of_rank in _with_weights(starts)))
    return starts


def weight_units(of_rank: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return when a rank runs its upper and lower chunks' weight gradients: in its first free units."""
    kinds = {unit: kind for kind, units in enumerate(of_rank[:WEIGHTS]) for unit in units}
    weights: tuple[list[int], list[int]] = ([], [])
    waiting = [0, 0]
    unit, left = min(kinds), 2 * len(of_rank[0])
    while left:
        kind = kinds.get(unit)
        if kind is None and any(waiting):
            chunk = 0 if waiting[0] else 1
            waiting[chunk] -= 1
            weights[chunk].append(unit)
            left -= 1
        elif kind is not None and kind >= INPUT_UP:
            waiting[kind - INPUT_UP] += 1
        unit += 1
    return weights


def _with_weights(starts: Starts) -> Starts:
    return [[*of_rank, sorted(unit for chunk in weight_units(of_rank) for unit in chunk)] for of_rank in starts]


def _kept(of_rank: Sequence[Sequence[int]]) -> list[int]:
    """Return the chunks of micro-batches that a rank keeps, from F to W, in each unit."""
    change = [0] * (max(of_rank[WEIGHTS]) + 1)
    for kind, units in enumerate(of_rank):
        for unit in units:
            change[unit] += {FORWARD_DOWN: 1, FORWARD_UP: 1, WEIGHTS: -1}.get(kind, 0)
    return list(accumulate(change))


def _placed(starts: Starts) -> Iterator[Placed]:
    """Yield all operations in the order of their units and ranks, as they stand when the walk begins."""
    last = len(starts[0][FORWARD_DOWN]) - 1
    units = ((t, r, k, m) for r, kinds in enumerate(starts) for k, each in enumerate(kinds) for m, t in enumerate(each))
    filled = ended = False
    for unit, rank, kind, m in sorted(units):
        filled = filled or (rank == 0 and kind == INPUT_DOWN)
        yield Placed(unit, rank, kind, m, not filled, filled and ended)
        ended = ended or (kind == FORWARD_DOWN and m == last)


def _inputs(rank: int, kind: int, p: int) -> list[tuple[int, int]]:
    """Return (rank, kind) of the inputs, in its micro-batch, of an operation other than a weight gradient."""
    other = rank - 1 if kind in (FORWARD_DOWN, INPUT_UP) else rank + 1
    return [(rank, kind - 1)] * (kind > 0) + [(other, kind)] * (0 <= other < p)


def _ready(starts: Starts, rank: int, kind: int, m: int) -> int:
    """Return the first unit after an operation's inputs and after the same operation of the previous micro-batch."""
    before = [starts[other][of][m] for other, of in _inputs(rank, kind, len(starts))] if kind != WEIGHTS else []
    before += [starts[rank][kind][m - 1]] if m else []
    return max(before, default=-1) + 1


def _move_together(starts: Starts) -> None:
    """Move fill and drain, in the order of their units; weight gradients are operations like others."""
    curves = [_kept(of_rank) for of_rank in starts]
    most = max(max(curve) for curve in curves)
    busy: list[set[int]] = [set() for _ in starts]
    gradients: list[list[int]] = [[] for _ in starts]
    for each in _placed(starts):
        rank, kind, unit = each.rank, each.kind, each.unit
        if each.fills or each.drains:
            first = _ready(starts, rank, kind, each.number)
            if kind == WEIGHTS:
                first = max(first, gradients[rank][each.number] + 1)
            elif kind <= FORWARD_UP:
                first = _with_room(curves[rank], most, first, each.unit)
            unit = next((u for u in range(first, each.unit) if u not in busy[rank]), each.unit)
            starts[rank][kind][each.number] = unit
            for between in range(unit, each.unit):
                curves[rank][between] += {FORWARD_DOWN: 1, FORWARD_UP: 1, WEIGHTS: -1}.get(kind, 0)
        busy[rank].add(unit)
        if kind in (INPUT_UP, INPUT_DOWN):
            insort(gradients[rank], unit)


def _with_room(curve: Sequence[int], most: int, first: int, unit: int) -> int:
    """Return the first unit, ``first`` or later, from which to ``unit`` one more can be kept."""
    while unit > first and curve[unit - 1] < most:
        unit -= 1
    return unit


def _squeezed(starts: Starts) -> Starts:
    """Return each rank's operations in their order, each as early as its inputs and its rank allow."""
    result: Starts = [[[] for _ in of_rank] for of_rank in starts]
    free = [0] * len(starts)
    for each in _placed(starts):
        needed = [] if each.kind == WEIGHTS else _inputs(each.rank, each.kind, len(starts))
        unit = max([free[each.rank], *(result[rank][kind][each.number] + 1 for rank, kind in needed)])
        result[each.rank][each.kind].append(unit)
        free[each.rank] = unit + 1
    return result


class _Line:
    """A rank without its weight gradients, which run in the units that are free."""

    def __init__(self, of_rank: Sequence[Sequence[int]]) -> None:
        self.kinds = {unit: kind for kind, units in enumerate(of_rank) for unit in units}
        state = Occupancy(0, 0)
        self.state = [state]
        for unit in range(max(self.kinds) + 1):
            state = self._after(unit, state)
            self.state.append(state)

    def move(self, unit: int, to: int, most: int) -> bool:
        """Move an operation to an earlier free unit unless more than ``most`` were kept; return whether it moved."""
        kind = self.kinds.pop(unit)
        self.kinds[to] = kind
        states: list[Occupancy] = []
        state = self.state[to]
        for each in range(to, len(self.state) - 1):
            state = self._after(each, state)
            if state.kept > most:
                del self.kinds[to]
                self.kinds[unit] = kind
                return False
            if each >= unit and state == self.state[each + 1]:
                break
            states.append(state)
        self.state[to + 1 : to + 1 + len(states)] = states
        return True

    def _after(self, unit: int, state: Occupancy) -> Occupancy:
        kind = self.kinds.get(unit)
        if kind is None:
            return Occupancy(state.waiting - 1, state.kept - 1) if state.waiting else state
        if kind <= FORWARD_UP:
            return Occupancy(state.waiting, state.kept + 1)
        return Occupancy(state.waiting + 1, state.kept)


def _move_drain(starts: Starts, most: int) -> None:
    """Move the drain, in the order of its units; no rank keeps more than ``most``."""
    lines = [_Line(of_rank) for of_rank in starts]
    busy: list[set[int]] = [set() for _ in starts]
    for each in _placed(starts):
        rank, unit = each.rank, each.unit
        if each.drains:
            earlier = range(_ready(starts, rank, each.kind, each.number), each.unit)
            free = (u for u in earlier if u not in busy[rank])
            unit = next((u for u in free if lines[rank].move(each.unit, u, most)), each.unit)
            starts[rank][each.kind][each.number] = unit
        busy[rank].add(unit)
