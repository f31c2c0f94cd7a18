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
"""Defaults of the classes of 0.2 for sizes that a flavor omits."""


def of_objects(family: str, model: Recorded) -> dict[str, Any]:
    """Return the sizes of 0.2's objects."""
    arguments = DEFAULTS.get(family, {}) | model.arguments
    experts = arguments.get("moe_args")
    sizes = {"layers": arguments["n_layers"], "hidden": arguments["dim"], "heads": arguments["n_heads"]}
    sizes |= {"vocabulary": arguments["vocab_size"], "tied": arguments.get("enable_weight_tying", False)}
    if family == "llama3":
        width = int(int(2 * 4 * arguments["dim"] / 3) * arguments.get("ffn_dim_multiplier", 1))
        sizes["ffn"] = -(-width // arguments["multiple_of"]) * arguments["multiple_of"]
    elif family != "gpt_oss":
        sizes["ffn"] = arguments.get("hidden_dim") or arguments["inter_dim"]
    if family != "deepseek_v3":
        sizes["kv_heads"] = arguments.get("n_kv_heads", arguments["n_heads"])
    if experts is not None:
        width = arguments.get("moe_inter_dim", arguments["dim"])
        sizes |= {"experts": experts.num_experts, "per_token": experts.top_k, "expert_ffn": width}
        sizes["shared"] = experts.num_shared_experts * width
    if family == "deepseek_v3":
        widths = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        sizes["latent"] = tuple(arguments[name] for name in widths)
        sizes |= {"value": arguments["v_head_dim"], "dense": arguments["n_dense_layers"]}
    return sizes


def of_layers(model: Recorded) -> dict[str, Any]:
    """Return the sizes of 0.3's layers."""
    first, last = model.layers[0], model.layers[-1]
    sizes = {"layers": len(model.layers), "hidden": model.arguments["dim"], "heads": first.get("n_heads")}
    sizes |= {"vocabulary": model.arguments["vocab_size"], "tied": bool(model.arguments.get("enable_weight_tying"))}
    if (dense := first.arguments.get("feed_forward")) is not None:
        sizes["ffn"] = dense.get("hidden_dim")
    if (latent := first.get("kv_lora_rank")) is not None:
        query = first.get("q_lora_rank")
        sizes["latent"] = (query, latent, first.get("qk_nope_head_dim"), first.get("qk_rope_head_dim"))
        sizes["value"] = first.get("v_head_dim")
    else:
        sizes["kv_heads"] = first.get("n_kv_heads") or first.get("n_heads")
    if (mixture := last.arguments.get("moe")) is not None:
        shared = mixture.arguments.get("shared_experts")
        sizes |= {"experts": mixture.get("num_experts"), "per_token": mixture.get("top_k")}
        sizes["expert_ffn"] = mixture.get("routed_experts").get("hidden_dim")
        sizes["shared"] = 0 if shared is None else shared.get("hidden_dim")
        sizes["dense"] = sum(each.arguments.get("moe") is None for each in model.layers)
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
    for flavor, model in registry(folder, family):
        shape = FLAVORS[family].get(without_kernels(flavor))
        if (family, flavor) in UNKNOWN:
            continue
        assert shape is not None, (family, flavor)
        theirs = of_layers(model) if "layers" in model.arguments else of_objects(family, model)
        expected = ours(shape)
        assert {name: expected[name] for name in theirs} == theirs, (family, flavor)
        seen += 1
    assert seen >= 2
