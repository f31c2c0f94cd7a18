"""The least cost of a row at given prices, layer by layer from the last: the labels of ``over_time`` (BOUNDS 15, 16).

A label is a cost of the layers from one on, the way through them and back for which earlier layers wait, and the parts
of the cost in an ``over_time._Row``.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner
from penstock.solvers.compiled.fields import Fields

SPENT = 4
"""Number of parts of a cost in labels: bytes times ns, and the parts that are over and kept at the first backward."""


@Fields.register
class UnlikeLayers(NamedTuple):
    """U unlike layers' least costs by O sizes of a slice on a kind of device; times in ns, float64.

    (U, O) of one slice: ``forward``, ``way``: forward and the gradient of its input, ``back`` of that. Of one row:
    ``work``, its ``over`` forward and ``backward``, and ``area`` in bytes times ns, ``area_after`` of it after the
    forward. (U, O, M) by M ways of recomputing: ``again`` and ``kept``, in bytes. ``kind`` (L,): the number in U of
    each layer.
    """

    forward: np.ndarray
    way: np.ndarray
    back: np.ndarray
    work: np.ndarray
    over: np.ndarray
    backward: np.ndarray
    area: np.ndarray
    area_after: np.ndarray
    again: np.ndarray
    kept: np.ndarray
    kind: np.ndarray


@Fields.register
class Paid(NamedTuple):
    """The ``price`` of a byte for one ns, and the prices at the first backward: ``over_time.Before``."""

    price: float
    time: float
    byte: float
    way: float


@Fields.register
class OverTimeLabels(NamedTuple):
    """Costs and ways (N,) of labels, and their parts (N, SPENT)."""

    cost: np.ndarray
    way: np.ndarray
    spent: np.ndarray


@compiled
def least_row(layers: UnlikeLayers, paid: Paid, most: np.ndarray, number: int, split: bool) -> np.ndarray:
    """Return (1 + SPENT,) float64: the least cost of a row, and its parts.

    ``most`` (L,): the most that a way of one ns through the layers from one on costs. More than ``number`` labels of a
    layer are merged. ``split``: of some first layers the forward is over at the first backward.
    """
    last = layers.kind.size - 1
    sizes = layers.forward.shape[1]
    room = 2 * number * sizes
    cost, way, place = np.empty(room), np.empty(room), np.empty(room + 1, dtype=np.int64)
    later = OverTimeLabels(np.zeros(2 * number), np.zeros(2 * number), np.zeros((2 * number, SPENT)))
    others = OverTimeLabels(np.zeros(2 * number), np.zeros(2 * number), np.zeros((2 * number, SPENT)))
    over = OverTimeLabels(np.zeros(number), np.zeros(number), np.zeros((number, SPENT)))
    num_later, num_over = 1, 0
    for layer in range(last, -1, -1):
        if split:
            _copy(over, num_over, later, num_later)
            both = num_later + num_over
            candidates = _after(layers, paid, layer, later, both, True, cost, way)
            num_over = _kept(
                layers, paid, layer, later, both, True, most[layer], number, cost, way, place, candidates, over
            )
        candidates = _after(layers, paid, layer, later, num_later, False, cost, way)
        num_later = _kept(
            layers, paid, layer, later, num_later, False, most[layer], number, cost, way, place, candidates, others
        )
        _copy(others, num_later, later, 0)
    result = np.empty(1 + SPENT)
    best = np.argmin(later.cost[:num_later])
    result[0] = later.cost[best]
    result[1:] = later.spent[best]
    if split and np.min(over.cost[:num_over]) < result[0]:
        best = np.argmin(over.cost[:num_over])
        result[0] = over.cost[best]
        result[1:] = over.spent[best]
    return result


@inner
def _copy(source: OverTimeLabels, number: int, target: OverTimeLabels, at: int) -> None:
    """Copy labels to others, from a place on."""
    for n in range(number):
        target.cost[at + n] = source.cost[n]
        target.way[at + n] = source.way[n]
        for part in range(SPENT):
            target.spent[at + n, part] = source.spent[n, part]


@inner
def _after(
    layers: UnlikeLayers,
    paid: Paid,
    layer: int,
    labels: OverTimeLabels,
    number: int,
    is_over: bool,
    cost: np.ndarray,
    way: np.ndarray,
) -> int:
    """Write the costs and ways with the layer before ``number`` labels, by size and label; return how many there are.

    ``is_over``: the layer's forward is over at the first backward.
    """
    kind = layers.kind[layer]
    _kinds, sizes, ways = layers.again.shape
    for size in range(sizes):
        if is_over:
            layer_cost = layers.backward[kind, size] + paid.time * layers.over[kind, size]
            layer_cost += paid.way * layers.forward[kind, size] + paid.price * layers.area_after[kind, size]
            back = layers.back[kind, size]
        else:
            layer_cost = layers.work[kind, size] + paid.price * layers.area[kind, size]
            back = layers.way[kind, size]
        for label in range(number):
            each = _held_for(layers, paid, kind, size, labels.way[label], is_over)
            least = np.inf
            for mode in range(ways):
                least = min(least, layers.again[kind, size, mode] + layers.kept[kind, size, mode] * each)
            cost[size * number + label] = least + layer_cost + labels.cost[label]
            way[size * number + label] = back + labels.way[label]
    return sizes * number


@inner
def _held_for(layers: UnlikeLayers, paid: Paid, kind: int, size: int, way: float, is_over: bool) -> float:
    """Return the cost of keeping a byte from the layer's forward, or the first backward, to its backward."""
    if is_over:
        return paid.price * way + paid.byte
    return paid.price * (layers.forward[kind, size] + way)


