"""Ranks that share layers train what one process trains: every pair of degrees, shardings, schedules and models."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from mesh_cases import MICRO_BATCHES, Case, Lowered, all_products, covering, lowered
from rank_pool import RankPool, differences

from penstock.convert.requested_degrees import degrees_of
from penstock.solvers.model.degrees import Degrees

pytestmark = pytest.mark.tier("quick")

HERE = Path(__file__).parent
STEPS = 2
FIRST = 13
"""Number of the cases that have every pair, which come in the order of how many pairs they add for their ranks."""
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate cases: the first with every pair in the standard tier, the day's of every triple in "everything"."""
    if "case" in metafunc.fixturenames:
        option = metafunc.config.getoption
        if option("--all-meshes"):
            cases = all_products()
        elif option("--tier") == "everything":
            cases = covering(3, option("--mesh-seed"))
        else:
            cases = covering(2)[:FIRST]
        metafunc.parametrize("case", cases, ids=str)


@pytest.mark.cases(1)
@pytest.mark.tier("ci")
def test_a_mesh_trains_what_one_process_trains_with_the_collectives_that_are_charged(
    world: RankPool, case: Case
) -> None:
    case_plan = lowered(case)
    done = world.train(case_plan.programs, f"mesh_jobs:{case.job}_{case.dtype}", steps=STEPS, directory=str(HERE))
    gradients, losses = differences(done)
    assert gradients <= TOLERANCE[case.dtype]
    assert losses <= TOLERANCE[case.dtype]
    assert {one["collectives_differ"] for one in done} == {None}
    if case.sharding == "none" and case.recompute == "none":
        for program, one in zip(case_plan.programs, done, strict=True):
            ran = {kind: one["collectives"].get(kind, 0) for kind in ("all_gather", "reduce_scatter")}
            layers = {i for entry in program.stages for i in range(entry.first, entry.last + 1)}
            assert ran == {kind: STEPS * number for kind, number in _charged(case_plan, layers).items()}


def _charged(case_plan: Lowered, layers: set[int]) -> dict[str, int]:
    """Count the collectives of these layers' passes that the simulator counts in a step, by the profile's variant."""
    counts = Counter({"all_gather": 0, "reduce_scatter": 0})
    degrees = case_plan.cells.degrees
    if degrees != Degrees():
        profile = case_plan.profile
        assert profile.variants is not None
        assert profile.classes is not None
        (variant,) = (each for each in profile.variants if degrees_of(each.degrees) == degrees)
        costs = variant.measurements[0].layers
        for layer in layers:
            for each in costs[profile.classes[layer]].collectives:
                if each.operation in counts and each.phase != "step":
                    counts[each.operation] += MICRO_BATCHES * each.count
    return dict(counts)


def _combinations(cases: list[Case], size: int) -> set[tuple[tuple[int, object], ...]]:
    return {each for case in cases for each in combinations(enumerate(case), size)}


def test_the_pairs_are_those_of_all_products() -> None:
    """By brute force: no pair of values that go together is missing."""
    chosen = covering(2)
    assert _combinations(chosen, 2) == _combinations(all_products(), 2)
    assert len(chosen) <= 60
    assert len(_combinations(chosen[:FIRST], 2)) >= len(_combinations(chosen, 2)) * 5 // 6


@pytest.mark.tier("nightly")
def test_every_days_cases_have_all_triples_and_are_others() -> None:
    triples = _combinations(all_products(), 3)
    days = [covering(3, day) for day in (1, 2)]
    for chosen in days:
        assert _combinations(chosen, 3) == triples
        assert len(chosen) <= 300
    assert len(set(days[0]) & set(days[1])) <= len(days[0]) // 2
