"""Multi-head attention and feed-forward, shared by the transformer examples.

.. [1] Vaswani et al., Attention Is All You Need (2017), section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Attention of ``x`` to itself, or to ``memory``; tensors are (samples, positions, width)."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"the width {width} has to be a multiple of the {heads} heads")
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """``mask`` is True where a key may be seen, (samples, positions)."""
        key, value = self.key_value(x if memory is None else memory).chunk(2, dim=-1)
        attended = functional.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(key),
            self._split(value),
            attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads


class FeedForward(nn.Sequential):
    """Two linear layers with an activation between."""

    def __init__(self, width: int, inner: int, activation: type[nn.Module] = nn.GELU, dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(width, inner), activation(), nn.Dropout(dropout), nn.Linear(inner, width))


class TokenEmbedding(nn.Module):
    """Token ids to vectors, plus a learned vector per position."""

    def __init__(self, vocabulary: int, length: int, width: int, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, positions) to (samples, positions, width)."""
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        out: Tensor = self.dropout(self.norm(self.tokens(ids) + positions))
        return out
