"""Orders for unequal stages, transfers and memory limits: ready operations overtake operations that are not ready.

The method is list scheduling (Graham, 1966) under memory limits. Lists that can run come from three sources: building
blocks for stages in a V (``blocks``), warm-ups and delays for stages in a line (``zero_bubble``), and rankings of kinds
(Qi et al., ICLR 2024, section 3.1, has one of them) that fill the memory budget, for the real times and for simpler
ones. Then real times and each device's memory budget decide: a device takes the first operation of its list that is
ready, so weight gradients and forwards fill its waiting times. A forward overtakes only where the operations before it
keep the memory that they will need (``support.list_kernel``). The resulting orders are used as lists again, also for
slightly changed times. Transfers count as delays; their contention is decided by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.memory import free_bytes, static_bytes, transient_bytes
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.blocks import v_blocks
from penstock.solvers.schedules.support.chained import Chained, Ranking
from penstock.solvers.schedules.support.chunks import Ranks
from penstock.solvers.schedules.v_shape import V_HALF, V_MIN, V_ZERO, repeated, zb_v
from penstock.solvers.schedules.zero_bubble import delayed

PATIENCES = (0, 2, 4)
ROUNDS = 3
MOST_TRIED, MOST_IMPROVED, LEAST_IMPROVED = 120, 64, 8
IMPROVED_OPERATIONS = 100_000
"""Limits on the lists that are tried, and on the improved lists among them.

