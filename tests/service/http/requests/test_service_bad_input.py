"""Tests that no input of a client gives a 500, and every refusal says what, where, which values and what to do."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_process import Server

from penstock.client import Client
from penstock.examples.tiny import tiny_plan_file, tiny_profile, tiny_request, tiny_topology
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.service.settings import Settings

UNKNOWN = "sha256:" + "7" * 64
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shared_server(own_server: Server) -> Server:
    """A separate server: objects that it created from mutated documents affect no other test."""
    return own_server


@pytest.fixture
def http(client: Client) -> httpx.Client:
    return client._http


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the document with one field set; ``path`` is a JSON pointer."""
    document = json.loads(json.dumps(document))
    *steps, last = path.strip("/").split("/")
    here: Any = document
    for step in steps:
        here = here[int(step)] if isinstance(here, list) else here[step]
    here[int(last) if isinstance(here, list) else last] = value
    return document


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        pytest.param("/colour", "red", "not permitted", id="unknown field"),
        pytest.param("/global_batch_size", -3, "greater than or equal to 1 (given: -3)", id="negative"),
        pytest.param("/global_batch_size", 2**70, "less than or equal to 9007199254740991", id="huge"),
        pytest.param("/global_batch_size", "16", "valid integer (given: '16')", id="wrong type"),
        pytest.param("/global_batch_size", 1.5, "valid integer", id="fraction"),
        pytest.param("/profile/layers", [], "at least 1 item", id="empty chain"),
        pytest.param("/profile/measurements/0/layers/2/forward_ns", -1, "(given: -1)", id="negative time"),
        pytest.param("/profile/source/expected_error", 1e400, "not JSON", id="infinite number"),
        pytest.param("/topology/uniform/nodes", 0, "greater than or equal to 1", id="no nodes"),
        pytest.param(
            "/topology", {"schema_version": 1, "name": "x"}, "exactly one of `nodes` and `uniform`", id="no form"
        ),
        pytest.param("/network", "slow", "is a text", id="wrong enumeration"),
        pytest.param("/schema_version", 9, "reads documents of version 1", id="another version"),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, path: str, value: Any, words: str):
    answer = http.post("/v1/plans", content=json.dumps(changed(tiny_request(), path, value)), headers=JSON)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "invalid-document")
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["instance"] == "/v1/plans"
    assert words in answer.text.replace("\\\\", "\\")
    if problem["errors"] and path != "/topology":
        assert problem["errors"][0]["pointer"] == path


@pytest.mark.parametrize(
    ("change", "code", "words", "remedy"),
    [
        pytest.param(
            {"planner": "daple"}, "unsupported-request", "no planner 'daple'", "did you mean 'dapple'", id="planner"
        ),
        pytest.param(
            {"planner": "gpipe", "schedule": "early-bakward"},
            "unsupported-request",
            "no schedule 'early-bakward'",
            "did you mean 'early-backward'",
            id="schedule",
        ),
        pytest.param({"options": {"speed": 3}}, "unsupported-request", "no option 'speed'", "", id="option"),
        pytest.param({"micro_batch_sizes": [99]}, "invalid-document", "[99] exceed the global batch", "", id="size"),
    ],
)
def test_what_nobody_here_does_is_refused_with_the_nearest_name(
    http: httpx.Client, change: dict[str, Any], code: str, words: str, remedy: str
):
    answer = http.post("/v1/plans", json=tiny_request() | change)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, code)
    assert words in answer.text
    assert remedy in problem.get("remedy", "")


def test_an_unknown_device_kind_is_refused(http: httpx.Client):
    body = changed(tiny_request(), "/topology/uniform/kind", "H100")
    problem = http.post("/v1/plans", json=body).json()
    assert problem["status"] == 422
    assert "H100" in json.dumps(problem)
    assert "V100" in problem["detail"]


