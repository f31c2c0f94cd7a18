"""BERT: an encoder with post-normalisation, fine-tuned on questions (start and end of the answer, as SQuAD).

The padding mask and the segment ids are model inputs that several layers read from the batch.

.. [1] Devlin et al., BERT (2018): base 110M, large 340M parameters.
.. [2] DAPPLE, Table II, and SPP, Table II: BERT-48, which is large with 48 layers, 640M.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from penstock.executor.run.job import LayerSpec, Styles

from .attention import (
    Attention,
    FeedForward,
    TokenEmbedding,
    divided_attention,
    divided_embedding,
    divided_feed_forward,
)
from .synthetic import SyntheticJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of one BERT."""

    blocks: int
    width: int
    heads: int
    length: int = 384
    positions: int = 512
    vocabulary: int = 30_522


class Embedding(nn.Module):
    """Tokens, positions and segments, normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(config.vocabulary, config.positions, config.width)
        self.segments = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        """Transform (samples, positions) to (samples, positions, width)."""
        out: Tensor = self.norm(self.tokens(ids) + self.segments(segments))
        return out


class Block(nn.Module):
    """Attention under the padding mask and feed-forward, each normalised after its residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.heads)
        self.norm_attention = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config.width, 4 * config.width)
        self.norm_feed_forward = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Transform (samples, positions, width) to the same shape."""
        x = self.norm_attention(x + self.attention(x, mask=mask))
        out: Tensor = self.norm_feed_forward(x + self.feed_forward(x))
        return out


class SpanHead(nn.Module):
    """Logits of the answer's first and last position, (samples, 2, positions)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.span = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two scores per position."""
        out: Tensor = self.span(x).transpose(1, 2)
        return out


class QuestionJob(SyntheticJob):
    """Sequences with segments, padding and the two ends of an answer."""

    def __init__(self, name: str, config: Config, *, batch_size: int) -> None:
        super().__init__(name, partial(layers, config), batch_size=batch_size)
        self.config = config

    def sample(self, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Draw random tokens, the last quarter of them the second segment, a random part of it padding."""
        length = self.config.length
        used = int(torch.randint(3 * length // 4, length + 1, (), generator=generator))
        where = torch.arange(length)
        ids = torch.randint(0, self.config.vocabulary, (length,), generator=generator)
        inputs = {"x": ids, "segments": (where >= 3 * length // 4).long(), "mask": where < used}
        return inputs, torch.randint(0, used, (2,), generator=generator)

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Return AdamW."""
        return AdamW(params, lr=3e-5)


def layers(config: Config) -> list[LayerSpec]:
    """Return embedding, blocks, head."""
    specs = [LayerSpec("embedding", partial(Embedding, config), ("x", "segments"), parallel=divided_words)]
    specs += [
        LayerSpec(f"block.{i}", partial(Block, config), ("x", "mask"), parallel=divided_block)
        for i in range(config.blocks)
    ]
    return [*specs, LayerSpec("head", partial(SpanHead, config.width), parallel=divided_head)]


def divided_words() -> Styles:
    """Divide the words over the GPUs; each has all positions and segments."""
    from .division import norm, part_of_tokens

    return {**divided_embedding("tokens"), "segments": part_of_tokens(), "norm": norm(local=True)}


def divided_block() -> Styles:
    """Divide the heads and the feed-forward over the GPUs, and between them the sequence."""
    from .division import norm

    norms = {"norm_attention": norm(local=True), "norm_feed_forward": norm(local=True)}
    return {**norms, **divided_attention("attention"), **divided_feed_forward("feed_forward")}


def divided_head() -> Styles:
    """Score a part of the sequence on each GPU; the loss is the loss of all scores."""
    from .division import joined, norm

    return {"span": norm(), "": joined(sequence=2)}


_LARGE = partial(Config, width=1024, heads=16)

base = QuestionJob("bert-base", Config(blocks=12, width=768, heads=12), batch_size=64)
large = QuestionJob("bert-large", _LARGE(blocks=24), batch_size=64)
bert_48 = QuestionJob("bert-48", _LARGE(blocks=48), batch_size=64)
bert_72 = QuestionJob("bert-72", _LARGE(blocks=72), batch_size=64)
tiny = QuestionJob("bert-tiny", Config(blocks=2, width=32, heads=2, length=16, vocabulary=64), batch_size=16)
