"""The Pareto front against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planning.pareto import Point, front, graded

pytestmark = pytest.mark.tier("quick")

POINTS = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.tuples(*[st.integers(0, 4).map(float)] * size), max_size=12)
)


def beaten(point: Point, by: Point) -> bool:
    return all(a <= b for a, b in zip(by, point, strict=True)) and any(a < b for a, b in zip(by, point, strict=True))


@given(POINTS)
def test_exactly_those_that_no_other_beats(points: list[Point]):
    assert front(points) == [not any(beaten(point, other) for other in points) for point in points]


def test_by_hand():
    fast, small, slow_and_big, equal = (-9.0, 8.0), (-3.0, 2.0), (-3.0, 4.0), (-9.0, 8.0)
    assert front([fast, small, slow_and_big, equal]) == [True, True, False, True]


def test_grades_hold_what_differs_little() -> None:
    """By hand: 100 and 101 are within 1 % of 100, 102 begins a grade; negative throughputs, and zeros, count alike."""
    assert graded([102.0, 100.0, 101.0, 200.0, 100.0], 0.01) == [1, 0, 0, 2, 0]
    assert graded([-100.0, -99.5, -98.0], 0.01) == [0, 0, 1]
    assert graded([0.0, 0.0, 1.0], 0.01) == [0, 0, 1]
    assert graded([], 0.01) == []
