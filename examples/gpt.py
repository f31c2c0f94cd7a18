"""GPT: a decoder-only transformer with pre-normalisation. ``job`` trains on two CPU cores, ``tiny`` is for tests.

.. [1] Radford et al., Language Models are Unsupervised Multitask Learners (2019): GPT-2's sizes.
.. [2] Black et al., GPT-NeoX-20B (2022), table 1: 44 layers of width 6144, head not tied.
.. [3] Brown et al., Language Models are Few-Shot Learners (2020), table 2.1: GPT-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from penstock.executor.run.job import LayerSpec, Styles

from .attention import (
    MODULES,
    Attention,
    FeedForward,
    TokenEmbedding,
    divided_attention,
    divided_embedding,
    divided_feed_forward,
)
from .synthetic import TokenJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of one GPT."""

    blocks: int
    width: int
    heads: int
    length: int
    vocabulary: int
    dropout: float = 0.0
    tied: bool = False


TIED = ("embedding.tokens.weight", "head.1.weight")
"""The embedding of the words is also the weight of their scores (Press and Wolf, 2017); GPT-2 has it so [1]_."""


class Block(nn.Module):
    """Attention and feed-forward, each with a residual around it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, config.heads, causal=True, dropout=config.dropout)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, 4 * width, dropout=config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (samples, positions, width) to the same shape."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        out: Tensor = x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))
        return out


class Head(nn.Sequential):
    """The last normalisation and the logits; their weight may be the embedding's, on another device too."""

    def __init__(self, config: Config) -> None:
        super().__init__(nn.LayerNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False))


def layers(config: Config) -> list[LayerSpec]:
    """Return embedding, blocks, head."""
    embedding = partial(TokenEmbedding, config.vocabulary, config.length, config.width, dropout=config.dropout)
    specs = [LayerSpec("embedding", embedding, parallel=divided_embedding, modules={})]
    specs += [
        LayerSpec(f"block.{i}", partial(Block, config), parallel=divided_block, modules=MODULES)
        for i in range(config.blocks)
    ]
    return [*specs, LayerSpec("head", partial(Head, config), parallel=divided_head, modules={})]


def divided_block() -> Styles:
    """Divide the heads and the feed-forward over the GPUs, and between them the sequence."""
    from .division import norm

    norms = {"norm_attention": norm(), "norm_feed_forward": norm()}
    return {**norms, **divided_attention("attention"), **divided_feed_forward("feed_forward")}


def divided_head() -> Styles:
    """Divide the scores over the GPUs."""
    from .division import norm, scores

    return {"0": norm(), "1": scores()}


def make(name: str, config: Config, *, batch_size: int, seed: int = 0) -> TokenJob:
    """Return a job that trains this GPT on random tokens."""
    job = TokenJob(
        name,
        partial(layers, config),
        batch_size=batch_size,
        length=config.length,
        vocabulary=config.vocabulary,
        seed=seed,
    )
    if config.tied:
        job.shared_parameters = (TIED,)
    return job


job = make("gpt", Config(blocks=8, width=256, heads=4, length=64, vocabulary=256), batch_size=64)
tiny = make("gpt-tiny", Config(blocks=4, width=32, heads=2, length=16, vocabulary=64), batch_size=16)
dropout = make("gpt-dropout", Config(blocks=4, width=32, heads=2, length=16, vocabulary=64, dropout=0.1), batch_size=16)
tied = make("gpt-tied", Config(blocks=4, width=32, heads=2, length=16, vocabulary=64, tied=True), batch_size=16)


_GPT2 = partial(Config, length=1024, vocabulary=50257)
gpt2_small = make("gpt2-small", _GPT2(blocks=12, width=768, heads=12), batch_size=64)
gpt2_xl = make("gpt2-xl", _GPT2(blocks=48, width=1600, heads=25), batch_size=64)
neox_20b = make("gpt-20b", Config(blocks=44, width=6144, heads=64, length=2048, vocabulary=50432), batch_size=64)
gpt3_175b = make(
    "gpt-3-175b",
    Config(blocks=96, width=12_288, heads=96, length=2048, vocabulary=50257, tied=True),
    batch_size=1536,
)
