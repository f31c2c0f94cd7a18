"""The fields by which each family is configured, and the values that its modelling code fixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.transformers.shape import Experts, LatentAttention, Windows
from penstock.shapes.families.config import Config

USUAL_LENGTH = 8192
"""Tokens of a sample by default: this, or the model's longest sequence where that is shorter."""

Fields = dict[str, Any]


def _llama(config: Config) -> Fields:
    """Read RMSNorm, rotary positions, grouped-query attention and a gated feed-forward, which most families share."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    width = config.number("head_dim", hidden // heads or 1)
    if config.values.get("head_dim") is None and hidden % heads:
        raise config.wrong(
            "hidden_size", f"has no head_dim, and its hidden_size {hidden} is not a multiple of {heads} heads"
        )
    return {
        "layers": config.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads", heads),
        "head_width": width,
        "ffn": config.number("intermediate_size"),
        "gated": True,
        "vocabulary": config.number("vocab_size"),
        "attention_biases": "all" if config.flag("attention_bias", False) else "none",
        "ffn_biases": config.flag("mlp_bias", False),
        "tied": config.flag("tie_word_embeddings", False),
        "positions": 0,
        "longest": config.number("max_position_embeddings", USUAL_LENGTH),
    }


def _windows(config: Config, usual: int | None, whole_every: int | None = None) -> Windows | None:
    """Read sliding windows, of ``usual`` positions by default; the last of every ``whole_every`` layers sees all.

    Raises UnsupportedRequest for windows in layers of another pattern.
    """
    if config.values.get("sliding_window", usual) is None:
        return None
    width, types = config.number("sliding_window", usual), config.values.get("layer_types")
    if types is None:
        return Windows(width=width, whole_every=whole_every)
    windowed = [each == "sliding_attention" for each in types]
    if not any(windowed):
        return None
    every = None if all(windowed) else windowed.index(False) + 1
    if every == 1 or windowed != [every is None or (number + 1) % every > 0 for number in range(len(windowed))]:
        raise UnsupportedRequest(
            f"{config.origin} has an unknown pattern of layer_types; the known one repeats some sliding_attention and "
            "then one full_attention"
        )
    return Windows(width=width, whole_every=every)


def _at_width(config: Config, width: int) -> Config:
    """Return the configuration with the library's default for the width of a head."""
    return Config({**config.values, "head_dim": config.number("head_dim", width)}, config.origin)


def _smollm3(config: Config) -> Fields:
    return {**_llama(config), "tied": config.flag("tie_word_embeddings", True)}


def _seed_oss(config: Config) -> Fields:
    of_queries = "qkv" if config.flag("attention_bias", True) else "none"
    biases = "all" if config.flag("attention_out_bias", False) else of_queries
    return {**_llama(_at_width(config, 128)), "attention_biases": biases}


def _ernie(config: Config) -> Fields:
    """Read one flag for all biases."""
    biases = config.flag("use_bias", False)
    fields = {"attention_biases": "all" if biases else "none", "ffn_biases": biases}
    return {**_llama(_at_width(config, 128)), **fields, "tied": config.flag("tie_word_embeddings", True)}


def _hunyuan(config: Config) -> Fields:
    return {**_llama(config), "ffn_biases": False, "query_key_norm": True}


def _glm_layer(config: Config) -> Fields:
    """Read biases of queries, keys and values."""
    biases = "qkv" if config.flag("attention_bias", False) else "none"
    return {**_llama(config), "attention_biases": biases, "ffn_biases": False}


def _glm(config: Config) -> Fields:
    return _glm_layer(_at_width(config, 128))


def _glm4(config: Config) -> Fields:
    return {**_glm(config), "norms_per_layer": 4}


def _glm4_moe(config: Config) -> Fields:
    """Read GLM-4.5: DeepSeek's experts behind grouped-query attention, without the prediction of further tokens."""
    fields = _glm_layer(config)
    norm = config.flag("use_qk_norm", False)
    return {**fields, "query_key_norm": norm, "experts": _routed(config, fields["layers"])}


