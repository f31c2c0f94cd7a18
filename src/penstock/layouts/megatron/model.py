"""The transformer that Megatron's flags describe, with Megatron's own defaults.

.. [1] Megatron-LM, ``training/arguments.py`` (validate_args), ``core/transformer/transformer_config.py``.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Literal

from pydantic import ValidationError

from penstock.layouts.megatron.flags import Flags
from penstock.layouts.megatron.names import EXPERT, OTHER_STACKS, WIDTHS
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.transformers.degrees import ContextKind
from penstock.schemas.transformers.shape import Experts, LatentAttention, TransformerShape

EXPERTS = ("num-experts", "moe-router-topk", "moe-ffn-hidden-size")
NEEDED = ("num-layers", "hidden-size", "num-attention-heads", "seq-length")
TOKENIZERS = {"gpt2bpetokenizer": 50_257, "llama2tokenizer": 32_000, "bertwordpiecelowercase": 30_522}
"""Vocabulary sizes of tokenizers whose type alone determines them."""
CONTEXT_KINDS: dict[str, ContextKind] = {"p2p": "ring", "allgather": "all_gather", "a2a": "all_to_all"}
_OTHER_MODELS = re.compile(r"\bpretrain_(bert|t5|ict|vision\w*|vlm|mimo|mamba|retro)\b")
_PATTERN = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")
_DROPOUT = 0.1


SHAPED_BY = (*NEEDED, *WIDTHS, "num-experts", "vocab-size", "moe-layer-freq")
"""The flags that determine the shape of a model."""


def shape_said(flags: Flags, name: str) -> TransformerShape:
    """Return the shape. Raises InvalidDocument for values that the flags leave open.

    Raises UnsupportedRequest for a model that no shape describes.
    """
    _refuse_others(flags)
    flags.ask(SHAPED_BY)
    missing = [needed for needed in NEEDED if flags.number(needed) is None]
    vocabulary = flags.number("padded-vocab-size") or flags.number("vocab-size")
    vocabulary = vocabulary or TOKENIZERS.get(flags.text_of("tokenizer-type") or "")
    missing += ["vocab-size"] if vocabulary is None else []
    if missing and flags.number("num-experts") is None and _has_experts(flags):
        missing += EXPERTS
    if missing:
        raise InvalidDocument(
            f"{flags.source} does not say the model: it has no {', '.join(f'--{each}' for each in missing)}",
            remedy=f"give the values: {' '.join(f'--given {each}=…' for each in missing)}; or the model: --example, "
            "--hf, --profile",
        )
    try:
        return TransformerShape.model_validate(_fields(flags, name, vocabulary or 0))
    except ValidationError as error:
        first = error.errors()[0]
        words = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise InvalidDocument(f"{flags.source} does not describe a transformer: {words}") from None


def _has_experts(flags: Flags) -> bool:
    """Return whether a text that does not state its model has flags of experts, which are then needed too."""
    return (flags.number(EXPERT) or 1) > 1 or re.search(r"--moe-", flags.text) is not None


def context_kind_said(flags: Flags) -> ContextKind | None:
    """Return how keys and values get around; None where the flags state nothing, or a way without costs."""
    stated = flags.text_of("cp-comm-type") if (flags.number("context-parallel-size") or 1) > 1 else None
    return None if stated is None else CONTEXT_KINDS.get(stated)


def _refuse_others(flags: Flags) -> None:
    if (other := _OTHER_MODELS.search(flags.text)) is not None:
        raise UnsupportedRequest(
            f"{flags.source} starts {other[0]}.py, whose model is not a decoder of equal layers",
            remedy="give a profile of the model: --profile, or --example",
        )
    if stacks := [name for name in OTHER_STACKS if flags.mentioned(name)]:
        raise UnsupportedRequest(
            f"{flags.source} has --{stacks[0]}: Penstock computes no costs for layers of several kinds",
            remedy="give a profile of the model: --profile",
        )


def _fields(flags: Flags, name: str, vocabulary: int) -> dict[str, Any]:
    hidden, heads = flags.number("hidden-size") or 0, flags.number("num-attention-heads") or 0
    length = flags.number("seq-length") or 0
    gated = any(flags.on(each) for each in ("swiglu", "quick-geglu", "gated-linear-unit"))
    usual_ffn = int(4 * hidden * 2 / 3 / 64) * 64 if flags.on("swiglu") else 4 * hidden
    ffn = flags.number("ffn-hidden-size") or usual_ffn
    groups = flags.number("num-query-groups")
    if groups is None:
        groups = 1 if flags.on("group-query-attention") else heads
    biases = _biases(flags)
    latent = _latent(flags)
    width = flags.number("kv-channels") or max(1, hidden // heads)
    learned = _positions(flags) == "learned_absolute"
    return {
        "name": name,
        "layers": flags.number("num-layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if latent is not None else groups,
        "head_width": width if latent is None else latent.plain_width + latent.rotary_width,
        "ffn": ffn,
        "gated": gated,
        "vocabulary": vocabulary,
        "padded_vocabulary": flags.number("padded-vocab-size"),
        "sequence_length": length,
        "norm": "rms" if flags.text_of("normalization") == "rmsnorm" else "layer",
        "query_key_norm": flags.on("qk-layernorm"),
        "attention_biases": biases,
        "ffn_biases": biases == "all",
        "tied": _tied(flags),
        "positions": (flags.number("max-position-embeddings") or length) if learned else 0,
        "sinks": flags.text_of("softmax-type") == "learnable",
        "dropout": _share(flags, "hidden-dropout", _DROPOUT),
        "experts": _experts(flags, ffn),
        "latent": latent,
    }


def _positions(flags: Flags) -> str:
    if flags.on("use-rotary-position-embeddings"):
        return "rope"
    return flags.text_of("position-embedding-type") or "learned_absolute"


def _biases(flags: Flags) -> Literal["none", "qkv", "all"]:
    off = flags.on("disable-bias-linear") or ("add-bias-linear" in flags.words and not flags.on("add-bias-linear"))
    if not off:
        return "all"
    return "qkv" if flags.on("add-qkv-bias") else "none"


def _tied(flags: Flags) -> bool:
    if "share-embeddings-and-output-weights" in flags.words:
        return flags.on("share-embeddings-and-output-weights")
    return not flags.on("untie-embeddings-and-output-weights")


def _share(flags: Flags, name: str, default: float) -> float:
    """Read a number that need not be whole. Raises InvalidDocument for any other value."""
    text = flags.text_of(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise flags.wrong(name, f"--{name} is {text!r}, not a number") from None


def _latent(flags: Flags) -> LatentAttention | None:
    if not flags.on("multi-latent-attention"):
        return None
    return LatentAttention(
        query_rank=flags.number("q-lora-rank"),
        key_value_rank=flags.number("kv-lora-rank") or 512,
        plain_width=flags.number("qk-head-dim") or 128,
        rotary_width=flags.number("qk-pos-emb-head-dim") or 64,
        value_width=flags.number("v-head-dim") or 128,
    )


def _experts(flags: Flags, ffn: int) -> Experts | None:
    number = flags.number("num-experts")
    if number is None or (number == 1 and "moe-router-topk" not in flags.words):  # one expert is the usual feed-forward
        return None
    padded = flags.on("moe-pad-expert-input-to-capacity")
    return Experts(
        number=number,
        per_token=flags.number("moe-router-topk") or 2,
        ffn=flags.number("moe-ffn-hidden-size") or ffn,
        shared_ffn=flags.number("moe-shared-expert-intermediate-size") or 0,
        shared_gate=flags.on("moe-shared-expert-gate"),
        dense_layers=_dense_layers(flags),
        capacity_factor=_share(flags, "moe-expert-capacity-factor", 1.0) if padded else None,
    )


def _dense_layers(flags: Flags) -> int:
    """Return the number of layers without experts at the front.

    Raises UnsupportedRequest where there are others further back.
    """
    text = (flags.text_of("moe-layer-freq") or "1").replace(" ", "")
    pattern = [int(text)] if text.isdecimal() else _pattern(text)
    if (text.isdecimal() and pattern != [1]) or any(a > b for a, b in pairwise(pattern)):
        raise UnsupportedRequest(
            f"{flags.source}, {flags.place('moe-layer-freq')}: --moe-layer-freq {text} puts dense layers after "
            "layers with experts; Penstock computes costs only where all dense layers come first",
            remedy="give a profile of the model: --profile",
        )
    return pattern.count(0)


def _pattern(text: str) -> list[int]:
    """Read ``([0]*3+[1]*58)``, or a list of a number for each layer."""
    layers: list[int] = []
    for numbers, times in _PATTERN.findall(text):
        layers += [int(each) for each in numbers.split(",")] * int(times or 1)
    return layers
