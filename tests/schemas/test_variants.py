"""Degrees in documents: what a variant has to be, and that readers which do not know degrees refuse plans that have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from small_request import with_degrees

from penstock.examples.tiny import tiny_plan_file
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import Plan
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers.degrees import Degrees

Json = dict[str, Any]
BEFORE = "c4d0594b0845dd35ebbf0cc3a3a4dd667c1d6c9f"
"""The last commit whose documents know no degrees."""
ROOT = Path(__file__).parents[2]


def profile() -> Json:
    """Return a profile of four layers with a variant, as it is stored."""
    model = with_degrees().profile
    assert isinstance(model, ModelProfile)
    return json.loads(model.canonical_json())  # type: ignore[no-any-return]


def variant(data: Json) -> Json:
    return data["variants"][0]  # type: ignore[no-any-return]


# ---- what a variant has to be ----------------------------------------------------------------------------------------


def _of_degrees_1(data: Json) -> None:
    variant(data)["degrees"] = {"tensor": 1}


def _short_measurement(data: Json) -> None:
    variant(data)["measurements"][0]["layers"].pop()


def _measured_twice(data: Json) -> None:
    variant(data)["measurements"] *= 2


def _without_classes(data: Json) -> None:
    del data["classes"]


def _without_variants(data: Json) -> None:
    del data["variants"]


def _too_few_classes(data: Json) -> None:
    data["classes"].pop()


def _unknown_class(data: Json) -> None:
    data["classes"][0] = 4


def _same_twice(data: Json) -> None:
    data["variants"] *= 2


def _unmeasured_kind(data: Json) -> None:
    data["measurements"].append(data["measurements"][0] | {"device_kind": "A100"})


def _weights_longer(data: Json) -> None:
    variant(data)["measurements"][0]["layers"][0]["backward_weight_ns"] = 99


def _unknown_field(data: Json) -> None:
    variant(data)["degrees"]["pipeline"] = 2


def _no_degree(data: Json) -> None:
    variant(data)["degrees"]["tensor"] = 0


def _modules(data: Json, *modules: Json) -> None:
    variant(data)["measurements"][0]["layers"][0]["modules"] = [
        {"forward_ns": 1, "freed_bytes": 1} | module for module in modules
    ]


def _module_twice(data: Json) -> None:
    _modules(data, {"module": "norm"}, {"module": "norm"})


def _more_than_the_stash(data: Json) -> None:
    _modules(data, {"module": "norm"}, {"module": "mlp", "freed_bytes": 4})


def _module_with_a_backward(data: Json) -> None:
    moved = {"phase": "backward", "operation": "all_gather", "over": "tensor", "bytes_per_sample": 3}
    _modules(data, {"module": "mlp", "collectives": [moved]})


def _unknown_module(data: Json) -> None:
    _modules(data, {"module": "core_attn"})


FAULTS: dict[Callable[[Json], None], str] = {
    _of_degrees_1: "a variant needs a degree above 1; costs at degrees of 1 belong in the profile's `layers` and "
    "`measurements`",
    _short_measurement: "at tensor 2 the measurement for 'V100' at 2 samples has 3 classes of layers, but the "
    "variant has 4",
    _measured_twice: "at tensor 2 'V100' at 2 samples is measured twice",
    _without_classes: "`variants` and `classes` go together: a variant has one entry per class of layers",
    _without_variants: "`variants` and `classes` go together: a variant has one entry per class of layers",
    _too_few_classes: "classes has 3 entries, but the profile has 4 layers",
    _unknown_class: "`classes` names class 4, but the variant at tensor 2 has 4",
    _same_twice: "tensor 2",
    _unmeasured_kind: "the variant at tensor 2 has no measurement on 'A100'",
    _weights_longer: "backward_weight_ns 99 exceeds backward_ns 12, of which it is a part",
    _unknown_field: "pipeline",
    _no_degree: "tensor",
    _module_twice: "module 'norm' occurs twice; names are unique",
    _more_than_the_stash: "the modules free 5 bytes together, more than stash_bytes 4",
    _module_with_a_backward: "module 'mlp' has a collective of phase 'backward'; recomputing it repeats only phase "
    "'forward'",
    _unknown_module: "module",
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__.strip("_"))
def test_a_variant_that_is_none_is_refused(spoil: Callable[[Json], None]) -> None:
    data = profile()
    ModelProfile.parse(deepcopy(data))
    spoil(data)
    with pytest.raises(InvalidDocument) as raised:
        ModelProfile.parse(data)
    sentences = [raised.value.detail, *(f"{fault.pointer} {fault.detail}" for fault in raised.value.faults)]
    assert any(FAULTS[spoil] in each for each in sentences), sentences


def test_a_profile_with_variants_is_read_as_it_was_written() -> None:
    data = profile()
    again = ModelProfile.parse(data)
    assert again == with_degrees().profile
    assert json.loads(again.canonical_json()) == data
    assert [str(each.degrees) for each in again.variants or ()] == ["tensor 2"]


def test_degrees_in_words() -> None:
    assert str(Degrees(tensor=8, context=2)) == "tensor 8, context 2"
    assert str(Degrees(expert_tensor=4)) == "expert tensor 4"


@pytest.mark.parametrize(
    ("memory", "refused"), [({"optimizer_sharding": "over_replicas"}, True), ({}, False), ({"optimizer": "sgd"}, False)]
)
def test_sharding_is_said_once(memory: Json, refused: bool) -> None:
    if not refused:
        assert with_degrees(sharding="none", memory=memory).sharding == "none"
        return
    with pytest.raises(InvalidDocument) as raised:
        with_degrees(sharding="none", memory=memory)
    sentences = [raised.value.detail, *(fault.detail for fault in raised.value.faults)]
    assert any("sharding is none, but memory.optimizer_sharding is over_replicas" in each for each in sentences)


def test_new_fields_that_are_left_out_are_in_no_document() -> None:
    """So the addresses of documents without them stay what they are."""
    request = with_degrees(profile={"classes": None, "variants": None}, degrees=None)
    assert not {"degrees", "sharding"} & set(json.loads(request.canonical_json()))
    assert not {"classes", "variants", "shape", "framework"} & set(json.loads(request.canonical_json())["profile"])
    plan = json.loads(Plan.parse(tiny_plan_file()["plan"]).canonical_json())
    assert not {"degrees", "sharding"} & set(plan)


# ---- the release before ----------------------------------------------------------------------------------------------


READER = """
import json, sys
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import Plan
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
for name, data in json.load(sys.stdin).items():
    kind = {"plan": Plan, "profile": ModelProfile, "request": PlanRequest}[name.split()[0]]
    try:
        kind.parse(data)
    except InvalidDocument as error:
        print(name, "refused", *(fault.pointer for fault in error.faults), sep="|")
    else:
        print(name, "read", sep="|")