def _mistral(config: Config) -> Fields:
    fields = {**_llama(config), "attention_biases": "none", "ffn_biases": False}
    return {**fields, "windows": _windows(config, 4096 if config.values.get("model_type") == "mistral" else None)}


def _qwen_windows(config: Config, layers: int) -> Windows | None:
    """Read windows in the layers from ``max_window_layers`` on.

    Raises UnsupportedRequest where there are other layers before these.
    """
    if not config.flag("use_sliding_window", False):
        return None
    whole = config.values.get("max_window_layers", 28)
    if whole and config.values.get("layer_types") is None:
        types = ["full_attention"] * min(whole, layers) + ["sliding_attention"] * max(0, layers - whole)
        return _windows(Config({**config.values, "layer_types": types}, config.origin), 4096)
    return _windows(config, 4096)


def _qwen2(config: Config) -> Fields:
    fields = {**_llama(config), "attention_biases": "qkv", "ffn_biases": False}
    return {**fields, "windows": _qwen_windows(config, fields["layers"])}


def _qwen3(config: Config) -> Fields:
    return _qwen3_layer(_at_width(config, 128))


def _qwen3_layer(config: Config) -> Fields:
    fields = {**_llama(config), "ffn_biases": False, "query_key_norm": True}
    return {**fields, "windows": _qwen_windows(config, fields["layers"])}


def _gemma(config: Config) -> Fields:
    return {
        **_llama(_at_width(config, 256)),
        "ffn_biases": False,
        "tied": config.flag("tie_word_embeddings", True),
    }


def _gemma2(config: Config) -> Fields:
    return {**_gemma(config), "norms_per_layer": 4, "windows": _windows(config, 4096, 2)}


def _gemma3(config: Config) -> Fields:
    """Read Gemma 3, where one layer of six sees all positions.

    The publisher leaves out the library's defaults.
    """
    usual = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = Config({**usual, **config.values}, config.origin)
    every = config.number("sliding_window_pattern", 6)
    return {**_gemma2(config), "query_key_norm": True, "windows": _windows(config, 4096, every)}


def _phi(config: Config) -> Fields:
    """Read attention and feed-forward side by side after one LayerNorm, biases everywhere."""
    return {
        **_llama(config),
        "gated": False,
        "norm": "layer",
        "norms_per_layer": 1,
        "attention_biases": "all",
        "ffn_biases": True,
        "head_bias": True,
        "dropout": config.share("resid_pdrop"),
    }


def _phi3(config: Config) -> Fields:
    fields = {**_llama(config), "attention_biases": "none", "ffn_biases": False}
    return {**fields, "dropout": config.share("resid_pdrop"), "windows": _windows(config, None)}


