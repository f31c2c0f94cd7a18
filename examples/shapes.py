"""Shapes of transformers by name, without torch: of the shipped profiles, and of models that have none.

Those of a profile are its module's, so that both count the same parameters. An import of another trainer's script is
compared with them, and ``penstock fits`` answers for them.

.. [1] Brown et al., Language Models are Few-Shot Learners (2020), table 2.1: GPT-3.
.. [2] Dubey et al., The Llama 3 Herd of Models (2024), table 3.
"""

from __future__ import annotations

from functools import partial

from penstock.schemas.transformers.shape import TransformerShape


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
    """An encoder that marks the two ends of an answer."""
    gpt = _gpt(name, layers, hidden, heads, 384, 30_522, head_bias=True)
    more = {"outputs": 2, "positions": 512, "token_types": 2, "embedding_norm": True, "final_norm": False}
    return gpt.model_copy(update=more)


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
    _bert("bert-base", 12, 768, 12),
    _large("bert-large", 24),
    _large("bert-48", 48),
    _large("bert-72", 72),
)

SHAPES: dict[str, TransformerShape] = {shape.name: shape for shape in _ALL}
"""By the name of the profile, or of the model."""
