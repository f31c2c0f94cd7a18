"""Hugging Face models whose sequences and experts ranks share: what is traced, and training against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, differences

from penstock.convert import to_problem
from penstock.executor.hugging_face.job import HuggingFaceJob
from penstock.executor.hugging_face.pieces import TRAINED
from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.profiling.tracing import Tracer
from penstock.executor.run.chain import Chain
from penstock.facts.device_table import device_facts
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.profile import DividedCost, DividedLayer, ModelProfile
from penstock.schemas.program import Program
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of
from penstock.shapes.hugging_face import shape_of
from penstock.shapes.layout import Layout
from penstock.solvers.degrees.contract import contract
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.schedules.gpipe import gpipe

LENGTH = 64
TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {**TINY, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    **TINY, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "topk_group": 1, "n_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "mixtral": {**EXPERTS, "sliding_window": None},
    "qwen3": {**TINY, "head_dim": 16},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {**EXPERTS, "head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
BLOCK = 2
"""The second of two blocks, which has experts in all mixtures."""


def values(family: str) -> dict[str, Any]:
    return {"model_type": family, **FAMILIES[family]}


def traced(family: str, **degrees: tuple[int, ...]) -> ModelProfile:
    job = HuggingFaceJob(values(family), sequence_length=LENGTH)
    return analytic_profile(job, "H100", (1,), "bf16", **degrees)  # type: ignore[arg-type]


def of_block(profile: ModelProfile) -> tuple[DividedLayer, DividedCost]:
    """Return one GPU's sizes and costs of the second block, at the last of the degrees."""
    assert profile.classes is not None
    assert profile.variants is not None
    variant, number = profile.variants[-1], profile.classes[BLOCK]
    return variant.layers[number], variant.measurements[0].layers[number]


def sent(cost: DividedCost, over: str) -> dict[tuple[str, str], tuple[int, int]]:
    return {
        (each.phase, each.operation): (each.count, each.bytes_per_sample)
        for each in cost.collectives
        if each.over == over
    }


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_sequences_send_what_the_closed_form_says(family: str) -> None:
    """Keys and values of whole heads; DeepSeek's library makes all heads of both before it attends, as others do."""
    profile = traced(family, context_degrees=(2,))
    shape = shape_of(values(family), sequence_length=LENGTH)
    layout = Layout(context=2, context_kind="all_gather", framework="torch")
    role = "dense" if shape.experts is None else "experts"
    expected = costs_of(Case(shape, layout, device_facts("H100")))[role]
    layer, cost = of_block(profile)
    whole = {
        (each.phase, each.operation): (2, 2 * each.bytes_per_sample)
        if each.count == 1
        else (each.count, each.bytes_per_sample)
        for each in expected.collectives
        if each.over == "context"
    }
    if shape.latent is None:
        assert sent(cost, "context") == whole
    else:
        keys = 2 * LENGTH * shape.heads * (shape.head_width + shape.latent.value_width)
        assert sent(cost, "context") == {
            ("forward", "all_gather"): (2, keys),
            ("backward", "reduce_scatter"): (2, keys),
        }
    assert layer.parameter_bytes == profile.layers[BLOCK].parameter_bytes


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_that_gpus_share_out(family: str) -> None:
    """Tokens there and back in both passes, their numbers before; parameters of the experts alone are divided."""
    profile = traced(family, expert_degrees=(4,))
    shape = shape_of(values(family), sequence_length=LENGTH)
    assert shape.experts is not None
    layer, cost = of_block(profile)
    expected = layers_of(Case(shape, Layout(expert=4, data=4, framework="torch"), device_facts("H100")))["experts"]
    assert (layer.parameter_bytes, layer.expert_bytes) == (expected.parameter_bytes, expected.expert_bytes)
    tokens = 2 * LENGTH * shape.experts.per_token * shape.hidden
    numbers = 8 * shape.experts.number
    assert sent(cost, "expert") == {
        ("forward", "all_to_all"): (3, 2 * tokens + numbers),
        ("backward", "all_to_all"): (2, 2 * tokens),
    }


