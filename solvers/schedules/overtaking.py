"""Orders for unequal stages, transfers and memory limits: operations overtake those that are not ready.

List scheduling (Graham, 1966) under memory limits. Lists that can run come from building blocks for stages in a V
(``blocks``), from warm-ups and delays for stages in a line (``zero_bubble``), and from rankings of kinds (Qi et al.,
ICLR 2024, section 3.1, has one of them) that fill the memory budget, for the real times and for simpler ones. Then real
times and each device's memory budget decide: a device takes the first operation of its list that is ready, so weight
gradients and forwards fill its waiting times; a forward overtakes only where the operations before it keep the memory
that they will need (``support.list_kernel``). Orders found are used as lists again, also for slightly changed times.
Transfers count as delays; their contention is decided by simulation.
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
"""Lists that are tried, and of those improved: how quick a list is says little of what it becomes."""
SHAKEN, SHAKES = 3, 30
"""The best orders that are shaken, and how often."""
MANY_CHUNKS = 3
MOVERS: tuple[tuple[int, ...], ...] = ((WEIGHT,), (FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE))
"""Which kinds overtake: weight gradients alone, or all."""
VIEWS = ((False, True), (False, False), (True, False))
"""(even times, transfers) for which orders are filled; what is made for simpler times may do for the real ones."""
BLOCKS = {"v-min": V_MIN, "v-half": V_HALF, "v-zero": V_ZERO}
AHEAD = (1, 2, 3)
DELAYS = (0, 1, 2, None)
"""Forwards that a rank is ahead of the next, and how many micro-batches per rank weight gradients are delayed."""


class Overtaken(NamedTuple):
    """Orders, and how long they take if transfers are mere delays."""

    time_ns: int
    orders: Orders


def overtaking(problem: Problem, allocation: Allocation, *, room_bytes: Sequence[int] | None = None) -> Orders:
    """Return the fastest orders with split backwards that are found; where none fits, those that keep least.

    ``room_bytes``: each rank's memory budget for in-flight micro-batches; None means what its devices have left after
    weights and buffers. Raises ``UnsupportedRequest`` where devices share only some of their stages.
    """
    return found_overtaking(problem, allocation, room_bytes=room_bytes)[0].orders


def found_overtaking(
    problem: Problem,
    allocation: Allocation,
    *,
    room_bytes: Sequence[int] | None = None,
    without: Orders | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Overtaken]:
    """Return all orders found, the fastest first, each once.

    ``without``: an order that is neither used as a starting list nor returned. ``stopped`` is called between
    counted work units, and ends the search with the orders found so far.
    """
    chained = Chained(problem, allocation)
    room = room_of(problem, allocation, chained.ranks) if room_bytes is None else list(room_bytes)
    if len(room) != len(chained.ranks.stages):
        raise ValueError(f"Expected memory budgets for {len(chained.ranks.stages)} ranks, got {len(room)}.")
    excluded = None if without is None else _mark(without)
    lists = {_mark(each): each for each in _lists(chained, room, stopped)}
    lists.pop(excluded, None)  # type: ignore[arg-type]
    found = {mark: Overtaken(chained.overtaken(each, room, (), 0)[0], each) for mark, each in lists.items()}
    if not found:
        alone = _one_at_a_time(chained)
        found = {_mark(alone): Overtaken(chained.overtaken(alone, room, (), 0)[0], alone)}
    best = [each.orders for each in sorted(found.values(), key=_time)[:MOST_TRIED]]
    best.sort(key=lambda orders: min(chained.overtaken(orders, room, movers, 0)[0] for movers in ((), *MOVERS)))
    size = sum(len(row.operations) for row in best[0].rows)
    most = min(MOST_IMPROVED, max(LEAST_IMPROVED, IMPROVED_OPERATIONS // max(1, size)))
    for each in improved(chained, best[:most], room, stopped):
        found.setdefault(_mark(each.orders), each)
    for each in _shaken(chained, sorted(found.values(), key=_time)[:SHAKEN], room, stopped):
        found.setdefault(_mark(each.orders), each)
    if excluded is not None:
        found.pop(excluded, None)
    return sorted(found.values(), key=_time)


def _time(each: Overtaken) -> int:
    return each.time_ns


def _mark(orders: Orders) -> bytes:
    return b"".join(row.operations.tobytes() for row in orders.rows)


def _lists(chained: Chained, room: Sequence[int], stopped: Callable[[], bool]) -> Iterator[Orders]:
    """Return orders that fit: blocks or delays, where the stages allow them, and rankings; fewer when stopped."""
    last, number = len(chained.allocation.stages) - 1, chained.allocation.num_micro_batches
    if chained.ranks.stages == tuple((r, last - r) for r in range((last + 1) // 2)):
        known = [repeated(chained.ranks, name, offsets, number) for name, offsets in BLOCKS.items()]
        known += [zb_v(chained.problem, chained.allocation)] if number > last else []
        yield from (each for each in known if chained.fits(each, room))
        yield from (each for each in v_blocks(chained, room) if chained.fits(each, room))
    elif len(chained.ranks.stages) > last:
        yield from (each for each in _delayed(chained, room) if chained.fits(each, room))
    for (even, ways), ranking in product(VIEWS, _rankings(len(chained.ranks.stages[0]))):
        if stopped():
            return
        for patience in PATIENCES:
            made = chained.constructed(ranking, room, patience, even=even, ways=ways)
            if made is not None:
                yield made[1]


def improved(
    chained: Chained, lists: Iterable[Orders], room: Sequence[int], stopped: Callable[[], bool] = lambda: False
) -> list[Overtaken]:
    """Return orders that overtake within each of the lists, the fastest first; ``room``: each rank's memory budget.

    Ties go to the earlier list and setting. When ``stopped``, fewer lists are used, but at least one.
    """
    found: dict[bytes, Overtaken] = {}
    for first in lists:
        if found and stopped():
            break
        for movers, patience in product(MOVERS, PATIENCES):
            current = first
            for _round in range(ROUNDS):
                time_ns, current = chained.overtaken(current, room, movers, patience)
                mark = _mark(current)
                if mark in found:
                    break
                found[mark] = Overtaken(time_ns, current)
    return sorted(found.values(), key=_time)


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
            made = Overtaken(*chained.overtaken(drawn, room, MOVERS[n % 2], PATIENCES[n // 2 % 3]))
            if made.time_ns <= current.time_ns:
                current = made
                yield made


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
    found: list[Ranking] = []
    for order in permutations(kinds[0] + kinds[1]) if chunks < MANY_CHUNKS else wholes:
        ends = len(order), order.index((FORWARD, 0)), min(order.index(each) for each in kinds[1])
        found += [(*order[:end], *weights, *order[end:]) for end in ends]
        own = (((INPUT, c), (WEIGHT, c)) if kind == INPUT else ((kind, c),) for kind, c in order)
        found.append(tuple(each for pair in own for each in pair))
    return list(dict.fromkeys(found))


def room_of(problem: Problem, allocation: Allocation, ranks: Ranks) -> list[int]:
    """Return the bytes that each rank's smallest device has for in-flight micro-batches after weights and buffers."""
    rows = most_rows(problem, allocation)
    found = []
    for chunks, devices in zip(ranks.stages, ranks.devices, strict=True):
        stages = [allocation.stages[s] for s in chunks]
        held = sum(static_bytes(problem, stage).total + transient_bytes(problem, stage, rows) for stage in stages)
        found.append(free_bytes(problem, devices) - held)
    return found


def _delayed(chained: Chained, room: Sequence[int]) -> Iterator[Orders]:
    """Return orders with longer warm-ups from rank to rank and delayed weight gradients (ALGORITHMS 7.6).

    ``AHEAD`` and ``DELAYS`` are clamped by the memory budget: 1 and 1 are ZB-H1, 2 and 2 ZB-H2.
    """
    each = [max(1, chained.taken_bytes(s)) for (s,) in chained.ranks.stages]
    most = [max(1, free // size) for free, size in zip(room, each, strict=True)]
    number = chained.allocation.num_micro_batches
    for ahead, after in product(AHEAD, DELAYS):
        yield delayed(chained.ranks, "delayed", number, ahead, most, after=number if after is None else after)
