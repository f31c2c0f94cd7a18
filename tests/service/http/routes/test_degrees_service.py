"""Degrees over HTTP: layouts of one's own beside planners, why not other degrees, and the pages that show them."""

from __future__ import annotations

import re

import httpx
import pytest

import penstock
from penstock.client import Client
from penstock.planning.inputs import find_profile, find_topology, with_open_degrees
from penstock.schemas.api.jobs import CompareRequest, JobOut
from penstock.schemas.errors import InvalidDocument, PenstockError, UnsupportedRequest
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers.degrees import Degrees

LAYOUT = "tensor=2,pipeline=2,micro-batch=2"


@pytest.fixture(scope="module")
def request_of_tests() -> PlanRequest:
    profile, topology = find_profile("gpt2-small"), find_topology("1x4xA100")
    return PlanRequest(profile=profile, topology=topology, global_batch_size=16, planner="even")


@pytest.fixture
def answered(client: Client, request_of_tests: PlanRequest) -> JobOut:
    """A job with a plan at a tensor degree of 2; 4 would have been allowed."""
    client.wait_until_ready()
    return client.plans.create(request_of_tests.model_copy(update={"degrees": (Degrees(tensor=2), Degrees(tensor=4))}))


@pytest.mark.tier("nightly")
def test_a_layout_of_ones_own_is_judged_beside_the_planners(client: Client, request_of_tests: PlanRequest) -> None:
    request = with_open_degrees(request_of_tests)
    rows = client.compare(CompareRequest(request=request, planners=("even",), layouts=(LAYOUT,)))
    assert [row.planner for row in rows] == ["yours", "even", "even"]
    assert rows[0].layout == "TP2 PP2 DP1, micro-batch 2"
    assert (
        rows[0].iteration_ns == next(iter(penstock.compare(request, planners=["even"], layouts=[LAYOUT]))).iteration_ns
    )
    assert rows[0].iteration_ns >= min(row.iteration_ns or rows[0].iteration_ns for row in rows[1:])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("layout", "error", "words"),
    [
        ("tensor=5", UnsupportedRequest, "tensor 5 needs 5 GPUs in one node, but the largest node has 4"),
        ("tensor=3", UnsupportedRequest, "tensor 3 does not divide 1024 tokens of a GPU; nearest: tensor 1, 2, 4"),
        ("tensor=4,pipeline=2", UnsupportedRequest, "= 8 does not divide 4 GPUs"),
        ("tensor=2,replicas=4", InvalidDocument, "filled by 2"),
        ("tensr=2", InvalidDocument, "is not a valid NAME=VALUE"),
    ],
)
def test_a_layout_that_cannot_be_judged(
    client: Client, request_of_tests: PlanRequest, layout: str, error: type[PenstockError], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        client.compare(
            CompareRequest(request=with_open_degrees(request_of_tests), planners=("even",), layouts=(layout,))
        )


@pytest.mark.tier("nightly")
def test_why_not_other_degrees_is_what_the_python_api_says(client: Client, answered: JobOut) -> None:
    there = client.explain({"plan": client.jobs.hash_of(answered.id), "why_not": ["tensor=1"]})
    here = penstock.explain(client.plans.file(answered.id), what_if=(), why_not=["tensor=1"])
    assert there.why_not == here.why_not
    (other,) = there.why_not
    assert other.time_ns is not None
    ours = sum(part.ours_ns for part in other.differences)
    assert abs(other.time_ns - ours - sum(p.theirs_ns - p.ours_ns for p in other.differences)) <= len(other.differences)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("asked_for", "error", "words"),
    [
        ("tensor=5", UnsupportedRequest, "tensor 5 does not divide 12 attention heads"),
        ("sharding=some", InvalidDocument, "is not a choice of degrees"),
        ("tensor", InvalidDocument, "is not a choice of degrees"),
    ],
)
def test_degrees_that_no_plan_can_have(
    client: Client, answered: JobOut, asked_for: str, error: type[PenstockError], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        client.explain({"plan": client.jobs.hash_of(answered.id), "why_not": [asked_for]})


@pytest.mark.tier("nightly")
def test_pages_say_the_degrees(http: httpx.Client, answered: JobOut) -> None:
    plan = http.get(f"/plans/{answered.id}").raise_for_status().text
    assert "2 replicas × TP 2 on 4 devices, 4 parts of the model in turn, no recomputation" in plan
    what_if = http.get(f"/plans/{answered.id}/what-if", params={"why_not": "tensor=1 next"}).raise_for_status().text
    assert what_if.count("<h2>Why not ") == 2
    assert "computation" in what_if
    wrong = http.get(f"/plans/{answered.id}/what-if", params={"why_not": "tensor=5"}).raise_for_status().text
    assert "tensor 5 does not divide 12 attention heads" in wrong