@pytest.mark.tier("nightly")
def test_experts_of_gpus_that_share_layers_too_get_each_a_part_of_the_tokens() -> None:
    profile = traced("mixtral", tensor_degrees=(2,), expert_degrees=(2,))
    layer, cost = of_block(profile)
    assert layer.expert_bytes is not None
    tokens = 2 * LENGTH * 2 * 32 // 2
    assert sent(cost, "expert")["backward", "all_to_all"] == (2, 2 * tokens)
    gathered = sent(cost, "tensor")["forward", "all_gather"]
    assert gathered == (1, 2 * LENGTH * 32), "what experts made of all parts"


def test_experts_in_fp32_compute_and_keep_as_many_elements() -> None:
    """Of which torch has no grouped products on the meta device."""
    job = HuggingFaceJob(values("mixtral"), sequence_length=LENGTH)
    costs = {}
    for dtype in (torch.float32, torch.bfloat16):
        chain = Chain(job)
        modules = [chain.build_layer(i, device="meta").to(dtype) for i in range(len(chain.specs))]
        costs[dtype] = Tracer(chain, modules, dtype).run(1).costs[BLOCK]
    wide, narrow = costs[torch.float32], costs[torch.bfloat16]
    for one, other in ((wide.forward, narrow.forward), (wide.backward, narrow.backward)):
        assert sum(each.flops for each in one) == sum(each.flops for each in other)
    experts = LENGTH * 2 * (2 * 32 + 4 * 64)
    assert wide.stash_bytes - narrow.stash_bytes > 2 * experts, "of experts alone, besides all else in two bytes more"


def test_degrees_that_do_not_divide_are_refused_by_layer() -> None:
    with pytest.raises(UnsupportedRequest, match=r"'block\.0' .* expert 3: .* 8 experts cannot be split evenly"):
        traced("mixtral", expert_degrees=(3,))
    with pytest.raises(UnsupportedRequest, match=r"'x' .* context 5 splits dimension 1 into 10 chunks"):
        traced("llama", context_degrees=(5,))
    with pytest.raises(UnsupportedRequest, match="has no experts for 2 GPUs to share"):
        traced("llama", expert_degrees=(2,))


def programs_of(family: str, degrees: Degrees) -> list[Program]:
    """Lower one GPU group with two micro-batches."""
    job = HuggingFaceJob(values(family), sequence_length=LENGTH, attention=TRAINED)
    each = {f"{name}_degrees": (value,) for name, value in degrees._asdict().items() if value > 1}
    profile = analytic_profile(job, "H100", (1, 2), **each)  # type: ignore[arg-type]
    uniform = UniformCluster(
        nodes=1,
        devices_per_node=degrees.cell,
        kind="H100",
        memory_bytes=2**36,
        fabric=Fabric(bandwidth_bytes_per_s=10**11),
    )
    request = {
        "profile": profile,
        "topology": ClusterTopology(name="world", uniform=uniform),
        "global_batch_size": 4,
        "memory": {"precision": "full"},
        "degrees": {name: value for name, value in degrees._asdict().items() if value > 1},
        "sharding": "none",
    }
    problem = contract(to_problem(PlanRequest.model_validate(request)), Choice(degrees, "none"))
    allocation = single_pipeline((Stage(0, len(profile.layers) - 1, (0,)),), 2)
    return lower(problem, allocation, gpipe(problem, allocation))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("llama", Degrees(context=2)),
        ("gpt2", Degrees(context=2)),
        ("deepseek_v3", Degrees(context=2)),
        ("mixtral", Degrees(expert=2)),
        ("qwen2_moe", Degrees(tensor=2, expert=2)),
        ("qwen3_moe", Degrees(context=2, expert=2)),
    ],
)
def test_ranks_train_as_one_process(pool: RankPool, tmp_path: Path, family: str, degrees: Degrees) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values(family)), encoding="utf-8")
    results = pool.train(programs_of(family, degrees), f"hf:config.json@{LENGTH}", steps=1, directory=str(tmp_path))
    gradients, loss = differences(results)
    assert max(gradients, loss) <= 2e-6


def test_windows_of_shared_sequences_are_not_trained(tmp_path: Path) -> None:
    """A window as long as a rank's part is not one over the whole sequence."""
    config = {**values("llama"), "model_type": "mistral", "sliding_window": LENGTH // 2}
    job = HuggingFaceJob(config, sequence_length=LENGTH, attention=TRAINED)
    with pytest.raises(UnsupportedRequest, match=r"cannot be divided by context 2: .* an explicit mask"):
        analytic_profile(job, "H100", (1,), context_degrees=(2,))
