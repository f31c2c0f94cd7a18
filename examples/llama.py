"""LLaMA 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU. 8B to 405B are for planning; ``tiny`` runs.

.. [1] Dubey et al., The Llama 3 Herd of Models (2024), table 3: layers, widths, heads, vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.executor.divided.context import positions
from penstock.executor.run.job import LayerSpec, Styles

from .attention import MODULES
from .synthetic import TokenJob

_ROPE_THETA = 500_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of one LLaMA."""

    blocks: int
    width: int
    heads: int
    key_value_heads: int
    inner: int
    length: int = 8192
    vocabulary: int = 128_256


class GroupedQueryAttention(nn.Module):
    """Causal attention in which groups of query heads share a key and a value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        shared = config.key_value_heads * self.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, shared, bias=False)
        self.value = nn.Linear(config.width, shared, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (samples, positions, width) to the same shape."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            _rotated(query), _rotated(key), value, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (samples, positions, width) to the same shape."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each with a residual around it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = GroupedQueryAttention(config)
        self.norm_feed_forward = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = SwiGLU(config.width, config.inner)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (samples, positions, width) to the same shape."""
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.feed_forward(self.norm_feed_forward(x))
        return out


class Head(nn.Sequential):
    """The last normalisation and the logits."""

    def __init__(self, config: Config) -> None:
        super().__init__(nn.RMSNorm(config.width, eps=1e-5), nn.Linear(config.width, config.vocabulary, bias=False))


def layers(config: Config) -> list[LayerSpec]:
    """Return embedding, blocks, head."""
    specs = [
        LayerSpec(
            "embedding", partial(nn.Embedding, config.vocabulary, config.width), parallel=divided_embedding, modules={}
        )
    ]
    specs += [
        LayerSpec(f"block.{i}", partial(Block, config), parallel=divided_block, modules=MODULES)
        for i in range(config.blocks)
    ]
    return [*specs, LayerSpec("head", partial(Head, config), parallel=divided_head, modules={})]


def divided_embedding() -> Styles:
    """Divide the words over the GPUs."""
    from .division import words

    return {"": words()}


def divided_block() -> Styles:
    """Divide the heads and the feed-forward over the GPUs, and between them the sequence."""
    from .division import columns, gathered, norm, rows

    return {
        "norm_attention": norm(),
        "attention": gathered(),
        **{f"attention.{name}": columns() for name in ("query", "key", "value")},
        "attention.out": rows(),
        "norm_feed_forward": norm(),
        "feed_forward": gathered(),
        "feed_forward.gate": columns(),
        "feed_forward.up": columns(),
        "feed_forward.down": rows(),
    }


def divided_head() -> Styles:
    """Divide the scores over the GPUs."""
    from .division import norm, scores

    return {"0": norm(), "1": scores()}


def make(name: str, config: Config, *, batch_size: int) -> TokenJob:
    """Return a job that trains this LLaMA on random tokens."""
    return TokenJob(
        name, partial(layers, config), batch_size=batch_size, length=config.length, vocabulary=config.vocabulary
    )


def _rotated(x: Tensor) -> Tensor:
    """Apply the rotary position embedding to (samples, heads, positions, head width)."""
    half = x.shape[-1] // 2
    frequency = _ROPE_THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


_8B = Config(blocks=32, width=4096, heads=32, key_value_heads=8, inner=14_336)
_70B = Config(blocks=80, width=8192, heads=64, key_value_heads=8, inner=28_672)
_405B = Config(blocks=126, width=16_384, heads=128, key_value_heads=8, inner=53_248)
_TINY = Config(blocks=2, width=32, heads=4, key_value_heads=2, inner=64, length=16, vocabulary=64)

llama_8b = make("llama-3-8b", _8B, batch_size=512)
llama_70b = make("llama-3-70b", _70B, batch_size=512)
llama_405b = make("llama-3.1-405b", _405B, batch_size=512)
tiny = make("llama-tiny", _TINY, batch_size=16)
