"""Plans over HTTP: what the OpenAPI document shows can be sent, answers are kept, events can be resumed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.client import Client
from penstock.examples.tiny import tiny_plan_file, tiny_profile, tiny_request, tiny_topology
from penstock.schemas.api.jobs import CompareRequest
from penstock.schemas.plan import Plan, PlanFile, PlanQuestion
from penstock.schemas.profile import ModelProfile
from penstock.schemas.program import Program
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.service.db.migrations import HEAD
from penstock.service.http.app import create_app
from penstock.service.settings import Settings


def documented_bodies() -> list[Any]:
    """Return every POST of the OpenAPI document that has an example."""
    paths = create_app(Settings(database="unused.sqlite")).openapi()["paths"]
    cases = []
    for path, methods in paths.items():
        body = methods.get("post", {}).get("requestBody")
        if body is not None:
            cases.append(pytest.param(path, body["content"]["application/json"]["example"], id=path))
    return cases


@pytest.mark.cases(2)
@pytest.mark.parametrize(("path", "example"), documented_bodies())
def test_the_documented_example_can_be_posted_as_it_is(http: httpx.Client, path: str, example: Any):
    answer = http.post(path.replace("{id}", "documented"), json=example)
    if path == "/v1/runs":
        assert answer.status_code == 409
        assert "no living agent offers 'node0/0', 'node1/0'" in answer.json()["detail"]
    else:
        assert answer.is_success, answer.text
    if path.startswith("/v1/agents/"):
        assert http.post(path.replace("{id}", "documented"), json=example | {"leaving": True}).is_success


def test_the_openapi_document_has_all_that_it_refers_to(http: httpx.Client):
    document = http.get("/openapi.json").json()
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(document["components"]["schemas"])
    assert {"PlanRequest", "PlanFile", "RunRequest", "SyncRequest", "ProblemDetails"} <= names


def test_a_new_request_is_a_job_and_a_known_one_an_answer(http: httpx.Client):
    body = tiny_request() | {"planner": "gpipe", "global_batch_size": 24}
    first = http.post("/v1/plans", json=body)
    assert first.status_code == 202
    assert "cache-status" not in first.headers
    assert first.headers["location"] == f"/v1/jobs/{first.json()['id']}"
    done = http.get(first.headers["location"], headers={"Prefer": "wait=60"}).json()
    assert done["state"] == "succeeded"
    assert done["result"]["status"] in ("optimal", "feasible")
    repeated = http.post("/v1/plans", json=body)
    assert repeated.status_code == 200
    assert repeated.headers["cache-status"] == "penstock; hit"
    assert repeated.json() == done


@pytest.mark.tier("nightly")
def test_prefer_wait_answers_with_the_result(http: httpx.Client):
    body = tiny_request() | {"global_batch_size": 20}
    answer = http.post("/v1/plans", json=body, headers={"Prefer": "respond-async, wait=60"})
    assert answer.status_code == 200
    assert answer.headers["preference-applied"] == "wait=60"
    assert answer.json()["state"] == "succeeded"


def test_hashes_stand_for_the_documents(client: Client, http: httpx.Client, planned: Any):
    profile = client.profiles.create(ModelProfile.parse(tiny_profile()))
    topology = client.topologies.create(ClusterTopology.parse(tiny_topology()))
    answer = http.post("/v1/plans", json=tiny_request() | {"profile": profile.hash, "topology": topology.hash})
    assert answer.status_code == 200
    assert answer.json()["result"]["plan_hash"] == planned.result.plan_hash
    stored = http.get(profile.href)
    assert ModelProfile.parse_json(stored.content).content_hash() == profile.hash
    assert http.get(profile.href, headers={"If-None-Match": stored.headers["etag"]}).status_code == 304
    assert ClusterTopology.parse_json(http.get(topology.href).content).content_hash() == topology.hash


def test_a_document_is_planned_as_it_stands(client: Client, planned: Any):
    request = PlanRequest.parse(tiny_request())
    assert planned.request_hash == request.content_hash()
    assert client.plans.file(planned.result.plan_hash).request == request


def test_numbers_that_are_equal_are_the_same_request(http: httpx.Client, planned: Any):
    source = tiny_profile()["source"] | {"expected_error": 0.20}
    body = {"seed": 0, **tiny_request(), "profile": {**tiny_profile(), "source": source, "scaling": "linear"}}
    answer = http.post("/v1/plans", content=json.dumps(body, indent=4), headers={"Content-Type": "application/json"})
    assert answer.json()["request_hash"] == planned.request_hash


def test_a_plan_is_immutable_under_its_hash(http: httpx.Client, planned: Any):
    address = planned.result.plan_hash
    answer = http.get(f"/v1/plans/{address}")
    assert Plan.parse_json(answer.content).content_hash() == address
    assert answer.headers["etag"] == f'"{address}"'
    assert "immutable" in answer.headers["cache-control"]
    assert http.get(f"/v1/plans/{address}", headers={"If-None-Match": f'"{address}"'}).status_code == 304
    file = PlanFile.parse_json(http.get(f"/v1/jobs/{planned.id}/plan-file").content)
    assert file == PlanFile(plan=planned.result.plan, request=PlanRequest.parse(tiny_request()))
    assert http.get(f"/v1/plans/{address}/plan-file").content == http.get(f"/v1/jobs/{planned.id}/plan-file").content


def test_programs_of_all_ranks_and_of_one(client: Client, http: httpx.Client, planned: Any):
    programs = client.plans.programs(planned.id)
    assert [Program.from_json(program).rank for program in programs] == list(range(len(programs)))
    assert http.get(f"/v1/plans/{planned.result.plan_hash}/programs/0").json() == programs[0]
    missing = http.get(f"/v1/plans/{planned.result.plan_hash}/programs/99")
    assert missing.status_code == 404
    assert f"its ranks are 0…{len(programs) - 1}" in missing.json()["detail"]


def test_events_as_a_stream_and_as_pages(http: httpx.Client, planned: Any):
    page = http.get(f"/v1/jobs/{planned.id}/events", params={"poll": 1}).json()
    assert page["done"]
    assert page["items"][0]["data"] == {"state": "queued"}
    assert page["items"][-1]["data"]["state"] == "succeeded"
    kinds = [event["kind"] for event in page["items"]]
    assert "progress" in kinds
    streamed = http.get(f"/v1/jobs/{planned.id}/events")
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [dict(line.split(": ", 1) for line in one.splitlines()) for one in streamed.text.strip().split("\n\n")]
    assert [json.loads(event["data"]) for event in events] == page["items"]
    assert [event["event"] for event in events] == kinds
    last = events[-2]["id"]
    resumed = http.get(f"/v1/jobs/{planned.id}/events", headers={"Last-Event-ID": last})
    assert resumed.text.count("data: ") == 1
    assert http.get(f"/v1/jobs/{planned.id}/events", params={"after": page["last"]}).status_code == 204


def test_jobs_in_pages(client: Client, planned: Any):
    client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "gpipe", "global_batch_size": 12}))
    first = client.jobs.page(limit=1)
    assert first.next_cursor is not None
    assert first.items[0].result is None
    second = client.jobs.page(limit=200, cursor=first.next_cursor)
    assert planned.id in {job.id for job in second.items}
    assert second.next_cursor is None


def test_infeasible_is_a_result(client: Client):
    topology = tiny_topology()
    topology["uniform"]["memory_bytes"] = 50_000_000
    job = client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "gpipe", "topology": topology}))
    assert job.state == "succeeded"
    assert job.result is not None
    assert (job.result.status, job.result.plan) == ("infeasible", None)
    assert job.result.infeasibility is not None
    assert job.result.infeasibility.missing_bytes


def test_a_plan_of_ones_own_is_judged(client: Client):
    file = PlanFile.parse(tiny_plan_file())
    assert client.verify(PlanQuestion(plan=file)).valid
    simulation = client.simulate(PlanQuestion(plan=file))
    assert simulation.valid
    assert simulation.plan.prediction is not None
    # 4 micro-batches of 4 samples: each stage computes 4 * 2 * (2 + 4) ms per micro-batch; by hand.
    assert [device.busy_ns for device in simulation.plan.prediction.devices] == [4 * 48_000_000] * 2


def test_a_plan_with_faults_is_described_not_refused(client: Client, http: httpx.Client):
    data = tiny_plan_file()
    data["plan"]["schedule"]["rows"][0]["text"] = "F0 F1 B0 F2 B1 F3 B3"
    verdict = client.verify(data)
    assert not verdict.valid
    assert verdict.sentences
    answer = http.post("/v1/plans:simulate", json=data)
    assert answer.status_code == 422
    assert answer.json()["code"] == "invalid-plan"


def test_validate_says_whether_an_answer_is_known(client: Client, planned: Any):
    checked = client.plans.validate(PlanRequest.parse(tiny_request()))
    assert (checked.request_hash, checked.cached) == (planned.request_hash, True)
    assert not client.plans.validate(PlanRequest.parse(tiny_request() | {"global_batch_size": 28})).cached


def test_compare_judges_planners_alike(client: Client):
    rows = client.compare({"request": tiny_request(), "planners": ["dp", "gpipe"]})
    assert [(row.planner, row.schedule) for row in rows][:2] == [("dp", "early-backward"), ("dp", "gpipe")]
    assert {row.planner for row in rows} == {"dp", "gpipe"}
    assert all(row.iteration_ns and row.bound_ns and row.iteration_ns >= row.bound_ns for row in rows)


def test_compare_says_which_planner_cannot_take_the_request(client: Client):
    request = PlanRequest.parse(tiny_request() | {"update_rules": ["elastic_averaging"]})
    rows = client.compare(CompareRequest(request=request, planners=("dp",)))
    assert [row.status for row in rows] == ["unsupported"]
    assert "synchronous" in rows[0].why


def test_what_there_is_to_ask_for(client: Client, http: httpx.Client):
    planners = {planner.name: planner for planner in client.planners()}
    assert {"auto", "dp", "gpipe", "dapple"} <= set(planners)
    assert planners["dapple"].schedules[0] == "auto"
    for example in client.examples():
        assert http.post("/v1/plans:validate", json=example.request).is_success, example.name


def test_health(http: httpx.Client):
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready", "revision": HEAD, "workers": 1, "slots": 2}
    assert http.get("/version").json()["name"] == "penstock"