def test_a_disconnected_topology_is_refused(http: httpx.Client):
    body = changed(tiny_request(), "/topology/uniform/nic", None)
    answer = http.post("/v1/plans", json=body)
    assert answer.status_code == 422
    assert "node1" in answer.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(b"", "is empty", id="nothing"),
        pytest.param(b"{", "is not JSON", id="cut off"),
        pytest.param(b"\xff\xfe\x00", "is not JSON", id="not text"),
        pytest.param(b'{"seed": NaN}', "NaN is not valid in JSON", id="NaN"),
        pytest.param(b'{"seed": 1, "seed": 2}', "['seed'] are given twice", id="doubled key"),
        pytest.param(b"[" * 200_000, "is not JSON", id="deep"),
        pytest.param(b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "is not JSON", id="deep and closed"),
        pytest.param(b'{"seed": ' + b"9" * 10_000 + b"}", "is not JSON", id="ten thousand digits"),
        pytest.param(b'{"planner": "\\ud800"}', "/planner", id="half a character"),
        pytest.param(b"[]", "is a list", id="a list"),
        pytest.param(b"null", "is empty", id="null"),
        pytest.param(b'"text"', "is a text", id="text"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/plans", "/v1/plans:verify", "/v1/runs", "/v1/profiles", "/v1/agents/a:sync"])
def test_a_body_that_is_no_document(http: httpx.Client, path: str, body: bytes, words: str):
    answer = http.post(path, content=body, headers=JSON)
    assert answer.status_code == 422
    if b"planner" not in body or path == "/v1/plans":
        assert words in answer.json()["detail"] + json.dumps(answer.json()["errors"])


def test_a_body_of_another_type(http: httpx.Client):
    answer = http.post("/v1/plans", content=json.dumps(tiny_request()), headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["code"]) == (415, "wrong-media-type")
    assert "Content-Type: application/json" in answer.json()["remedy"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v1/plans", tiny_request() | {"profile": UNKNOWN}, 404, "POST the profile to /v1/profiles first"),
        ("POST", "/v1/plans", tiny_request() | {"topology": UNKNOWN}, 404, "POST the topology to /v1/topologies first"),
        ("GET", f"/v1/plans/{UNKNOWN}", None, 404, "POST a request to /v1/plans first"),
        ("GET", f"/v1/plans/{UNKNOWN}/plan-file", None, 404, "no plan is stored"),
        ("GET", f"/v1/plans/{UNKNOWN}/programs/0", None, 404, "no plan is stored"),
        ("GET", f"/v1/profiles/{UNKNOWN}", None, 404, "POST the profile"),
        ("GET", "/v1/topologies/x", None, 404, "POST the topology"),
        ("GET", "/v1/jobs/nobody", None, 404, "no job 'nobody'"),
        ("GET", "/v1/jobs/%00%ff%f0", None, 404, "no job"),
        ("GET", "/v1/jobs/nobody/events", None, 404, "no job 'nobody'"),
        ("GET", "/v1/jobs/nobody/incumbent", None, 404, "no job 'nobody'"),
        ("POST", "/v1/jobs/nobody:cancel", None, 404, "no job 'nobody'"),
        ("POST", "/v1/jobs/nobody:finish", None, 404, "no job 'nobody'"),
        ("GET", "/v1/jobs?limit=0", None, 422, "/query/limit"),
        ("GET", "/v1/jobs?state=lost", None, 422, "/query/state"),
        ("GET", f"/v1/plans/{UNKNOWN}/programs/-1", None, 422, "/path/rank"),
        ("GET", "/v1/jobs/nobody/events?after=99999999999999999999", None, 422, "/query/after"),
        ("GET", "/v2/plans", None, 404, "there is nothing at /v2/plans"),
        ("DELETE", "/v1/plans", None, 405, "takes POST, not DELETE"),
        ("PUT", "/v1/jobs/x:cancel", None, 405, "takes DELETE and GET and POST, not PUT"),
    ],
)
def test_what_is_not_there(http: httpx.Client, method: str, path: str, body: Any, status: int, words: str):
    answer = http.request(method, path, json=body)
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (status, status)
    assert words in problem["detail"] + problem.get("remedy", "")
    assert answer.headers["content-type"] == "application/problem+json"
    if status == 405:
        assert set(answer.headers["allow"].split(", ")) == set(words.split(",")[0].split()[1::2])


