"""Every plan's work: all samples through all layers at their cheapest, on all devices.

A layer's time over its samples is smallest at a measured size or at the largest that a slice may have: between two
sizes the time is linear in the samples, below the smallest it is constant or proportional, above the largest
proportional, and always rounded up. Where kinds differ, a device counts as the part of a quickest one that it is for
the layer in which it compares best.
"""

from __future__ import annotations

from fractions import Fraction

from penstock.solvers.all_plans.options import Numbers, numbers_of
from penstock.solvers.problem import Problem


def load_ns(problem: Problem, share: Fraction) -> int:
    """``ceil(work / devices)``; ``share``: of a processor, that an operation takes at least. Updates need all of it."""
    work = [[share * problem.global_batch_size * each for each in times] for times in _cheapest(problem)]
    updates = Fraction(int(problem.update_ns[-1]))
    quickest = [min(times) for times in zip(*work, strict=True)]
    part = dict(zip(_kinds(problem), (_part(times, quickest) for times in work), strict=True))
    devices = sum(part[problem.kind_source[device.kind]] for device in problem.devices)
    total = sum(quickest, updates)
    return max(-int(-total // problem.num_devices), -int(-sum(quickest) // devices))


def _kinds(problem: Problem) -> list[tuple[str, float]]:
    return sorted({problem.kind_source[device.kind] for device in problem.devices})


def _cheapest(problem: Problem) -> list[list[Fraction]]:
    """Of each kind, each layer's time per sample."""
    numbers = numbers_of(problem)
    whole = Numbers(numbers[0].least, numbers[-1].most)
    _least, most = whole.rows(problem.global_batch_size)
    return [
        [_per_sample(problem, kind, layer, most) for layer in range(problem.num_layers)] for kind in _kinds(problem)
    ]


def _per_sample(problem: Problem, kind: tuple[str, float], layer: int, most: int) -> Fraction:
    source, speed = kind
    points = [(p.rows, int(p.forward_ns[layer] + p.backward_ns[layer])) for p in problem.measured[source]]
    found = [Fraction(time, rows) for rows, time in points if rows <= most]
    above = [(rows, time) for rows, time in points if rows > most]
    if above and not any(rows == most for rows, _time in points):
        found.append(_between(points, above[0], most, problem.linear))
    return min(found) / Fraction(speed)


def _between(points: list[tuple[int, int]], above: tuple[int, int], most: int, linear: bool) -> Fraction:
    """Per sample at a size that was not measured, before rounding."""
    high_rows, high = above
    if linear:
        return Fraction(high, high_rows)
    below = [point for point in points if point[0] < most]
    if not below:
        return Fraction(high, most)
    low_rows, low = below[-1]
    return (low + Fraction((high - low) * (most - low_rows), high_rows - low_rows)) / most


def _part(times: list[Fraction], quickest: list[Fraction]) -> Fraction:
    """Of a quickest device: the largest ratio of any layer."""
    return max((best / own for own, best in zip(times, quickest, strict=True) if own), default=Fraction(1))
