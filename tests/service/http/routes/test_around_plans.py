"""Routes around a plan: its other forms, jobs that are tried again and deleted, lists, sweeps, the page of the API."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import httpx
import pytest

from penstock.client import Client
from penstock.examples.tiny import tiny_plan_file, tiny_profile, tiny_request, tiny_sweep
from penstock.exporting.forms import FORMS
from penstock.schemas.api.explanation import ExplainRequest
from penstock.schemas.api.jobs import PlanComparison
from penstock.schemas.api.sweep import SweepRequest
from penstock.schemas.errors import Conflict, NotFound
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest

UNKNOWN = "sha256:" + "7" * 64
TRAINERS = {"megatron", "megatron-bridge", "torchtitan", "deepspeed", "ranges"}
"""Forms that take some plans only: tests of layouts have them."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("to", sorted(FORMS.keys() - TRAINERS))
def test_a_plan_in_every_form(http: httpx.Client, planned: Any, to: str):
    answer = http.get(f"/v1/plans/{planned.result.plan_hash}:export", params={"to": to})
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == FORMS[to].media_type
    assert answer.headers["content-disposition"].startswith('attachment; filename="plan-')
    assert http.get(f"/v1/plans/{planned.result.plan_hash}:export", params={"to": to}).content == answer.content
    looks_right = {
        "plan": lambda: PlanFile.parse_json(answer.content).plan == planned.result.plan,
        "program": lambda: answer.json() == http.get(f"/v1/plans/{planned.result.plan_hash}/programs").json(),
        "chrome-trace": lambda: any(event["ph"] == "X" for event in answer.json()["traceEvents"]),
        "csv": lambda: len(answer.text.splitlines()) == len(planned.result.plan.schedule.rows),
        "svg": lambda: ET.fromstring(answer.text).tag.endswith("svg"),
        "report": lambda: "<html" in answer.text,
    }
    assert looks_right[to]()


def test_forms_that_are_not_there(http: httpx.Client, planned: Any):
    assert http.get(f"/v1/plans/{planned.result.plan_hash}:export", params={"to": "png"}).status_code == 422
    assert http.get(f"/v1/plans/{UNKNOWN}:export", params={"to": "svg"}).status_code == 404


def test_a_stored_plan_is_explained_like_one_of_ones_own(client: Client, planned: Any):
    stored = client.explain({"plan": planned.result.plan_hash, "what_if": ["bandwidth=2"]})
    assert stored == client.explain(ExplainRequest(plan=client.plans.file(planned.id), what_if=("bandwidth=2",)))
    assert "bandwidth=2" in {row.name for row in stored.what_ifs}
    with pytest.raises(NotFound):
        client.explain({"plan": UNKNOWN})


def test_the_best_plan_of_an_ended_job_is_its_plan(client: Client, planned: Any):
    assert client.jobs.plan_file(planned.id, best=True) == client.plans.file(planned.id)


def test_jobs_are_found_by_tag_profile_planner_and_state(client: Client):
    request = PlanRequest.parse(tiny_request() | {"global_batch_size": 36, "planner": "gpipe"})
    job = client.plans.create(request, tag="weekly", priority=3)
    assert isinstance(request.profile, ModelProfile)
    wanted = {"tag": "weekly", "planner": "gpipe", "state": "succeeded", "profile": request.profile.content_hash()}
    for name, value in wanted.items():
        assert job.id in {each.id for each in client.jobs.page(limit=200, **{name: value}).items}, name  # type: ignore[arg-type]
    assert client.jobs.page(tag="monthly").items == ()
    assert client.jobs.page(profile=UNKNOWN).items == ()


def test_a_job_is_deleted_and_its_plan_stays(client: Client, http: httpx.Client):
    request = PlanRequest.parse(tiny_request() | {"planner": "gpipe", "global_batch_size": 52})
    job = client.plans.create(request)
    assert job.result is not None
    client.jobs.delete(job.id)
    with pytest.raises(NotFound):
        client.jobs.get(job.id)
    assert http.get(f"/v1/plans/{job.result.plan_hash}").status_code == 200
    assert client.plans.create(request).id != job.id, "its answer went with it, though its body is remembered"