def _gpt2(config: Config) -> Fields:
    hidden, heads = config.number("n_embd"), config.number("n_head")
    if hidden % heads:
        raise config.wrong("n_embd", f"has n_embd {hidden}, which is not a multiple of {heads} heads")
    return {
        "layers": config.number("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_width": hidden // heads,
        "ffn": config.number("n_inner", 4 * hidden),
        "gated": False,
        "vocabulary": config.number("vocab_size"),
        "norm": "layer",
        "attention_biases": "all",
        "ffn_biases": True,
        "tied": config.flag("tie_word_embeddings", True),
        "dropout": config.share("resid_pdrop"),
        "positions": config.number("n_positions", 1024),
        "longest": config.number("n_positions", 1024),
    }


def _local_experts(config: Config, ffn: int, *, biases: bool = False) -> Experts:
    """Return experts of the feed-forward's width; ``biases``: of theirs and of the router."""
    return Experts(
        number=config.number("num_local_experts"),
        per_token=config.number("num_experts_per_tok"),
        ffn=ffn,
        router_bias=biases,
        biases=biases,
    )


def _mixtral(config: Config) -> Fields:
    fields = _mistral(config)
    return {**fields, "experts": _local_experts(config, fields["ffn"])}


def _qwen3_moe(config: Config) -> Fields:
    _refuse_mixed(config)
    experts = Experts(
        number=_number_of_experts(config),
        per_token=config.number("num_experts_per_tok"),
        ffn=config.number("moe_intermediate_size"),
    )
    return {**_qwen3_layer(config), "experts": experts}


def _qwen2_moe(config: Config) -> Fields:
    _refuse_mixed(config)
    experts = Experts(
        number=_number_of_experts(config),
        per_token=config.number("num_experts_per_tok"),
        ffn=config.number("moe_intermediate_size"),
        shared_ffn=config.number("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {**_qwen2(config), "experts": experts}


def _number_of_experts(config: Config) -> int:
    """Read the number of experts; newer releases of the library write ``num_local_experts``."""
    return config.number("num_experts" if "num_experts" in config.values else "num_local_experts")


def _refuse_mixed(config: Config) -> None:
    """Refuse layers with and without experts in turn. Raises UnsupportedRequest."""
    if config.values.get("mlp_only_layers") or config.number("decoder_sparse_step", 1) > 1:
        raise UnsupportedRequest(
            f"{config.origin} has dense layers between layers with experts (decoder_sparse_step, mlp_only_layers); "
            "Penstock knows dense layers only at the front"
        )


def _deepseek(config: Config) -> Fields:
    """Read latent attention, shared experts, dense layers at the front; prediction of further tokens is left out."""
    heads = config.number("num_attention_heads")
    fields = _llama(Config({**config.values, "num_key_value_heads": heads, "head_dim": 1}, config.origin))
    experts = _routed(config, fields["layers"])
    latent = LatentAttention(
        query_rank=None if config.values.get("q_lora_rank") is None else config.number("q_lora_rank"),
        key_value_rank=config.number("kv_lora_rank"),
        plain_width=config.number("qk_nope_head_dim"),
        rotary_width=config.number("qk_rope_head_dim"),
        value_width=config.number("v_head_dim"),
    )
    wide = latent.plain_width + latent.rotary_width
    return {**fields, "head_width": wide, "ffn_biases": False, "experts": experts, "latent": latent}


def _routed(config: Config, layers: int) -> Experts:
    """Read routed and shared experts of one width, and dense layers at the front."""
    ffn = config.number("moe_intermediate_size")
    dense = config.values.get("first_k_dense_replace", 0)
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise config.wrong(
            "first_k_dense_replace", f"has first_k_dense_replace {dense!r}, which is not a number of layers"
        )
    shared = 0 if config.values.get("n_shared_experts") in (None, 0) else config.number("n_shared_experts")
    return Experts(
        number=config.number("n_routed_experts"),
        per_token=config.number("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=shared * ffn,
        dense_layers=min(dense, layers),
    )


def _gpt_oss(config: Config) -> Fields:
    """Read gpt-oss: every layer has experts with biases, and attention has biases and a learned sink per head.

    Every second layer has a window.
    """
    fields = _llama(config)
    experts = _local_experts(config, fields["ffn"], biases=True)
    windows = _windows(config, 128, 2)
    return {**fields, "attention_biases": "all", "sinks": True, "experts": experts, "windows": windows}


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "granite": _llama,
    "smollm3": _smollm3,
    "ministral3": _mistral,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "hunyuan_v1_dense": _hunyuan,
    "glm": _glm,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2,
    "qwen2_vl_text": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen3_vl_text": _qwen3,
    "qwen3_vl_moe_text": _qwen3_moe,
}
"""The readers of configurations, by their ``model_type``."""
SEEING = ("qwen2_vl", "qwen2_5_vl")
"""Families whose published configurations have the language model's fields next to the fields of an image encoder."""
OF_ARCHITECTURE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Ministral3ForCausalLM": "ministral3",
    "SeedOssForCausalLM": "seed_oss",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
}
"""The family that has the layers of each architecture."""