"""


@pytest.fixture(scope="module")
def release_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The schemas of a release that knows no degrees."""
    place = tmp_path_factory.mktemp("before")
    archive = run(["git", "archive", BEFORE, "schemas"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip("this checkout does not have the release before degrees")
    (place / "penstock").mkdir()
    (place / "penstock" / "__init__.py").write_text("")
    run(["tar", "-x", "-C", str(place / "penstock")], input=archive.stdout, check=True)
    return place


@pytest.mark.tier("ci")
def test_the_release_before_reads_no_plan_with_degrees(release_before: Path) -> None:
    """It would take each GPU for a replica; what says nothing of degrees it reads as ever."""
    plan = json.loads(Plan.parse(tiny_plan_file()["plan"]).canonical_json())
    without = with_degrees(profile={"classes": None, "variants": None}, degrees=None)
    request = json.loads(PlanRequest.parse(json.loads(with_degrees().canonical_json())).canonical_json())
    old = json.loads(without.canonical_json())
    documents = {
        "plan": plan,
        "plan degrees": plan | {"degrees": {"tensor": 2}},
        "plan sharding": plan | {"sharding": "optimizer"},
        "profile variants": profile(),
        "profile": old["profile"],
        "request": old,
        "request degrees": request | {"profile": old["profile"]},
    }
    process = run(
        [sys.executable, "-c", READER],
        input=json.dumps(documents),
        env={"PYTHONPATH": str(release_before), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    results = dict(line.split("|", 1) for line in process.stdout.splitlines())
    assert {name: results[name] for name in ("plan", "profile", "request")} == dict.fromkeys(
        ("plan", "profile", "request"), "read"
    )
    assert results["plan degrees"] == "refused|/degrees"
    assert results["plan sharding"] == "refused|/sharding"
    assert results["request degrees"] == "refused|/degrees"
    assert set(results["profile variants"].split("|")) >= {"refused", "/classes", "/variants"}