def test_only_what_has_failed_or_was_cancelled_is_tried_again(client: Client, planned: Any):
    with pytest.raises(Conflict, match="succeeded"):
        client.jobs.retry(planned.id)
    with pytest.raises(NotFound):
        client.jobs.retry("nobody")


def test_documents_in_pages(client: Client, http: httpx.Client):
    for number in range(3):
        client.profiles.create(ModelProfile.parse(tiny_profile() | {"name": f"tiny {number}"}))
    first = client.profiles.page(limit=2)
    assert [item.name for item in first.items] == ["tiny 2", "tiny 1"]
    second = client.profiles.page(limit=200, cursor=first.next_cursor)
    assert "tiny 0" in {item.name for item in second.items}
    assert not {item.hash for item in first.items} & {item.hash for item in second.items}
    assert client.profiles.get(first.items[0].hash).name == "tiny 2"
    tag = http.get("/v1/profiles").headers["etag"]
    assert http.get("/v1/profiles", headers={"If-None-Match": tag}).status_code == 304


def test_a_sweep_from_its_begin_to_its_end(client: Client):
    heard: list[int] = []
    sweep = client.sweeps.create(SweepRequest.parse(tiny_sweep()), on_change=lambda now: heard.append(now.ended))
    assert (sweep.state, sweep.cases, len(sweep.rows)) == ("succeeded", 4, 4)
    assert any(row.pareto for row in sweep.rows)
    assert heard == sorted(heard)
    assert sweep.id in {each.id for each in client.sweeps.page().items}
    assert client.sweeps.get(sweep.id) == sweep
    client.sweeps.delete(sweep.id)
    with pytest.raises(NotFound):
        client.sweeps.get(sweep.id)


def test_rows_of_a_comparison_come_one_by_one(client: Client, http: httpx.Client):
    question = {"request": tiny_request(), "planners": ["dp", "gpipe"]}
    answer = http.post("/v1/plans:compare", json=question, headers={"Accept": "text/event-stream"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [dict(line.split(": ", 1) for line in one.splitlines()) for one in answer.text.strip().split("\n\n")]
    assert [event["event"] for event in events] == ["row"] * (len(events) - 2) + ["result", "end"]
    rows = [PlanComparison.model_validate_json(event["data"]) for event in events[:-2]]
    heard: list[PlanComparison] = []
    whole = client.compare(question, on_row=heard.append)
    assert tuple(heard) == whole
    assert [(row.planner, row.schedule, row.iteration_ns) for row in rows] == [
        (row.planner, row.schedule, row.iteration_ns) for row in whole
    ]


def test_all_faults_are_named_at_once(http: httpx.Client):
    body = tiny_request() | {"global_batch_size": -1, "seed": "x", "colour": "red"}
    answer = http.post("/v1/plans:validate", json=body)
    assert {fault["pointer"] for fault in answer.json()["errors"]} == {"/global_batch_size", "/seed", "/colour"}


def test_keys_that_are_doubled_and_numbers_that_are_none_are_pointed_at(http: httpx.Client):
    text = json.dumps({"plan": tiny_plan_file()["plan"], "request": tiny_request() | {"seed": float("nan")}})
    text = text.replace('"name": "block2"', '"name": "block2", "name": "again"')
    answer = http.post("/v1/plans:verify", content=text, headers={"Content-Type": "application/json"})
    pointers = {fault["pointer"]: fault["code"] for fault in answer.json()["errors"]}
    assert pointers == {"/request/seed": "not-finite", "/request/profile/layers/2": "doubled-key"}


def test_the_page_of_the_api_lists_every_route(http: httpx.Client):
    page = http.get("/docs").text
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page
    outside = re.findall(r'(?:src|href)="(?!/|#)([^"]+)"', page)
    assert outside == []


def test_every_route_says_how_it_refuses(http: httpx.Client):
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            problem = operation["responses"]["default"]["content"]["application/problem+json"]["schema"]
            assert problem == {"$ref": "#/components/schemas/ProblemDetails"}, (method, path)
