"""The least time of one pipeline by where each device's lowest layer is: labels from the first layer to the last.

A device whose lowest layer is l begins when a micro-batch has come through the layers before l, and the result of its
last operation travels back through them or is reduced. In the walk through the layers, ``used`` devices have their
lowest layer at or before the present layer; any time added to the way of the other devices counts for each of them. A
label, by ``used`` and the option of its last layer, is the cost so far (twice the device-ns, see ``Terms``) and the
*rest*: the least time from a device's last backward, were the next layer its lowest, to the end. A label is dropped if
both numbers are larger than another's; two labels may be merged into their minima. New devices come in the same ranges
as the holders of a layer: the largest number of the range, for the cost of its smallest.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.fields import Fields


@Fields.register
class Terms(NamedTuple):
    """Arrays by option o (a layer is held by ``least[o]`` to ``most[o]`` devices), number of devices k, layer l; ns.

    * ``forward`` and ``gradient`` [o, l]: of one slice; ``work`` [o, l]: device-ns of a step.
    * ``after`` [k, l]: from a layer's last gradient to the end, held by k devices or more; ``update`` [l].
    * ``cuttable`` [l]: whether a stage may begin there.
    * [o before, o, l] ``out`` and ``back``: a transfer to a new device and back. ``out_same`` and ``back_same``:
      without a new device; ``closed`` and ``closed_same``: where the transfer is impossible.
    * ``head`` and ``tail``: the way of a slice through the layers before these, and back through them to the end.
    * ``rest_weight`` + ``update_weight`` = 2, in halves: weights of the time after a device's last backward and of its
      updates. The larger of these times counts, so that any mean of them is a bound.
    """

    least: np.ndarray
    most: np.ndarray
    forward: np.ndarray
    gradient: np.ndarray
    work: np.ndarray
    after: np.ndarray
    update: np.ndarray
    cuttable: np.ndarray
    out: np.ndarray
    back: np.ndarray
    out_same: np.ndarray
    back_same: np.ndarray
    closed: np.ndarray
    closed_same: np.ndarray
    head: int
    tail: int
    rest_weight: int
    update_weight: int


@Fields.register
class Labels(NamedTuple):
    """Room for the labels of two layers: (2, devices, options, cap) cost and rest; (2, devices, options)."""

    cost: np.ndarray
    rest: np.ndarray
    filled: np.ndarray


@inner
def _add(labels: Labels, side: int, used: int, option: int, cost: int, rest: int) -> None:
    """Keep a label that none dominates; where there is no room, lower the one whose rest is nearest."""
    n, cap = labels.filled[side, used, option], labels.cost.shape[3]
    for i in range(n):
        if labels.cost[side, used, option, i] <= cost and labels.rest[side, used, option, i] <= rest:
            return
    kept = 0
    for i in range(n):
        if labels.cost[side, used, option, i] < cost or labels.rest[side, used, option, i] < rest:
            labels.cost[side, used, option, kept] = labels.cost[side, used, option, i]
            labels.rest[side, used, option, kept] = labels.rest[side, used, option, i]
            kept += 1
    if kept < cap:
        labels.cost[side, used, option, kept] = cost
        labels.rest[side, used, option, kept] = rest
        labels.filled[side, used, option] = kept + 1
        return
    near = 0
    for i in range(kept):
        if abs(labels.rest[side, used, option, i] - rest) < abs(labels.rest[side, used, option, near] - rest):
            near = i
    labels.cost[side, used, option, near] = min(labels.cost[side, used, option, near], cost)
    labels.rest[side, used, option, near] = min(labels.rest[side, used, option, near], rest)
    labels.filled[side, used, option] = kept


@loop
def least_cost(terms: Terms, labels: Labels, devices: int, below: int) -> int:
    """Return the least cost with exactly ``devices`` devices below ``below``, or ``below`` if no plan is cheaper."""
    options, layers = terms.work.shape
    tail = 0
    for layer in range(1, layers):
        tail += _least_alone(terms, layer)
    labels.filled[:] = 0
    best = below
    for o in range(options):
        if terms.least[o] <= devices:
            rest = max(terms.tail, terms.after[terms.least[o], 0])
            new = min(terms.most[o], devices)
            cost = _layer_cost(terms, o, 0, terms.least[o], devices - new)
            cost += (2 * terms.head + terms.rest_weight * rest) * devices
            if cost + tail < best:
                if new == devices:
                    best = cost + tail
                else:
                    _add(labels, 0, new, o, cost, rest + terms.gradient[o, 0])
    for layer in range(1, layers):
        if best < below:
            return best
        side = layer % 2
        labels.filled[side] = 0
        after = tail - _least_alone(terms, layer)
        for used in range(1, devices):
            for option in range(options):
                for i in range(labels.filled[1 - side, used, option]):
                    cost, rest = labels.cost[1 - side, used, option, i], labels.rest[1 - side, used, option, i]
                    if cost + tail < best:
                        best = _grow(terms, labels, layer, devices, used, option, cost, rest, after, best)
        tail = after
    return best


@inner
def _grow(
    terms: Terms,
    labels: Labels,
    layer: int,
    devices: int,
    used: int,
    option: int,
    cost: int,
    rest: int,
    tail: int,
    best: int,
) -> int:
    """Grow a label by every option of the next layer; return the best cost of labels that place the last device."""
    last = layer == terms.work.shape[1] - 1
    left = devices - used
    for o in range(terms.work.shape[0]):
        if not terms.cuttable[layer] and o != option:
            continue
        for some in range(o + 2 if terms.cuttable[layer] else 1):
            new = min(terms.most[some - 1], left) if some > 0 else 0
            number = max(terms.least[some - 1], terms.least[o]) if some > 0 else terms.least[o]
            if some > 0 and terms.least[some - 1] > left:
                break
            if number > used + new or (
                terms.closed[option, o, layer] if new > 0 else terms.closed_same[option, o, layer]
            ):
                continue
            there = terms.out[option, o, layer] if new > 0 else terms.out_same[option, o, layer]
            then = rest + (terms.back[option, o, layer] if new > 0 else terms.back_same[option, o, layer])
            then = max(then, terms.after[number, layer])
            value = cost + left * (2 * there + terms.rest_weight * (then - rest))
            value += _layer_cost(terms, o, layer, number, left - new)
            if value + tail < best:
                if new == left:
                    best = value + tail
                elif not last:
                    _add(labels, layer % 2, used + new, o, value, then + terms.gradient[o, layer])
    return best


@inner
def _layer_cost(terms: Terms, o: int, layer: int, number: int, others: int) -> int:
    """Return the cost of a layer, including the devices whose lowest layer comes after it."""
    cost = 2 * terms.work[o, layer] + terms.update_weight * number * terms.update[layer]
    return cost + others * (2 * terms.forward[o, layer] + terms.rest_weight * terms.gradient[o, layer])


@inner
def _least_alone(terms: Terms, layer: int) -> int:
    """Return the least cost of a layer over all options."""
    least = _layer_cost(terms, 0, layer, terms.least[0], 0)
    for o in range(1, terms.work.shape[0]):
        least = min(least, _layer_cost(terms, o, layer, terms.least[o], 0))
    return least
