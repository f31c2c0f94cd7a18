"""Tests of the requests to the planners when devices are lost."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.examples.tiny import tiny_request
from penstock.schemas.request import PlanRequest
from penstock.service.runs.replanning import requests_for

pytestmark = pytest.mark.tier("quick")


@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        pytest.param({}, [None], id="degrees-of-1"),
        pytest.param({"planner": "gpipe"}, [None, None], id="another-planner"),
        pytest.param({"degrees": {"tensor": 2}}, [2, "auto"], id="a-degree-that-may-not-fit-any-more"),
        pytest.param({"degrees": "auto"}, ["auto"], id="open-degrees"),
        pytest.param({"planner": "gpipe", "degrees": {"tensor": 2}}, [2, 2, "auto"], id="both"),
    ],
)
def test_degrees_are_kept_first_and_chosen_again_where_they_do_not_fit(
    changes: dict[str, Any], degrees: list[Any]
) -> None:
    request = PlanRequest.parse(tiny_request() | changes)
    requests = requests_for(request, {"node0/0"})
    assert [getattr(one.degrees, "tensor", one.degrees) for one in requests] == degrees
    assert all(one.planner == "auto" for one in requests[1:])
    assert all([device.id for node in one.topology.nodes for device in node.devices] == ["node0/0"] for one in requests)
