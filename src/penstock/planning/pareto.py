"""The Pareto front of a table of answers."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, ...]
"""One answer's coordinates; smaller is better in each."""


def front(points: Sequence[Point]) -> list[bool]:
    """Return for each point whether it is on the Pareto front. Equal points are on it together or not at all.

    In lexicographic order a point can be dominated only by an earlier one, and then by one of the front so far.
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
    """Return the grade of each value, the smallest first; values of one grade differ by at most the share ``alike``."""
    grades = [0] * len(values)
    grade, first = -1, 0.0
    for number in sorted(range(len(values)), key=values.__getitem__):
        if grade < 0 or values[number] - first > alike * abs(first):
            grade, first = grade + 1, values[number]
        grades[number] = grade
    return grades


def _beats(one: Point, other: Point) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
