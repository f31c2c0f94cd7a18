"""Documents of the wrong kind are named for what they are, and unknown fields get the nearest existing name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock.examples import catalogue
from penstock.examples.tiny import tiny_plan_file, tiny_request
from penstock.schemas.document import Document
from penstock.schemas.errors import InvalidDocument, WrongDocument
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.recognising import HINTED_FAULTS, MARKS, recognised
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology


def _samples() -> dict[str, Any]:
    file = tiny_plan_file()
    request = tiny_request()
    return {
        "profile": catalogue.profile("gpt2-small").model_dump(mode="json", exclude_none=True),
        "topology": catalogue.cluster("2x4xV100").model_dump(mode="json", exclude_none=True),
        "plan request": request,
        "plan file": file,
        "plan": file["plan"],
        "sweep request": {"request": request, "over": {}},
        "placement request": {"topology": request["topology"], "jobs": []},
    }


KINDS: dict[str, type[Document]] = {
    kind.kind: kind for kind in (ModelProfile, ClusterTopology, PlanRequest, PlanFile, Plan)
}


@pytest.mark.tier("ci")
@pytest.mark.parametrize("actual", sorted(_samples()))
@pytest.mark.parametrize("wanted", sorted(KINDS))
def test_a_document_of_another_kind_is_named(actual: str, wanted: str) -> None:
    assert actual in MARKS
    if actual == wanted:
        assert KINDS[wanted].parse(_samples()[actual]).kind == wanted
        return
    with pytest.raises(WrongDocument) as caught:
        KINDS[wanted].parse(_samples()[actual], origin="'x.json'")
    assert caught.value.detail == f"'x.json' is a {actual}, not a {wanted}"
    assert caught.value.document_kind == actual
    assert caught.value.exit_code == 65
    assert pickle.loads(pickle.dumps(caught.value)).detail == caught.value.detail


@pytest.mark.parametrize("data", [None, [1], "text", {}, {"name": "x"}, {"colour": "red"}])
def test_what_looks_like_nothing_is_not_guessed(data: Any) -> None:
    assert recognised(data) is None


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (PlanRequest, {"time_limit": 10}, "/time_limit: .* did you mean `termination.time_limit_ns`"),
        (PlanRequest, {"gap": 0.1}, "/gap: .* did you mean `termination.gap`"),
        (PlanRequest, {"micro_batch_size": [4]}, "/micro_batch_size: .* did you mean `micro_batch_sizes`"),
        (
            PlanRequest,
            {"termination": {"time_limit_s": 3}},
            "time_limit_s: .* did you mean `time_limit_ns`",
        ),
        (PlanRequest, {"memory": {"update_rule": "x"}}, "/memory/update_rule: .* did you mean `update_rules`"),
        (PlanRequest, {"model": "gpt2-small"}, "/model: .* did you mean `profile`"),
        (PlanRequest, {"cluster": "2x4xV100"}, "/cluster: .* did you mean `topology`"),
        (PlanRequest, {"colour": "red"}, r"/colour: Extra inputs are not permitted \(given: 'red'\)$"),
        (
            ClusterTopology,
            {"uniform": {"device_per_node": 8}, "nodes": ()},
            "/uniform/device_per_node: .* did you mean `devices_per_node`",
        ),
    ],
)
def test_a_misspelt_field_is_told_the_nearest(kind: type[Document], change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidDocument, match=rf"(?m){words}"):
        kind.parse(_samples()[kind.kind] | change)


def test_only_so_many_faults_are_given_a_hint() -> None:
    """Looking for close names takes time, and a body may have very many unknown fields."""
    unknown = {f"micro_batch_size_{number}": 1 for number in range(3000)} | {"m" * 100_000: 1}
    with pytest.raises(InvalidDocument) as caught:
        PlanRequest.parse(tiny_request() | unknown)
    hinted = [fault for fault in caught.value.faults if "did you mean" in fault.detail]
    assert len(hinted) == HINTED_FAULTS
