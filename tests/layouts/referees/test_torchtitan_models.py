"""The sizes of torchtitan's flavors, as its two newest releases' own registries have them."""

from __future__ import annotations

from typing import Any

import pytest
from installed import folder_of
from test_torchtitan_split import FULL
from torchtitan_registry import Recorded, registry

from penstock.layouts.torchtitan.models import FLAVORS, without_kernels
from penstock.schemas.transformers.shape import TransformerShape

UNKNOWN = {("gpt_oss", "debugmodel")}
"""Flavors of the registries that are left out."""
DEFAULTS = {
    "llama3": {"vocab_size": 128_256, "multiple_of": 256},
    "gpt_oss": {"dim": 2880, "n_heads": 64, "n_kv_heads": 8, "head_dim": 64, "vocab_size": 201_088},
}
"""What the classes of 0.2 have where a flavor does not say it."""


def of_objects(family: str, made: Recorded) -> dict[str, Any]:
    """Sizes of 0.2's objects."""
    said = DEFAULTS.get(family, {}) | made.said
    experts = said.get("moe_args")
    sizes = {"layers": said["n_layers"], "hidden": said["dim"], "heads": said["n_heads"]}
    sizes |= {"vocabulary": said["vocab_size"], "tied": said.get("enable_weight_tying", False)}
    if family == "llama3":
        width = int(int(2 * 4 * said["dim"] / 3) * said.get("ffn_dim_multiplier", 1))
        sizes["ffn"] = -(-width // said["multiple_of"]) * said["multiple_of"]
    elif family != "gpt_oss":
        sizes["ffn"] = said.get("hidden_dim") or said["inter_dim"]
    if family != "deepseek_v3":
        sizes["kv_heads"] = said.get("n_kv_heads", said["n_heads"])
    if experts is not None:
        width = said.get("moe_inter_dim", said["dim"])
        sizes |= {"experts": experts.num_experts, "per_token": experts.top_k, "expert_ffn": width}
        sizes["shared"] = experts.num_shared_experts * width
    if family == "deepseek_v3":
        widths = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        sizes["latent"] = tuple(said[name] for name in widths)
        sizes |= {"value": said["v_head_dim"], "dense": said["n_dense_layers"]}
    return sizes


def of_layers(made: Recorded) -> dict[str, Any]:
    """Sizes of 0.3's layers."""
    first, last = made.layers[0], made.layers[-1]
    sizes = {"layers": len(made.layers), "hidden": made.said["dim"], "heads": first.get("n_heads")}
    sizes |= {"vocabulary": made.said["vocab_size"], "tied": bool(made.said.get("enable_weight_tying"))}
    if (dense := first.said.get("feed_forward")) is not None:
        sizes["ffn"] = dense.get("hidden_dim")
    if (latent := first.get("kv_lora_rank")) is not None:
        query = first.get("q_lora_rank")
        sizes["latent"] = (query, latent, first.get("qk_nope_head_dim"), first.get("qk_rope_head_dim"))
        sizes["value"] = first.get("v_head_dim")
    else:
        sizes["kv_heads"] = first.get("n_kv_heads") or first.get("n_heads")
    if (mixture := last.said.get("moe")) is not None:
        shared = mixture.said.get("shared_experts")
        sizes |= {"experts": mixture.get("num_experts"), "per_token": mixture.get("top_k")}
        sizes["expert_ffn"] = mixture.get("routed_experts").get("hidden_dim")
        sizes["shared"] = 0 if shared is None else shared.get("hidden_dim")
        sizes["dense"] = sum(each.said.get("moe") is None for each in made.layers)
    return sizes


def ours(shape: TransformerShape) -> dict[str, Any]:
    sizes: dict[str, Any] = {name: getattr(shape, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn")}
    sizes |= {"vocabulary": shape.vocabulary, "tied": shape.tied}
    if (experts := shape.experts) is not None:
        sizes |= {"experts": experts.number, "per_token": experts.per_token, "expert_ffn": experts.ffn}
        sizes |= {"shared": experts.shared_ffn, "dense": experts.dense_layers}
    if (latent := shape.latent) is not None:
        ranks = (latent.query_rank or 0, latent.key_value_rank, latent.plain_width, latent.rotary_width)
        sizes |= {"latent": ranks, "value": latent.value_width}
    return sizes


@pytest.mark.parametrize("family", sorted(FLAVORS))
@pytest.mark.parametrize("release", sorted(FULL))
def test_flavors_have_the_registrys_sizes(release: str, family: str, pytestconfig: pytest.Config) -> None:
    folder = folder_of(FULL[release], pytestconfig.getoption("tier"))
    seen = 0
    for flavor, made in registry(folder, family):
        shape = FLAVORS[family].get(without_kernels(flavor))
        if (family, flavor) in UNKNOWN:
            continue
        assert shape is not None, (family, flavor)
        theirs = of_layers(made) if "layers" in made.said else of_objects(family, made)
        known = ours(shape)
        assert {name: known[name] for name in theirs} == theirs, (family, flavor)
        seen += 1
    assert seen >= 2
