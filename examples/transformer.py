"""The Transformer: an encoder whose output every decoder layer reads, so that it crosses all of the decoder's cuts.

One embedding serves both sides, so the embedded target crosses the encoder; the logits are not tied to it.

.. [1] Vaswani et al., Attention Is All You Need (2017), table 3: base 65M and big 213M parameters with tied logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from penstock.executor.divided.context import positions
from penstock.executor.run.job import LayerSpec, Styles

from .attention import Attention, FeedForward, divided_attention, divided_feed_forward
from .synthetic import TokenJob


class TranslationJob(TokenJob):
    """Pairs of sequences: a source, and a target to continue."""

    sequences: Sequence[str] = ()

    def sample(self, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Return random tokens on both sides."""
        inputs, targets = super().sample(generator)
        source = torch.randint(0, self.vocabulary, (self.length,), generator=generator)
        return {"source": source, "target": inputs["x"]}, targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of one Transformer; ``depth`` counts the layers of each side."""

    depth: int
    width: int
    heads: int
    inner: int
    length: int = 256
    vocabulary: int = 37_000


class Sinusoids(nn.Module):
    """A fixed vector for each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        """Transform (positions) to (positions, width)."""
        frequency = 10_000.0 ** (
            -torch.arange(0, self.width, 2, device=positions.device, dtype=torch.float32) / self.width
        )
        angle = positions[:, None] * frequency
        return torch.cat((angle.sin(), angle.cos()), dim=-1)


class SharedEmbedding(nn.Module):
    """Source and target embedded by one table, with sinusoids for the positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.width = config.width
        self.table = nn.Embedding(config.vocabulary, config.width)
        self.positions = Sinusoids(config.width)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Transform (samples, positions) twice, to (samples, positions, width) twice."""
        return self._embedded(source), self._embedded(target)

    def _embedded(self, ids: Tensor) -> Tensor:
        tokens: Tensor = self.table(ids) * self.width**0.5
        vectors: Tensor = self.positions(positions(ids.shape[1], device=ids.device, dtype=torch.float32))
        return tokens + vectors.to(tokens.dtype)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each normalised after its residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.heads)
        self.norm_attention = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config.width, config.inner, nn.ReLU)
        self.norm_feed_forward = nn.LayerNorm(config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (samples, positions, width) to the same shape."""
        x = self.norm_attention(x + self.attention(x))
        out: Tensor = self.norm_feed_forward(x + self.feed_forward(x))
        return out


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, feed-forward."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.heads, causal=True)
        self.norm_attention = nn.LayerNorm(config.width)
        self.cross = Attention(config.width, config.heads)
        self.norm_cross = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config.width, config.inner, nn.ReLU)
        self.norm_feed_forward = nn.LayerNorm(config.width)

    def forward(self, y: Tensor, memory: Tensor) -> Tensor:
        """Transform (samples, positions, width) to the same shape."""
        y = self.norm_attention(y + self.attention(y))
        y = self.norm_cross(y + self.cross(y, memory))
        out: Tensor = self.norm_feed_forward(y + self.feed_forward(y))
        return out


def layers(config: Config) -> list[LayerSpec]:
    """Return the embedding of both sides, encoder on ``x``, decoder on ``y`` reading ``x``, logits."""
    embedding, logits = (
        partial(SharedEmbedding, config),
        partial(nn.Linear, config.width, config.vocabulary, bias=False),
    )
    encoder, decoder = partial(EncoderLayer, config), partial(DecoderLayer, config)
    return [
        LayerSpec("embedding", embedding, ("source", "target"), ("x", "y"), divided_words),
        *(LayerSpec(f"encoder.{i}", encoder, parallel=divided_encoder) for i in range(config.depth)),
        *(LayerSpec(f"decoder.{i}", decoder, ("y", "x"), ("y",), divided_decoder) for i in range(config.depth)),
        LayerSpec("logits", logits, ("y",), ("y",), divided_logits),
    ]


def divided_words() -> Styles:
    """Divide the words over the GPUs."""
    from .division import part_of_positions, words

    return {"table": words(), "positions": part_of_positions()}


def divided_encoder() -> Styles:
    """Divide the heads and the feed-forward over the GPUs, and between them the sequence."""
    from .division import norm

    norms = {"norm_attention": norm(local=True), "norm_feed_forward": norm(local=True)}
    return {**norms, **divided_attention("attention"), **divided_feed_forward("feed_forward")}


def divided_decoder() -> Styles:
    """Divide the decoder as the encoder, and the heads of its attention to the encoder."""
    from .division import norm

    return {**divided_encoder(), "norm_cross": norm(local=True), **divided_attention("cross", memory=True)}


def divided_logits() -> Styles:
    """Divide the scores over the GPUs."""
    from .division import scores

    return {"": scores()}


def make(name: str, config: Config, *, batch_size: int) -> TranslationJob:
    """Return a job that trains this Transformer on random pairs."""
    job = TranslationJob(
        name, partial(layers, config), batch_size=batch_size, length=config.length, vocabulary=config.vocabulary
    )
    job.outputs = ("y",)
    job.sequences = ("source", "target")
    return job


base = make("transformer", Config(depth=6, width=512, heads=8, inner=2048), batch_size=256)
big = make("transformer-big", Config(depth=6, width=1024, heads=16, inner=4096), batch_size=256)
tiny = make("transformer-tiny", Config(depth=2, width=16, heads=2, inner=32, length=6, vocabulary=32), batch_size=16)
