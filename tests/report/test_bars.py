"""Bar charts of pages: every length is a share of one scale, and layouts beside a plan have the times of the judge."""

from __future__ import annotations

import pytest

import penstock
from penstock.layouts.plain import written_layout
from penstock.report import baselines as report_baselines
from penstock.report.baselines import baselines
from penstock.report.blocks import Bar, Bars
from penstock.report.view import standing
from penstock.schemas.plan import PlanFile

SORTS = ("weights", "activations")


def test_parts_follow_each_other_on_one_scale() -> None:
    rows = (
        Bar("small", (("weights", 1.0), ("activations", 2.0)), "3"),
        Bar("large", (("activations", 9.0),), "9", 1.0),
    )
    chart = Bars(rows, line=5.0)
    assert chart.sorts == SORTS
    small, large = (rectangles for _row, rectangles, _whisker in chart.drawn)
    scale = 100 / chart.end
    assert small == (
        (0, 0.0, pytest.approx(scale, abs=1e-3)),
        (1, pytest.approx(scale, abs=1e-3), pytest.approx(2 * scale, abs=1e-3)),
    )
    assert large == ((1, 0.0, pytest.approx(9 * scale, abs=1e-3)),)
    assert chart.drawn[1][2] == (pytest.approx(8 * scale, abs=1e-3), pytest.approx(10 * scale, abs=1e-3))
    assert chart.mark == pytest.approx(5 * scale, abs=1e-3)
    assert all(start + length <= 100 for _row, parts, _whisker in chart.drawn for _sort, start, length in parts)


def test_a_line_beyond_all_bars_is_inside_the_chart() -> None:
    chart = Bars((Bar("small", (("weights", 1.0),), "1"),), line=10.0)
    assert chart.mark == 100
    assert chart.drawn[0][1] == ((0, 0.0, 10.0),)


def test_no_bars_are_a_chart() -> None:
    assert Bars(()).drawn == ()


@pytest.fixture(scope="module")
def file() -> PlanFile:
    return penstock.plan("gpt2-small", "1x4xV100", global_batch_size=16, planner="even", max_plans=4).file


def test_layouts_beside_a_plan_have_the_times_of_the_judge(file: PlanFile) -> None:
    rows = baselines(file.request)
    words = ("tensor=1", "tensor=1,sharding=parameters", "tensor=1,sharding=optimizer")
    layouts = [written_layout(file.request, each).layout for each in words]
    assert [row.time_ns for row in rows] == [each.file.plan.prediction.time_per_global_batch_ns for each in layouts]
    assert [row.missing_bytes for row in rows] == [each.missing_bytes for each in layouts] == [0, 0, 0]
    assert rows[2].name == "Megatron's rule: TP 1 · PP 1 · ZeRO-1"
    chart = standing(file.plan, rows)
    assert [row.total for row in chart.rows] == [
        file.plan.prediction.time_per_global_batch_ns,
        *(row.time_ns for row in rows),
    ]
    assert chart.line_text.startswith("no plan can beat ")


def test_megatrons_rule_splits_no_further_than_memory_asks() -> None:
    request = penstock.plan("llama-3-8b", "1x8xH100", global_batch_size=8, planner="even", max_plans=1).request
    rule = baselines(request)[-1]
    assert rule.missing_bytes == 0
    tensor = int(rule.name.split("TP ")[1].split()[0])
    assert tensor > 1
    assert not written_layout(request, f"tensor={tensor // 2},sharding=optimizer").layout.fits


def test_a_model_without_known_layers_has_data_parallelism_alone() -> None:
    answer = penstock.plan("resnet-50", "1x2xV100", global_batch_size=8, planner="dp")
    (row,) = baselines(answer.request)
    assert row.time_ns == answer.file.plan.prediction.time_per_global_batch_ns
    assert standing(answer.plan, ()) is None


def test_large_clusters_have_none(file: PlanFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_baselines, "MOST_DEVICES", 3)
    assert baselines(file.request) == ()
