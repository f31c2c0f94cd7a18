"""``/v1/plans:explain``: the same answer as the Python API gives, and refusals for what cannot be explained."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from service_process import Server

import penstock
from penstock.client import Client
from penstock.examples.tiny import tiny_plan_file
from penstock.schemas.api.explanation import ExplainRequest, OtherLayout
from penstock.schemas.errors import InvalidDocument, InvalidPlan, NotFound, UnsupportedRequest
from penstock.schemas.plan import PlanFile

UNKNOWN = f"sha256:{64 * '0'}"


@pytest.fixture
def file() -> PlanFile:
    return PlanFile.parse(tiny_plan_file())


@pytest.mark.tier("nightly")
def test_the_service_says_what_the_python_api_says(client: Client, file: PlanFile) -> None:
    client.wait_until_ready()
    other = OtherLayout(cuts=("block1",), num_micro_batches=2)
    heard: list[str] = []
    question = ExplainRequest(plan=file, what_if=("bandwidth=2", "devices=+1"), layout=other)
    explanation = client.explain(question, on_progress=heard.append)
    assert "the critical path" in heard
    layout = penstock.Layout(("block1",), num_micro_batches=2)
    assert explanation == penstock.explain(file, what_if=["bandwidth=2", "devices=+1"], layout=layout)
    assert [row.name for row in explanation.what_ifs] == ["", "bandwidth=2", "devices=+1"]
    assert explanation.layout is not None
    assert explanation.layout.fits


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"layout": {"cuts": ["9"]}}, InvalidDocument, "no layer 9"),
        ({"layout": {"cuts": ["2", "1"]}}, InvalidDocument, "begin with layer 1"),
        ({"layout": {"cuts": ["blok1"]}}, InvalidDocument, "block1"),
        ({"layout": {"cuts": ["1"], "schedule": "gpip"}}, UnsupportedRequest, "gpipe"),
        ({"what_if": ["bandwith=2"]}, InvalidDocument, "is not a known change"),
        ({"what_if": ["memory=1e999999999"]}, InvalidDocument, "is not a factor"),
        ({"what_if": ["devices=-2"]}, UnsupportedRequest, "cannot be removed"),
        ({"what_if": ["speed=2"], "planner": "daple"}, UnsupportedRequest, "dapple"),
        ({"max_plans": 0}, InvalidDocument, "/max_plans"),
        ({"layout": {"cuts": []}}, InvalidDocument, "/layout/cuts"),
        ({"plan": UNKNOWN}, NotFound, "no plan"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    client: Client, file: PlanFile, how: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        client.explain({"plan": file.model_dump(mode="json", exclude_none=True), **how})
    assert words in str(caught.value)


def test_a_plan_that_cannot_run_is_refused(shared_server: Server) -> None:
    data = json.loads(json.dumps(tiny_plan_file()))
    data["plan"]["schedule"]["rows"][0]["text"] = "B0 F0 F1 B1 F2 B2 F3 B3"
    answer = httpx.post(f"{shared_server.url}/v1/plans:explain", json=data, timeout=60)
    assert (answer.status_code, answer.json()["code"]) == (422, InvalidPlan.code)
    assert "out of order" in json.dumps(answer.json())
