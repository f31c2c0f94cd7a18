"""Every plan's work: all samples through all layers at their cheapest, on all devices; with pins, on the allowed ones.

A layer's time over its samples is smallest at a measured size or at the largest that a slice may have: between two
sizes the time is linear in the samples, below the smallest it is constant or proportional, above the largest
proportional, and always rounded up. Where kinds differ, a device counts as a fraction of the quickest one, taken at
the layer in which it compares best, among the layers that it may hold. Layers that pins confine to some devices
(``confined``) are work of those devices alone, and cannot begin before a first slice has come through earlier layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.one_pipeline.confined import Confined, confined, holders
from penstock.solvers.bounds.one_pipeline.layer_costs import Numbers, numbers_of
from penstock.solvers.model.problem import Measured, Problem

Source = tuple[str, float]
"""The source of a device kind's times, and its speed."""


class Around(NamedTuple):
    """The least time of a flushed step before each layer, and after the last backward of its device."""

    head_ns: Sequence[int]
    tail_ns: Sequence[int]


def load_ns(problem: Problem, share: Fraction, around: Around | None = None) -> int:
    """Return the larger ``ceil(work / devices)`` of all layers and of the layers that pins confine to some devices, in
    ns.

    ``share``: the least share of a processor that an operation takes. Updates need all of it. ``around``: the time
    before and after the work on each layer; None where steps overlap.
    """
    # Where kinds differ, a layer that only slow devices may hold makes these look quick in all others.
    unpinned = load_ns(replace(problem, pins=()), share, around) if problem.pins else 0
    work = _Work(problem, share)
    return max(unpinned, *(work.of(each, around) for each in confined(problem)))


class _Work:
    """The time of all samples in each layer, by kind and at its quickest."""

    def __init__(self, problem: Problem, share: Fraction) -> None:
        self.problem, self._holders = problem, holders(problem)
        self._times = {
            kind: [share * problem.global_batch_size * each for each in times]
            for kind, times in zip(kinds_of(problem), _cheapest(problem), strict=True)
        }
        self._sources = [problem.kind_source[device.kind] for device in problem.devices]
        sources = {allowed: {self._sources[device] for device in allowed} for allowed in set(self._holders)}
        self._quickest = [
            min(self._times[source][layer] for source in sources[allowed])
            for layer, allowed in enumerate(self._holders)
        ]

    def of(self, part: Confined, around: Around | None) -> int:
        """Return the least time of the work on the confined layers, including the time around it."""
        problem = self.problem
        work = sum((self._quickest[layer] for layer in part.layers), Fraction(0))
        updates = sum(int(problem.update_ns[layer + 1] - problem.update_ns[layer]) for layer in part.layers)
        alike = -int(-(work + updates) // len(part.devices))
        computing = -int(-work // self._worth(part))
        if around is None:
            return max(alike, computing)
        first = part.layers[0]
        return around.head_ns[first] + max(alike, computing + around.tail_ns[first])

    def _worth(self, part: Confined) -> Fraction:
        """Return the number of quickest devices that these are worth at best."""
        worth_of: dict[tuple[Source, tuple[bool, ...]], Fraction] = {}
        total = Fraction(0)
        for device in part.devices:
            alike = self._sources[device], tuple(device in pin.devices for pin in self.problem.pins)
            if alike not in worth_of:
                worth_of[alike] = self._part(device, part.layers)
            total += worth_of[alike]
        return total

    def _part(self, device: int, layers: Sequence[int]) -> Fraction:
        """Return a device's largest ratio to a quickest one, over the layers that the device may hold."""
        times = self._times[self._sources[device]]
        allowed = (layer for layer in layers if device in self._holders[layer])
        return max((self._quickest[at] / times[at] for at in allowed if times[at]), default=Fraction(1))


def kinds_of(problem: Problem) -> list[Source]:
    """Return the kinds of devices whose times differ."""
    return sorted({problem.kind_source[device.kind] for device in problem.devices})


def _cheapest(problem: Problem) -> list[list[Fraction]]:
    """Return, for each kind, each layer's time per sample."""
    return [
        [each / Fraction(kind[1]) for each in least_per_sample(problem, kind, lambda p: p.forward_ns + p.backward_ns)]
        for kind in kinds_of(problem)
    ]


def least_per_sample(problem: Problem, kind: Source, value: Callable[[Measured], np.ndarray]) -> list[Fraction]:
    """Return each layer's least value per sample, over all sizes of a slice, as measured on the source of a kind.

    For layers with the same values it is computed once.
    """
    numbers = numbers_of(problem)
    whole = Numbers(numbers[0].least, numbers[-1].most)
    _least, most = whole.rows(problem.global_batch_size)
    measured = problem.measured[kind[0]]
    sizes = [point.rows for point in measured]
    least: dict[tuple[int, ...], Fraction] = {}
    per_layer = []
    for values in zip(*(value(point).tolist() for point in measured), strict=True):
        if values not in least:
            least[values] = _per_sample(list(zip(sizes, values, strict=True)), most, problem.linear)
        per_layer.append(least[values])
    return per_layer


def _per_sample(points: list[tuple[int, int]], most: int, linear: bool) -> Fraction:
    ratios = [Fraction(value, rows) for rows, value in points if rows <= most]
    above = [(rows, value) for rows, value in points if rows > most]
    if above and not any(rows == most for rows, _value in points):
        ratios.append(_between(points, above[0], most, linear))
    return min(ratios)


def _between(points: list[tuple[int, int]], above: tuple[int, int], most: int, linear: bool) -> Fraction:
    """Return the value per sample at a size that was not measured, before rounding."""
    high_rows, high = above
    if linear:
        return Fraction(high, high_rows)
    below = [point for point in points if point[0] < most]
    if not below:
        return Fraction(high, most)
    low_rows, low = below[-1]
    return (low + Fraction((high - low) * (most - low_rows), high_rows - low_rows)) / most
