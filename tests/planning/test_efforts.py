"""Efforts in requests: what is asked for where nothing is said, and what contradicts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.examples import catalogue
from penstock.examples.tiny import tiny_request
from penstock.planning.inputs import with_effort
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.request import PlanRequest
from penstock.service.pages.commands import command, python

pytestmark = pytest.mark.tier("quick")


def request(**termination: Any) -> PlanRequest:
    return PlanRequest.parse(tiny_request() | ({"termination": termination} if termination else {}))


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "normal"),
        ({"gap": 0.1}, "normal"),
        ({"time_limit_ns": 0}, None),
        ({"time_limit_ns": 10**9}, None),
        ({"max_plans": 3}, None),
        ({"effort": "quick"}, "quick"),
        ({"effort": "quick", "max_plans": 3}, "quick"),
        ({"effort": "thorough", "time_limit_ns": 10**9}, "thorough"),
    ],
    ids=str,
)
def test_normal_is_asked_for_where_nothing_says_when_to_stop(fields: dict[str, Any], effort: str | None) -> None:
    result = with_effort(request(**fields))
    assert result.termination.effort == effort
    assert result.termination.model_dump(exclude={"effort"}) == request(**fields).termination.model_dump(
        exclude={"effort"}
    )


def test_contradicting_limits_are_refused() -> None:
    with pytest.raises(InvalidDocument) as refused:
        request(effort="thorough", max_plans=4)
    (fault,) = refused.value.faults
    assert fault.pointer == "/termination"
    assert "effort 'thorough' lets every planner search to its end, but max_plans 4 ends it earlier" in fault.detail
    with pytest.raises(InvalidDocument, match=r"1 fault"):
        request(effort="fast")


@pytest.mark.parametrize(
    ("termination", "flags", "arguments"),
    [
        ({"effort": "quick"}, "--effort quick", "    effort='quick',"),
        (
            {"time_limit_ns": 10**9, "max_plans": 2},
            "--time-limit 1 --max-plans 2",
            "    time_limit=1.0,\n    max_plans=2,",
        ),
    ],
)
def test_pages_say_how_to_ask_the_same(termination: dict[str, Any], flags: str, arguments: str) -> None:
    shipped = PlanRequest.parse(
        {
            "profile": catalogue.profile("bert-48"),
            "topology": catalogue.cluster("dapple-config-a"),
            "global_batch_size": 16,
            "termination": termination,
        }
    )
    assert flags in command(shipped)
    assert arguments in python(shipped)
