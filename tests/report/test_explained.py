"""The page's section on why: tables that add up, and the critical path marked on the timeline."""

from __future__ import annotations

import json

import pytest
from test_page import _parts

from penstock.examples.tiny import tiny_plan_file
from penstock.planning.explain import explain
from penstock.report.plan_files import page
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.plan import PlanFile


@pytest.fixture
def file() -> PlanFile:
    return PlanFile.parse(tiny_plan_file())


@pytest.fixture
def explanation(file: PlanFile) -> Explanation:
    return explain(file, what_if=())


def test_the_path_is_marked_where_it_runs(file: PlanFile, explanation: Explanation) -> None:
    """A mark for each segment, on the device that computes or sends; together as long as the step."""
    text = page(file)
    drawn = json.loads(_parts(text).scripts["timeline-data"])
    segments = explanation.path.segments
    assert [end - start for _lane, _low, start, end in drawn["path"]] == [segment.length_ns for segment in segments]
    assert [bool(low) for _lane, low, _start, _end in drawn["path"]] == [not segment.devices for segment in segments]
    for (lane, _low, _start, _end), segment in zip(drawn["path"], segments, strict=True):
        if segment.devices:
            assert drawn["lanes"][lane]["device"] == segment.devices[0]


def test_the_tables_stand_on_the_page(file: PlanFile, explanation: Explanation) -> None:
    text = page(file)
    for words in (
        "What the time is made of",
        "Critical path",
        "Idle time by cause",
        "Effect of single changes",
        "marked in red",
    ):
        assert words in text
    for each in explanation.sensitivities:
        assert each.sentence in text
