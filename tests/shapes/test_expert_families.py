"""Families of mixtures of experts, as they are read of config.json: parameters of the library's own modules."""

from __future__ import annotations

import pytest
import torch

from penstock.shapes import parameters
from penstock.shapes.hugging_face import shape_of
from penstock.shapes.roles import roles_of

pytestmark = pytest.mark.tier("ci")

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 512, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 160, "num_experts_per_tok": 3, "head_dim": 20,
}  # fmt: skip
_DEEPSEEK = {
    **_SIZES, "num_key_value_heads": 6, "moe_intermediate_size": 40, "n_routed_experts": 8, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_QWEN = {**_SIZES, "moe_intermediate_size": 40, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}

FAMILIES: dict[str, dict[str, object]] = {
    "mixtral": {**_SIZES, "num_local_experts": 8},
    "qwen2_moe": {**_QWEN, "head_dim": None, "shared_expert_intermediate_size": 56},
    "qwen3_moe": _QWEN,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": {**_SIZES, "num_local_experts": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_librarys_modules(family: str) -> None:
    fields = {name: value for name, value in FAMILIES[family].items() if value is not None}
    config = transformers.AutoConfig.for_model(family, **fields, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict(), sequence_length=64)
    layers = [sum(one.numel() for one in layer.parameters()) for layer in model.model.layers]
    assert layers == [parameters.layer(shape, dense=role == "dense").total for role in roles_of(shape)[1:-1]]
    assert sum(one.numel() for one in model.parameters()) == parameters.total(shape)
    assert shape.experts is not None
    assert shape.experts.per_token == 3
