"""Shapes of transformers by name, without torch: of the shipped profiles, and of models without a profile.

A profile's shape is its module's shape, so that both count the same parameters. An import of another trainer's script
is compared with these shapes, and ``penstock fits`` answers for them.

.. [1] Brown et al., Language Models are Few-Shot Learners (2020), table 2.1: GPT-3.
.. [2] Dubey et al., The Llama 3 Herd of Models (2024), table 3.
.. [3] ``config.json`` of mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B, deepseek-ai/DeepSeek-V2
   and -V3 (without the prediction of a further token), openai/gpt-oss-120b (of whose layers every other one attends to
   128 positions); samples have the 4,096 tokens of most of their pretraining.
"""

from __future__ import annotations

from functools import partial

from penstock.schemas.transformers.shape import Experts, LatentAttention, TransformerShape, Windows


def _gpt(
    name: str, layers: int, hidden: int, heads: int, length: int, vocabulary: int, *, head_bias: bool = False
) -> TransformerShape:
    return TransformerShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_width=hidden // heads,
        ffn=4 * hidden,
        gated=False,
        vocabulary=vocabulary,
        sequence_length=length,
        norm="layer",
        attention_biases="all",
        ffn_biases=True,
        head_bias=head_bias,
        positions=length,
    )


def _llama(name: str, layers: int, hidden: int, heads: int, ffn: int) -> TransformerShape:
    return TransformerShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_width=hidden // heads,
        ffn=ffn,
        gated=True,
        vocabulary=128_256,
        sequence_length=8192,
    )


def _bert(name: str, layers: int, hidden: int, heads: int) -> TransformerShape:
    """Return an encoder that marks the two ends of an answer."""
    gpt = _gpt(name, layers, hidden, heads, 384, 30_522, head_bias=True)
    more = {"outputs": 2, "positions": 512, "token_types": 2, "embedding_norm": True, "final_norm": False}
    return gpt.model_copy(update=more)


def _mixture(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, experts: Experts
) -> TransformerShape:
    """Return a mixture of experts, with heads of 128 and no dense layers."""
    return TransformerShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_width=128,
        ffn=experts.ffn,
        gated=True,
        vocabulary=vocabulary,
        sequence_length=4096,
        experts=experts,
    )


def _qwen3(name: str, layers: int, hidden: int, heads: int, ffn: int) -> TransformerShape:
    """Return a mixture whose queries and keys are normalised; a dense layer is as wide as 8 experts."""
    experts = Experts(number=128, per_token=8, ffn=ffn)
    shape = _mixture(name, layers, hidden, heads, 4, 151_936, experts)
    return shape.model_copy(update={"query_key_norm": True, "ffn": 8 * ffn})


def _deepseek(name: str, layers: int, hidden: int, ffn: int, vocabulary: int, experts: Experts) -> TransformerShape:
    latent = LatentAttention(query_rank=1536, key_value_rank=512, plain_width=128, rotary_width=64, value_width=128)
    shape = _mixture(name, layers, hidden, 128, 128, vocabulary, experts)
    return shape.model_copy(update={"head_width": 192, "ffn": ffn, "latent": latent})


_large = partial(_bert, hidden=1024, heads=16)
_ALL = (
    _gpt("gpt", 8, 256, 4, 64, 256),
    _gpt("gpt2-small", 12, 768, 12, 1024, 50_257),
    _gpt("gpt2-xl", 48, 1600, 25, 1024, 50_257),
    _gpt("gpt-20b", 44, 6144, 64, 2048, 50_432),
    _gpt("gpt-3-175b", 96, 12_288, 96, 2048, 50_257).model_copy(update={"tied": True}),
    _llama("llama-3-8b", 32, 4096, 32, 14_336),
    _llama("llama-3-70b", 80, 8192, 64, 28_672),
    _llama("llama-3.1-405b", 126, 16_384, 128, 53_248),
    _mixture("mixtral-8x7b", 32, 4096, 32, 8, 32_000, Experts(number=8, per_token=2, ffn=14_336)),
    _qwen3("qwen3-30b-a3b", 48, 2048, 32, 768),
    _qwen3("qwen3-235b-a22b", 94, 4096, 64, 1536),
    _deepseek(
        "deepseek-v2", 60, 5120, 12_288, 102_400,
        Experts(number=160, per_token=6, ffn=1536, shared_ffn=2 * 1536, dense_layers=1),
    ),
    _deepseek(
        "deepseek-v3", 61, 7168, 18_432, 129_280,
        Experts(number=256, per_token=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    ),
    _mixture(
        "gpt-oss-120b", 36, 2880, 64, 8, 201_088,
        Experts(number=128, per_token=4, ffn=2880, router_bias=True, biases=True),
    ).model_copy(update={
        "head_width": 64, "attention_biases": "all", "sinks": True, "windows": Windows(width=128, whole_every=2),
    }),
    _bert("bert-base", 12, 768, 12),
    _large("bert-large", 24),
    _large("bert-48", 48),
    _large("bert-72", 72),
)  # fmt: skip

SHAPES: dict[str, TransformerShape] = {shape.name: shape for shape in _ALL}
"""Shapes by the name of the profile, or of the model."""
