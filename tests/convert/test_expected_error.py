"""The stated error of a plan: by the kinds that it uses and by how many GPUs hold its experts."""

from __future__ import annotations

import pytest

import penstock
from penstock.examples.catalogue import cluster, shape
from penstock.facts.device_table import (
    ANALYTIC_EXPECTED_ERROR,
    EXTRAPOLATED_EXPECTED_ERROR,
    MANY_EXPERTS_EXPECTED_ERROR,
)
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers.degrees import Framework
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of


def error_of(model: str, cluster_name: str, kind: str, framework: Framework = "torch", expert: int = 1) -> float:
    """Return the stated error of a plain layout, from costs of one kind."""
    degrees = DegreeOptions(tensor=(), context=(1,), expert=(expert,))
    few = shape(model).model_copy(update={"layers": 2})
    profile = profile_of(few, framework, (kind, "A100"), micro_batch_sizes=(1,), degrees=degrees)
    request = PlanRequest(profile=profile, topology=cluster(cluster_name), global_batch_size=64)
    prediction = penstock.even_layout(request, expert=expert, sharding="optimizer").file.plan.prediction
    assert prediction is not None
    return prediction.expected_error


@pytest.mark.parametrize(
    ("cluster_name", "kind", "framework", "expected"),
    [
        ("1x8xH100", "H100", "megatron", ANALYTIC_EXPECTED_ERROR),
        ("1x8xH200", "H200", "megatron", EXTRAPOLATED_EXPECTED_ERROR),  # its kernels are taken to be an H100's
        ("1x8xH200", "H200", "torch", ANALYTIC_EXPECTED_ERROR),
        ("1x8xGB200", "GB200", "torch", EXTRAPOLATED_EXPECTED_ERROR),
        ("1x8xGB200", "B200", "torch", ANALYTIC_EXPECTED_ERROR),  # scaled from B200's, as the topology says
    ],
)
def test_a_kind_whose_kernels_are_anothers_has_a_larger_error(
    cluster_name: str, kind: str, framework: Framework, expected: float
) -> None:
    assert error_of("llama-3-8b", cluster_name, kind, framework) == expected


def test_experts_that_several_nodes_hold_have_a_larger_error() -> None:
    inside = error_of("qwen3-30b-a3b", "1x8xH100", "H100", expert=8)
    assert inside < MANY_EXPERTS_EXPECTED_ERROR
    for cluster_name, expert in (("2x4xH100", 8), ("2x8xH100", 16)):
        assert error_of("qwen3-30b-a3b", cluster_name, "H100", expert=expert) == MANY_EXPERTS_EXPECTED_ERROR
