"""XLNet: relative positions in every attention, each layer with a separate projection of them; content stream only.

.. [1] Yang et al., XLNet (2019); relative attention from Dai et al., Transformer-XL (2019), section 3.3.
.. [2] DAPPLE, Table II: XLNet-36, large with 36 layers, 500M parameters (in units of 2^20, as its profile shows).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.examples.attention import FeedForward, divided_feed_forward
from penstock.examples.synthetic import TokenJob
from penstock.executor.run.job import LayerSpec, Styles


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of one XLNet."""

    blocks: int
    width: int
    heads: int
    length: int = 512
    vocabulary: int = 32_000


class HeadBias(nn.Module):
    """A learned vector for each head, added to its queries."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, heads, positions, width) to the same shape."""
        return x + self.weight


class RelativeAttention(nn.Module):
    """An attention with scores ``(q + u) k + (q + v) r``, where r projects the distance between two positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.relative = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.content_bias = HeadBias(heads, self.head_width)
        self.position_bias = HeadBias(heads, self.head_width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, positions, width) to the same shape."""
        length = x.shape[1]
        query, key, value = (part.transpose(1, 2) for part in self._heads(self.query_key_value(x), 3).chunk(3, dim=-1))
        distance = self._heads(self.relative(_sinusoids(length, x)[None]), 1).transpose(1, 2)[0]
        near = self.position_bias(query) @ distance.transpose(-1, -2)
        bias = _shifted(near, length) / self.head_width**0.5
        attended = functional.scaled_dot_product_attention(self.content_bias(query), key, value, attn_mask=bias)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor, parts: int) -> Tensor:
        """Return (…, positions, heads, parts of each): all heads, or a GPU's heads."""
        heads: Tensor = x.unflatten(-1, (-1, parts * self.head_width))
        return heads


class Block(nn.Module):
    """Relative attention and feed-forward, each normalised after its residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = RelativeAttention(config.width, config.heads)
        self.norm_attention = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config.width, 4 * config.width)
        self.norm_feed_forward = nn.LayerNorm(config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, positions, width) to the same shape."""
        x = self.norm_attention(x + self.attention(x))
        out: Tensor = self.norm_feed_forward(x + self.feed_forward(x))
        return out


class Head(nn.Module):
    """A class for each position, as the loss of fine-tuning; the vocabulary is not predicted."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classes = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return (samples, positions, classes)."""
        out: Tensor = self.classes(x)
        return out


class LabelJob(TokenJob):
    """Tokens, with one of two labels for each."""

    def sample(self, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Return a sequence; the label of a token is its parity."""
        inputs, tokens = super().sample(generator)
        return inputs, tokens % 2


def layers(config: Config) -> list[LayerSpec]:
    """Build embedding, blocks, head."""
    words = partial(nn.Embedding, config.vocabulary, config.width)
    specs = [LayerSpec("embedding", words, parallel=divided_words)]
    specs += [LayerSpec(f"block.{i}", partial(Block, config), parallel=divided_block) for i in range(config.blocks)]
    return [*specs, LayerSpec("head", partial(Head, config.width, 2), parallel=divided_head)]


def divided_words() -> Styles:
    """Return the styles that put a part of the words on each GPU."""
    from penstock.examples.division import words

    return {"": words()}


def divided_block() -> Styles:
    """Return the styles that put a part of the heads and of the feed-forward on each GPU.

    Between them each GPU has a part of the sequence.
    """
    from penstock.examples.division import OfHeads, columns, gathered, norm, rows

    return {
        "attention": gathered(),
        "attention.query_key_value": columns(),
        "attention.relative": columns(),
        "attention.content_bias": OfHeads(),
        "attention.position_bias": OfHeads(),
        "attention.out": rows(),
        "norm_attention": norm(local=True),
        **divided_feed_forward("feed_forward"),
        "norm_feed_forward": norm(local=True),
    }


def divided_head() -> Styles:
    """Return the styles with which each GPU scores its part of the sequence; the loss is over all scores."""
    from penstock.examples.division import joined, norm

    return {"classes": norm(), "": joined()}


def make(name: str, config: Config, *, batch_size: int) -> LabelJob:
    """Return a job that trains this XLNet on random tokens."""
    return LabelJob(
        name, partial(layers, config), batch_size=batch_size, length=config.length, vocabulary=config.vocabulary
    )


def _sinusoids(length: int, like: Tensor) -> Tensor:
    """Return sinusoids of positions from ``length - 1`` down to ``-length``, (2 * length, width)."""
    width = like.shape[-1]
    distance = torch.arange(length - 1, -length - 1, -1, device=like.device, dtype=torch.float32)
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angle = distance[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), dim=-1).to(like.dtype)


def _shifted(scores: Tensor, length: int) -> Tensor:
    """Move row i of (…, length, 2 * length) by i, so that column j holds the distance from i to j."""
    *lead, rows, columns = scores.shape
    flat = scores.reshape(*lead, columns, rows)[..., 1:, :].reshape(*lead, rows, columns - 1)
    return flat[..., :length].contiguous()


xlnet_36 = make("xlnet-36", Config(blocks=36, width=1024, heads=16), batch_size=128)
tiny = make("xlnet-tiny", Config(blocks=2, width=32, heads=2, length=16, vocabulary=64), batch_size=16)
