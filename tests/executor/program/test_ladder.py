"""The climb of advance forward propagation: pure, so its iterations are lists of times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.executor.program.ladder import ITERATIONS, MARGIN, WARMUP, Ladder

pytestmark = pytest.mark.tier("quick")

EACH = WARMUP + ITERATIONS


def climbed(ladder: Ladder, time_ns: Callable[[int], int], steps: int) -> list[int]:
    """Return the rungs of so many iterations, of which one on rung i takes ``time_ns(i)``."""
    rungs = []
    for _ in range(steps):
        rungs.append(ladder.rung)
        assert ladder.after_step(time_ns(ladder.rung)) == ladder.rung
    return rungs


def test_it_climbs_while_it_gets_faster_and_goes_back_once() -> None:
    times = [1000, 900, 800, 805, 1]
    rungs = climbed(Ladder(5), lambda i: times[i], 6 * EACH)
    assert rungs == [0] * EACH + [1] * EACH + [2] * EACH + [3] * EACH + [2] * 2 * EACH, "rung 4 is never tried"


@pytest.mark.parametrize(("second", "last"), [(991, 0), (990, 0), (989, 1)])
def test_one_percent_is_not_faster(second: int, last: int) -> None:
    ladder = Ladder(2)
    climbed(ladder, lambda i: (1000, second)[i], 3 * EACH)
    assert (ladder.rung, ladder.settled) == (last, True)


def test_memory_ends_the_ladder() -> None:
    ladder = Ladder(3)
    climbed(ladder, lambda i: 1000 - 100 * i, 4 * EACH)
    assert (ladder.rung, ladder.settled) == (2, True)
    assert climbed(Ladder(1), lambda _: 5, 3) == [0, 0, 0]


def test_the_first_iteration_on_a_rung_is_not_counted() -> None:
    """A slow first step of the run would make every other rung look faster."""
    ladder = Ladder(2)
    for time_ns in (10**9, 100, 100, 100, 50, 105, 105, 105):
        ladder.after_step(time_ns)
    assert (ladder.rung, ladder.settled) == (0, True)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8))
def test_it_ends_where_the_rule_says(times: list[int]) -> None:
    """The rule once more: the first rung whose successor is not more than 1 % faster, by plain search."""
    wanted = next(
        (i for i in range(len(times) - 1) if times[i + 1] >= (1 - MARGIN) * times[i]),
        len(times) - 1,
    )
    ladder = Ladder(len(times))
    climbed(ladder, lambda i: times[i], EACH * (len(times) + 1))
    assert (ladder.rung, ladder.settled) == (wanted, True)


def test_nothing_to_climb_is_refused() -> None:
    with pytest.raises(ValueError, match="expected rungs"):
        Ladder(0)
