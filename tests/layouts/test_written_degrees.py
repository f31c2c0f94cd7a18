"""Layouts at degrees: what is written, what is refused and why, and what differs from a user's own file."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

import penstock
from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.exporting.layouts import layout_text
from penstock.layouts.against import with_differences
from penstock.planning.judge import judge
from penstock.questions.solve import solve
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers.degrees import Framework
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of

pytestmark = pytest.mark.tier("ci")


@cache
def request(model: str, framework: Framework, expert_tensor: int = 1) -> PlanRequest:
    shape = SHAPES[model].model_copy(update={"layers": 4})
    degrees = DegreeOptions(context=(1, 2), expert_tensor=expert_tensor)
    profile = profile_of(shape, framework, ("H100",), micro_batch_sizes=(1,), degrees=degrees)
    topology = catalogue.cluster("2x8xH100")
    return PlanRequest.model_validate({"profile": profile, "topology": topology, "global_batch_size": 16})


def plan(model: str = "llama-3-8b", framework: Framework = "megatron", **layout: Any) -> PlanFile:
    plan_request = request(model, framework, layout.get("expert_tensor", 1))
    return penstock.even_layout(plan_request, **{"pipeline": 2, "sharding": "optimizer"} | layout).file


def flags(text: str) -> list[str]:
    return re.findall(r"(?m)^    --(.*)$", text)


def test_megatron_gets_each_degree_and_what_goes_with_it() -> None:
    text = layout_text(plan("mixtral-8x7b", tensor=2, context=2, expert=8, recompute=["norm", "mlp"]), "megatron")
    assert "16 ranks, 2 of the pipeline × 2 replicas × 4 that share layers" in text
    assert "LAUNCH_ARGS=(--nnodes 2 --nproc-per-node 8)\n" in text
    assert flags(text) == [
        "tensor-model-parallel-size 2",
        "sequence-parallel",
        "context-parallel-size 2",
        "cp-comm-type p2p",
        "expert-model-parallel-size 8",
        "expert-tensor-parallel-size 1",
        "moe-token-dispatcher-type alltoall",
        "moe-grouped-gemm",
        "pipeline-model-parallel-size 2",
        "pipeline-model-parallel-layout 'Ett|ttL'",
        "num-layers 4",
        "micro-batch-size 1",
        "global-batch-size 16",
        "recompute-granularity selective",
        "recompute-modules moe layernorm",
        "overlap-grad-reduce",
        "use-distributed-optimizer",
        "overlap-param-gather",
        "grad-reduce-in-bf16",
    ]


def test_a_module_that_megatron_does_not_recompute_is_refused() -> None:
    with pytest.raises(UnsupportedRequest, match="every layer recomputes attention by itself, for which megatron"):
        layout_text(plan(tensor=2, recompute=["attention"]), "megatron")


@pytest.mark.parametrize(
    ("to", "model", "layout", "words"),
    [
        ("deepspeed", "llama-3-8b", {"tensor": 2}, "tensor 2, and its PipelineModule cannot split"),
        ("torchtitan", "mixtral-8x7b", {"tensor": 2, "expert": 4, "expert_tensor": 2},
         "torchtitan's experts are whole on a GPU"),
        ("torchtitan", "mixtral-8x7b", {"expert": 8, "sharding": "none"}, "it spreads experts over these GPUs only"),
        ("ranges", "llama-3-8b", {"tensor": 2}, "ranges of layers are not written at tensor 2"),
    ],
)  # fmt: skip
def test_what_a_trainer_refuses_is_not_written(to: str, model: str, layout: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedRequest, match=words):
        layout_text(plan(model, **layout), to)


@pytest.mark.parametrize(
    ("target", "expert_tensor", "degrees", "words"),
    [
        ("deepspeed", 1, "auto", "deepspeed has no plans at .*: its PipelineModule cannot split"),
        ("torchtitan", 2, {"expert": 4, "expert_tensor": 2}, "torchtitan's experts are whole on a GPU"),
    ],
)
def test_degrees_that_a_target_refuses_are_not_planned(
    target: str, expert_tensor: int, degrees: Any, words: str
) -> None:
    document = request("mixtral-8x7b", "megatron", expert_tensor).model_dump(mode="json")
    plan_request = PlanRequest.parse(document | {"target": target, "degrees": degrees, "planner": "uniform"})
    with pytest.raises(UnsupportedRequest, match=words):
        solve(plan_request, workers=1)


def test_plans_for_a_target_are_within_its_limits_at_degrees_too() -> None:
    """The planners that rank degrees otherwise make plans that no trainer has."""
    document = request("llama-3-8b", "megatron").model_dump(mode="json")
    more = {"target": "megatron", "degrees": [{"tensor": 2}, {"tensor": 4}], "sharding": "optimizer"}
    plan_request = PlanRequest.parse(document | more | {"global_batch_size": 8, "termination": {"max_plans": 2}})
    result = solve(plan_request, workers=1)
    assert result.plan is not None
    assert result.plan.planner == "uniform"
    file = PlanFile(plan=result.plan, request=plan_request)
    assert judge(file).faults == ()
    degree = result.plan.degrees
    assert degree is not None
    assert flags(layout_text(file, "megatron"))[0] == f"tensor-model-parallel-size {degree.tensor}"


def test_other_kernels_and_another_exchange_are_said() -> None:
    text = layout_text(plan(tensor=2, context=2), "torchtitan")
    assert "the plan's costs are those of the framework megatron, not of torchtitan" in text
    assert "the plan's costs are those of ring; torchtitan gathers keys and values" in text


USER_SCRIPT = """#!/bin/bash
TP=4
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $TP --sequence-parallel \\
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4 \\
    --micro-batch-size 1 --global-batch-size 16 --use-distributed-optimizer  # --overlap-grad-reduce
