"""Shipped models and clusters by name in requests over HTTP."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_process import in_process
from jsonschema import Draft202012Validator

from penstock.examples import catalogue
from penstock.examples.tiny import tiny_layout, tiny_placement, tiny_sweep
from penstock.planning.inputs import find_profile, with_choices
from penstock.questions.answer import request_of
from penstock.questions.naming import document_of, with_documents
from penstock.schemas.api.jobs import CompareRequest
from penstock.schemas.api.layouts import LayoutRequest
from penstock.schemas.api.placement import PlacementRequest
from penstock.schemas.api.sweep import SweepRequest
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.request import PlanRequest
from penstock.shapes.routing import Routing

NAMED = {"model": "gpt2-small", "cluster": "2x4xV100", "global_batch_size": 64}


def _inline() -> dict[str, Any]:
    profile, topology = catalogue.profile("gpt2-small"), catalogue.cluster("2x4xV100")
    documents = {"profile": profile.model_dump(mode="json"), "topology": topology.model_dump(mode="json")}
    return {**documents, "global_batch_size": 64}


def ask(directory: Path, path: str, body: Any) -> httpx.Response:
    async def post() -> httpx.Response:
        async with in_process(directory) as http:
            return await http.post(path, json=body)

    return asyncio.run(post())


def test_a_request_by_name_is_the_request_with_the_documents(tmp_path: Path):
    """What a question by names does not state is chosen as for commands and forms: degrees, memory, effort."""
    chosen = with_choices(PlanRequest.parse(_inline()))
    assert chosen.degrees == "auto"
    assert chosen.termination.effort == "normal"
    named, inline = (ask(tmp_path, "/v1/plans:validate", body) for body in (NAMED, chosen.model_dump(mode="json")))
    assert (named.status_code, inline.status_code) == (200, 200), named.text
    assert named.json() == inline.json()
    assert ask(tmp_path, "/v1/plans", NAMED).status_code == 202
    literal = ask(tmp_path, "/v1/plans:validate", _inline())
    assert literal.json()["request_hash"] != named.json()["request_hash"]


def test_a_stored_document_beside_a_name_is_part_of_the_question(tmp_path: Path):
    async def ask_all() -> list[httpx.Response]:
        async with in_process(tmp_path) as http:
            stored = (await http.post("/v1/topologies", json=_inline()["topology"])).json()["hash"]
            by_hash = {name: value for name, value in NAMED.items() if name != "cluster"} | {"topology": stored}
            bodies = [NAMED, by_hash]
            sweeps = [{"request": body, "over": {"global_batch_sizes": [32, 64]}} for body in bodies]
            plans = [await http.post("/v1/plans:validate", json=body) for body in bodies]
            return plans + [await http.post("/v1/sweeps", json=sweep) for sweep in sweeps]

    *plans, by_name, by_hash = asyncio.run(ask_all())
    assert plans[0].status_code == 200, plans[0].text
    assert plans[0].json() == plans[1].json()
    assert by_name.status_code == by_hash.status_code == 201
    planners = [row["planner"] for answer in (by_name, by_hash) for row in answer.json()["rows"]]
    assert planners == ["even"] * 4


def test_questions_by_names_are_those_of_python():
    """Each surface makes the same request of the same names."""
    request = request_of("gpt2-small", "2x4xV100", {"global_batch_size": 64})
    assert document_of(PlanRequest, dict(NAMED), PlanRequest.parse) == request
    compared = document_of(CompareRequest, {"request": dict(NAMED)}, CompareRequest.parse)
    assert compared.request == request
    many = request_of("gpt2-small", "2x4xV100", {"global_batch_size": 64}, many=True)
    swept = document_of(SweepRequest, {"request": dict(NAMED), "over": {}}, SweepRequest.parse)
    assert swept.request == many
    assert many.planner == "even"
    named = {"request": dict(NAMED), "over": {"planners": ["dapple"]}}
    assert document_of(SweepRequest, named, SweepRequest.parse).request == request


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"model": "gpt2-smal"}, "/model", "gpt2-small"),
        ({"cluster": "2x4xV99"}, "/cluster", "V100"),
        ({"cluster": 5}, "/cluster", "is a name, not 5"),
        ({"profile": "sha256:" + "0" * 64}, "/model", "give either 'model' or 'profile', not both"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, change: dict[str, Any], pointer: str, words: str):
    answer = ask(tmp_path, "/v1/plans:validate", NAMED | change)
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert fault["pointer"] == pointer
    assert words in fault["detail"]


@pytest.mark.tier("quick")
def test_names_wherever_documents_are_taken():
    profile, topology = catalogue.profile("gpt2-small"), catalogue.cluster("2x4xV100")
    sweep = {**tiny_sweep(), "request": dict(NAMED), "over": {"clusters": ["2x4xV100", "16xA100"]}}
    swept = SweepRequest.parse(with_documents(SweepRequest, sweep))
    assert (swept.request.profile, swept.request.topology) == (profile, topology)
    assert swept.over.topologies == (topology, catalogue.cluster("16xA100"))
    layout = LayoutRequest.parse(with_documents(LayoutRequest, {**tiny_layout(), "request": dict(NAMED)}))
    assert layout.request.shape == catalogue.shape("gpt2-small")
    other = with_documents(LayoutRequest, {**tiny_layout(), "request": {**NAMED, "model": "resnet-50"}})
    assert LayoutRequest.parse(other).request.profile == catalogue.profile("resnet-50")
    placement = tiny_placement()
    del placement["topology"], placement["jobs"][0]["profile"]
    placement["jobs"][0]["model"] = "gpt2-small"
    placed = PlacementRequest.parse(with_documents(PlacementRequest, placement | {"cluster": "2x4xV100"}))
    assert (placed.topology, placed.jobs[0].profile) == (topology, profile)
    with pytest.raises(InvalidDocument, match="no cluster 'here'") as caught:
        with_documents(SweepRequest, {"request": dict(NAMED), "over": {"clusters": ["here"]}})
    assert caught.value.faults[0].pointer == "/over/clusters/0"


@pytest.mark.tier("quick")
@pytest.mark.parametrize("data", [[], None, {"request": []}, {"jobs": {}}, {"over": []}, {"over": {"topologies": 1}}])
@pytest.mark.parametrize("model", [PlanRequest, SweepRequest, LayoutRequest, PlacementRequest])
def test_what_is_no_request_is_left_to_the_schema(model: Any, data: Any):
    assert with_documents(model, data) == data


def test_names_are_documented(tmp_path: Path):
    async def openapi() -> Any:
        async with in_process(tmp_path) as http:
            return (await http.get("/openapi.json")).json()

    document = asyncio.run(openapi())
    schema = {"$ref": "#/components/schemas/PlanRequest", "components": document["components"]}
    validator = Draft202012Validator(schema)
    assert validator.is_valid(NAMED)
    assert validator.is_valid(_inline())
    assert not validator.is_valid(NAMED | _inline())
    assert not validator.is_valid({"model": "gpt2-small", "global_batch_size": 64})
    assert validator.is_valid(NAMED | {"routing_imbalance": 1.5})
    assert not validator.is_valid(NAMED | {"routing_imbalance": "much"})


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("path", "body", "pointer", "words"),
    [
        ("/v1/plans", {"model": "gpt2-small", "global_batch_size": 64}, "/topology", ("'cluster'", "2x8xH100")),
        ("/v1/plans", {"cluster": "2x4xV100", "global_batch_size": 64}, "/profile", ("'model'", "gpt2-small")),
        ("/v1/plans", {"model": "gpt2-small", "cluster": "2x4xV100"}, "/global_batch_size", ("is missing",)),
        ("/v1/fits", {"model": "gpt2-small"}, "/topology", ("'cluster'", "2x8xH100")),
        ("/v1/placements", {"jobs": [{"name": "a", "global_batch_size": 4}]}, "/topology", ("'cluster'",)),
        ("/v1/placements", {"jobs": [{"name": "a", "global_batch_size": 4}]}, "/jobs/0/profile", ("'model'",)),
    ],
)
def test_what_is_missing_is_said_with_what_may_be_sent(
    path: str, body: dict[str, Any], pointer: str, words: tuple[str, ...], tmp_path: Path
):
    answer = ask(tmp_path, path, body)
    assert answer.status_code == 422
    details = {fault["pointer"]: fault["detail"] for fault in answer.json()["errors"]}
    assert details[pointer].startswith("is missing")
    assert all(word in details[pointer] for word in words)
    assert ("hash of a stored one" in details[pointer]) == (pointer != "/global_batch_size")


@pytest.mark.tier("nightly")
def test_tokens_of_a_mixture_by_name_are_routed_as_asked():
    named = {"model": "mixtral-8x7b", "cluster": "2x8xH100", "global_batch_size": 64}
    request = with_documents(PlanRequest, {**named, "routing_imbalance": 1.5})
    assert request["profile"] == find_profile("mixtral-8x7b", routing=Routing(routing_imbalance=1.5))
    assert request["profile"].shape.experts.routing_imbalance == 1.5
    capped = with_documents(PlanRequest, {**named, "capacity_factor": 1})
    assert capped["profile"].shape.experts.capacity_factor == 1
    even = with_documents(PlanRequest, {**named, "routing_imbalance": None})
    assert even["profile"] == catalogue.profile("mixtral-8x7b")
    assert even.keys() == {"profile", "topology", "global_batch_size"}


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("change", "pointers", "words"),
    [
        ({"routing_imbalance": 0.5}, ["/routing_imbalance"], "at least the mean; a value at least 1, at most 4"),
        ({"capacity_factor": 5.0}, ["/capacity_factor"], "at most all tokens, 4 times"),
        ({"routing_imbalance": "1.2"}, ["/routing_imbalance"], "is a number such as 1.2, not '1.2'"),
        ({"routing_imbalance": True}, ["/routing_imbalance"], "is a number"),
        ({"routing_imbalance": 1.1, "capacity_factor": 1.1}, ["/routing_imbalance", "/capacity_factor"], "exclude"),
        ({"model": "gpt2-small", "routing_imbalance": 1.1}, ["/routing_imbalance"], "gpt2-small has no experts"),
        ({"model": "/etc/passwd", "routing_imbalance": 1.1}, ["/model"], "no model '/etc/passwd'"),
    ],
)
def test_routing_that_is_refused(change: dict[str, Any], pointers: list[str], words: str):
    named = {"model": "mixtral-8x7b", "cluster": "2x8xH100", "global_batch_size": 64}
    with pytest.raises(InvalidDocument, match=re.escape(words)) as caught:
        with_documents(PlanRequest, named | change)
    assert [fault.pointer for fault in caught.value.faults] == pointers