How quick a list is says little of what it becomes.
"""
SHAKEN, SHAKES = 3, 30
"""Limits: the best orders that are shaken, and how often."""
MANY_CHUNKS = 3
MOVERS: tuple[tuple[int, ...], ...] = ((WEIGHT,), (FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE))
"""The kinds of operations that overtake: weight gradients alone, or all."""
VIEWS = ((False, True), (False, False), (True, False))
"""Pairs (even times, transfers) for which orders are filled; orders for simpler times may suit the real times."""
BLOCKS = {"v-min": V_MIN, "v-half": V_HALF, "v-zero": V_ZERO}
AHEAD = (1, 2, 3)
DELAYS = (0, 1, 2, None)
"""Forwards by which a rank is ahead of the next, and delays of weight gradients in micro-batches per rank."""


class Overtaken(NamedTuple):
    """Orders, and their time if transfers are mere delays."""

    time_ns: int
    orders: Orders


def overtaking(problem: Problem, allocation: Allocation, *, room_bytes: Sequence[int] | None = None) -> Orders:
    """Return the fastest orders with split backwards; where none fits, the orders that keep least.

    ``room_bytes``: each rank's memory budget for in-flight micro-batches; None means what its devices have left after
    weights and buffers. Raises ``UnsupportedRequest`` where devices share only some of their stages.
    """
    return found_overtaking(problem, allocation, room_bytes=room_bytes)[0].orders


def found_overtaking(
    problem: Problem,
    allocation: Allocation,
    *,
    room_bytes: Sequence[int] | None = None,
    excluded: Orders | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Overtaken]:
    """Return all orders of the search, the fastest first, each once.

    ``excluded``: an order that is neither used as a starting list nor returned. ``stopped`` is called between
    counted work units, and ends the search with the orders so far.
    """
    chained = Chained(problem, allocation)
    room = room_of(problem, allocation, chained.ranks) if room_bytes is None else list(room_bytes)
    if len(room) != len(chained.ranks.stages):
        raise ValueError(f"Expected memory budgets for {len(chained.ranks.stages)} ranks, got {len(room)}.")
    excluded_mark = None if excluded is None else _mark(excluded)
    lists = {_mark(each): each for each in _lists(chained, room, stopped)}
    lists.pop(excluded_mark, None)  # type: ignore[arg-type]
    by_mark = {mark: Overtaken(chained.overtaken(each, room, (), 0)[0], each) for mark, each in lists.items()}
    if not by_mark:
        alone = _one_at_a_time(chained)
        by_mark = {_mark(alone): Overtaken(chained.overtaken(alone, room, (), 0)[0], alone)}
    best = [each.orders for each in sorted(by_mark.values(), key=_time)[:MOST_TRIED]]
    best.sort(key=lambda orders: min(chained.overtaken(orders, room, movers, 0)[0] for movers in ((), *MOVERS)))
    size = sum(len(row.operations) for row in best[0].rows)
    most = min(MOST_IMPROVED, max(LEAST_IMPROVED, IMPROVED_OPERATIONS // max(1, size)))
    for each in improved(chained, best[:most], room, stopped):
        by_mark.setdefault(_mark(each.orders), each)
    for each in _shaken(chained, sorted(by_mark.values(), key=_time)[:SHAKEN], room, stopped):
        by_mark.setdefault(_mark(each.orders), each)
    if excluded_mark is not None:
        by_mark.pop(excluded_mark, None)
    return sorted(by_mark.values(), key=_time)


def _time(each: Overtaken) -> int:
    return each.time_ns


def _mark(orders: Orders) -> bytes:
    return b"".join(row.operations.tobytes() for row in orders.rows)


def _lists(chained: Chained, room: Sequence[int], stopped: Callable[[], bool]) -> Iterator[Orders]:
    """Return orders that fit: blocks or delays, where the stages allow them, and rankings; fewer when stopped."""
    last, number = len(chained.allocation.stages) - 1, chained.allocation.num_micro_batches
    if chained.ranks.stages == tuple((r, last - r) for r in range((last + 1) // 2)):
        candidates = [repeated(chained.ranks, name, offsets, number) for name, offsets in BLOCKS.items()]
        candidates += [zb_v(chained.problem, chained.allocation)] if number > last else []
        yield from (each for each in candidates if chained.fits(each, room))
        yield from (each for each in v_blocks(chained, room) if chained.fits(each, room))
    elif len(chained.ranks.stages) > last:
        yield from (each for each in _delayed(chained, room) if chained.fits(each, room))
    for (even, ways), ranking in product(VIEWS, _rankings(len(chained.ranks.stages[0]))):
        if stopped():
            return
        for patience in PATIENCES:
            result = chained.constructed(ranking, room, patience, even=even, ways=ways)
            if result is not None:
                yield result[1]


def improved(
    chained: Chained, lists: Iterable[Orders], room: Sequence[int], stopped: Callable[[], bool] = lambda: False
) -> list[Overtaken]:
    """Return orders that overtake within each of the lists, the fastest first; ``room``: each rank's memory budget.

    Ties go to the earlier list and setting. When ``stopped``, fewer lists are used, but at least one.
    """
    by_mark: dict[bytes, Overtaken] = {}
    for first in lists:
        if by_mark and stopped():
            break
        for movers, patience in product(MOVERS, PATIENCES):
            current = first
            for _round in range(ROUNDS):
                time_ns, current = chained.overtaken(current, room, movers, patience)
                mark = _mark(current)
                if mark in by_mark:
                    break
                by_mark[mark] = Overtaken(time_ns, current)
    return sorted(by_mark.values(), key=_time)


def _shaken(
    chained: Chained, best: Iterable[Overtaken], room: Sequence[int], stopped: Callable[[], bool]
) -> Iterator[Overtaken]:
    """Improve each order by overtaking for perturbed times and then for the real ones; keep it when not longer."""
    for k, first in enumerate(best):
        rng, current = np.random.default_rng(chained.problem.seed + k), first
        for n in range(SHAKES):
            if stopped():
                return
            drawn = chained.shaken(current.orders, room, MOVERS[1], PATIENCES[n % 3], rng)
            trial = Overtaken(*chained.overtaken(drawn, room, MOVERS[n % 2], PATIENCES[n // 2 % 3]))
            if trial.time_ns <= current.time_ns:
                current = trial
                yield trial


def _one_at_a_time(chained: Chained) -> Orders:
    """Return the orders with one micro-batch in the pipeline at a time, which keep least."""
    rows = []
    for chunks in chained.ranks.stages:
        there = [(FORWARD, s) for s in chunks]
        back = [(kind, s) for s in reversed(chunks) for kind in (INPUT, WEIGHT)]
        rows.append([(kind, s, m) for m in range(chained.allocation.num_micro_batches) for kind, s in there + back])
    return chained.ranks.orders("one at a time", rows)


def _rankings(chunks: int) -> list[Ranking]:
    """Return rankings of gradients and forwards; weight gradients last, before forwards, or after their own inputs.

    With three or more chunks the later ones always go first.
    """
    weights = tuple((WEIGHT, c) for c in reversed(range(chunks)))
    kinds = [tuple((kind, c) for c in reversed(range(chunks))) for kind in (INPUT, FORWARD)]
    wholes = [(*first, *second) for first, second in permutations(kinds)]
    rankings: list[Ranking] = []
    for order in permutations(kinds[0] + kinds[1]) if chunks < MANY_CHUNKS else wholes:
        ends = len(order), order.index((FORWARD, 0)), min(order.index(each) for each in kinds[1])
        rankings += [(*order[:end], *weights, *order[end:]) for end in ends]
        pairs = (((INPUT, c), (WEIGHT, c)) if kind == INPUT else ((kind, c),) for kind, c in order)
        rankings.append(tuple(each for pair in pairs for each in pair))
    return list(dict.fromkeys(rankings))


def room_of(problem: Problem, allocation: Allocation, ranks: Ranks) -> list[int]:
    """Return the bytes that each rank's smallest device has for in-flight micro-batches after weights and buffers."""
    rows = most_rows(problem, allocation)
    budgets = []
    for chunks, devices in zip(ranks.stages, ranks.devices, strict=True):
        stages = [allocation.stages[s] for s in chunks]
        resident = sum(static_bytes(problem, stage).total + transient_bytes(problem, stage, rows) for stage in stages)
        budgets.append(free_bytes(problem, devices) - resident)
    return budgets


def _delayed(chained: Chained, room: Sequence[int]) -> Iterator[Orders]:
    """Return orders with longer warm-ups from rank to rank and delayed weight gradients (ALGORITHMS 7.6).

    ``AHEAD`` and ``DELAYS`` are clamped by the memory budget: 1 and 1 are ZB-H1, 2 and 2 ZB-H2.
    """
    each = [max(1, chained.taken_bytes(s)) for (s,) in chained.ranks.stages]
    most = [max(1, free // size) for free, size in zip(room, each, strict=True)]
    number = chained.allocation.num_micro_batches
    for ahead, after in product(AHEAD, DELAYS):
        yield delayed(chained.ranks, "delayed", number, ahead, most, after=number if after is None else after)
