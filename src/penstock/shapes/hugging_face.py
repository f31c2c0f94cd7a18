"""The shape of a transformer from the ``config.json`` of a Hugging Face model; the library itself is not needed.

A family is a row of ``FAMILIES``: what its configuration says in fields of its own, and what its modelling code fixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.transformers.shape import Experts, LatentAttention, TransformerShape, Windows

USUAL_LENGTH = 8192
"""Tokens of a sample by default: this, or the model's longest sequence where that is shorter."""

Fields = dict[str, Any]


@dataclass(frozen=True)
class _Config:
    """A configuration's values, with the place of each in errors."""

    values: Mapping[str, Any]
    origin: str

    def number(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises InvalidDocument where it is missing, without a default, or is none."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(name, f"has no {name!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, f"has {name} {value!r}, which is no number of at least 1")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises InvalidDocument for anything else."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, f"has {name} {value!r}, which is neither true nor false")
        return value

    def share(self, name: str) -> float:
        """A probability; 0 where it is missing. Raises InvalidDocument for anything else."""
        value = self.values.get(name) or 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.wrong(name, f"has {name} {value!r}, which is no number between 0 and 1")
        return float(value)

    def wrong(self, name: str, what: str) -> InvalidDocument:
        """The error of a field."""
        return InvalidDocument(
            f"{self.origin}, of family {self.values.get('model_type')!r}, {what}",
            faults=(Fault(f"/{name}", what, "field"),),
            remedy="take config.json as the model's publisher has it",
        )


def shape_of(
    values: Mapping[str, Any], *, sequence_length: int | None = None, origin: str = "config.json"
) -> TransformerShape:
    """The shape that a configuration describes.

    A family that is not known is read as its architecture, or as the language model in its ``text_config``; ``remarks``
    says so. Raises UnsupportedRequest where that is not known either, InvalidDocument for missing or impossible fields.
    """
    family = values.get("model_type")
    if family is None:
        raise InvalidDocument(
            f"{origin} has no 'model_type', so it is no configuration of a Hugging Face model",
            remedy=f"a config.json of one of the families {', '.join(FAMILIES)}",
        )
    layers = _with_layers(values)
    if layers is None:
        raise _unknown(values, origin)
    values, layers_of = layers
    try:
        fields = FAMILIES[layers_of](_Config(values, origin))
    except ValidationError as error:
        raise _not_a_transformer(origin, error) from None
    longest = fields.pop("longest")
    if fields["positions"] and sequence_length is not None and sequence_length > fields["positions"]:
        raise UnsupportedRequest(
            f"{origin} has {fields['positions']} learned positions, fewer than a sequence of {sequence_length} tokens"
        )
    fields["sequence_length"] = sequence_length or min(longest, USUAL_LENGTH)
    name = values.get("_name_or_path")
    fields["name"] = name if isinstance(name, str) and 0 < len(name) <= 512 and not name.startswith("/") else family
    try:
        return TransformerShape.model_validate(fields)
    except ValidationError as error:
        raise _not_a_transformer(origin, error) from None


def remarks(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what an answer has to say of how a readable configuration is read."""
    family, layers = values.get("model_type"), _with_layers(values)
    if layers is None:
        return ()
    inner, other = layers
    sentences = []
    if inner is not values:
        sentences.append(f"{family!r} is read as the {other!r} in its text_config: judged is that language model alone")
    elif family != other:
        sentences.append(f"the family {family!r} is read as {other!r}, by the architecture that config.json names")
    if values.get("quantization_config") or inner.get("quantization_config"):
        sentences.append("the quantization in config.json is left out: training is in bf16")
    return tuple(sentences)


def _with_layers(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
    """Return the configuration that has the layers, and the family by which it is read; None where none is known."""
    text = values.get("text_config")
    for inner in (values, text) if isinstance(text, Mapping) else (values,):
        family = inner.get("model_type")
        if isinstance(family, str) and family in FAMILIES:
            return inner, family
        architectures = inner.get("architectures")
        for name in architectures if isinstance(architectures, list) else ():
            if isinstance(name, str) and name in _OF_ARCHITECTURE and "hidden_size" in inner:
                return inner, _OF_ARCHITECTURE[name]
    return None


def _unknown(values: Mapping[str, Any], origin: str) -> UnsupportedRequest:
    """Return the refusal of a family that is not known, with all that the configuration says of its layers."""
    family, text = values["model_type"], values.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    within = f", its text_config of {inner!r}" if inner is not None else ""
    return UnsupportedRequest(
        f"{origin} is of the family {family!r}{within}, whose layers are not known; known are {', '.join(FAMILIES)}",
        faults=(Fault("/model_type", f"unknown family {family!r}", "family"),),
        remedy="if its layers are those of a known family, that family as model_type",
    )


def _not_a_transformer(origin: str, error: ValidationError) -> InvalidDocument:
    """The error of widths that no transformer has, with the first mistake."""
    first = error.errors()[0]
    words = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    return InvalidDocument(f"{origin} does not describe a transformer: {words}")


def _llama(config: _Config) -> Fields:
    """RMSNorm, rotary positions, grouped-query attention and a gated feed-forward: what most families share."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    width = config.number("head_dim", hidden // heads or 1)
    if config.values.get("head_dim") is None and hidden % heads:
        raise config.wrong("hidden_size", f"has hidden_size {hidden}, no multiple of {heads} heads, and no head_dim")
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


def _windows(config: _Config, usual: int | None, whole_every: int | None = None) -> Windows | None:
    """Sliding windows, of ``usual`` positions where nothing is said; of ``whole_every`` layers the last has none.

    Raises UnsupportedRequest for windows in layers of no such pattern.
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
            f"{config.origin} has layer_types in another pattern than some sliding_attention and then one "
            "full_attention, which alone is known"
        )
    return Windows(width=width, whole_every=every)


def _mistral(config: _Config) -> Fields:
    fields = {**_llama(config), "attention_biases": "none", "ffn_biases": False}
    return {**fields, "windows": _windows(config, 4096 if config.values.get("model_type") == "mistral" else None)}


def _qwen_windows(config: _Config, layers: int) -> Windows | None:
    """Of layers from ``max_window_layers`` on. Raises UnsupportedRequest where there are others before these."""
    if not config.flag("use_sliding_window", False):
        return None
    whole = config.values.get("max_window_layers", 28)
    if whole and config.values.get("layer_types") is None:
        types = ["full_attention"] * min(whole, layers) + ["sliding_attention"] * max(0, layers - whole)
        return _windows(_Config({**config.values, "layer_types": types}, config.origin), 4096)
    return _windows(config, 4096)


def _qwen2(config: _Config) -> Fields:
    fields = {**_llama(config), "attention_biases": "qkv", "ffn_biases": False}
    return {**fields, "windows": _qwen_windows(config, fields["layers"])}


def _qwen3(config: _Config) -> Fields:
    wide = {**config.values, "head_dim": config.number("head_dim", 128)}
    return _qwen3_layer(_Config(wide, config.origin))


def _qwen3_layer(config: _Config) -> Fields:
    fields = {**_llama(config), "ffn_biases": False, "query_key_norm": True}
    return {**fields, "windows": _qwen_windows(config, fields["layers"])}


def _gemma(config: _Config) -> Fields:
    wide = {**config.values, "head_dim": config.number("head_dim", 256)}
    return {
        **_llama(_Config(wide, config.origin)),
        "ffn_biases": False,
        "tied": config.flag("tie_word_embeddings", True),
    }


def _gemma2(config: _Config) -> Fields:
    return {**_gemma(config), "norms_per_layer": 4, "windows": _windows(config, 4096, 2)}


def _gemma3(config: _Config) -> Fields:
    """One layer of six sees all positions."""
    every = config.number("sliding_window_pattern", 6)
    return {**_gemma2(config), "query_key_norm": True, "windows": _windows(config, 4096, every)}


def _phi(config: _Config) -> Fields:
    """Attention and feed-forward side by side after one LayerNorm, biases everywhere."""
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


def _phi3(config: _Config) -> Fields:
    fields = {**_llama(config), "attention_biases": "none", "ffn_biases": False}
    return {**fields, "dropout": config.share("resid_pdrop"), "windows": _windows(config, None)}


def _gpt2(config: _Config) -> Fields:
    hidden, heads = config.number("n_embd"), config.number("n_head")
    if hidden % heads:
        raise config.wrong("n_embd", f"has n_embd {hidden}, no multiple of {heads} heads")
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


def _mixtral(config: _Config) -> Fields:
    fields = _mistral(config)
    experts = Experts(
        number=config.number("num_local_experts"),
        per_token=config.number("num_experts_per_tok"),
        ffn=fields["ffn"],
    )
    return {**fields, "experts": experts}


def _qwen3_moe(config: _Config) -> Fields:
    _refuse_mixed(config)
    experts = Experts(
        number=_number_of_experts(config),
        per_token=config.number("num_experts_per_tok"),
        ffn=config.number("moe_intermediate_size"),
    )
    return {**_qwen3_layer(config), "experts": experts}


def _qwen2_moe(config: _Config) -> Fields:
    _refuse_mixed(config)
    experts = Experts(
        number=_number_of_experts(config),
        per_token=config.number("num_experts_per_tok"),
        ffn=config.number("moe_intermediate_size"),
        shared_ffn=config.number("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {**_qwen2(config), "experts": experts}


def _number_of_experts(config: _Config) -> int:
    """Newer releases of the library write ``num_local_experts``."""
    return config.number("num_experts" if "num_experts" in config.values else "num_local_experts")


def _refuse_mixed(config: _Config) -> None:
    """Refuse layers with and without experts in turn. Raises UnsupportedRequest."""
    if config.values.get("mlp_only_layers") or config.number("decoder_sparse_step", 1) > 1:
        raise UnsupportedRequest(
            f"{config.origin} has layers without experts among those with (decoder_sparse_step, mlp_only_layers); only "
            "dense layers at the front are known"
        )


def _deepseek(config: _Config) -> Fields:
    """Latent attention, shared experts, dense layers at the front; prediction of further tokens is left out."""
    heads = config.number("num_attention_heads")
    fields = _llama(_Config({**config.values, "num_key_value_heads": heads, "head_dim": 1}, config.origin))
    layers = fields["layers"]
    ffn = config.number("moe_intermediate_size")
    dense = config.values.get("first_k_dense_replace", 0)
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise config.wrong(
            "first_k_dense_replace", f"has first_k_dense_replace {dense!r}, which is no number of layers"
        )
    shared = 0 if config.values.get("n_shared_experts") in (None, 0) else config.number("n_shared_experts")
    experts = Experts(
        number=config.number("n_routed_experts"),
        per_token=config.number("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=shared * ffn,
        dense_layers=min(dense, layers),
    )
    latent = LatentAttention(
        query_rank=None if config.values.get("q_lora_rank") is None else config.number("q_lora_rank"),
        key_value_rank=config.number("kv_lora_rank"),
        plain_width=config.number("qk_nope_head_dim"),
        rotary_width=config.number("qk_rope_head_dim"),
        value_width=config.number("v_head_dim"),
    )
    wide = latent.plain_width + latent.rotary_width
    return {**fields, "head_width": wide, "ffn_biases": False, "experts": experts, "latent": latent}


def _gpt_oss(config: _Config) -> Fields:
    """Every layer has experts with biases; attention has biases, a learned sink per head, and in turn a window."""
    fields = _llama(config)
    experts = Experts(
        number=config.number("num_local_experts"),
        per_token=config.number("num_experts_per_tok"),
        ffn=fields["ffn"],
        router_bias=True,
        biases=True,
    )
    windows = _windows(config, 128, 2)
    return {**fields, "attention_biases": "all", "sinks": True, "experts": experts, "windows": windows}


FAMILIES: dict[str, Callable[[_Config], Fields]] = {
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
}
"""How the configuration of each ``model_type`` is read."""
_OF_ARCHITECTURE = {
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
}
"""The family that has the layers of each architecture."""