"""


def test_each_flag_that_differs_has_a_line() -> None:
    text = with_differences(layout_text(plan(tensor=2), "megatron"), "megatron", USER_SCRIPT, "train.sh")
    lines = text.split("# megatron layout of plan")[0].splitlines()
    assert lines == [
        "# differs from train.sh in 6 settings:",
        "#   --tensor-model-parallel-size 2: train.sh, line 3, has 4",
        "#   --pipeline-model-parallel-layout Ett|ttL: train.sh does not have it",
        "#   --overlap-grad-reduce: train.sh does not have it",
        "#   --overlap-param-gather: train.sh does not have it",
        "#   --grad-reduce-in-bf16: train.sh does not have it",
        "#   --num-layers-per-virtual-pipeline-stage 1: train.sh, line 4, has it, this layout not: leave it out",
    ]


@pytest.mark.parametrize("to", ["megatron", "megatron-bridge", "torchtitan"])
def test_a_written_layout_differs_in_nothing_from_itself(to: str) -> None:
    text = layout_text(plan(tensor=2, framework="torch" if to == "torchtitan" else "megatron"), to)
    assert with_differences(text, to, text, "own").startswith("# own says the same of all settings\n")


def test_python_and_toml_are_compared_as_well() -> None:
    text = layout_text(plan(tensor=2, framework="torch"), "torchtitan")
    user_file = "[parallelism]\ntensor_parallel_degree = 1\npipeline_parallel_degree = 2\n"
    commented = with_differences(text, "torchtitan", user_file, "train.toml")
    assert "#   tensor_parallel_degree 2: train.toml, line 2, has 1\n" in commented
    assert "pipeline_parallel_degree" not in commented.split('"""')[0].replace("expert_parallel_degree", "")
    recipe = layout_text(plan(tensor=2), "megatron-bridge")
    commented = with_differences(recipe, "megatron-bridge", "cfg.model.sequence_parallel = False\n", "recipe.py")
    assert "#   sequence_parallel: recipe.py, line 1, does not have it\n" in commented


@pytest.mark.tier("quick")
def test_a_text_without_settings_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="notes has no settings of a megatron layout"):
        with_differences("", "megatron", "the pipeline is deep", "notes")
