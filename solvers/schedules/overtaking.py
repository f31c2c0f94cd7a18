"""Orders for unequal stages, transfers and memory limits: operations overtake what is not ready.

List scheduling (Graham, 1966) under memory limits. Schedules made for equal times give lists that can run, rankings of
kinds (Qi et al., ICLR 2024, section 3.1, has one of them) give more; real times and the room on each device decide. A
device takes the first operation of its list that is ready, so weight gradients and forwards fill its waiting times; a
forward from behind only where the operations before it keep the room that they will want (``kernels.overtake``).
Transfers count as delays; what they do to each other is for the judge to say. Orders found are lists in their turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations, product
from typing import NamedTuple

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.allocation import Allocation
from penstock.solvers.batching import row_classes
from penstock.solvers.memory import static_bytes, transient_bytes
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders
from penstock.solvers.schedules.chained import Chained, Ranking
from penstock.solvers.schedules.chunks import Ranks
from penstock.solvers.schedules.v_shape import V_HALF, V_MIN, V_ZERO, Offsets, repeated, zb_v
from penstock.solvers.schedules.zero_bubble import delayed

PATIENCES = (0, 2, 4)
ROUNDS = 3
MOST_RANKED = 6
MANY_CHUNKS = 3
MOVERS: tuple[tuple[int, ...], ...] = ((WEIGHT,), (FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE))
"""Which kinds overtake: weight gradients alone, or all."""
BLOCKS = {"v-min": V_MIN, "v-half": V_HALF, "v-half-mirrored": Offsets(1, 2, 1, 2), "v-zero": V_ZERO}
DELAYS = {"zb-h1": 1, "zb-h2": 2, "zb-h3": 3}


class Overtaken(NamedTuple):
    """Orders, and how long they take where transfers are mere delays."""

    time_ns: int
    orders: Orders


def overtaking(problem: Problem, allocation: Allocation, *, room_bytes: Sequence[int] | None = None) -> Orders:
    """The quickest orders with split backwards found; where nothing fits, those that keep least.

    ``room_bytes``: what each rank has for micro-batches in flight; None takes what its devices have left beside
    weights and buffers. Raises ``UnsupportedRequest`` where devices share some of their stages only.
    """
    return found_overtaking(problem, allocation, room_bytes=room_bytes)[0].orders


def found_overtaking(
    problem: Problem, allocation: Allocation, *, room_bytes: Sequence[int] | None = None, without: Iterable[str] = ()
) -> list[Overtaken]:
    """All orders found, the quickest first, each once. ``without``: lists that are left out."""
    chained = Chained(problem, allocation)
    room = room_of(problem, allocation, chained.ranks) if room_bytes is None else list(room_bytes)
    if len(room) != len(chained.ranks.stages):
        raise ValueError(f"Expected the room of {len(chained.ranks.stages)} ranks, got {len(room)}.")
    lists = [each for each in _first_lists(chained, room) if each.name not in set(without)]
    fitting = [each for each in lists if chained.fits(each, room)] + _constructed(chained, room)
    return improved(chained, fitting or [_one_at_a_time(chained)], room)


def improved(chained: Chained, lists: Iterable[Orders], room: Sequence[int]) -> list[Overtaken]:
    """Orders that overtake within each of the lists, the quickest first; ``room`` of each rank.

    Ties go to the earlier list and setting.
    """
    found: dict[bytes, Overtaken] = {}
    for first in lists:
        for movers, patience in product(MOVERS, PATIENCES):
            current = first
            for _round in range(ROUNDS):
                time_ns, current = chained.overtaken(current, room, movers, patience)
                mark = b"".join(row.operations.tobytes() for row in current.rows)
                if mark in found:
                    break
                found[mark] = Overtaken(time_ns, current)
    return sorted(found.values(), key=lambda each: each.time_ns)


def _constructed(chained: Chained, room: Sequence[int]) -> list[Orders]:
    """The quickest orders that each fill the room by a ranking of kinds, ``MOST_RANKED`` of them."""
    ranked = []
    for ranking, patience in product(_rankings(len(chained.ranks.stages[0])), PATIENCES):
        made = chained.constructed(ranking, room, patience)
        if made is not None:
            ranked.append(made)
    ranked.sort(key=lambda each: each[0])
    return [orders for _time, orders in ranked[:MOST_RANKED]]


def _one_at_a_time(chained: Chained) -> Orders:
    """One micro-batch in the pipeline after the other, which keeps least."""
    rows = []
    for chunks in chained.ranks.stages:
        there = [(FORWARD, s) for s in chunks]
        back = [(kind, s) for s in reversed(chunks) for kind in (INPUT, WEIGHT)]
        rows.append([(kind, s, m) for m in range(chained.allocation.num_micro_batches) for kind, s in there + back])
    return chained.ranks.orders("one at a time", rows)


def _rankings(chunks: int) -> list[Ranking]:
    """Gradients and forwards in any order, weight gradients last or before the first chunk's forwards.

    Of three chunks and more the later ones always go first.
    """
    weights = tuple((WEIGHT, c) for c in reversed(range(chunks)))
    kinds = [tuple((kind, c) for c in reversed(range(chunks))) for kind in (INPUT, FORWARD)]
    wholes = [(*first, *second) for first, second in permutations(kinds)]
    found: list[Ranking] = []
    for order in permutations(kinds[0] + kinds[1]) if chunks < MANY_CHUNKS else wholes:
        first = order.index((FORWARD, 0))
        found += [(*order, *weights), (*order[:first], *weights, *order[first:])]
    return found


def room_of(problem: Problem, allocation: Allocation, ranks: Ranks) -> list[int]:
    """Bytes that each rank's smallest device has for micro-batches in flight, beside weights and buffers."""
    rows = row_classes(problem.global_batch_size, allocation.num_micro_batches)[0][0]
    found = []
    for chunks, devices in zip(ranks.stages, ranks.devices, strict=True):
        stages = [allocation.stages[s] for s in chunks]
        held = sum(static_bytes(problem, stage).total + transient_bytes(problem, stage, rows) for stage in stages)
        found.append(min(problem.capacity_bytes(d) - problem.devices[d].context_bytes for d in devices) - held)
    return found


def _first_lists(chained: Chained, room: Sequence[int]) -> list[Orders]:
    """Zero-bubble orders for equal times, of those that keep least first; none where stages lie otherwise."""
    ranks, allocation, number = chained.ranks, chained.allocation, chained.allocation.num_micro_batches
    last = len(allocation.stages) - 1
    if ranks.stages == tuple((r, last - r) for r in range((last + 1) // 2)):
        blocks = [repeated(ranks, name, offsets, number) for name, offsets in BLOCKS.items()]
        return [*blocks, zb_v(chained.problem, allocation)] if number > last else blocks
    if len(ranks.stages) <= last:
        return []
    each = [max(1, chained.taken_bytes(s)) for (s,) in ranks.stages]
    most = [max(1, free // size) for free, size in zip(room, each, strict=True)]
    return [delayed(ranks, name, number, late, most) for name, late in DELAYS.items()]
