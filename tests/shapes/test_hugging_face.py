"""config.json as people have it: what is missing or impossible is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.schemas.errors import InvalidDocument, PenstockError, UnsupportedRequest
from penstock.shapes.families.table import FAMILIES, USUAL_LENGTH
from penstock.shapes.hugging_face import remarks, shape_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336, "max_position_embeddings": 131072,
}  # fmt: skip
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}


def test_an_unknown_family_lists_the_known_in_one_sentence() -> None:
    with pytest.raises(UnsupportedRequest) as caught:
        shape_of({**LLAMA, "model_type": "bloom"})
    assert caught.value.detail.count("\n") == 0
    assert all(family in caught.value.detail for family in FAMILIES)
    assert caught.value.exit_code == 65


GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262208, "num_key_value_heads": 16, "hidden_size": 5376, "head_dim": 128,
    "num_hidden_layers": 62, "num_attention_heads": 32, "intermediate_size": 21504,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "like", "words"),
    [
        pytest.param(
            {**LLAMA, "model_type": "house", "architectures": ["LlamaForCausalLM"]},
            LLAMA,
            "the family 'house' is read as 'llama', by the architecture",
            id="renamed",
        ),
        pytest.param(
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA},
            GEMMA,
            "'gemma3' is read as the 'gemma3_text' in its text_config",
            id="vision and language",
        ),
        pytest.param(
            {
                "model_type": "seeing",
                "text_config": {**LLAMA, "model_type": "house_text", "architectures": ["LlamaForCausalLM"]},
            },
            LLAMA,
            "'seeing' is read as the 'llama' in its text_config",
            id="renamed within",
        ),
        pytest.param(
            {
                "model_type": "qwen3_vl",
                "tie_word_embeddings": True,
                "text_config": {**LLAMA, "model_type": "qwen3_vl_text"},
            },
            {**LLAMA, "model_type": "qwen3", "tie_word_embeddings": True},
            "'qwen3_vl' is read as the 'qwen3_vl_text' in its text_config",
            id="embedding and head tied of the whole",
        ),
        pytest.param(
            {**LLAMA, "model_type": "qwen2_5_vl"},
            {**LLAMA, "model_type": "qwen2"},
            "judged is the language model of 'qwen2_5_vl' alone",
            id="vision and language side by side",
        ),
        pytest.param(
            {**LLAMA, "quantization_config": {"quant_method": "fp8"}},
            LLAMA,
            "the quantization in config.json is left out",
            id="quantized",
        ),
    ],
)
def test_a_family_is_read_by_what_the_file_says_of_its_layers(
    values: dict[str, Any], like: dict[str, Any], words: str
) -> None:
    assert shape_of(values).model_copy(update={"name": ""}) == shape_of(like).model_copy(update={"name": ""})
    (remark,) = remarks(values)
    assert words in remark
    assert remarks(like) == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**LLAMA, "model_type": "odd", "architectures": ["OddForCausalLM"]}, "the family 'odd', whose layers"),
        ({"model_type": "seeing", "text_config": {"model_type": "odd"}}, "'seeing', its text_config of 'odd', whose"),
        ({"model_type": "odd", "architectures": [["LlamaForCausalLM"]], "text_config": 3}, "the family 'odd', whose"),
    ],
)
def test_a_family_that_nothing_explains_is_refused_with_what_to_do(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedRequest) as caught:
        shape_of(values)
    assert words in caught.value.detail
    assert "as model_type" in str(caught.value.remedy)
    assert remarks(values) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": None}, "no 'model_type'"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_size": "4096"}, "hidden_size '4096', which is not a number"),
        ({"hidden_size": True}, "hidden_size True, which is not a number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0, which is not a number of at least 1"),
        ({"hidden_size": 4097}, "not a multiple of 32 heads"),
        ({"num_key_value_heads": 5}, "32 heads are not a multiple of the 5"),
        ({"tie_word_embeddings": "yes"}, "neither true nor false"),
        ({"vocab_size": 2**60}, "vocabulary"),
        ({"model_type": ["llama"]}, "not known"),
    ],
)
def test_what_is_missing_or_impossible_is_named(change: dict[str, Any], words: str) -> None:
    configuration = {name: value for name, value in {**LLAMA, **change}.items() if value is not None}
    with pytest.raises(PenstockError, match=r"config\.json") as caught:
        shape_of(configuration)
    assert words in str(caught.value)
    assert caught.value.exit_code == 65


def test_what_the_publisher_of_gemma_3_leaves_out_is_what_the_library_has() -> None:
    left_out = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    sparse = {name: value for name, value in GEMMA.items() if name not in left_out}
    assert shape_of(sparse) == shape_of({**sparse, **left_out})


def test_the_remedy_for_a_missing_field_is_to_add_it_and_for_a_wrong_one_the_published_file() -> None:
    with pytest.raises(InvalidDocument) as caught:
        shape_of({"model_type": "seeing", "text_config": {"model_type": "llama", "vocab_size": 32064}})
    assert "add hidden_size; where the publisher's file leaves it out" in str(caught.value.remedy)
    with pytest.raises(InvalidDocument) as caught:
        shape_of({**LLAMA, "hidden_size": "4096"})
    assert "as the model's publisher has it" in str(caught.value.remedy)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_reads_an_empty_or_a_wild_configuration(family: str) -> None:
    for filling in ({}, dict.fromkeys(_NAMES, 2**40), dict.fromkeys(_NAMES, -1), {name: [] for name in _NAMES}):
        with pytest.raises(PenstockError):
            shape_of({**filling, "model_type": family})


_NAMES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers", "vocab_size",
    "n_embd", "n_layer", "n_head", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "n_routed_experts", "n_shared_experts", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip


def test_lengths() -> None:
    assert shape_of(LLAMA).sequence_length == USUAL_LENGTH
    assert shape_of({**LLAMA, "max_position_embeddings": 4096}).sequence_length == 4096
    assert shape_of(LLAMA, sequence_length=32_768).sequence_length == 32_768
    assert shape_of(GPT2).sequence_length == 1024
    with pytest.raises(UnsupportedRequest, match="1024 learned positions"):
        shape_of(GPT2, sequence_length=2048)


def test_layers_with_experts_in_turn_are_refused() -> None:
    moe = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    assert shape_of({**moe, "mlp_only_layers": []}).experts is not None
    with pytest.raises(UnsupportedRequest, match="decoder_sparse_step"):
        shape_of({**moe, "decoder_sparse_step": 2})


def test_more_experts_per_token_than_there_are() -> None:
    with pytest.raises(InvalidDocument, match="3 experts per token are more than the 2 experts"):
        shape_of({**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3})
