"""The race of alternatives against a list of all results."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from penstock.solvers.bounds.race import Race
from penstock.solvers.costs.infinity import NEVER_NS


@dataclass
class Rising:
    """Bounds of one alternative from the lowest on, none above its result; the result is None where it has no plan."""

    bounds: list[int]
    result_ns: int | None
    raises: int = 0

    @property
    def least_ns(self) -> int:
        return self.bounds[min(self.raises, len(self.bounds) - 1)]

    def raised(self, _below_ns: float) -> Rising | None:
        if self.raises + 1 < len(self.bounds):
            self.raises += 1
            return self
        return None if self.result_ns is None else self


def drawn(rng: random.Random) -> list[Rising]:
    alternatives = []
    for _ in range(rng.randint(1, 9)):
        result_ns = None if rng.random() < 0.2 else rng.randint(1, 40)
        bounds = sorted({rng.randint(0, result_ns or 40) for _ in range(rng.randint(1, 4))})
        alternatives.append(Rising(bounds, result_ns))
    return alternatives


@pytest.mark.parametrize("seed", range(60))
def test_the_best_result_is_found_and_no_alternative_evaluated_that_its_bounds_rule_out(seed: int) -> None:
    every = drawn(random.Random(seed))
    best_ns = min((each.result_ns for each in every if each.result_ns is not None), default=NEVER_NS)
    race, limits_ns = Race(every), [NEVER_NS]
    while (each := race.next_below(lambda _each: limits_ns[-1])) is not None:
        assert each.raises == len(each.bounds) - 1, "its bounds are asked for before it is evaluated"
        assert each.least_ns <= best_ns, "of those left, another had a lower bound"
        assert each.result_ns is not None
        limits_ns.append(min(limits_ns[-1], each.result_ns))
    assert limits_ns[-1] == best_ns


@pytest.mark.parametrize("seed", range(60))
def test_its_bound_is_on_every_result_and_raised_no_further_than_needed(seed: int) -> None:
    rng = random.Random(seed)
    every, below_ns = drawn(rng), rng.randint(1, 40)
    before = [each.least_ns for each in every]
    race = Race(every)
    results = [each.result_ns for each in every if each.result_ns is not None]
    assert race.least_ns(raises=0) == min(before)
    least_ns = race.least_ns(below_ns)
    assert least_ns <= min(results, default=NEVER_NS)
    for each, before_ns in zip(every, before, strict=True):
        assert each.raises == 0 or before_ns < below_ns, "its bound was no reason to ask for another"
    assert race.least_ns() >= least_ns


def test_a_copy_runs_apart_and_what_enters_takes_part() -> None:
    race = Race([Rising([3], 5), Rising([1], 9)])
    other = race.copy()
    other.enter(Rising([2], 2))

    def everything(apart: Race[Rising]) -> list[int | None]:
        results = []
        while (each := apart.next_below(lambda _each: NEVER_NS)) is not None:
            results.append(each.result_ns)
        return results

    assert everything(other) == [9, 2, 5]
    assert everything(race) == [9, 5]


def test_of_equal_bounds_the_one_that_entered_first_is_next() -> None:
    first, second, third = (Rising([3], 3) for _ in range(3))
    race = Race([first])
    race.enter(second)
    race.enter(third)
    order = [race.next_below(lambda _each: NEVER_NS) for _ in range(3)]
    assert list(map(id, order)) == list(map(id, (first, second, third)))
