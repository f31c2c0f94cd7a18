"""Long lists of wrong values at every field of every body are answered soon and briefly, with the number of faults."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from fuzz_lists import MOST_BYTES, MOST_S, Findings, fuzz

from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.api.topology_import import TopologyImport
from penstock.schemas.document import MOST_FAULTS, MOST_REPORTED_BYTES, first_faults, load_json
from penstock.schemas.errors import Fault as GivenFault
from penstock.schemas.errors import InvalidDocument, InvalidPlan
from penstock.service.http.requests.bodies import BODY_MODELS
from penstock.service.http.routes import plans  # noqa: F401  (its bodies are known then)
from penstock.service.parsing import LARGE_BYTES, parse
from penstock.service.problems import problem_response

pytestmark = pytest.mark.tier("quick")

COUNT = 150


def inline(document: Any) -> Any:
    """Return a document that has no hash of a stored one."""
    return document


def _fuzz(directory: Path) -> Findings:
    return asyncio.run(fuzz(2, COUNT, directory))


@pytest.mark.tier("nightly")
def test_no_long_list_holds_the_service_or_is_answered_at_length(tmp_path: Path):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:  # without the objects of other tests
        findings = alone.submit(_fuzz, tmp_path).result()
    assert len(findings.paths) >= 15
    assert findings.answers[422] > COUNT / 2
    assert findings.cut > COUNT / 10, "lists of few faults are not long"
    assert findings.slowest[0] < MOST_S, findings.slowest
    assert findings.longest[0] <= MOST_BYTES, findings.longest
    assert not [status for status in findings.answers if status >= 500]


def test_the_first_faults_are_listed_and_the_others_counted():
    wrong = {"schema_version": 1, "sources": [{"text": "a"}], "options": {"devices": [0] * 5000}}
    with pytest.raises(InvalidDocument, match=f"5000 faults; the first {MOST_FAULTS} follow") as caught:
        parse(TopologyImport, json.dumps(wrong).encode(), inline)
    listed = caught.value.faults
    assert [fault.pointer for fault in listed[:-1]] == [f"/options/devices/{at}" for at in range(MOST_FAULTS)]
    assert (listed[-1].detail, listed[-1].code) == ("4900 more faults are not listed", "more-faults")


def test_a_large_body_is_read_to_the_first_wrong_entry_of_each_list():
    wrong = {"schema_version": 1, "sources": [{"text": 1}, {"text": 2}], "options": {"devices": [0] * LARGE_BYTES}}
    with pytest.raises(InvalidDocument, match="has 2 faults") as caught:
        parse(TopologyImport, json.dumps(wrong).encode(), inline)
    assert {fault.pointer for fault in caught.value.faults} == {"/sources/0/text", "/options/devices/0"}
    assert "first wrong entry" in (caught.value.remedy or "")


def test_a_large_body_is_the_same_document():
    good = {"schema_version": 1, "sources": [{"text": "x" * LARGE_BYTES, "format": "slurm-conf"}], "options": {}}
    assert parse(TopologyImport, json.dumps(good).encode(), inline) == TopologyImport.parse(good)


def reported_by_comparison(errors: list[dict[str, Any]]) -> list[str]:
    """Return the pointers of reported faults, by comparing each fault with every other one."""
    pointers = ["".join(f"/{step}" for step in error["loc"]) for error in errors]
    return [
        pointer
        for pointer, error in zip(pointers, errors, strict=True)
        if error["type"] not in ("too_short", "string_type")
        or not any(other.startswith(pointer + "/") for other in pointers)
    ]


def test_faults_that_follow_from_inner_ones_are_left_out_as_by_comparing_all_pairs():
    rng = random.Random(1)
    left_out = 0
    for _ in range(300):
        errors = [
            {
                "loc": tuple(rng.choice(["a", "b", 0, 1]) for _ in range(rng.randint(0, 4))),
                "type": rng.choice(["too_short", "string_type", "missing", "int_type"]),
                "msg": "wrong",
                "input": None,
            }
            for _ in range(rng.randint(1, 12))
        ]
        faults, more = first_faults(errors)
        assert [fault.pointer for fault in faults] == reported_by_comparison(errors)
        assert more == 0
        left_out += len(errors) - len(faults)
    assert left_out > 100


@pytest.mark.parametrize(("text", "code"), [("NaN", "not-finite"), ('{"a":1,"a":2}', "doubled-key")])
def test_what_is_no_json_is_listed_briefly_too(text: str, code: str):
    with pytest.raises(InvalidDocument) as caught:
        load_json("[" + ",".join([text] * 30_000) + "]")
    listed = caught.value.faults
    assert [fault.pointer for fault in listed[:-1]] == [f"/{at}" for at in range(MOST_FAULTS)]
    assert {fault.code for fault in listed[:-1]} == {code}
    assert listed[-1].detail == f"{30_000 - MOST_FAULTS} more faults are not listed"


def test_long_texts_are_cut_in_a_report():
    errors = [{"loc": ("k" * 9999, at), "type": "x", "msg": "\0" * 9999, "input": "\0" * 9999} for at in range(90)]
    faults, more = first_faults(errors)
    assert 0 < len(faults) < 90
    assert len(faults) + more == 90
    assert sum(len(json.dumps([fault.pointer, fault.detail])) for fault in faults) <= MOST_REPORTED_BYTES


def test_no_problem_is_longer_than_an_answer_may_be():
    faults = tuple(GivenFault(f"/{at}", "\0" * 100) for at in range(5000))
    problem = ProblemDetails.of(InvalidPlan("x" * 10**6, faults=faults, remedy="y" * 10**6))
    body = bytes(problem_response(problem).body)
    assert len(body) <= MOST_BYTES
    assert "more faults are not listed" in json.loads(body)["errors"][-1]["detail"]


def test_every_body_has_a_validator_for_large_ones():
    for model in BODY_MODELS.values():
        with pytest.raises(InvalidDocument):
            parse(model, b'{"no such field": "' + b"x" * LARGE_BYTES + b'"}', inline)
    assert len(BODY_MODELS) > 5
