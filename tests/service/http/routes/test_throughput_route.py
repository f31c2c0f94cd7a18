"""POST /v1/profiles:calibrate-throughput and its client."""

from __future__ import annotations

import httpx
import pytest

from penstock.calibration.throughput import calibrate_throughput
from penstock.client import Client
from penstock.examples.tiny import tiny_plan_file, tiny_throughput
from penstock.schemas.api.throughput import ThroughputRequest
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import PlanFile

PATH = "/v1/profiles:calibrate-throughput"


def test_the_service_says_what_python_says(client: Client, http: httpx.Client) -> None:
    file = PlanFile.parse(tiny_plan_file())
    there = client.calibrate_throughput(ThroughputRequest(plan_file=file, step_ns=400_000_000, show=(file,)))
    assert there == calibrate_throughput(file, step_ns=400_000_000, show=[file])
    assert there.run.after_ns == pytest.approx(400_000_000, rel=1e-3)
    assert http.post(PATH, json=tiny_throughput()).json()["factor"] == there.factor


def test_refusals_name_the_numbers(client: Client, http: httpx.Client) -> None:
    with pytest.raises(UnsupportedRequest, match="with computation on V100"):
        client.calibrate_throughput(ThroughputRequest(plan_file=PlanFile.parse(tiny_plan_file()), step_ns=1))
    both = {**tiny_throughput(), "tokens_per_s_per_gpu": 1.0}
    assert http.post(PATH, json=both).status_code == 422
