"""Models that the library transformers builds of a configuration, traced, against the closed form of their shapes."""

from __future__ import annotations

import socket
import sys
from functools import cache
from typing import Any, NoReturn

import pytest

from penstock.executor.hugging_face.job import HuggingFaceJob
from penstock.executor.profiling.analytic import TORCH_DTYPES, analytic_profile
from penstock.executor.profiling.tracing import Tracer
from penstock.executor.run.chain import Chain
from penstock.facts.device_table import device_facts
from penstock.schemas.errors import InvalidDocument, MissingExtra, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of
from penstock.shapes.costs.library import explained, kept_by_the_library
from penstock.shapes.hugging_face import shape_of
from penstock.shapes.layout import Layout
from penstock.shapes.roles import Role, is_dense, is_windowed, roles_of

LENGTH = 256
LLAMA = {
    "hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 3584, "vocab_size": 32_000,
}  # fmt: skip
EXPERTS = {**LLAMA, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
LATENT = {
    **LLAMA, "num_key_value_heads": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_group": 1,
    "n_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
WIDE = {**LLAMA, "head_dim": 128}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "head_dim": 64},
    "mixtral": {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": LLAMA,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 1024},
    "qwen3": WIDE,
    "qwen3_moe": {**EXPERTS, "head_dim": 128},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {**LATENT, "q_lora_rank": 768, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    "gemma": WIDE,
    "gemma2": WIDE,
    "gemma3_text": {**WIDE, "num_hidden_layers": 7},
    "phi": {**LLAMA, "num_key_value_heads": 16},
    "phi3": {**LLAMA, "vocab_size": 32_064},
    "gpt2": {"n_embd": 1024, "n_layer": 3, "n_head": 16, "n_positions": 512, "vocab_size": 50_257, **NO_DROPOUT},
    "gpt_oss": {**LLAMA, "intermediate_size": 1024, "num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64},
    "granite": LLAMA,
    "smollm3": {**LLAMA, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "ministral3": WIDE,
    "hunyuan_v1_dense": {**LLAMA, "head_dim": 64},
}
DIVIDED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi")
"""Families without experts, all of whose products the library divides."""
DEGREES = (2, 4, 8)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> NoReturn:
        raise AssertionError("a config.json is all that a trace needs")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def values(family: str) -> dict[str, Any]:
    return {"model_type": family, **CONFIGS[family]}


def shape(family: str) -> TransformerShape:
    return shape_of(values(family), sequence_length=LENGTH)


@cache
def traced(family: str, degrees: tuple[int, ...] = ()) -> ModelProfile:
    job = HuggingFaceJob(values(family), sequence_length=LENGTH)
    return analytic_profile(job, "H100", (1,), "bf16", tensor_degrees=degrees)


def firsts(family: str) -> dict[Role, int]:
    """Return the first layer of each role."""
    roles = roles_of(shape(family))
    return {role: roles.index(role) for role in dict.fromkeys(roles)}


def case(family: str, degree: int = 1) -> Case:
    layout = Layout(tensor=degree, framework="torch", sequence_parallel=False)
    return Case(shape(family), layout, device_facts("H100"))


@pytest.mark.cases(3)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_has_the_parameters_of_its_shape(family: str) -> None:
    profile = traced(family)
    assert len(profile.layers) == len(roles_of(shape(family)))
    assert sum(layer.parameter_bytes for layer in profile.layers) == 2 * parameters.total(shape(family))
    expected = layers_of(case(family))
    for role, first in firsts(family).items():
        assert profile.layers[first].parameter_bytes == expected[role].parameter_bytes, role


@pytest.mark.cases(3)
@pytest.mark.parametrize("family", CONFIGS)
def test_what_layers_keep_is_the_closed_form_and_what_is_named_by_operator(family: str) -> None:
    expected = costs_of(case(family))
    for role, first in firsts(family).items():
        kept = traced(family).measurements[0].layers[first].stash_bytes
        named = kept_by_the_library(values(family), shape(family), role)
        assert kept - sum(named.values()) == pytest.approx(expected[role].stash_bytes, rel=1e-4), role


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("deepseek_v3", {"norm_topk_prob": False, "q_lora_rank": None}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 768}),
        ("llama", {"num_key_value_heads": 16, "attention_bias": True}),
    ],
    ids=str,
)
def test_operators_are_named_of_other_settings_of_a_family(family: str, more: dict[str, Any]) -> None:
    config = {**values(family), **more}
    job, model = HuggingFaceJob(config, sequence_length=LENGTH), shape_of(config, sequence_length=LENGTH)
    kept = analytic_profile(job, "H100", (1,), "bf16").measurements[0].layers[-2].stash_bytes
    role = roles_of(model)[-2]
    expected = costs_of(Case(model, Layout(framework="torch"), device_facts("H100")))[role]
    assert kept - sum(kept_by_the_library(config, model, role).values()) == pytest.approx(
        expected.stash_bytes, rel=1e-4
    )


def test_a_profile_says_by_which_operators_its_blocks_differ() -> None:
    dense, experts = explained(values("deepseek_v2"), shape("deepseek_v2"), device_facts("H100"))
    expected = costs_of(case("deepseek_v2"))
    kept = {
        role: traced("deepseek_v2").measurements[0].layers[first].stash_bytes
        for role, first in firsts("deepseek_v2").items()
    }
    roles: tuple[tuple[str, Role], ...] = ((dense, "dense"), (experts, "experts"))
    for sentence, role in roles:
        less = 1 - kept[role] / expected[role].stash_bytes
        assert f"keeps {less:.1%} less than the closed form of torch's own modules says: " in sentence
    assert dense.endswith(": norms -6.5%, rotary positions +0.3%")
    assert experts.endswith(
        ": copies that come back -7.9%, norms -4.9%, rotary positions +0.2%, weight of the router +0.2%"
    )


@pytest.mark.cases(4)
@pytest.mark.parametrize("family", CONFIGS)
def test_flops_are_those_of_the_weights_that_tokens_meet(family: str) -> None:
    """And of the square of attention, as torch counts it, with the widths of queries and of values."""
    chain = Chain(HuggingFaceJob(values(family), sequence_length=LENGTH))
    modules = [chain.build_layer(i, device="meta").to(TORCH_DTYPES["bf16"]) for i in range(len(chain.specs))]
    costs = Tracer(chain, modules, TORCH_DTYPES["bf16"]).run(1).costs
    model = shape(family)
    wide = model.head_width + (model.head_width if model.latent is None else model.latent.value_width)
    attention = 2 * model.heads * wide
    width = model.windows.width if model.windows else 0
    for role, first in firsts(family).items():
        if role in ("embedding", "head"):
            continue
        seen = width * (2 * LENGTH - width) / LENGTH if is_windowed(role) else LENGTH
        expected = 2 * _weights(model, dense=is_dense(role)) + attention * seen
        flops = sum(each.flops for each in costs[first].forward) / LENGTH
        assert flops == pytest.approx(expected, rel=0.01), role


def _weights(model: TransformerShape, *, dense: bool) -> int:
    weights = sum(rows * columns for rows, columns in parameters.matrices(model, dense=dense))
    if dense or model.experts is None:
        return weights
    one = (3 if model.gated else 2) * model.hidden * model.experts.ffn
    return weights + model.experts.per_token * one + model.hidden * model.experts.number


@pytest.mark.cases(1)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("family", DIVIDED)
def test_the_librarys_own_division_is_that_of_the_closed_form(family: str, degree: int) -> None:
    """But for two things: it sums the gradient of each product's input alone, and gathers all scores."""
    profile = traced(family, DEGREES)
    assert profile.classes is not None
    assert profile.variants is not None
    (variant,) = [each for each in profile.variants if each.degrees.tensor == degree]
    assert variant.boundary == "whole"
    layers, costs = layers_of(case(family, degree)), costs_of(case(family, degree))
    size = 2 * LENGTH * shape(family).hidden
    for role, first in firsts(family).items():
        number = profile.classes[first]
        assert variant.layers[number].parameter_bytes == layers[role].parameter_bytes, role
        collectives = {
            (each.phase, each.operation): (each.count, each.bytes_per_sample)
            for each in variant.measurements[0].layers[number].collectives
        }
        expected = {
            (each.phase, each.operation): (each.count, each.bytes_per_sample) for each in costs[role].collectives
        }
        if role == "head":
            expected = {("backward", "all_reduce"): (1, size)}
            expected["forward", "all_gather"] = (1, 2 * LENGTH * shape(family).vocabulary)
        elif role == "dense":
            products = 4 if family == "phi" else 5
            norms = 2 * shape(family).query_key_norm
            width = 2 * shape(family).head_width
            expected["backward", "all_reduce"] = (products + norms, products * size + norms * width)
        assert collectives == expected, role


def test_experts_are_divided_by_their_width() -> None:
    profile = traced("mixtral", (2,))
    assert profile.variants is not None
    model, block = shape("mixtral"), profile.variants[0].layers[1]
    sizes = parameters.layer(model, dense=False)
    assert block.parameter_bytes == 2 * (sizes.replicated + (sizes.dense + sizes.expert) // 2)
    forward = [each for each in profile.variants[0].measurements[0].layers[1].collectives if each.phase == "forward"]
    assert [(each.operation, each.count, each.bytes_per_sample) for each in forward] == [
        ("all_reduce", 2, 2 * 2 * LENGTH * model.hidden)
    ], "behind attention and behind the experts"


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_a_family_that_the_library_does_not_divide_is_refused(family: str) -> None:
    with pytest.raises(
        UnsupportedRequest, match=r"layer 'embedding' cannot be divided by tensor 2: .*no tensor-parallel"
    ):
        traced(family, (2,))


@pytest.mark.parametrize("family", ["opt", "bloom"])
def test_a_model_that_is_no_chain_of_layers_is_refused(family: str) -> None:
    """OPT's layers are inside a decoder of their own, BLOOM has a norm before the first."""
    with pytest.raises(UnsupportedRequest, match=r"config.json: the model \w+ForCausalLM has "):
        HuggingFaceJob({"model_type": family, "num_hidden_layers": 2})


def test_heads_that_the_degree_does_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedRequest, match=r"layer 'block\.0' cannot be divided by tensor 16: "):
        traced("llama", (16,))


def test_a_deep_model_is_traced_once_for_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    trace = Tracer.trace

    def counted(self: Tracer, index: int, *arguments: Any) -> Any:
        runs.append(index)
        return trace(self, index, *arguments)

    monkeypatch.setattr(Tracer, "trace", counted)
    deep = {**values("deepseek_v3"), "num_hidden_layers": 61, "first_k_dense_replace": 3}
    profile = analytic_profile(HuggingFaceJob(deep, sequence_length=LENGTH), "H100", (1,), "bf16")
    assert len(profile.layers) == 63
    assert runs == [0, 1, 4, 62], "embedding, a dense layer, one with experts, head"


def test_what_is_no_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidDocument, match="has no 'model_type'"):
        HuggingFaceJob({"hidden_size": 8})
    with pytest.raises(InvalidDocument, match=r"cannot build a causal language model of family 'vit' from 'x\.json'"):
        HuggingFaceJob({"model_type": "vit"}, origin="'x.json'")
    with pytest.raises(InvalidDocument, match="of family 'no such'"):
        HuggingFaceJob({"model_type": "no such"})
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"penstock\[hf\]"):
        HuggingFaceJob(values("llama"))