def test_a_body_beyond_the_limit(start_server: Any):
    http = start_server(max_body_bytes=1024, slots=0).client._http
    answer = http.post("/v1/plans", json=tiny_request())
    assert (answer.status_code, answer.json()["code"]) == (413, "too-large")
    assert "more than 1.00 KiB (1,024 bytes)" in answer.json()["detail"]
    chunks = (b" " * 500 for _ in range(100))
    assert http.post("/v1/plans", content=chunks, headers=JSON).status_code == 413


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/plan/pipelines/0/stages/1/layers", [3, 3]),
        ("/plan/pipelines/0/stages/0/devices", ["node7/0"]),
        ("/plan/pipelines/0/stages/1/devices", ["node0/0"]),
        ("/plan/schedule/rows/0/text", "B0 F0 F1 F2 F3 B1 B2 B3"),
        ("/plan/schedule/rows/0/text", "F0 F0 F0"),
        ("/plan/schedule/rows/0/text", "hello"),
        ("/plan/schedule/rows/0/text", "(F0)*99999999999"),
        ("/plan/num_micro_batches", 9007199254740991),
        ("/plan/global_batch_size", 8),
        ("/plan/request_hash", UNKNOWN),
    ],
)
def test_a_plan_with_faults(http: httpx.Client, path: str, value: Any):
    body = changed(tiny_plan_file(), path, value)
    verdict = http.post("/v1/plans:verify", json=body)
    if verdict.status_code == 200:
        assert not verdict.json()["valid"]
        assert verdict.json()["sentences"]
    else:
        assert verdict.status_code == 422
    assert http.post("/v1/runs", json={"plan": body, "model": "gpt"}).status_code in (404, 422)


def leaves(document: Any, path: str = "") -> list[str]:
    """Return pointers to all values of a document."""
    pointers = [path] if path else []
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        pointers += leaves(value, f"{path}/{key}")
    return pointers


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["", "sha256:", UNKNOWN, "\x00", "../../etc/passwd", "a" * 5000, "{0.__class__}", "{}{}"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
SUBJECTS = {
    "/v1/plans:validate": tiny_request(),
    "/v1/plans:verify": tiny_plan_file(),
    "/v1/plans:simulate": tiny_plan_file(),
    "/v1/plans:explain": tiny_plan_file(),
    "/v1/profiles": tiny_profile(),
    "/v1/topologies": tiny_topology(),
}


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data(), target=st.sampled_from(sorted(SUBJECTS)))
def test_mutated_documents_are_answered_or_refused(http: httpx.Client, data: st.DataObject, target: str):
    subject = SUBJECTS[target]
    path = data.draw(st.sampled_from(leaves(subject)))
    body = changed(subject, path, data.draw(ODD))
    answer = http.post(target, content=json.dumps(body), headers=JSON)
    assert answer.status_code in (200, 201, 404, 422), answer.text
    if answer.status_code >= 400:
        assert answer.json()["detail"]
        assert "Traceback" not in answer.text


@pytest.mark.tier("quick")
def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_PORT", "many")
    with pytest.raises(InvalidDocument, match="PENSTOCK_") as caught:
        Settings.load(lease_s=-1)
    assert {fault.pointer for fault in caught.value.faults} == {"/port", "/lease_s"}


@pytest.mark.tier("quick")
def test_a_service_for_everybody_has_to_be_wanted():
    with pytest.raises(UnsupportedRequest, match=r"'0\.0\.0\.0' can be reached from other machines") as caught:
        Settings(host="0.0.0.0").refuse_unprotected()
    assert "allow_unauthenticated" in (caught.value.remedy or "")
    Settings(host="0.0.0.0", allow_unauthenticated=True).refuse_unprotected()
    for loopback in ("127.0.0.1", "::1", "localhost"):
        Settings(host=loopback).refuse_unprotected()
