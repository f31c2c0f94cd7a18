"""Which answers no other answer beats: the Pareto front of a table."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, ...]
"""One answer; in every coordinate less is better."""


def front(points: Sequence[Point]) -> list[bool]:
    """Of each point, whether no other is at least as good everywhere and better somewhere. Equal points stay together.

    In lexicographic order a point can be beaten only by one before it, and then by one of the front so far.
    """
    order = sorted(range(len(points)), key=points.__getitem__)
    kept: list[Point] = []
    inside = [False] * len(points)
    for number in order:
        point = points[number]
        if not any(_beats(other, point) for other in kept):
            inside[number] = True
            kept.append(point)
    return inside


def graded(values: Sequence[float], alike: float) -> list[int]:
    """Of each value the number of its grade, the least first; a grade's values are alike to that share."""
    grades = [0] * len(values)
    grade, first = -1, 0.0
    for number in sorted(range(len(values)), key=values.__getitem__):
        if grade < 0 or values[number] - first > alike * abs(first):
            grade, first = grade + 1, values[number]
        grades[number] = grade
    return grades


def _beats(one: Point, other: Point) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