@inner
def _kept(
    layers: UnlikeLayers,
    paid: Paid,
    layer: int,
    labels: OverTimeLabels,
    number: int,
    is_over: bool,
    most: float,
    room: int,
    cost: np.ndarray,
    way: np.ndarray,
    place: np.ndarray,
    candidates: int,
    target: OverTimeLabels,
) -> int:
    """Write the new labels without labels that another one undercuts for every way, by rising cost and falling way.

    More than ``room`` labels are merged into the least of both. Return their number.
    """
    left = _undominated(cost, way, place, candidates, most)
    kind = layers.kind[layer]
    count = min(left, room)
    step = left / count
    for n in range(count):
        first, last = place[n], place[n]
        if left > room:
            first = place[int(n * step)]
            last = place[(int((n + 1) * step) if n + 1 < count else left) - 1]
        size, label = first // number, first % number
        each = _held_for(layers, paid, kind, size, labels.way[label], is_over)
        least, mode = np.inf, 0
        for other in range(layers.again.shape[2]):
            value = layers.again[kind, size, other] + layers.kept[kind, size, other] * each
            if value < least:
                least, mode = value, other
        stash = layers.kept[kind, size, mode]
        target.cost[n], target.way[n] = cost[first], way[last]
        for part in range(SPENT):
            target.spent[n, part] = labels.spent[label, part]
        if is_over:
            target.spent[n, 0] += stash * labels.way[label] + layers.area_after[kind, size]
            target.spent[n, 1] += layers.over[kind, size]
            target.spent[n, 2] += stash
            target.spent[n, 3] += layers.forward[kind, size]
        else:
            target.spent[n, 0] += stash * (layers.forward[kind, size] + labels.way[label]) + layers.area[kind, size]
    return count


@inner
def _undominated(cost: np.ndarray, way: np.ndarray, place: np.ndarray, candidates: int, most: float) -> int:
    """Write the places of labels that no other label undercuts for every way; return their number."""
    first = 0
    for n in range(1, candidates):
        if cost[n] < cost[first] or (cost[n] == cost[first] and way[n] < way[first]):
            first = n
    whole, shortest, number = cost[first] + most * way[first], way[first], 0
    for n in range(candidates):
        if way[n] < shortest and cost[n] + most * way[n] < whole:
            place[1 + number] = n
            number += 1
    _sort(place, number, cost, way)
    place[0], left = first, 1
    for at in range(1, 1 + number):
        n = place[at]
        if way[n] < shortest:
            shortest = way[n]
            if cost[n] + most * way[n] < whole:
                whole = cost[n] + most * way[n]
                place[left] = n
                left += 1
    return left


@inner
def _sort(place: np.ndarray, number: int, cost: np.ndarray, way: np.ndarray) -> None:
    """Sort ``number`` places from the second on by rising cost, equal costs by way: a heap, emptied."""
    for start in range(number // 2, 0, -1):
        _sink(place, start, number, cost, way)
    for end in range(number, 1, -1):
        place[1], place[end] = place[end], place[1]
        _sink(place, 1, end - 1, cost, way)


@inner
def _sink(place: np.ndarray, at: int, number: int, cost: np.ndarray, way: np.ndarray) -> None:
    """Let a place sink below all places after it, in a heap of places 1 to ``number`` with the last on top."""
    moved = place[at]
    while 2 * at <= number:
        child = 2 * at
        if child < number and _precedes(place[child], place[child + 1], cost, way):
            child += 1
        if not _precedes(moved, place[child], cost, way):
            break
        place[at] = place[child]
        at = child
    place[at] = moved


@inner
def _precedes(a: int, b: int, cost: np.ndarray, way: np.ndarray) -> bool:
    if cost[a] != cost[b]:
        return cost[a] < cost[b]
    return way[a] < way[b] if way[a] != way[b] else a < b
