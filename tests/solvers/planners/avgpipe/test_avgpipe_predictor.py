"""AvgPipe's predictor: the worked example to the digit, both modes, and the choice under memory limits."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.solvers.planners.avgpipe.predictor import Degrees, Measured, Rank, choose, predict

UNIT = 1_000_000
EXAMPLE = Measured(
    4, 1, (Rank(8 * UNIT, 2 * UNIT, (500_000, 600_000, 400_000, 500_000), 1, 0, 4),) * 2
)  # K 2, T_gpu 8, 𝕋 2, F_mod 1, F_dat 4 (ALGORITHMS 6.3)


@pytest.mark.parametrize(
    ("degrees", "compute", "blocked", "wait", "total", "memory"),
    [
        ((4, 1), "8", "0.5", "2.5", "11", 5),
        ((8, 1), "16", "0.25", "2.25", "18.5", 3),
        ((2, 1), "4.2", "1", "3.1", "8.3", 9),
        ((4, 2), "4.2", "1", "2.05", "7.25", 10),
        ((8, 2), "8", "0.5", "1.5", "10", 6),
        ((4, 4), "4", "5", "3", "12", 20),
    ],
)
def test_worked_example(
    degrees: tuple[int, int], compute: str, blocked: str, wait: str, total: str, memory: int
) -> None:
    prediction = predict(EXAMPLE, Degrees(*degrees))
    assert prediction.compute_ns == (Fraction(compute) * UNIT,) * 2
    assert prediction.blocked_ns == (Fraction(blocked) * UNIT,) * 2
    assert prediction.upstream_ns == (0, Fraction(wait) * UNIT)
    assert prediction.downstream_ns == (Fraction(wait) * UNIT, 0)
    assert prediction.time_ns == Fraction(total) * UNIT
    assert prediction.memory_bytes == (memory, memory)


def test_wall_mode_counts_iterations_and_one_reference_model() -> None:
    """(4, 2): T_gpu 8.4, 𝕋 4, blocked 1, wait 3.1: 12.5 for two batches; with half in flight 2 · 3 + 2 + 2 · 4 / 2."""
    ranks = tuple(rank._replace(parallel_bytes=3, reference_bytes=2) for rank in EXAMPLE.ranks)
    measured = Measured(4, 1, ranks)
    prediction = predict(measured, Degrees(4, 2), "wall", growth=(Fraction(1, 2),) * 2)
    assert prediction.compute_ns == (Fraction("8.4") * UNIT,) * 2
    assert prediction.time_ns == Fraction("12.5") * UNIT / 2
    assert prediction.memory_bytes == (12, 12)
    assert predict(measured, Degrees(4, 2)).memory_bytes == (18, 18)


ranks = st.builds(
    Rank,
    st.integers(1, 10**6),
    st.integers(0, 10**6),
    st.lists(st.integers(0, UNIT), min_size=1, max_size=4).map(tuple),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 100),
)
runs = st.builds(Measured, st.integers(1, 16), st.integers(1, 3), st.lists(ranks, min_size=1, max_size=4).map(tuple))


@given(runs)
def test_the_measured_setting_predicts_itself(measured: Measured) -> None:
    degrees = Degrees(measured.num_micro_batches, measured.num_pipelines)
    for mode in ("paper", "wall"):
        prediction = predict(measured, degrees, mode)
        assert prediction.compute_ns == tuple(rank.compute_ns for rank in measured.ranks)
        assert prediction.transfer_ns == tuple(rank.transfer_ns for rank in measured.ranks)
        assert prediction.memory_bytes == tuple(
            measured.num_pipelines * rank.parallel_bytes + rank.reference_bytes + rank.data_bytes
            for rank in measured.ranks
        )


@given(runs, st.integers(1, 16), st.integers(1, 4), st.integers(2, 5))
def test_more_bandwidth_never_makes_it_slower(measured: Measured, number: int, pipelines: int, faster: int) -> None:
    quick = measured._replace(ranks=tuple(r._replace(transfer_ns=r.transfer_ns // faster) for r in measured.ranks))
    for mode in ("paper", "wall"):
        degrees = Degrees(number, pipelines)
        assert predict(quick, degrees, mode).time_ns <= predict(measured, degrees, mode).time_ns


def test_chooses_the_fastest_that_fits() -> None:
    """By the example: (4, 2) is fastest with 10 bytes, (2, 1) next with 9, then (8, 2) with 6."""
    grid = [Degrees(m, n) for m in (2, 4, 8) for n in (1, 2)]
    predictions = [(degrees, predict(EXAMPLE, degrees)) for degrees in grid]
    assert choose(predictions, (10, 10))[:2] == [Degrees(4, 2), Degrees(2, 1)]
    assert choose(predictions, (10, 9))[0] == Degrees(2, 1)
    assert choose(predictions, (6, 6))[0] == Degrees(8, 2)
    assert choose(predictions, (2, 2)) == []


def test_ties_go_to_fewer_pipelines_then_fewer_micro_batches() -> None:
    same = predict(EXAMPLE, Degrees(4, 1))
    assert choose([(Degrees(m, n), same) for m in (8, 4) for n in (2, 1)], (9, 9)) == [
        Degrees(4, 1),
        Degrees(8, 1),
        Degrees(4, 2),
        Degrees(8, 2),
    ]
