"""Layers whose attention sees a window: which they are, their pairs of positions, FLOPs and times."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.examples.shapes import SHAPES
from penstock.facts.device_table import device_facts
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.transformers.degrees import Framework
from penstock.schemas.transformers.shape import TransformerShape, Windows
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of
from penstock.shapes.flops import flops_per_sample
from penstock.shapes.hugging_face import shape_of
from penstock.shapes.layout import Layout
from penstock.shapes.profiles import profile_of
from penstock.shapes.roles import roles_of, windowed_layers

LLAMA = {
    "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 3584, "vocab_size": 32_000, "max_position_embeddings": 32_768,
}  # fmt: skip
ALL, EVERY = (True,) * 6, (False,) * 6
ALTERNATE, FIVE_OF_SIX = (True, False) * 3, (*(True,) * 5, False)


def shape(length: int, windows: Windows | None) -> TransformerShape:
    return SHAPES["llama-3-8b"].model_copy(update={"sequence_length": length, "windows": windows})


def pairs(length: int, width: int) -> int:
    """Count the pairs of queries and keys that they see, one by one."""
    return sum(min(position + 1, width) for position in range(length))


@pytest.mark.parametrize(
    ("family", "more", "windowed"),
    [
        ("llama", {"sliding_window": 128}, EVERY),
        ("mistral", {"sliding_window": 128}, ALL),
        ("mistral", {"sliding_window": None}, EVERY),
        ("mistral", {}, ALL),
        ("gemma2", {"head_dim": 64}, ALTERNATE),
        ("gemma3_text", {"head_dim": 64, "sliding_window": 512}, FIVE_OF_SIX),
        ("gemma3_text", {"head_dim": 64, "sliding_window_pattern": 2}, ALTERNATE),
        ("phi3", {"sliding_window": 2047}, ALL),
        ("phi3", {}, EVERY),
        ("qwen2", {"sliding_window": 128}, EVERY),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, ALL),
        ("qwen3", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 6}, EVERY),
        ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2}, ALTERNATE),
        (
            "gpt_oss",
            {
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "layer_types": [*["sliding_attention"] * 5, "full_attention"],
            },
            FIVE_OF_SIX,
        ),
    ],
    ids=str,
)
def test_configurations_say_which_layers_have_windows(
    family: str, more: dict[str, Any], windowed: tuple[bool, ...]
) -> None:
    shape = shape_of({"model_type": family, **LLAMA, **more}, sequence_length=8192)
    assert windowed_layers(shape) == windowed


def test_windows_in_no_pattern_are_refused_in_a_sentence() -> None:
    configuration = {"model_type": "qwen2", **LLAMA, "use_sliding_window": True, "max_window_layers": 4}
    with pytest.raises(
        UnsupportedRequest, match="an unknown pattern of layer_types; the known one repeats some sliding_attention"
    ):
        shape_of(configuration)


@pytest.mark.parametrize(("length", "width"), [(64, 7), (64, 64), (1000, 128)])
def test_flops_are_those_of_the_pairs_that_are_seen(length: int, width: int) -> None:
    """Causal attention does not count half of the diagonal, nor a window half of its edge."""
    windowed, whole = shape(length, Windows(width=width)), shape(length, None)
    saved = flops_per_sample(whole) - flops_per_sample(windowed)
    per_pair = 12 * whole.layers * whole.heads * whole.head_width
    assert saved == per_pair * (pairs(length, length) - pairs(length, width) - (length - width) / 2)


def test_a_window_as_long_as_a_sample_is_none() -> None:
    assert roles_of(shape(4096, Windows(width=4096))) == roles_of(shape(4096, None))
    assert flops_per_sample(shape(4096, Windows(width=4096))) == flops_per_sample(shape(4096, None))


@pytest.mark.tier("ci")
@pytest.mark.parametrize("framework", ["megatron", "torch"])
def test_windowed_layers_take_less_time_and_hold_and_keep_the_same(framework: Framework) -> None:
    case = Case(shape(32_768, Windows(width=128, whole_every=2)), Layout(framework=framework), device_facts("H100"))
    costs, layers = costs_of(case), layers_of(case)
    whole, windowed = costs["dense"], costs["windowed dense"]
    alone = costs_of(Case(shape(32_768, None), Layout(framework=framework), device_facts("H100")))["dense"]
    assert whole == alone
    assert windowed.stash_bytes == whole.stash_bytes
    assert layers["windowed dense"] == layers["dense"]
    products = costs_of(Case(shape(32_768, Windows(width=1, whole_every=2)), case.layout, device_facts("H100")))
    attention = whole.forward_ns - products["windowed dense"].forward_ns
    seen = 1 - (whole.forward_ns - windowed.forward_ns) / attention
    assert seen == pytest.approx(pairs(32_768, 128) / pairs(32_768, 32_768), abs=2e-3)
    assert attention > whole.forward_ns / 4, "of which windows leave little"


def test_the_profile_of_gpt_oss_has_both_kinds_of_layers() -> None:
    profile = profile_of(SHAPES["gpt-oss-120b"], "megatron", ["H100"], micro_batch_sizes=(1,))
    assert [layer.kind for layer in profile.layers[:4]] == [
        "Embedding",
        "WindowExpertBlock",
        "ExpertBlock",
        "WindowExpertBlock",
    ]
    windowed, whole = profile.measurements[0].layers[1:3]
    assert windowed.forward_ns < whole.forward_ns
    assert any("18 of 36 layers attend to 128 positions" in each for each in profile.assumptions)
    assert profile.classes is not None
    assert profile.classes[:4] == (0, 1, 2, 1)
