"""Degrees as they are asked for: of experts and context, by options, in layouts, and why not others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

import penstock
from penstock.convert import to_problem
from penstock.convert.plans import from_plan
from penstock.convert.requested_degrees import named_degrees
from penstock.layouts.plain import written_layout
from penstock.schemas.coverage import SCHEDULE_SCOPE
from penstock.schemas.errors import InvalidDocument, InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.degrees import Choice, Degrees

Json = dict[str, Any]
BLOCKS = 4
COSTED_DEGREES: tuple[dict[str, int], ...] = (
    {"tensor": 2},
    {"tensor": 2, "context": 2},
    {"expert": 4},
    {"tensor": 2, "expert": 4},
    {"tensor": 2, "expert": 2, "expert_tensor": 2},
)
CLUSTER = {"name": "one", "uniform": {"nodes": 2, "devices_per_node": 4, "kind": "cpu", "memory_bytes": 2**30}}
CLUSTER["uniform"] |= {"nic": {"bandwidth_bytes_per_s": 10**9}}  # type: ignore[operator]


def profile() -> ModelProfile:
    return ModelProfile.parse(profile_with(random.Random(0), COSTED_DEGREES))


def request(**fields: Any) -> PlanRequest:
    return PlanRequest.parse({"profile": profile(), "topology": CLUSTER, "global_batch_size": 16, **fields})


def planned(**fields: Any) -> PlanFile:
    options = {"global_batch_size": 16, "planner": "even", **fields}
    return penstock.plan(profile(), request().topology, **options).file


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"tensor": "auto"}, "auto"),
        ({"tensor": "auto", "expert": "auto"}, "auto"),
        ({"tensor": (1,)}, [{}, {"expert": 4}]),
        ({"tensor": (1,), "expert": (1,)}, [{}]),
        ({"expert": (4,)}, [{"expert": 4}, {"tensor": 2, "expert": 4}]),
        ({"tensor": (2,), "context": (2, 1), "expert": (1,)}, [{"tensor": 2, "context": 2}, {"tensor": 2}]),
        ({"expert_tensor": (2,)}, [{"tensor": 2, "expert": 2, "expert_tensor": 2}]),
        ({"expert": "auto", "context": (2,)}, [{"tensor": 2, "context": 2}]),
    ],
)
def test_what_is_not_named_is_free(named: dict[str, Any], expected: Any) -> None:
    assert named_degrees(profile(), named) == expected


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"expert": (4, 8)}, "has no costs at expert 8"),
        ({"context": (2,), "expert": (4,)}, "has no costs at context 2, expert 4"),
    ],
)
def test_what_the_profile_does_not_know_is_refused(named: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidDocument, match=words):
        to_problem(request(degrees=named_degrees(profile(), named)))


@pytest.mark.parametrize("degrees", COSTED_DEGREES, ids=str)
def test_plans_count_samples_and_name_all_gpus(degrees: dict[str, int]) -> None:
    """A plan and its prediction, read again, match the contracted problem, which counts rows."""
    file = planned(degrees=degrees)
    plan, choice = file.plan, Choice(Degrees(**degrees), file.plan.sharding)
    cells = contract(to_problem(file.request), choice)
    allocation, _schedule = from_plan(plan, cells)
    assert plan.global_batch_size == 16 == cells.global_batch_size * choice.degrees.meshes
    assert plan.micro_batch_size == 16 // plan.num_micro_batches
    for stage, allocation_stage in zip(plan.pipelines[0].stages, allocation.pipelines[0].stages, strict=True):
        assert len(stage.devices) == choice.degrees.cell * allocation_stage.replicas
    assert penstock.judge(file).faults == ()
    is_stated = "run equally many samples" in " ".join(plan.assumptions)
    assert is_stated == (choice.degrees.meshes > 1)
    claims = {each.model for each in plan.certificates if "equally many samples on" in each.model}
    assert claims == (
        {each.model for each in plan.certificates if each.scope != SCHEDULE_SCOPE} if is_stated else set()
    )
    with pytest.raises(InvalidPlan):
        from_plan(plan.model_copy(update={"micro_batch_size": plan.micro_batch_size + 1}), cells)


def test_uneven_batches_are_refused_with_their_numbers() -> None:
    with pytest.raises(
        UnsupportedRequest, match="4 GPUs that need equally many samples, but the global batch of 14 is not"
    ):
        planned(degrees={"expert": 4}, global_batch_size=14)
    with pytest.raises(UnsupportedRequest, match="no micro-batch of 2, 6 samples is a multiple of 4"):
        planned(degrees={"expert": 4}, micro_batch_sizes=[2, 6])
    assert planned(degrees={"expert": 4}, micro_batch_sizes=[2, 8]).plan.micro_batch_size == 8


@pytest.mark.tier("quick")
def test_layouts_name_every_degree() -> None:
    plan_request = request(memory={"optimizer": "sgd"})
    result = written_layout(plan_request, "tensor=2,expert=4,pipeline=2,replicas=2,micro-batch=2")
    assert result.words == "TP2 PP2 EP4 DP2, micro-batch 2"
    plan = result.layout.file.plan
    assert (plan.num_micro_batches, plan.micro_batch_size) == (4, 4)
    assert [len(stage.devices) for stage in plan.pipelines[0].stages] == [4, 4]
    with pytest.raises(InvalidDocument, match="is not a valid NAME=VALUE"):
        written_layout(plan_request, "experts=4")


def test_why_not_other_experts() -> None:
    file = planned(degrees="auto", sharding="none")
    other = next(each for each in ({"expert": 4}, {"context": 2}) if not _has(file, each))
    ((name, value),) = other.items()
    (answer,) = penstock.explain(file, what_if=(), why_not=[f"{name}={value}"]).why_not
    assert f"{name} {value}" in answer.choice
    with pytest.raises(UnsupportedRequest, match="no costs at expert 2"):
        penstock.explain(file, what_if=(), why_not=["expert=2,expert-tensor=1"])


def _has(file: PlanFile, degrees: dict[str, int]) -> bool:
    assert file.plan.degrees is not None
    return all(getattr(file.plan.degrees, name) == value for name, value in degrees.items())


def profile_with(rng: random.Random, degrees: Sequence[dict[str, int]]) -> Json:
    """Return an embedding, some blocks and a head, with about a GPU's part of all costs at each of the degrees."""
    names = ["embedding", *(f"block.{n}" for n in range(BLOCKS)), "head"]
    times = {"forward_ns": 8_000, "backward_ns": 16_000, "stash_bytes": 4_000}
    return {
        "name": "drawn",
        "layers": [{"name": name, "kind": name.split(".")[0], "parameter_bytes": 80_000} for name in names],
        "boundaries": [[{"name": "x", "bytes_per_sample": 800, "gradient_bytes_per_sample": 800}] for _ in names[1:]],
        "measurements": [{"device_kind": "cpu", "micro_batch_size": 1, "layers": [times for _ in names]}],
        "framework": "megatron",
        "classes": [0, *[1] * BLOCKS, 2],
        "variants": [_variant(rng, each) for each in degrees],
        "source": {"method": "analytic", "expected_error": 0.1},
    }


def _variant(rng: random.Random, degrees: dict[str, int]) -> Json:
    mesh = degrees.get("tensor", 1) * degrees.get("context", 1)
    cost = {"forward_ns": 8_000 // mesh, "backward_ns": 16_000 // mesh, "stash_bytes": 4_000 // mesh}
    weights = {"parameter_bytes": 80_000 // degrees.get("tensor", 1), "update_ns": 10}
    return {
        "degrees": degrees,
        "boundary": "sharded",
        "layers": [weights, weights | {"expert_bytes": rng.randrange(30_000)}, weights],
        "measurements": [{"device_kind": "cpu", "micro_batch_size": 1, "layers": [cost] * 3}],
    }


def test_python_leaves_open_what_is_listed() -> None:
    choices = planned(degrees={"tensor": (1, 2), "expert": 4}).request.degrees
    assert [str(each) for each in choices] == ["expert 4", "tensor 2, expert 4"]  # type: ignore[union-attr]
