"""The client's conveniences against a real service."""

from __future__ import annotations

import pytest

from penstock.client import Client
from penstock.examples.tiny import tiny_request
from penstock.schemas.api.jobs import JobEvent
from penstock.schemas.errors import NotFound, UnsupportedRequest
from penstock.schemas.request import PlanRequest


def test_plan_waits_and_tells_the_story(client: Client):
    heard: list[JobEvent] = []
    client.wait_until_ready()
    request = PlanRequest.parse(tiny_request() | {"planner": "gpipe", "global_batch_size": 40})
    job = client.plans.create(request, on_event=heard.append)
    assert job.result is not None
    assert [event.sequence for event in heard] == list(range(1, len(heard) + 1))
    assert heard[0].data == {"state": "queued"}
    assert heard[-1].data["plan_hash"] == job.result.plan_hash
    progress = [event.data for event in heard if event.kind == "progress"]
    values = [each["incumbent_ns"] for each in progress if each["incumbent_ns"] is not None]
    assert values == sorted(values, reverse=True)
    pairs = [(each["bound_ns"], each["incumbent_ns"]) for each in progress]
    assert all(bound <= value for bound, value in pairs if bound is not None and value is not None)
    assert job.incumbent_ns == values[-1]


def test_a_known_plan_has_no_story_to_tell(client: Client):
    request = PlanRequest.parse(tiny_request() | {"planner": "gpipe", "global_batch_size": 44})
    first = client.plans.create(request)
    heard: list[JobEvent] = []
    again = client.plans.create(request, on_event=heard.append)
    assert (again.id, again.result, heard) == (first.id, first.result, [])


def test_refusals_are_raised(client: Client):
    with pytest.raises(UnsupportedRequest, match="no planner 'nobody'"):
        client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "nobody"}))
    with pytest.raises(NotFound, match="no job 'x'"):
        client.jobs.get("x")
