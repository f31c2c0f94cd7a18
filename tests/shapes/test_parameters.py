"""Numbers of parameters, against published totals, the shipped profiles, and PyTorch modules on the meta device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from penstock.examples import catalogue, gpt, llama
from penstock.examples.models import MODELS
from penstock.examples.shapes import SHAPES
from penstock.executor.run.job import LayerSpec
from penstock.schemas.transformers.shape import Experts, TransformerShape
from penstock.shapes import parameters
from penstock.shapes.families.table import FAMILIES
from penstock.shapes.hugging_face import shape_of

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
_SMALL = {"num_hidden_layers": 3, "vocab_size": 1000}
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_OTHER = {"hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4,
          "intermediate_size": 3072, "vocab_size": 1000}  # fmt: skip
_GLM = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 512, "use_qk_norm": True, "attention_bias": True}  # fmt: skip

PUBLISHED = [
    # meta-llama/Meta-Llama-3-8B, -70B, Llama-3.1-405B: totals of their safetensors
    ({**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
     8_030_261_248),
    ({**_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
     70_553_706_496),
    ({**_LLAMA, "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
      "intermediate_size": 53248}, 405_853_388_800),
    # mistralai/Mistral-7B-v0.1, Mixtral-8x7B-v0.1
    ({"model_type": "mistral", "vocab_size": 32000, "num_key_value_heads": 8, "hidden_size": 4096,
      "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}, 7_241_732_096),
    ({"model_type": "mixtral", "vocab_size": 32000, "num_key_value_heads": 8, "hidden_size": 4096,
      "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336, "num_local_experts": 8,
      "num_experts_per_tok": 2}, 46_702_792_704),
    # Qwen/Qwen2-7B, Qwen3-8B, Qwen3-30B-A3B
    ({"model_type": "qwen2", "vocab_size": 152064, "num_key_value_heads": 4, "hidden_size": 3584,
      "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944}, 7_615_616_512),
    ({"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "hidden_size": 4096, "head_dim": 128,
      "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}, 8_190_735_360),
    ({"model_type": "qwen3_moe", "vocab_size": 151936, "num_key_value_heads": 4, "hidden_size": 2048, "head_dim": 128,
      "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144, "moe_intermediate_size": 768,
      "num_experts": 128, "num_experts_per_tok": 8}, 30_532_122_624),
    # google/gemma-7b, gemma-2-9b
    ({"model_type": "gemma", "vocab_size": 256000, "num_key_value_heads": 16, "hidden_size": 3072, "head_dim": 256,
      "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 24576}, 8_537_680_896),
    ({"model_type": "gemma2", "vocab_size": 256000, "num_key_value_heads": 8, "hidden_size": 3584, "head_dim": 256,
      "num_hidden_layers": 42, "num_attention_heads": 16, "intermediate_size": 14336}, 9_241_705_984),
    # microsoft/phi-2, Phi-3-mini-4k-instruct
    ({"model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "num_hidden_layers": 32,
      "num_attention_heads": 32, "intermediate_size": 10240}, 2_779_683_840),
    ({"model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "num_hidden_layers": 32,
      "num_attention_heads": 32, "intermediate_size": 8192}, 3_821_079_552),
    # openai-community/gpt2, gpt2-xl; openai/gpt-oss-20b
    ({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    ({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    ({"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
      "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 2880, "num_local_experts": 32,
      "num_experts_per_tok": 4, "attention_bias": True}, 20_914_757_184),
    # deepseek-ai/DeepSeek-V2: 236B in its report; DeepSeek-V3 without the multi-token prediction: 671B in its report
    ({"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 5120, "num_hidden_layers": 60,
      "num_attention_heads": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
      "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": 1536, **_MLA},
     235_741_434_880),
    ({"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
      "num_attention_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
      "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536, **_MLA},
     671_026_404_352),
    # Hugging Face transformers 5.23, three layers on the meta device: the families without a total above
    ({"model_type": "gemma3_text", "hidden_size": 2304, "num_hidden_layers": 3, "num_attention_heads": 8,
      "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 262208}, 837_729_024),
    ({"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 16,
      "num_key_value_heads": 16, "vocab_size": 151936, "intermediate_size": 5632, "moe_intermediate_size": 1408,
      "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4}, 2_334_013_440),
    *(({"model_type": family, **_OTHER, **fields}, total) for family, fields, total in (
        ("granite", {}, 38_231_040), ("smollm3", {}, 37_207_040), ("ministral3", {"head_dim": 128}, 46_095_360),
        ("seed_oss", {}, 46_104_576), ("ernie4_5", {"use_bias": True}, 45_105_152),
        ("hunyuan_v1_dense", {}, 38_231_424), ("glm", {"attention_bias": True}, 46_104_576),
        ("glm4", {"attention_bias": True}, 46_110_720), ("glm4_moe", _GLM, 50_835_328), ("qwen2_vl", {}, 38_235_648),
        ("qwen2_vl_text", {}, 38_235_648), ("qwen2_5_vl", {}, 38_235_648), ("qwen2_5_vl_text", {}, 38_235_648),
        ("qwen3_vl_text", {}, 46_096_128), ("qwen3_vl_moe_text", {
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}, 47_693_184),
    )),
    # zai-org/GLM-4.5-Air without the multi-token prediction: 106B in its report; ByteDance-Seed/Seed-OSS-36B
    ({"model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
      "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
      "n_shared_experts": 1, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
      "num_key_value_heads": 8, "vocab_size": 151552}, 106_852_245_504),
    ({"model_type": "seed_oss", "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 27648,
      "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136}, 36_151_104_512),
]  # fmt: skip


@pytest.mark.parametrize(("config", "published"), PUBLISHED, ids=[str(total) for _config, total in PUBLISHED])
def test_published_totals(config: dict[str, object], published: int) -> None:
    assert parameters.total(shape_of(config)) == published


NAMED = {
    # published: 46.7B, 30.5B, 235B, 236B, 671B and 116.83B
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize(("name", "published"), NAMED.items())
def test_mixtures_by_name_have_their_published_totals(name: str, published: int) -> None:
    assert parameters.total(SHAPES[name]) == published


def test_every_family_has_a_total_to_keep() -> None:
    assert {config["model_type"] for config, _total in PUBLISHED} == FAMILIES.keys()


@pytest.mark.parametrize("name", sorted(SHAPES.keys() & set(catalogue.model_names())))
def test_shapes_of_examples_have_their_profiles_parameters(name: str) -> None:
    width = 4 if MODELS[name].dtype == "fp32" else 2
    profiled = sum(layer.parameter_bytes for layer in catalogue.profile(name).layers) // width
    assert parameters.total(SHAPES[name]) == profiled


def _counted(specs: list[LayerSpec]) -> int:
    with torch.device("meta"):
        return sum(one.numel() for spec in specs for one in spec.build().parameters())


@pytest.mark.tier("ci")
@pytest.mark.parametrize("key_value_heads", [1, 2, 8])
def test_a_llama_of_any_widths_is_counted_as_its_modules(key_value_heads: int) -> None:
    config = llama.Config(blocks=3, width=96, heads=8, key_value_heads=key_value_heads, inner=200, vocabulary=77)
    shape = SHAPES["llama-3-8b"].model_copy(
        update={
            "layers": 3, "hidden": 96, "heads": 8, "kv_heads": key_value_heads, "head_width": 12, "ffn": 200,
            "vocabulary": 77,
        }
    )  # fmt: skip
    assert parameters.total(shape) == _counted(llama.layers(config))


@pytest.mark.tier("ci")
def test_a_gpt_of_any_widths_is_counted_as_its_modules() -> None:
    config = gpt.Config(blocks=3, width=96, heads=8, length=50, vocabulary=77)
    widths = {"layers": 3, "hidden": 96, "heads": 8, "kv_heads": 8, "head_width": 12, "ffn": 384, "vocabulary": 77}
    shape = SHAPES["gpt2-small"].model_copy(update={**widths, "positions": 50})
    assert parameters.total(shape) == _counted(gpt.layers(config))


def test_classes_add_up_to_a_layer_by_hand() -> None:
    make = partial(
        TransformerShape, name="m", layers=2, hidden=8, heads=4, kv_heads=2, head_width=3, ffn=10, gated=True,
        vocabulary=16, sequence_length=4,
    )  # fmt: skip
    attention = 2 * 8 * 12 + 2 * 8 * 6
    assert parameters.layer(make(), dense=True) == (attention + 3 * 8 * 10, 2 * 8, 0)
    experts = Experts(number=6, per_token=2, ffn=5, shared_ffn=7, dense_layers=1)
    counts = parameters.layer(make(experts=experts), dense=False)
    assert counts == (attention + 3 * 8 * 7, 2 * 8 + 6 * 8, 6 * 3 * 8 * 5)
