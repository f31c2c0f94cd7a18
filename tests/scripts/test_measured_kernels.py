"""Measurements of one H100, and how far the shipped numbers are from them."""

from __future__ import annotations

import bench_layers
import measured_kernels
import pytest
from kernel_fits import Terms, facts_of, fitted, held_out

from penstock.facts.device_table import EXTRAPOLATED_EXPECTED_ERROR
from penstock.shapes import primitives


def test_the_shipped_rule_is_what_the_measurements_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert measured_kernels.compare_measured() == 0
    assert "NOT" not in capsys.readouterr().out


def test_another_rule_is_told_from_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rule = primitives.rule_of(facts_of("H100"))
    other = rule._replace(exposed_in_groups=1.0, forward=rule.forward._replace(rate=1.0))
    monkeypatch.setitem(primitives._MEASURED, "H100", other)
    assert measured_kernels.compare_measured() == 2
    printed = capsys.readouterr().out
    assert printed.count("NOT THE FIT") == 2


def test_blocks_are_predicted_at_the_level_of_kernels_and_not_at_that_of_runs() -> None:
    blocks = list(measured_kernels.measured()["blocks"].named())
    assert len(blocks) >= 15
    kernels = bench_layers.printed("closed form", blocks, {"kernels": bench_layers.closed_form(blocks, "kernels")})
    runs = bench_layers.printed("closed form", blocks, {"runs": bench_layers.closed_form(blocks, "runs")})
    assert kernels <= bench_layers.MOST
    assert runs > EXTRAPOLATED_EXPECTED_ERROR


def test_a_fit_finds_the_factors_that_times_were_made_with() -> None:
    import numpy as np

    terms = np.array([[1.0, 4.0], [2.0, 3.0], [5.0, 1.0], [7.0, 2.0], [3.0, 9.0], [8.0, 8.0]])
    fixed = np.full(6, 0.5)
    measured = Terms(terms, fixed, fixed + terms @ np.array([1.2, 0.7]), np.ones(6))
    assert fitted(measured) == pytest.approx([1.2, 0.7])
    assert held_out(measured, [(i,) for i in range(6)]) == pytest.approx(np.zeros(6), abs=1e-6)
