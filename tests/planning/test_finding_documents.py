"""Profiles and shapes by value, by name, by file, and by a Hugging Face model's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.examples import catalogue
from penstock.planning.inputs import find_profile, find_shape
from penstock.schemas.errors import InvalidDocument, NotFound, UnsupportedRequest
from penstock.shapes.profiles import computed_profile

pytestmark = pytest.mark.tier("quick")

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip


def _written(folder: Path, **more: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | more))
    return path


def test_a_name_with_a_dot_is_a_name() -> None:
    assert find_profile("llama-3.1-405b").name == "llama-3.1-405b"


def test_a_configuration_is_the_profile_of_its_shape(tmp_path: Path) -> None:
    profile = find_profile(_written(tmp_path))
    assert profile.framework == "torch"
    assert profile.shape is not None
    assert profile.shape.sequence_length == 8192
    shipped = catalogue.profile("llama-3-8b")
    assert profile.layers[1].parameter_bytes == shipped.layers[1].parameter_bytes
    assert [each.degrees for each in profile.variants or ()] == [each.degrees for each in shipped.variants or ()]
    assert set(profile.device_kinds) == set(shipped.device_kinds)
    short = find_profile(_written(tmp_path), framework="megatron", sequence_length=1024)
    assert (short.framework, short.shape and short.shape.sequence_length) == ("megatron", 1024)


def test_a_shipped_transformer_is_computed_anew_for_another_framework_or_length() -> None:
    shipped = catalogue.profile("llama-3-8b")
    assert find_profile("llama-3-8b", framework="torch", sequence_length=8192) is shipped
    megatron = find_profile("llama-3-8b", framework="megatron")
    assert megatron.framework == "megatron"
    assert megatron.measurements[0].layers[1].stash_bytes < 0.7 * shipped.measurements[0].layers[1].stash_bytes
    short = find_profile("llama-3-8b", sequence_length=4096)
    assert short.boundaries[0][0].bytes_per_sample == shipped.boundaries[0][0].bytes_per_sample // 2


def test_a_profile_as_it_is_has_one_framework(tmp_path: Path) -> None:
    profile = computed_profile(find_shape("llama-3-8b"), "megatron", ("H100",), (1,))
    assert find_profile(profile, framework="megatron") is profile
    path = tmp_path / "profile.json"
    path.write_bytes(profile.canonical_json())
    assert find_profile(path) == profile
    with pytest.raises(InvalidDocument, match="'llama-3-8b' is of megatron and samples of 8192 tokens, not of torch"):
        find_profile(path, framework="torch")
    with pytest.raises(InvalidDocument, match="'resnet-50' is of no stated framework"):
        find_profile(catalogue.profile("resnet-50"), sequence_length=128)


def test_what_is_unknown_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedRequest, match="is of the family 'mamba'"):
        find_profile(_written(tmp_path, model_type="mamba", architectures=["MambaForCausalLM"]))
    with pytest.raises(InvalidDocument, match="2 experts per token are more than the 1 experts"):
        find_profile(_written(tmp_path, model_type="mixtral", num_local_experts=1, num_experts_per_tok=2))
    with pytest.raises(UnsupportedRequest, match="1024 learned positions, fewer than a sequence of 2048"):
        find_profile("gpt2-small", sequence_length=2048)
    with pytest.raises(NotFound, match="no transformer 'resnet-50'"):
        find_profile("resnet-50", framework="megatron")
    with pytest.raises(InvalidDocument, match="the framework 'jax' is none of megatron, torch"):
        computed_profile(find_shape("llama-3-8b"), "jax")  # type: ignore[arg-type]


@pytest.mark.tier("nightly")
def test_a_plan_says_how_tokens_were_routed() -> None:
    """Python's ``penstock.plan``, whose assumptions say it; more tokens on the busiest GPU take longer."""

    def planned(**how: float) -> penstock.Answer:
        return penstock.plan(
            "mixtral-8x7b", "4x8xH100", global_batch_size=32, planner="even", framework="megatron", sequence_length=512,
            degrees={"expert": 8}, sharding="optimizer", max_plans=1, **how,
        )  # fmt: skip

    even, same, uneven = planned(), planned(routing_imbalance=1.0), planned(routing_imbalance=1.5)
    assert same.plan == even.plan
    assert uneven.seconds_per_global_batch > even.seconds_per_global_batch
    assumption = (
        "no token is dropped, and the busiest GPU's experts get 1.5 times the mean; all-to-all is hidden by nothing"
    )
    assert assumption in uneven.plan.assumptions
    assert assumption not in even.plan.assumptions
    with pytest.raises(UnsupportedRequest, match=r"routing imbalance 0\.9 is not possible"):
        planned(routing_imbalance=0.9)
    with pytest.raises(InvalidDocument, match=r"has fixed costs; capacity factor 1\.0 needs"):
        penstock.plan(catalogue.profile("resnet-50"), "1x8xH100", global_batch_size=8, capacity_factor=1.0)
