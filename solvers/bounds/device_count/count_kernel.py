"""The least price of devices by the head of the next stage and by the most in flight: from layer to layer.

A state is (layer, class of limits, head). Its value is the least price of the devices of stages up to the layer, which
is their number where all devices are alike. Heads and ways are whole units of ``Question.unit`` ns. ``limits`` are the
classes' largest limits, falling from M on. A stage has no more in flight than the stage before it, so no class is
followed by a class of a larger limit.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.device_count.stage_runs import Runs
from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.fields import Fields

MANY = 2**30
"""The price that marks an impossible entry."""


@Fields.register
class CountQuestion(NamedTuple):
    """The question whether there is a plan below ``time_ns`` for at most ``worth`` with a whole in [``low``, ``high``)
    units.

    ``worth``: the price of all devices; ``unit``: ns.
    """

    time_ns: int
    batches: int
    worth: int
    unit: int
    low: int
    high: int


@Fields.register
class Rest(NamedTuple):
    """(L + 1,) of the stages from a layer on: the least price, and the shortest way in units; ``MANY`` if none."""

    price: np.ndarray
    way: np.ndarray


@Fields.register
class Counts(NamedTuple):
    """Arrays of a count.

    ``price`` (longest run + 1, C, H): by layer, class and head. ``limits`` (C,), ``class_of`` (M + 1,), ``open`` (C,
    2), ``least`` (H,).
    """

    price: np.ndarray
    limits: np.ndarray
    class_of: np.ndarray
    open: np.ndarray
    least: np.ndarray


@loop
def rests(runs: Runs, unit: int, rest: Rest) -> None:
    """Write the least price and way of the stages from each layer on."""
    last = rest.way.size - 1
    rest.price[last], rest.way[last] = 0, 0
    for first in range(last - 1, -1, -1):
        price, way = MANY, MANY
        for n in range(runs.begin[first], runs.begin[first + 1]):
            after = first + runs.layers[n]
            if rest.price[after] < MANY:
                price = min(price, rest.price[after] + runs.price[n])
                way = min(way, rest.way[after] + (runs.forward_ns[n] + runs.backward_ns[n] + runs.sent_ns[n]) // unit)
        rest.price[first], rest.way[first] = price, min(way, MANY)


@inner
def _first_head(runs: Runs, n: int, question: CountQuestion, limit: int) -> int:
    """Return the least head, in units, from which a stage with that limit may end in time; ``MANY`` if no head is."""
    forward, backward, again = runs.forward_ns[n], runs.backward_ns[n], runs.again_ns[n]
    way, batches, time = forward + backward, question.batches, question.time_ns
    step = (way + runs.sent_ns[n]) // question.unit
    after = (question.low - step) * question.unit + runs.sent_ns[n]  # head and rest together
    most = 0
    if again > 0:  # rebuilt while no gradient has come: within the free memory
        most = again * limit
        if runs.rebuilt[n] > 0 and runs.flight_bytes[n] <= runs.rebuilt[n]:
            left = max(0, runs.room[n] - limit * runs.flight_bytes[n])
            most = min(most, int(again * (left / runs.rebuilt[n])) + 1)
        elif runs.rebuilt[n] > 0:
            most = min(most, again * (runs.room[n] // runs.rebuilt[n]))
    work = batches * (way + again)
    before_first = forward + after - limit * forward - most
    after_last = backward + after - limit * (backward + again)
    if work + max(before_first, after_last) >= time:
        return MANY
    if limit == batches:
        return 0
    head = 0
    both = work + before_first + after_last - time
    if both >= 0:
        head = both // question.unit + 1
    area = 2 * batches * (way + after) + limit * (limit - 1) * way - 2 * limit * time
    if area >= 0:
        head = max(head, area // (2 * question.unit * (batches - limit)) + 1)
    turns, left_over = (batches - 1) // limit, (batches - 1) % limit
    chain = (turns + 1) * (way + after) + left_over * forward - time
    if chain >= 0:
        head = max(head, chain // (turns * question.unit) + 1)
    return head


@inner
def _open(question: CountQuestion, counts: Counts, rest: Rest, first: int) -> bool:
    """Drop states that cannot be completed, or that a state of a larger limit at no higher price makes needless."""
    here = first % counts.price.shape[0]
    stop = max(0, min(question.high, question.high - rest.way[first]))
    most = question.worth - rest.price[first]
    for head in range(stop):
        counts.least[head] = min(MANY, most + 1)
    any_open = False
    for c in range(counts.limits.size):
        counts.open[c, 0], counts.open[c, 1] = stop, 0
        for head in range(stop):
            value = counts.price[here, c, head]
            if value < counts.least[head]:
                counts.least[head] = value
                counts.open[c, 0] = min(counts.open[c, 0], head)
                counts.open[c, 1] = head + 1
                any_open = True
            else:
                counts.price[here, c, head] = MANY
    return any_open


@loop
def least_price(runs: Runs, question: CountQuestion, counts: Counts, rest: Rest) -> int:
    """Return the price of the cheapest plan of ``question``; ``MANY`` if all devices together cost less."""
    layers, ring = rest.way.size - 1, counts.price.shape[0]
    counts.price[:, :, : question.high] = MANY
    counts.price[0, 0, 0] = 0
    for first in range(layers):
        here = first % ring
        if _open(question, counts, rest, first):
            for n in range(runs.begin[first], runs.begin[first + 1]):
                step = (runs.forward_ns[n] + runs.backward_ns[n] + runs.sent_ns[n]) // question.unit
                until = min(question.high - step, -((runs.work_ns[n] - question.time_ns) // question.unit))
                there = (first + runs.layers[n]) % ring
                for c in range(counts.limits.size):
                    if counts.open[c, 1] == 0:
                        continue
                    limit = min(runs.limit[n], counts.limits[c])
                    low = max(counts.open[c, 0], _first_head(runs, n, question, limit))
                    kept = counts.class_of[limit]
                    for head in range(low, min(counts.open[c, 1], until)):
                        value = counts.price[here, c, head] + runs.price[n]
                        if value < counts.price[there, kept, head + step]:
                            counts.price[there, kept, head + step] = value
        counts.price[here, :, : question.high] = MANY
    least = MANY
    for c in range(counts.limits.size):
        for head in range(question.low, question.high):
            least = min(least, counts.price[layers % ring, c, head])
    return least
